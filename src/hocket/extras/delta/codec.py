"""Encode the change between two versions of a tensor, lossless to the last bit.

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
    """Encode the change from `old` to `new`, contiguous tensors of equal shape and dtype."""
    import pyarrow

    integers = _INTEGERS[old.itemsize]
    differing = old.view(-1).view(integers) ^ new.view(-1).view(integers)
    compressed = pyarrow.Codec("zstd").compress(differing.numpy(), asbytes=True)
    packed = torch.frombuffer(bytearray(compressed), dtype=torch.uint8)
    return Change(int(torch.count_nonzero(differing)), packed)


def apply(old: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the new version, as uint8 like `old`.

    Raise OSError for the change of a tensor of another size.
    """
    import pyarrow

    differing = pyarrow.Codec("zstd").decompress(
        packed.numpy(), decompressed_size=old.nbytes, asbytes=True
    )
    return old ^ torch.frombuffer(bytearray(differing), dtype=torch.uint8)


def save(changes: Mapping[str, Change], folder: Path, base: str) -> None:
    """Write the delta file; `base` is the checksum of the version that it changes."""
    packed = {name: change.packed for name, change in changes.items() if change.num_changed}
    save_file(packed, folder / DELTA_FILE, metadata={"base": base})


def base_of(folder: Path) -> str:
    """Read the checksum of the version that a delta file changes."""
    with safe_open(folder / DELTA_FILE, framework="pt") as changes:
        return str(changes.metadata()["base"])


def patch(files: Path, folder: Path) -> None:
    """Change the safetensors files in `files` by the delta file in `folder`, in place.

    A second time would undo it. Raise OSError, ValueError, KeyError or SafetensorError; the files
    are then neither the old nor the new version.
    """
    with safe_open(folder / DELTA_FILE, framework="pt") as changes:
        remaining = set(changes.keys())
        for path in sorted(files.glob("*.safetensors")):
            with path.open("r+b") as file:
                header_size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(header_size))
                begin = 8 + header_size  # of the tensors
                for name in header.keys() & remaining:
                    start, end = header[name]["data_offsets"]
                    file.seek(begin + start)
                    old = torch.frombuffer(bytearray(file.read(end - start)), dtype=torch.uint8)
                    file.seek(begin + start)
                    file.write(apply(old, changes.get_tensor(name)).numpy().data)
                remaining -= header.keys()
    if remaining:
        raise KeyError(f"there is no tensor {min(remaining)!r} to change")
