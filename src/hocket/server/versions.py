"""Published weight versions on disk: found under one root, and verified to the last byte before a model sees them."""

import dataclasses
import json
import math
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hocket import delta, manifest
from hocket.protocol import AdapterConfig, BaseVersion, Manifest, TensorLayout, TensorSpec
from hocket.server.errors import ApiError, invalid

if TYPE_CHECKING:
    import torch

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
UNUSED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers that old checkpoints of any architecture may hold, and nobody reads or writes any more."""
OVERHEAD_BYTES = 64 << 20
"""What a version has besides its tensors, at most: a manifest, and the headers of its files."""
REPUBLISH = "publish the version again, under a new name; the old weights keep serving"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapes:
    """What a checkpoint of the served model consists of.

    Attributes:
        shapes: shape of each tensor, by its name in the checkpoint.
        tied: tensors that may be left out, as they are the same as another one: {"lm_head.weight": "…embed…"}.
    """

    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]


def model_shapes(path: str) -> ModelShapes:
    """Reads names and shapes from a model's own checkpoint, as transformers and so the trainer writes them again.

    They are not those of the model in memory where an architecture has experts: transformers fuses these, and takes
    them apart on saving. A model without safetensors is taken to have the same names on disk and in memory.

    Args:
        path: a model folder, or the name of a hub model whose files are on this machine.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), trust_remote_code=False)
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
    """Returns the most bytes that the files of a version of this model can have."""
    return 4 * sum(math.prod(shape) for shape in expected.shapes.values()) + OVERHEAD_BYTES


def adapter_shapes(adapter: AdapterConfig, model: ModelShapes) -> ModelShapes:
    """Returns what an adapter of the model consists of: A [r, in] and B [out, r] of every layer that it names."""
    shapes = {}
    for name, shape in model.shapes.items():
        layer = name.removesuffix(".weight")
        adapted = any(f".{layer}".endswith(f".{target}") for target in adapter.target_modules)
        if adapted and len(shape) == 2 and layer != name:
            shapes[f"base_model.model.{layer}.lora_A.weight"] = (adapter.r, shape[1])
            shapes[f"base_model.model.{layer}.lora_B.weight"] = (shape[0], adapter.r)
    return ModelShapes(shapes=shapes, tied={})


def _checkpoint_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes in the headers of a model's safetensors files; nothing where it has none."""
    from safetensors import safe_open

    index = _model_file(path, "model.safetensors.index.json")
    names = ["model.safetensors"]
    if index is not None:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    shapes = {}
    for file_path in filter(None, (_model_file(path, name) for name in names)):
        with safe_open(file_path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes


def _model_file(path: str, name: str) -> Path | None:
    """Returns a file of a model folder or of a hub model, None where it is not on this machine."""
    if Path(path).is_dir():
        file = Path(path, name)
        return file if file.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, name)
    return Path(found) if isinstance(found, str) else None


def find(root: Path, name: str) -> Path:
    """Returns the folder called `name` under `root`.

    Raises:
        ApiError: the name is not a plain relative path, leads out of the root, or is no complete version.
    """
    hint = "send the folder's name relative to the server's root, which /health tells"
    parts = name.split("/")
    # Names with a leading dot are versions still being written, or about to be removed.
    if "\\" in name or "\0" in name or any(part in ("", "..") or part.startswith(".") for part in parts):
        raise invalid(f"source.name: {name!r} is not the name of a version under the root", hint, code="bad_name")
    try:
        folder = root.joinpath(*parts).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise ApiError(404, "no_such_version", f"there is no {name!r} under {root}", hint) from error
    if not folder.is_relative_to(root):
        raise invalid(f"source.name: {name!r} leads out of the root", hint, code="bad_name")
    if not (folder / manifest.COMPLETE_FILE).is_file():
        raise ApiError(
            409, "incomplete_version", f"{name!r} has no {manifest.COMPLETE_FILE} marker: it is not finished", REPUBLISH
        )
    return folder


def verify(folder: Path, described: Manifest, version: int, expected: ModelShapes) -> None:
    """Reads the whole version, and returns if every byte is as described and the model can take it.

    Raises:
        ApiError: 409 with the reason; nothing has been loaded.
    """
    if described.version != version:
        raise _refused(f"the manifest is of version {described.version}, not {version}")
    if manifest.total_checksum(described.tensors) != described.checksum:
        raise _refused("the manifest's checksum is not the one of its tensors")
    layout = [TensorLayout(name=name, dtype=t.dtype, shape=t.shape) for name, t in described.tensors.items()]
    check_layout(layout, expected)
    _check_ties(described, expected)
    try:
        found = manifest.specs(_each_once(folder, described))
    except _file_errors() as error:
        raise _refused(f"can't read the safetensors files: {error}") from error
    for name, item in found.items():
        _check_tensor(name, item, described.tensors[name])
    missing = sorted(described.tensors.keys() - found.keys())
    if missing:
        raise _refused(f"tensor {missing[0]!r} is missing in the files ({len(missing)} in all)")


def temporary_prefix() -> str:
    """Returns what names of this process's temporary folders begin with."""
    return f"hocket-weights-{os.getpid()}-"


