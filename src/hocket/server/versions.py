"""Find published versions under a root, and check them against the model."""

import itertools
import math
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from hocket.protocol import AdapterConfig, Manifest, TensorLayout, TensorSpec, manifest
from hocket.protocol.manifest import ModelShapes
from hocket.server.errors import ApiError, invalid, parse

M = TypeVar("M", bound=pydantic.BaseModel)

OVERHEAD_BYTES = 64 << 20
"""Most bytes of a version's manifest and headers."""
REPUBLISH = "publish the version again, under a new name; the old weights keep serving"


def max_bytes(expected: ModelShapes) -> int:
    return 4 * sum(map(math.prod, expected.shapes.values())) + OVERHEAD_BYTES


def adapter_shapes(adapter: AdapterConfig, model: ModelShapes, max_rank: int) -> ModelShapes:
    """Return an adapter's tensors: A [r, in] and B [out, r] of every layer that it names."""
    if adapter.r > max_rank:
        hint = f"start the server with the trainer's section model.lora, or model.lora.rank={adapter.r}"
        raise ApiError(
            409, "rank_too_high", f"the engine takes adapters up to rank {max_rank}", hint
        )
    targets = "|".join(map(re.escape, adapter.target_modules))
    matrix = re.compile(rf"((.*\.)?({targets}))\.weight")
    shapes = {}
    for name, shape in model.shapes.items():
        adapted = matrix.fullmatch(name)
        if adapted and len(shape) == 2:
            shapes[f"base_model.model.{adapted[1]}.lora_A.weight"] = (adapter.r, shape[1])
            shapes[f"base_model.model.{adapted[1]}.lora_B.weight"] = (shape[0], adapter.r)
    return ModelShapes(shapes, tied={})


def find(root: Path, name: str) -> Path:
    """Return the complete version `name` under `root`. Raises ApiError."""
    hint = "start server and trainer with the same sync.root; source.name is relative to it"
    try:
        folder = (root / name).resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise ApiError(
            404, "no_such_version", f"there is no {name!r} under {root}", hint
        ) from error
    if not folder.is_relative_to(root):
        raise invalid(f"source.name: {name!r} leads out of the root", hint, code="bad_name")
    if not (folder / manifest.COMPLETE_FILE).is_file():
        message = f"{name!r} has no {manifest.COMPLETE_FILE} marker: it is not finished"
        raise ApiError(409, "incomplete_version", message, REPUBLISH)
    return folder


def read(root: Path, name: str) -> tuple[Path, Manifest, AdapterConfig | None]:
    """Return a version's folder, manifest and, of an adapter, the config. Raises ApiError."""
    folder = find(root, name)
    return folder, _parsed(Manifest, folder / manifest.MANIFEST_FILE), read_adapter(folder)


def read_adapter(folder: Path) -> AdapterConfig | None:
    path = folder / manifest.ADAPTER_FILE
    return _parsed(AdapterConfig, path) if path.is_file() else None


def _parsed(message: type[M], path: Path) -> M:
    try:
        return parse(message, path.read_bytes())
    except (OSError, ApiError) as error:
        raise refused(f"can't read {path.name}: {error}") from error


def check_manifest(described: Manifest, version: int, expected: ModelShapes) -> None:
    """Raise ApiError unless the manifest is of this version and of the model's tensors."""
    if described.version != version:
        raise refused(f"the manifest is of version {described.version}, not {version}")
    if manifest.total_checksum(described.tensors) != described.checksum:
        raise refused("the manifest's checksum is not the one of its tensors")
    _check_tensors(described.tensors, expected)


def check_buckets(
    buckets: Sequence[Sequence[TensorLayout]], expected: ModelShapes, *, partial: bool = False
) -> None:
    """Raise ApiError unless what is to come are the model's tensors, or some of them, each once."""
    items = list(itertools.chain(*buckets))
    # Tied tensors count as different: only one is to come.
    tensors = {
        item.name: TensorSpec(dtype=item.dtype, shape=item.shape, checksum=item.name)
        for item in items
    }
    if len(tensors) < len(items):
        raise refused("a tensor is named twice")
    if partial:
        shapes = {name: shape for name, shape in expected.shapes.items() if name in tensors}
        expected = expected._replace(shapes=shapes)
    _check_tensors(tensors, expected)


def _check_tensors(tensors: Mapping[str, TensorSpec], expected: ModelShapes) -> None:
    """Raise ApiError unless these are the model's tensors, and tied ones the same."""
    for name, source in expected.tied.items():
        if {name, source} <= tensors.keys() and tensors[name].checksum != tensors[source].checksum:
            raise refused(
                f"the model ties {name!r} to {source!r}: leave it out, or let both be the same"
            )
    left_out = expected.tied.keys() - tensors.keys()
    wanted = {name: shape for name, shape in expected.shapes.items() if name not in left_out}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    _require_equal(found, "the version", wanted, "the model")


def check_headers(folder: Path, described: Manifest) -> None:
    """Raise ApiError unless the files' headers have the manifest's tensors, each once.

    A wrong byte shows as it goes into the model.
    """
    from safetensors import SafetensorError

    announced = {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in described.tensors.items()
    }
    found = dict[str, tuple[str, tuple[int, ...]]]()
    try:
        for name, tensor in manifest.tensors(folder):  # whose data is not read
            if name in found:
                raise refused(f"the files hold tensor {name!r} twice")
            found[name] = manifest.dtype_name(tensor.dtype), tuple(tensor.shape)
    except (OSError, SafetensorError) as error:
        raise refused(f"can't read the safetensors files: {error}") from error
    _require_equal(found, "the files", announced, "the manifest")


def _require_equal(
    found: Mapping[str, Any], of: str, wanted: Mapping[str, Any], owner: str
) -> None:
    """Raise ApiError for the first tensor of which they differ."""
    for name in [*found, *wanted]:
        here = found.get(name, "missing")
        there = wanted.get(name, "missing")
        if here != there:
            raise refused(f"tensor {name!r} is {here} in {of}, {there} in {owner}")


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
