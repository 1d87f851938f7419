"""What a weight version must consist of, and checksums that trainer and server compute alike.

The checksum of a tensor is a position-weighted sum of its 32-bit words modulo 2^64, Σ (2i + 1)·K·w_i: every weight is
odd, so a change of any single word always changes the sum, and swapped words do too. It runs where the tensor lies,
in plain torch, in bounded memory. The last words are padded with zero bytes.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.protocol import Manifest, TensorSpec

if TYPE_CHECKING:
    import torch

MANIFEST_FILE = "manifest.json"
COMPLETE_FILE = "COMPLETE"

_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as a signed 64-bit integer
_CHUNK_WORDS = 1 << 22


def tensor_checksum(tensor: "torch.Tensor") -> str:
    """Returns 16 hexadecimal digits for the tensor's bytes, whatever its dtype and device."""
    import torch

    raw = tensor.detach().contiguous().flatten().view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for start in range(0, raw.numel(), 4 * _CHUNK_WORDS):
        part = raw[start : start + 4 * _CHUNK_WORDS]
        if part.numel() % 4:
            part = torch.nn.functional.pad(part, (0, 4 - part.numel() % 4))
        words = (
            part.clone().view(torch.int32).to(torch.int64)
            if part.storage_offset() % 4
            else part.view(torch.int32).long()
        )
        first = start // 4
        index = torch.arange(first, first + words.numel(), dtype=torch.int64, device=raw.device)
        total += (words * ((2 * index + 1) * _FACTOR)).sum()
    return f"{int(total.item()) & (1 << 64) - 1:016x}"


def spec(tensor: "torch.Tensor") -> TensorSpec:
    """Returns dtype, shape and checksum of one tensor."""
    return TensorSpec(
        dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape), checksum=tensor_checksum(tensor)
    )


def total_checksum(tensors: Mapping[str, TensorSpec]) -> str:
    """Returns one checksum for a whole version: names, dtypes, shapes and contents, in any order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        item = tensors[name]
        digest.update(f"{name}:{item.dtype}:{item.shape}:{item.checksum}\n".encode())
    return digest.hexdigest()[:32]


def build(version: int, tensors: Iterable[tuple[str, "torch.Tensor"]], *, dtype: str) -> Manifest:
    """Returns the manifest of the tensors, each read once."""
    specs = {name: spec(tensor) for name, tensor in tensors}
    return Manifest(version=version, dtype=dtype, tensors=specs, checksum=total_checksum(specs))


def read(folder: Path) -> Manifest:
    """Reads manifest.json. Raises OSError or ValueError where it is missing or malformed."""
    return Manifest.model_validate(json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8")))
