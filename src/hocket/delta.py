"""Encode what changed between two versions of a tensor: small, lossless to the last bit, the same code on both ends.

Master weights are float32 and a step of reinforcement learning is small, so that most weights, rounded to 16 bits, stay
as they were. The others are sent as their new values and the compressed distances between their positions.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

DELTA_FILE = "delta.safetensors"


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """The difference of two versions of a tensor."""

    count: int  # elements whose bits differ
    parts: Mapping[str, torch.Tensor]  # {} for none; {"gaps", "values"}, or all "values" where that is smaller


def encode(old: torch.Tensor, new: torch.Tensor) -> Change:
    """Return what turns `old` into `new`, two contiguous tensors of one shape and dtype on the CPU."""
    differs = _bits(old) != _bits(new)
    count = int(torch.count_nonzero(differs))
    if count == 0:
        return Change(0, {})
    if count * (1 + new.itemsize) < new.nbytes:  # a gap takes about a byte
        positions = differs.nonzero()[:, 0]
        parts = {"gaps": _compressed(positions), "values": new.view(-1)[positions]}
        if sum(part.nbytes for part in parts.values()) < new.nbytes:
            return Change(count, parts)
    return Change(count, {"values": new.view(-1)})


def apply(old: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return what the `parts` of a Change make of `old`. Raises as `patch` does where they are another tensor's."""
    if not parts:
        return old
    values = parts["values"]
    if values.dtype != old.dtype:
        raise ValueError(f"values of {values.dtype} can't change a tensor of {old.dtype}")
    if "gaps" not in parts:
        return values.view(old.shape)
    new = old.clone()
    _bits(new)[_positions(parts["gaps"], values.numel())] = _bits(values)
    return new


def save(changes: Mapping[str, Change], folder: Path) -> None:
    """Write the changes of named tensors to the folder's delta file."""
    save_file({f"{name}:{part}": t for name, c in changes.items() for part, t in c.parts.items()}, folder / DELTA_FILE)


def patch(files: Path, folder: Path) -> None:
    """Change the tensors in the safetensors files of one folder, in place, by the delta file of another.

    Raises OSError, ValueError, IndexError, KeyError, RuntimeError or SafetensorError where the disk is full or the
    delta is of other files, which are then neither the old nor the new version.
    """
    with safe_open(folder / DELTA_FILE, framework="pt") as changes:
        keys: dict[str, list[str]] = {}
        for key in changes.keys():  # noqa: SIM118 - not a mapping
            name, _, part = key.rpartition(":")
            keys.setdefault(name, []).append(part)
        for path in sorted(files.glob("*.safetensors")):
            with path.open("r+b") as file:
                begin = 8 + int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(begin - 8))
                for name in header.keys() & keys.keys():
                    parts = {part: changes.get_tensor(f"{name}:{part}") for part in keys.pop(name)}
                    start, end = header[name]["data_offsets"]
                    file.seek(begin + start)
                    old = torch.frombuffer(bytearray(file.read(end - start)), dtype=parts["values"].dtype)
                    file.seek(begin + start)
                    file.write(apply(old, parts).view(torch.uint8).numpy().data)
    if keys:
        raise KeyError(f"there is no tensor {min(keys)!r} to change")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers: as numbers, NaN differs from itself, and -0.0 equals 0.0."""
    return tensor.view(-1).view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def _compressed(positions: torch.Tensor) -> torch.Tensor:
    """Return the distances between increasing positions [k], int64, as compressed bytes, uint8."""
    import pyarrow

    distances = positions.diff(prepend=positions.new_zeros(1))
    planes = distances.view(torch.uint8).view(-1, 8).t().contiguous()  # all lowest bytes, then all second ones, ...
    return torch.frombuffer(bytearray(pyarrow.Codec("zstd").compress(planes.numpy())), dtype=torch.uint8)


def _positions(gaps: torch.Tensor, count: int) -> torch.Tensor:
    """Return the positions that `_compressed` was given."""
    import pyarrow

    raw = bytearray(pyarrow.Codec("zstd").decompress(gaps.numpy(), decompressed_size=8 * count))
    return torch.frombuffer(raw, dtype=torch.uint8).view(8, count).t().reshape(-1).view(torch.int64).cumsum(0)
