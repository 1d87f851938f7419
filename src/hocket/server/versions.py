"""Find published weight versions under one root, and check them against the model."""

import dataclasses
import functools
import math
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pydantic

from hocket.protocol import AdapterConfig, Manifest, TensorLayout, TensorSpec, manifest
from hocket.server.errors import ApiError, invalid, parse

M = TypeVar("M", bound=pydantic.BaseModel)

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Precisions that weights can have: safetensors' names and torch's."""
UNUSED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers in old checkpoints of any architecture that transformers ignores."""
# A leading dot marks versions that are being written or removed.
_NAME = re.compile(r"[^./\\\0][^/\\\0]*(/[^./\\\0][^/\\\0]*)*")
OVERHEAD_BYTES = 64 << 20
"""Most bytes of a version besides its tensors: the manifest and the headers of its files."""
REPUBLISH = "publish the version again, under a new name; the old weights keep serving"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapes:
    """The tensors of a checkpoint of the served model."""

    shapes: Mapping[str, tuple[int, ...]]  # by name in the checkpoint
    tied: Mapping[str, str]  # tensors that equal another one and may be left out: {"lm_head.weight": "...embed..."}


@functools.cache
def model_shapes(path: str) -> ModelShapes:
    """Read names and shapes from a model's own checkpoint, as transformers and so the trainer writes them again.

    In memory they are others where an architecture has experts, which transformers fuses. A model without safetensors
    is taken to have the same names on disk and in memory.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)  # None, the default, asks on the terminal
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    in_memory = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    unused = re.compile("|".join([*UNUSED, *(model._keys_to_ignore_on_load_unexpected or ())]))
    prefix = f"{model.base_model_prefix}."
    shapes = {}
    for name, shape in _checkpoint_shapes(path).items():
        if name not in in_memory and prefix + name in in_memory:
            shapes[prefix + name] = shape  # saved without its head: on loading, transformers adds what is missing
        elif name in in_memory or not unused.search(name):
            shapes[name] = shape
    shapes = shapes or in_memory
    tied = dict(model.all_tied_weights_keys)
    for name, source in tied.items():
        if source in shapes:
            shapes.setdefault(name, shapes[source])
    return ModelShapes(shapes=shapes, tied=tied)


def max_bytes(expected: ModelShapes) -> int:
    return 4 * sum(math.prod(shape) for shape in expected.shapes.values()) + OVERHEAD_BYTES


def adapter_shapes(adapter: AdapterConfig, model: ModelShapes, max_rank: int) -> ModelShapes:
    """Return the tensors of an adapter of the model: A [r, in] and B [out, r] of every layer that it names."""
    if adapter.r > max_rank:
        hint = f"start the server with the trainer's section model.lora, or model.lora.rank={adapter.r}"
        raise ApiError(409, "rank_too_high", f"the engine takes adapters up to rank {max_rank}", hint)
    shapes = {}
    for name, shape in model.shapes.items():
        layer = name.removesuffix(".weight")
        adapted = any(f".{layer}".endswith(f".{target}") for target in adapter.target_modules)
        if adapted and len(shape) == 2 and layer != name:
            shapes[f"base_model.model.{layer}.lora_A.weight"] = (adapter.r, shape[1])
            shapes[f"base_model.model.{layer}.lora_B.weight"] = (shape[0], adapter.r)
    return ModelShapes(shapes=shapes, tied={})


def _checkpoint_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes in a model's safetensors files; {} where it has none."""
    from huggingface_hub import errors, get_local_safetensors_metadata, snapshot_download

    folder = path if Path(path).is_dir() else snapshot_download(path, local_files_only=True)
    try:
        files = get_local_safetensors_metadata(folder).files_metadata.values()
    except errors.NotASafetensorsRepoError:
        return {}
    return {name: tuple(tensor.shape) for file in files for name, tensor in file.tensors.items()}


def find(root: Path, name: str) -> Path:
    """Return the complete version called `name`, a plain relative path, under `root`; raise ApiError for any other."""
    hint = "start server and trainer with the same sync.root; source.name is relative to it"
    if not _NAME.fullmatch(name):
        raise invalid(f"source.name: {name!r} is not the name of a version under the root", hint, code="bad_name")
    try:
        folder = (root / name).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise ApiError(404, "no_such_version", f"there is no {name!r} under {root}", hint) from error
    if not folder.is_relative_to(root):
        raise invalid(f"source.name: {name!r} leads out of the root", hint, code="bad_name")
    if not (folder / manifest.COMPLETE_FILE).is_file():
        message = f"{name!r} has no {manifest.COMPLETE_FILE} marker: it is not finished"
        raise ApiError(409, "incomplete_version", message, REPUBLISH)
    return folder


