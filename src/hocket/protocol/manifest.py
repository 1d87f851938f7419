"""Describe versions by checksums that trainer and server compute alike.

A tensor's bytes are read as 64-bit words w, padded with zero bytes to blocks of 2^12, modulo 2^64: a block is
s = Σ (2i + 1)·K·w_i, the tensor is t ← t·K + s over its blocks. All factors are odd, so any changed word shows.
"""

import concurrent.futures
import functools
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hocket.protocol import Manifest, TensorSpec, model_files

if TYPE_CHECKING:
    import torch

MANIFEST_FILE = "manifest.json"
COMPLETE_FILE = "COMPLETE"
ADAPTER_FILE = "adapter_config.json"

_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd
_BLOCK_WORDS = 1 << 12  # fit into a core's cache
_BLOCKS_AT_ONCE = 1 << 9  # 16 MiB


class ModelShapes(NamedTuple):
    """The tensors of a checkpoint of the served model."""

    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[
        str, str
    ]  # to another one, and may be left out: {"lm_head.weight": "...embed..."}
    model: str = ""  # its class

    @property
    def architecture(self) -> str:
        """Return the class, with a checksum of names and shapes."""
        shapes = repr(sorted(self.shapes.items())).encode()
        return f"{self.model} {hashlib.sha256(shapes).hexdigest()[:8]}"


@functools.cache
def model_shapes(path: str) -> ModelShapes:
    """Describe the tensors that the trainer publishes of a model, from the headers of its files."""
    from transformers.core_model_loading import revert_weight_conversion

    files, _ = model_files.weight_files(path)
    shapes, _ = model_files.read_headers(files)
    model, _ = model_files.load_on_meta(path, shapes)
    published = revert_weight_conversion(model, model.state_dict())
    named = {name: tuple(tensor.shape) for name, tensor in published.items()}
    return ModelShapes(named, dict(model.all_tied_weights_keys), type(model).__name__)


def tensor_checksum(tensor: "torch.Tensor") -> str:
    """Return 16 hexadecimal digits for the tensor's bytes."""
    import torch

    raw = tensor.detach().contiguous().flatten().view(torch.uint8)
    if raw.storage_offset() % 8:  # it starts between two words
        raw = raw.clone()
    whole = raw.numel() // (8 * _BLOCK_WORDS) * (8 * _BLOCK_WORDS)
    tail = torch.nn.functional.pad(raw[whole:], (0, -raw.numel() % (8 * _BLOCK_WORDS)))
    factors = (2 * torch.arange(_BLOCK_WORDS, device=raw.device) + 1) * _FACTOR
    total = 0
    for part in (raw[:whole], tail):
        blocks = part.view(torch.int64).view(-1, _BLOCK_WORDS)
        for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
            for block in _block_sums(blocks[start : start + _BLOCKS_AT_ONCE], factors).tolist():
                total = (total * _FACTOR + block) % (1 << 64)
    return f"{total:016x}"


def _block_sums(blocks: "torch.Tensor", factors: "torch.Tensor") -> "torch.Tensor":
    if blocks.is_cuda:  # where torch has no matrix products of integers
        return (blocks * factors).sum(1)
    return blocks @ factors


def dtype_name(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")


def spec(tensor: "torch.Tensor") -> TensorSpec:
    return TensorSpec(
        dtype=dtype_name(tensor.dtype), shape=list(tensor.shape), checksum=tensor_checksum(tensor)
    )


def specs(named: Iterable[tuple[str, "torch.Tensor"]]) -> dict[str, TensorSpec]:
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0)), "checksum") as threads:
        return dict(threads.map(lambda item: (item[0], spec(item[1])), named))


def total_checksum(tensors: Mapping[str, TensorSpec], text: str = "") -> str:
    """Return the checksum of a version, whatever the order of its tensors; a checkpoint has a text, too."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        item = tensors[name]
        digest.update(f"{name}:{item.dtype}:{item.shape}:{item.checksum}\n".encode())
    return digest.hexdigest()[:32]


def write(folder: Path, version: int, tensors: Mapping[str, TensorSpec]) -> str:
    """Make a folder a version; return its checksum."""
    manifest = Manifest(version=version, tensors=dict(tensors), checksum=total_checksum(tensors))
    (folder / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    (folder / COMPLETE_FILE).touch()
    return manifest.checksum


def tensors(folder: Path) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Yield a folder's tensors. Raises SafetensorError for a broken file."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)
