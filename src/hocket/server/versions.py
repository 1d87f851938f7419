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

from hocket.common.files import is_in_memory
from hocket.protocol import AdapterConfig, Manifest, TensorLayout, TensorSpec, manifest
from hocket.protocol.manifest import ModelShapes
from hocket.server.errors import ApiError, invalid, parse

M = TypeVar("M", bound=pydantic.BaseModel)

OVERHEAD_BYTES = 64 << 20
"""The largest size of a version's manifest and headers together."""
REPUBLISH = "publish the version again, under a new name; the old weights keep serving"


def max_bytes(expected: ModelShapes) -> int:
    """Bound the size of a version: all tensors in float32, and its manifest and headers."""
    return 4 * sum(map(math.prod, expected.shapes.values())) + OVERHEAD_BYTES


def adapter_shapes(adapter: AdapterConfig, model: ModelShapes, max_rank: int) -> ModelShapes:
    """List an adapter's tensors: A [r, in] and B [out, r] of every layer that it names.

    Raises ApiError for a rank above the engine's.
    """
    if adapter.r > max_rank:
        message = f"the engine takes adapters up to rank {max_rank}"
        hint = (
            "start the server with the trainer's section model.lora, or "
            f"model.lora.rank={adapter.r}"
        )
        raise ApiError(409, "rank_too_high", message, hint)
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
    """Find the folder of the complete version `name` under `root`. Raises ApiError."""
    hint = "start server and trainer with the same sync.root; source.name is relative to it"
    try:
        folder = (root / name).resolve(strict=True)
        link = (root / name).parent.resolve() / folder.name
    except (OSError, RuntimeError, ValueError) as error:
        message = f"there is no {name!r} under {root}"
        raise ApiError(404, "no_such_version", message, hint) from error
    # A trainer on this machine may have left a link to a version in memory.
    is_link_to_memory = link.is_relative_to(root) and is_in_memory(folder)
    if not folder.is_relative_to(root) and not is_link_to_memory:
        raise invalid(f"source.name: {name!r} leads out of the root", hint, code="bad_name")
    # The writer adds the marker last.
    if not (folder / manifest.COMPLETE_FILE).is_file():
        message = f"{name!r} has no {manifest.COMPLETE_FILE} marker: it is not finished"
        raise ApiError(409, "incomplete_version", message, REPUBLISH)
    return folder


def read(root: Path, name: str) -> tuple[Path, Manifest, AdapterConfig | None]:
    """Read the version `name` under `root`, except its tensors. Raises ApiError.

    Returns its folder, its manifest and, if it is an adapter, the adapter's config.
    """
    folder = find(root, name)
    return folder, _parsed(Manifest, folder / manifest.MANIFEST_FILE), read_adapter(folder)


def read_adapter(folder: Path) -> AdapterConfig | None:
    """Read the config of the adapter in a folder; None where it holds a whole model."""
    path = folder / manifest.ADAPTER_FILE
    return _parsed(AdapterConfig, path) if path.is_file() else None


def _parsed(message_type: type[M], path: Path) -> M:
    try:
        return parse(message_type, path.read_bytes())
    except (OSError, ApiError) as error:
        raise refused(f"can't read {path.name}: {error}") from error


def check_manifest(described: Manifest, version: int, expected: ModelShapes) -> None:
    """Raise ApiError unless a manifest describes this version and the model's tensors."""
    if described.version != version:
        raise refused(f"the manifest is of version {described.version}, not {version}")
    if manifest.total_checksum(described.tensors) != described.checksum:
        raise refused("the manifest's checksum is not the one of its tensors")
    _check_tensors(described.tensors, expected)


def check_buckets(
    buckets: Sequence[Sequence[TensorLayout]], expected: ModelShapes, *, partial: bool = False
) -> None:
    """Raise ApiError unless the announced buckets hold each of the model's tensors once.

    With `partial` they may hold some of the tensors only.
    """
    layouts = list(itertools.chain.from_iterable(buckets))
    # The checksums are not known yet. With names in their place no two tensors are equal, so that
    # only one of two tied tensors may come.
    tensors = dict[str, TensorSpec]()
    for layout in layouts:
        tensors[layout.name] = TensorSpec(
            dtype=layout.dtype, shape=layout.shape, checksum=layout.name
        )
    if len(tensors) < len(layouts):
        raise refused("a tensor is named twice")
    if partial:
        shapes = {name: shape for name, shape in expected.shapes.items() if name in tensors}
        expected = expected._replace(shapes=shapes)
    _check_tensors(tensors, expected)


def _check_tensors(tensors: Mapping[str, TensorSpec], expected: ModelShapes) -> None:
    """Raise ApiError unless these are the model's tensors, and tied ones are equal."""
    for name, source in expected.tied.items():
        if {name, source} <= tensors.keys() and tensors[name].checksum != tensors[source].checksum:
            message = (
                f"the model ties {name!r} to {source!r}: leave it out, or let both be the same"
            )
            raise refused(message)
    # A tied tensor may be left out, as the model has its values under another name.
    left_out = expected.tied.keys() - tensors.keys()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    model_shapes = {name: shape for name, shape in expected.shapes.items() if name not in left_out}
    _require_equal(shapes, "the version", model_shapes, "the model")


def check_headers(folder: Path, described: Manifest) -> None:
    """Raise ApiError unless the files' headers list the manifest's tensors, each once.

    The data is not read here. A wrong byte in it shows in the checksum as it goes into the model.
    """
    from safetensors import SafetensorError

    announced = dict[str, tuple[str, tuple[int, ...]]]()
    for name, spec in described.tensors.items():
        announced[name] = spec.dtype, tuple(spec.shape)
    stored = dict[str, tuple[str, tuple[int, ...]]]()
    try:
        for name, tensor in manifest.tensors(folder):
            if name in stored:
                raise refused(f"the files hold tensor {name!r} twice")
            stored[name] = manifest.dtype_name(tensor.dtype), tuple(tensor.shape)
    except (OSError, SafetensorError) as error:
        raise refused(f"can't read the safetensors files: {error}") from error
    _require_equal(stored, "the files", announced, "the manifest")


def _require_equal(
    actual: Mapping[str, Any], actual_place: str, expected: Mapping[str, Any], expected_place: str
) -> None:
    """Raise ApiError for the first tensor that differs; each place is named in the message."""
    for name in list(actual) + list(expected):
        actual_value = actual.get(name, "missing")
        expected_value = expected.get(name, "missing")
        if actual_value != expected_value:
            places = f"{actual_value} in {actual_place}, {expected_value} in {expected_place}"
            raise refused(f"tensor {name!r} is {places}")


def temporary_prefix() -> str:
    """Begin the name of a temporary folder; `remove_leftovers` reads the process's id from it."""
    return f"hocket-weights-{os.getpid()}-"


def remove_leftovers() -> None:
    """Remove the temporary folders of servers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob("hocket-weights-*-*"):
        pid = folder.name.split("-")[2]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)


def refused(reason: str) -> ApiError:
    """Make the error of a version that the server does not load."""
    return ApiError(409, "bad_version", reason, REPUBLISH)