def read(root: Path, name: str) -> tuple[Path, Manifest, AdapterConfig | None]:
    """Find a version; return its folder, manifest and, unless it is of whole weights, the adapter's config."""
    folder = find(root, name)
    adapter = folder / manifest.ADAPTER_FILE
    described = _parsed(Manifest, folder / manifest.MANIFEST_FILE)
    return folder, described, _parsed(AdapterConfig, adapter) if adapter.is_file() else None


def _parsed(message: type[M], path: Path) -> M:
    try:
        return parse(message, path.read_bytes())
    except (OSError, ApiError) as error:
        raise refused(f"can't read {path.name}: {error}") from error


def check(folder: Path, described: Manifest, version: int, expected: ModelShapes) -> None:
    """Raise ApiError unless the folder holds what its manifest says, and that is this version of the model."""
    check_manifest(described, version, expected)
    check_headers(folder, described)


def check_manifest(described: Manifest, version: int, expected: ModelShapes) -> None:
    """Raise ApiError unless the manifest is of this version and of tensors that the model can take."""
    tensors = described.tensors
    if described.version != version:
        raise refused(f"the manifest is of version {described.version}, not {version}")
    if manifest.total_checksum(tensors) != described.checksum:
        raise refused("the manifest's checksum is not the one of its tensors")
    _check_layout(tensors, expected)
    for name, source in expected.tied.items():
        if {name, source} <= tensors.keys() and tensors[name].checksum != tensors[source].checksum:
            raise refused(f"the model ties {name!r} to {source!r}, but they differ")


def check_buckets(buckets: Sequence[Sequence[TensorLayout]], expected: ModelShapes) -> None:
    """Raise ApiError unless tensors to come are the model's, each once; their bytes have checksums."""
    items = [item for bucket in buckets for item in bucket]
    layout = {item.name: item for item in items}
    if len(layout) < len(items):
        raise refused("a tensor is named twice")
    _check_layout(layout, expected)
    for name, source in expected.tied.items():
        if {name, source} <= layout.keys():
            raise ApiError(409, "bad_version", f"the model ties {name}", "send it once")


def _check_layout(found: Mapping[str, TensorSpec | TensorLayout], expected: ModelShapes) -> None:
    """Raise ApiError unless these are the model's tensors, in a precision that weights can have."""
    for name, tensor in found.items():
        shape = expected.shapes.get(name)
        if shape is None:
            raise refused(f"the model has no tensor {name!r}")
        if tuple(tensor.shape) != shape:
            raise refused(f"tensor {name!r} has shape {tensor.shape}, the model's is {list(shape)}")
        if tensor.dtype not in DTYPES.values():
            raise refused(f"tensor {name!r} is {tensor.dtype}; weights are {', '.join(DTYPES.values())}")
    missing = sorted(expected.shapes.keys() - found.keys() - expected.tied.keys())
    if missing:
        raise refused(f"tensor {missing[0]!r} is missing ({len(missing)} in all)")


def check_headers(folder: Path, described: Manifest) -> None:
    """Raise ApiError unless the headers of the files have the manifest's tensors, each once.

    A wrong byte shows in the checksum of what goes into the model.
    """
    from safetensors import SafetensorError, safe_open

    announced = {name: (tensor.dtype, tensor.shape) for name, tensor in described.tensors.items()}
    found: dict[str, tuple[str, list[int]]] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    if name in found:
                        raise refused(f"the files hold tensor {name!r} twice")
                    header = opened.get_slice(name)
                    found[name] = DTYPES.get(header.get_dtype(), header.get_dtype()), list(header.get_shape())
    except (OSError, SafetensorError) as error:
        raise refused(f"can't read the safetensors files: {error}") from error
    for name in announced | found:
        here = found.get(name, "missing")
        there = announced.get(name, "missing")
        if here != there:
            raise refused(f"tensor {name!r} is {here} in the files, {there} in the manifest")


def temporary_prefix() -> str:
    return f"hocket-weights-{os.getpid()}-"


def remove_left() -> None:
    """Remove the temporary folders of servers that were killed."""
    for left in Path(tempfile.gettempdir()).glob("hocket-weights-*-*"):
        pid = left.name.split("-")[2]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(left, ignore_errors=True)


def refused(reason: str) -> ApiError:
    return ApiError(409, "bad_version", reason, REPUBLISH)