def _sweep() -> None:
    """Removes the temporary folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob("hocket-weights-*-*"):
        pid = folder.name.split("-")[2]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)


class PatchedCopy:
    """The server's own copy of the newest version, in a temporary folder: what deltas are applied to.

    The first delta after a full version makes the copy, of that version's files.
    """

    def __init__(self) -> None:
        _sweep()
        self._full: tuple[Path, str] | None = None  # the newest full version and its checksum
        self._folder: Path | None = None
        self._checksum = ""
        self._lock = threading.RLock()  # a call may still be at it whose caller has given up

    def whole(self, folder: Path, described: Manifest, version: int, expected: ModelShapes) -> Path:
        """Returns a folder with all tensors of a version, verified as by `verify`.

        Args:
            folder: the version: complete, or a delta, which is applied to the copy.

        Raises:
            ApiError: 409 with the reason. After a delta the trainer may publish the version in full.
        """
        with self._lock:
            return self._whole(folder, described, version, expected)

    def _whole(self, folder: Path, described: Manifest, version: int, expected: ModelShapes) -> Path:
        if described.base is None:
            verify(folder, described, version, expected)
            self.discard()
            self._full = (folder, described.checksum)
            return folder
        try:
            if self._folder is None or self._checksum not in (described.base.checksum, described.checksum):
                self.discard()
                self._copy(described.base)
                assert self._folder is not None
            self._checksum = ""  # until all of it has been verified, it is no version
            delta.patch(self._folder, folder)  # which may be done twice
            verify(self._folder, described, version, expected)
        except Exception as error:
            self.discard()
            if isinstance(error, ApiError):
                raise
            # Whatever it was, a full disk or a delta of nonsense: the version in full needs no copy.
            raise _refused(f"the delta can't be applied: {type(error).__name__}: {error}") from error
        self._checksum = described.checksum
        return self._folder

    def _copy(self, base: BaseVersion) -> None:
        """Makes a new copy of the base, if that is the newest full version."""
        folder, checksum = self._full or (None, "")
        if folder is None or checksum != base.checksum or not folder.is_dir():
            reason = f"this is what changed since version {base.version}, of which this server has no files"
            raise ApiError(409, "no_base", reason, "publish the version in full")
        self._folder = Path(tempfile.mkdtemp(prefix=temporary_prefix()))
        for path in folder.glob("*.safetensors"):
            shutil.copyfile(path, self._folder / path.name)

    def discard(self) -> None:
        """Removes the copy, if there is one."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder, self._checksum = None, ""


def read_manifest(folder: Path) -> Manifest:
    """Reads manifest.json. Raises ApiError where it is missing or malformed."""
    try:
        return manifest.read(folder)
    except (OSError, ValueError) as error:
        raise _refused(f"can't read {manifest.MANIFEST_FILE}: {error}") from error


def read_adapter(folder: Path, described: Manifest) -> AdapterConfig | None:
    """Reads what the adapter is, None for a version that is none. Raises ApiError where it can't be read."""
    if described.content != "adapter":
        return None
    if described.base is not None:
        raise _refused("an adapter is published whole, never as what has changed in it")
    try:
        return AdapterConfig.model_validate_json((folder / manifest.ADAPTER_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _refused(f"can't read {manifest.ADAPTER_FILE}, or it is not of plain LoRA: {error}") from error


def check_layout(layout: Sequence[TensorLayout], expected: ModelShapes) -> None:
    """Raises ApiError unless these are the model's tensors, each once and in a precision that weights can have."""
    for item in layout:
        shape = expected.shapes.get(item.name)
        if shape is None:
            raise _refused(f"the model has no tensor {item.name!r}")
        if tuple(item.shape) != shape:
            raise _refused(f"tensor {item.name!r} has shape {item.shape}, the model's is {list(shape)}")
        if item.dtype not in FLOAT_DTYPES:
            raise _refused(f"tensor {item.name!r} is {item.dtype}; weights are {', '.join(FLOAT_DTYPES)}")
    names = {item.name for item in layout}
    if len(names) < len(layout):
        raise _refused("a tensor is named twice")
    missing = sorted(expected.shapes.keys() - names - expected.tied.keys())
    if missing:
        raise _refused(f"tensor {missing[0]!r} is missing ({len(missing)} in all)")


def refuse_copies(layout: Sequence[TensorLayout], expected: ModelShapes) -> None:
    """Raises ApiError where a tied tensor comes besides the one that it is the same as: it could be another."""
    names = {item.name for item in layout}
    for name, source in expected.tied.items():
        if name in names and source in names:
            raise _refused(f"the model ties {name!r} to {source!r}, which is sent once")


def _check_ties(described: Manifest, expected: ModelShapes) -> None:
    for name, source in expected.tied.items():
        copy, original = described.tensors.get(name), described.tensors.get(source)
        if copy is not None and original is not None and copy.checksum != original.checksum:
            raise _refused(f"the model ties {name!r} to {source!r}, but they differ")


def _each_once(folder: Path, described: Manifest) -> "Iterator[tuple[str, torch.Tensor]]":
    seen = set()
    for name, tensor in manifest.tensors(folder):
        if name not in described.tensors:
            raise _refused(f"the files hold tensor {name!r}, which the manifest does not have")
        if name in seen:
            raise _refused(f"the files hold tensor {name!r} twice")
        seen.add(name)
        yield name, tensor


def _check_tensor(name: str, found: TensorSpec, wanted: TensorSpec) -> None:
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        raise _refused(
            f"tensor {name!r} is {found.dtype} {found.shape} in the file, {wanted.dtype} {wanted.shape} in the manifest"
        )
    if found.checksum != wanted.checksum:
        raise _refused(f"the bytes of tensor {name!r} are not the ones that were published")


def _refused(reason: str) -> ApiError:
    return ApiError(409, "bad_version", reason, REPUBLISH)


def _file_errors() -> tuple[type[Exception], ...]:
    from safetensors import SafetensorError

    return (OSError, SafetensorError)
