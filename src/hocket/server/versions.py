"""Published weight versions on disk: found under one root, and verified to the last byte before a model sees them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hocket import manifest
from hocket.protocol import Manifest
from hocket.server.errors import ApiError, invalid

if TYPE_CHECKING:
    import torch

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
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
    """Reads a model's config and builds the model without memory for its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), trust_remote_code=False)
    return ModelShapes(
        shapes={name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
        tied=dict(model.all_tied_weights_keys),
    )


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


def verify(folder: Path, version: int, expected: ModelShapes) -> Manifest:
    """Reads the whole version and returns its manifest if every byte is as it says and the model can take it.

    Raises:
        ApiError: 409 with the reason; nothing has been loaded.
    """
    described = read_manifest(folder)
    if described.version != version:
        raise _refused(f"the manifest is of version {described.version}, not {version}")
    if manifest.total_checksum(described.tensors) != described.checksum:
        raise _refused("the manifest's checksum is not the one of its tensors")
    _check_shapes(described, expected)
    found = set()
    try:
        for name, tensor in manifest.tensors(folder):
            if name not in described.tensors:
                raise _refused(f"the files hold tensor {name!r}, which the manifest does not have")
            if name in found:
                raise _refused(f"the files hold tensor {name!r} twice")
            _check_tensor(name, tensor, described)
            found.add(name)
    except _file_errors() as error:
        raise _refused(f"can't read the safetensors files: {error}") from error
    missing = sorted(described.tensors.keys() - found)
    if missing:
        raise _refused(f"tensor {missing[0]!r} is missing in the files ({len(missing)} in all)")
    return described


def read_manifest(folder: Path) -> Manifest:
    """Reads manifest.json. Raises ApiError where it is missing or malformed."""
    try:
        return manifest.read(folder)
    except (OSError, ValueError) as error:
        raise _refused(f"can't read {manifest.MANIFEST_FILE}: {error}") from error


def _check_shapes(described: Manifest, expected: ModelShapes) -> None:
    for name, item in described.tensors.items():
        shape = expected.shapes.get(name)
        if shape is None:
            raise _refused(f"the model has no tensor {name!r}")
        if tuple(item.shape) != shape:
            raise _refused(f"tensor {name!r} has shape {item.shape}, the model's is {list(shape)}")
        if item.dtype not in FLOAT_DTYPES:
            raise _refused(f"tensor {name!r} is {item.dtype}; weights are {', '.join(FLOAT_DTYPES)}")
    missing = sorted(expected.shapes.keys() - described.tensors.keys() - expected.tied.keys())
    if missing:
        raise _refused(f"tensor {missing[0]!r} is missing ({len(missing)} in all)")
    for name, source in expected.tied.items():
        copy, original = described.tensors.get(name), described.tensors.get(source)
        if copy is not None and original is not None and copy.checksum != original.checksum:
            raise _refused(f"the model ties {name!r} to {source!r}, but they differ")


def _check_tensor(name: str, tensor: "torch.Tensor", described: Manifest) -> None:
    found, wanted = manifest.spec(tensor), described.tensors[name]
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
