"""Encode what changed between two versions of a tensor, lossless to the last bit.

A step changes few weights of 16 bits: old XOR new is mostly zeros, which zstd compresses.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

DELTA_FILE = "delta.safetensors"
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Change(NamedTuple):
    num_changed: int  # elements whose bits differ
    packed: torch.Tensor  # uint8: old bits XOR new bits, compressed


def encode(old: torch.Tensor, new: torch.Tensor) -> Change:
    """Return what turns `old` into `new`, contiguous tensors of one shape and dtype on the CPU."""
    import pyarrow

    differing = old.view(-1).view(_INTEGERS[old.itemsize]) ^ new.view(-1).view(
        _INTEGERS[new.itemsize]
    )
    packed = pyarrow.Codec("zstd").compress(differing.numpy(), asbytes=True)
    return Change(
        int(torch.count_nonzero(differing)), torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    )


def apply(old: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Return the bytes, uint8, of the new version. Raises OSError for another tensor's change."""
    import pyarrow

    differing = pyarrow.Codec("zstd").decompress(
        packed.numpy(), decompressed_size=old.nbytes, asbytes=True
    )
    return old ^ torch.frombuffer(bytearray(differing), dtype=torch.uint8)


def save(changes: Mapping[str, Change], folder: Path, base: str) -> None:
    """Write the delta file; `base`: checksum of the version that is changed."""
    packed = {name: change.packed for name, change in changes.items() if change.num_changed}
    save_file(packed, folder / DELTA_FILE, metadata={"base": base})


def base_of(folder: Path) -> str:
    with safe_open(folder / DELTA_FILE, framework="pt") as changes:
        return str(changes.metadata()["base"])


def patch(files: Path, folder: Path) -> None:
    """Change the safetensors files of one folder by the delta file of another, in place; once only.

    Raises OSError, ValueError, KeyError or SafetensorError; the files are then neither the old nor
    the new version.
    """
    with safe_open(folder / DELTA_FILE, framework="pt") as changes:
        left = set(changes.keys())
        for path in sorted(files.glob("*.safetensors")):
            with path.open("r+b") as file:
                begin = 8 + int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(begin - 8))
                for name in header.keys() & left:
                    start, end = header[name]["data_offsets"]
                    file.seek(begin + start)
                    old = torch.frombuffer(bytearray(file.read(end - start)), dtype=torch.uint8)
                    file.seek(begin + start)
                    file.write(apply(old, changes.get_tensor(name)).numpy().data)
                left -= header.keys()
    if left:
        raise KeyError(f"there is no tensor {min(left)!r} to change")
