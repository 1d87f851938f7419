"""What changed between two versions of a tensor, bit by bit: small, lossless, and the same code on both ends.

Master weights are float32 and a step of reinforcement learning is small, so that most weights, rounded to 16 bits, stay
as they were. The others are sent as their new values and the gaps between them. A gap, the number of unchanged elements
in front of a changed one, is a row of digits: the largest number of its integer type says "so many, and go on", any
other one ends it. So a narrow type serves gaps of any length; of two types the one that takes fewer bytes is used.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DELTA_FILE = "delta.safetensors"


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """What makes one tensor of another.

    Attributes:
        count: elements whose bits differ.
        parts: {} where none does; {"whole"}: the new tensor, where that is smaller; else {"gaps", "values"}.
    """

    count: int
    parts: "Mapping[str, torch.Tensor]"


def encode(old: "torch.Tensor", new: "torch.Tensor") -> Change:
    """Returns what makes `new` of `old`, two contiguous tensors of one shape and dtype on the CPU.

    Raises:
        ValueError: they are not alike.
    """
    import torch

    if (old.shape, old.dtype) != (new.shape, new.dtype):
        raise ValueError(f"a {old.dtype} tensor {list(old.shape)} can't become {new.dtype} {list(new.shape)}")
    differs = _bits(old) != _bits(new)
    count = int(torch.count_nonzero(differs))
    if count == 0:
        return Change(0, {})
    if count * (1 + new.itemsize) < new.nbytes:  # a digit has a byte at least
        positions = differs.nonzero()[:, 0]
        parts = {"gaps": _gaps(positions), "values": new.view(-1)[positions]}
        if sum(part.nbytes for part in parts.values()) < new.nbytes:
            return Change(count, parts)
    return Change(count, {"whole": new})


def apply(old: "torch.Tensor", parts: "Mapping[str, torch.Tensor]") -> "torch.Tensor":
    """Returns the tensor that `parts`, of `encode`, make of `old`.

    Raises:
        ValueError, IndexError, RuntimeError: they were not made for a tensor like this one.
    """
    if not parts:
        return old
    if "whole" in parts:
        new = parts["whole"]
    elif parts.keys() == {"gaps", "values"} and parts["values"].dtype == old.dtype:
        new = old.clone()
        _bits(new)[_positions(parts["gaps"])] = _bits(parts["values"])
    else:
        raise ValueError(f"no change of a {old.dtype} tensor has the parts {sorted(parts)}")
    if (new.shape, new.dtype) != (old.shape, old.dtype):
        raise ValueError(f"a {old.dtype} tensor {list(old.shape)} can't become {new.dtype} {list(new.shape)}")
    return new


def save(changes: Mapping[str, Change], folder: Path) -> None:
    """Writes the changes of named tensors to the folder's delta file."""
    from safetensors.torch import save_file

    save_file({f"{name}:{part}": t for name, c in changes.items() for part, t in c.parts.items()}, folder / DELTA_FILE)


def patch(files: Path, folder: Path) -> None:
    """Changes the tensors in the safetensors files of one folder, in place, by the delta file of another.

    One tensor at a time is in memory. Where this raises, the files are neither the old nor the new version.

    Raises:
        OSError, ValueError, IndexError, KeyError, RuntimeError, SafetensorError: the disk is full, or the delta was
            not made for these files.
    """
    import torch
    from safetensors import safe_open

    with safe_open(folder / DELTA_FILE, framework="pt") as changes:
        keys: dict[str, list[str]] = {}
        for key in changes.keys():  # noqa: SIM118 - not a mapping
            name, _, part = key.rpartition(":")
            keys.setdefault(name, []).append(part)
        for path in sorted(files.glob("*.safetensors")):
            with path.open("r+b") as file:
                begin, header = _header(file)
                for name in header.keys() & keys.keys():
                    parts = {part: changes.get_tensor(f"{name}:{part}") for part in keys.pop(name)}
                    dtype = (parts["whole"] if "whole" in parts else parts["values"]).dtype
                    start, end = header[name]["data_offsets"]
                    file.seek(begin + start)
                    raw = bytearray(file.read(end - start))
                    new = apply(torch.frombuffer(raw, dtype=dtype).view(header[name]["shape"]), parts)
                    file.seek(begin + start)
                    file.write(new.view(-1).view(torch.uint8).numpy().data)
    if keys:
        raise KeyError(f"there is no tensor {min(keys)!r} to change")


def _header(file: Any) -> tuple[int, dict[str, Any]]:
    """Returns where the tensors of an open safetensors file begin, and what it says of each."""
    size = int.from_bytes(file.read(8), "little")
    return 8 + size, json.loads(file.read(size))


def _bits(tensor: "torch.Tensor") -> "torch.Tensor":
    """Returns the elements as integers: as numbers, NaN differs from itself, and -0.0 equals 0.0."""
    import torch

    return tensor.view(-1).view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def _gaps(positions: "torch.Tensor") -> "torch.Tensor":
    """Returns the digits, uint8 or uint16, of the gaps between increasing positions [k], int64."""
    import torch

    gaps = positions.diff(prepend=positions.new_tensor([-1])) - 1

    def num_digits(largest: int) -> torch.Tensor:
        return gaps // largest + 1

    narrow, wide = num_digits(255), num_digits(65535)
    if narrow.sum() <= 2 * wide.sum():
        digits, largest, dtype = narrow, 255, torch.uint8
    else:
        digits, largest, dtype = wide, 65535, torch.uint16
    last = digits.cumsum(0)
    row = torch.full((int(last[-1]),), largest, dtype=torch.int32)
    row[last - 1] = (gaps % largest).int()
    return row.to(dtype)


def _positions(gaps: "torch.Tensor") -> "torch.Tensor":
    """Returns the positions, int64, that `_gaps` was given."""
    import torch

    row = gaps.long()
    more = row == torch.iinfo(gaps.dtype).max
    return (row + ~more).cumsum(0)[~more] - 1
