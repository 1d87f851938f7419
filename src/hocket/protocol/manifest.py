"""Describe versions of weights by checksums, which trainer and server compute in the same way.

A tensor's bytes are read as 64-bit words w, padded with zero bytes to blocks of 2^12 words. All
sums are modulo 2^64: the sum of a block is s = Σ (2i + 1)·K·w_i, that of the tensor t ← t·K + s,
block after block. All factors are odd, so any changed word changes the sum.
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

_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # K, as a signed 64-bit number; odd
_BLOCK_WORDS = 1 << 12  # a block fits into a core's cache
_BLOCKS_AT_ONCE = 1 << 9  # 16 MiB
_BLOCK_BYTES = 8 * _BLOCK_WORDS


class ModelShapes(NamedTuple):
    """The tensors that a checkpoint of the served model has."""

    shapes: Mapping[str, tuple[int, ...]]  # by name
    # Tensors that may be left out, as they equal another one: {"lm_head.weight": "...embed..."}
    tied: Mapping[str, str]
    model: str = ""  # the name of the model's class

    @property
    def architecture(self) -> str:
        """Identify the architecture: its class, and a checksum of the tensors' names and shapes."""
        shapes = repr(sorted(self.shapes.items())).encode()
        return f"{self.model} {hashlib.sha256(shapes).hexdigest()[:8]}"


@functools.cache
def model_shapes(path: str) -> ModelShapes:
    """Describe the tensors that the trainer publishes of a model, by the headers of its files."""
    from transformers.core_model_loading import revert_weight_conversion

    files, _ = model_files.weight_files(path)
    shapes, _ = model_files.read_headers(files)
    model, _ = model_files.load_on_meta(path, shapes)
    # Names in memory become names in files, by which tensors are published.
    published = revert_weight_conversion(model, model.state_dict())
    named = {name: tuple(tensor.shape) for name, tensor in published.items()}
    return ModelShapes(named, dict(model.all_tied_weights_keys), type(model).__name__)


def tensor_checksum(tensor: "torch.Tensor") -> str:
    """Compute the checksum of a tensor's bytes, 16 hexadecimal digits."""
    import torch

    raw = tensor.detach().contiguous().flatten().view(torch.uint8)
    if raw.storage_offset() % 8:  # it starts between two words
        raw = raw.clone()
    # Whole blocks are read where they are; only the rest is copied, to pad it with zeros.
    whole = raw.numel() // _BLOCK_BYTES * _BLOCK_BYTES
    tail = torch.nn.functional.pad(raw[whole:], (0, -raw.numel() % _BLOCK_BYTES))
    factors = (2 * torch.arange(_BLOCK_WORDS, device=raw.device) + 1) * _FACTOR
    total = 0
    for part in (raw[:whole], tail):
        blocks = part.view(torch.int64).view(-1, _BLOCK_WORDS)
        for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
            for block in _block_sums(blocks[start : start + _BLOCKS_AT_ONCE], factors).tolist():
                total = (total * _FACTOR + block) % (1 << 64)
    return f"{total:016x}"


def _block_sums(blocks: "torch.Tensor", factors: "torch.Tensor") -> "torch.Tensor":
    """Multiply each row of words, [blocks, words], by the factors and add it up, int64 [blocks]."""
    if blocks.is_cuda:  # torch has no matrix products of integers there
        return (blocks * factors).sum(1)
    return blocks @ factors


def dtype_name(dtype: "torch.dtype") -> str:
    """Name a dtype as messages do: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def spec(tensor: "torch.Tensor") -> TensorSpec:
    """Describe a tensor: dtype, shape and checksum."""
    dtype = dtype_name(tensor.dtype)
    return TensorSpec(dtype=dtype, shape=list(tensor.shape), checksum=tensor_checksum(tensor))


def described(
    named: Iterable[tuple[str, "torch.Tensor"]],
) -> Iterator[tuple[str, "torch.Tensor", TensorSpec]]:
    """Yield named tensors with their specs, computed on all cores that this process may use."""

    def describe(item: tuple[str, "torch.Tensor"]) -> tuple[str, "torch.Tensor", TensorSpec]:
        name, tensor = item
        return name, tensor, spec(tensor)

    num_threads = len(os.sched_getaffinity(0))
    with concurrent.futures.ThreadPoolExecutor(num_threads, "checksum") as threads:
        yield from threads.map(describe, named)


def specs(named: Iterable[tuple[str, "torch.Tensor"]]) -> dict[str, TensorSpec]:
    """Describe named tensors by name."""
    return {name: spec for name, _, spec in described(named)}


def total_checksum(spec_of: Mapping[str, TensorSpec], text: str = "") -> str:
    """Compute the checksum of a whole version, whatever the order of its tensors.

    `text`: a checkpoint's state beside its tensors.
    """
    digest = hashlib.sha256(text.encode())
    for name in sorted(spec_of):
        item = spec_of[name]
        digest.update(f"{name}:{item.dtype}:{item.shape}:{item.checksum}\n".encode())
    return digest.hexdigest()[:32]


def write(folder: Path, version: int, spec_of: Mapping[str, TensorSpec]) -> str:
    """Make a folder of tensors a version: write its manifest and, last, its mark of completeness.

    Returns the version's checksum.
    """
    manifest = Manifest(version=version, tensors=dict(spec_of), checksum=total_checksum(spec_of))
    (folder / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    (folder / COMPLETE_FILE).touch()
    return manifest.checksum


def tensors(folder: Path) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Yield a folder's tensors with their names. Raises SafetensorError for a broken file."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)
