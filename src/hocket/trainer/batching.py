"""Make micro-batches of samples; the only place where sequences move to the next-token axis.

A sequence of n tokens has n - 1 positions: position t reads token t and predicts token t + 1. The
sequences of a micro-batch lie in one row (packing.py) without padding, which changes results by
rounding only.
"""

import dataclasses
import itertools
import math
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hocket.algorithm.losses import LossBatch
from hocket.trainer.attention import WHOLE, RowPart, Segments
from hocket.trainer.packing import PLAIN, Packer, members_of_units, num_positions, plan_rows
from hocket.types import Image, TokenSequence, TrainSample


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch(LossBatch):
    """The input of one forward pass of one rank.

    The axes in the names of its tensors:

    - b: always 1.
    - r: positions of the row that the model reads, in which a shared prefix is once.
    - t: next-token positions of all sequences, one sequence after another, each with its prefix. A
      number at t belongs to the token that is predicted there.
    - n: trained tokens.

    Ranks that divide a row (trainer.sequence_parallel) have all of t, and each its part of r and n.
    """

    segments: Segments  # the row's segments, for attention
    input_ids_br: Tensor  # the tokens that are read
    target_ids_bt: Tensor  # the tokens that are predicted
    trained_n: Tensor  # places on the axis t where the mask is True
    row_n: Tensor  # places in `input_ids_br` of the positions that predict these
    lengths: tuple[int, ...]  # positions of each sequence along t
    unbiased_bt: Tensor  # True on sampled tokens of unbiased samples
    places: tuple[int, ...]  # places of the sequences among the samples that `divide` got
    max_tokens: int
    """Most trained tokens of the micro-batches that ranks run at the same time.

    All of these ranks call the head as often as so many tokens need.
    """
    images: tuple[Image, ...] = ()  # the row's images; `start` of each is its place in the row


def minibatches(groups: Sequence[int], *, epochs: int, count: int, seed: int) -> list[list[int]]:
    """Choose the samples of each update: result[update] has their places, in order.

    Every epoch deals the groups, shuffled by `seed`, into `count` mini-batches, or fewer if there
    are fewer groups; groups[i] is the group of sample i.
    """
    distinct = sorted(set(groups))
    generator = random.Random(seed)
    count = min(count, len(distinct))
    updates = []
    for _ in range(epochs):
        shuffled = generator.sample(distinct, len(distinct))
        for first in range(count):
            chosen = set(shuffled[first::count])
            updates.append([place for place, group in enumerate(groups) if group in chosen])
    return updates


def divide(
    samples: Sequence[TrainSample],
    *,
    micro_batch_tokens: int,
    num_ranks: int,
    row_tokens: float = math.inf,
    cost: Callable[[int], float] = float,
    packer: Packer = PLAIN,
    unit: int = 1,
) -> list[list["PackedRow"]]:
    """Pack samples into micro-batches, the same number on every rank.

    Ranks get about the same cost. Within a rank the costliest micro-batch comes first, so that
    ranks run similar ones at a time. A rank that has fewer of them runs a masked position.

    Args:
        samples: the samples of one update.
        micro_batch_tokens: positions that a micro-batch may have.
        num_ranks: number of ranks that compute different rows.
        row_tokens: positions after which a row gets longer only where much is shared: on CPUs.
        cost: computes what a sequence costs, from its number of positions.
        packer: decides which sequences come together.
        unit: number of consecutive samples that stay together, in this order, in one micro-batch:
            2 for the pairs of dpo and rm.

    Returns:
        result[rank][i]: the rank's micro-batch i, still to be built on its device.
    """
    # Everything below is in the packer's order; `places` leads back to `samples`. A unit is ordered
    # by its first sample.
    places = members_of_units(packer.order(samples[::unit]), unit)
    packed = [samples[place] for place in places]
    trained = [sample.sequence.mask[1:].count(True) for sample in packed]
    plans = plan_rows(
        packed,
        packer,
        num_ranks,
        micro_batch_tokens=micro_batch_tokens,
        row_tokens=min(row_tokens, micro_batch_tokens),
        cost=cost,
        unit=unit,
    )

    # Ranks run their rows i at the same time: rows without samples make their numbers equal.
    result: list[list[PackedRow]] = [[] for _ in plans]
    for rows_of_ranks in itertools.zip_longest(*plans, fillvalue=[]):
        max_tokens = 0
        for row in rows_of_ranks:
            max_tokens = max(max_tokens, sum(trained[number] for number in row))
        for rank, row in enumerate(rows_of_ranks):
            packed_row = PackedRow(
                samples=[packed[number] for number in row] or [_blank(packed[0])],
                places=tuple(places[number] for number in row),
                packer=packer,
                max_tokens=max_tokens,
                num_tokens_global=sum(trained),
                num_sequences_global=len(trained) - trained.count(0),
            )
            result[rank].append(packed_row)
    return result


def _blank(sample: TrainSample) -> TrainSample:
    """Make a sample of one position, without a trained token, with the columns of another."""
    zeros = (0.0, 0.0)
    sequence = TokenSequence(token_ids=array("I", (0, 0)), mask=(False, False), logprobs=zeros)
    columns = dict.fromkeys(sample.columns, zeros)
    return TrainSample(sequence=sequence, advantages=zeros, columns=columns)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """The samples of one micro-batch: small enough to be sent to the rank that computes it."""

    samples: Sequence[TrainSample]  # in their order in the row
    places: tuple[int, ...]  # their places among all samples; () for a row without samples
    packer: Packer
    max_tokens: int  # this field and the next two are those of TrainBatch
    num_tokens_global: int
    num_sequences_global: int

    def __call__(self, device: torch.device, part: RowPart = WHOLE) -> TrainBatch:
        """Build the micro-batch on a device, with this rank's part of the row."""
        arrays_of = [_arrays(sample) for sample in self.samples]

        def along_t(name: str) -> Tensor:
            """Concatenate a column of all sequences along the next-token axis: [1, t]."""
            columns = [arrays[name][1:] for arrays in arrays_of]  # nothing predicts a first token
            return torch.from_numpy(np.concatenate(columns))[None]

        def on_device(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        # Lay the tokens that are read into the row: no position reads a sequence's last token.
        ids = [arrays["token_ids"][:-1] for arrays in arrays_of]
        starts = self.packer.starts(self.samples)
        row = _lay_out(ids, starts, device, part)
        input_ids_br = part.of_row(torch.from_numpy(row.ids_r)[None])

        # Find the positions of this rank's part of the row that predict a trained token.
        mask_bt = along_t("mask")
        trained_n = mask_bt[0].nonzero()[:, 0]
        size = input_ids_br.shape[1]
        first_place = part.number * size  # of the part in the row
        row_n = torch.from_numpy(np.concatenate(row.places))[trained_n] - first_place
        is_here = (row_n >= 0) & (row_n < size)

        # Number the samples along t.
        lengths = tuple(map(num_positions, self.samples))
        sample_bt = torch.arange(len(self.samples)).repeat_interleave(torch.tensor(lengths))[None]
        is_unbiased = torch.tensor([sample.is_unbiased for sample in self.samples])
        return TrainBatch(
            segments=row.segments,
            input_ids_br=on_device(input_ids_br),
            target_ids_bt=on_device(along_t("token_ids")),
            mask_bt=on_device(mask_bt),
            rollout_logprobs_bt=on_device(along_t("rollout_logprobs")),
            advantages_bt=on_device(along_t("advantages")),
            columns={name: on_device(along_t(name)) for name in self.samples[0].columns},
            trained_n=on_device(trained_n[is_here]),
            row_n=on_device(row_n[is_here]),
            sample_bt=on_device(sample_bt),
            unbiased_bt=on_device(is_unbiased[sample_bt] & mask_bt),
            lengths=lengths,
            places=self.places,
            images=_images(self.samples, row.places, starts),
            max_tokens=self.max_tokens,
            num_tokens_global=self.num_tokens_global,
            num_sequences_global=self.num_sequences_global,
        )


class _Layout(NamedTuple):
    """A row of tokens, its segments, and the places of its sequences."""

    segments: Segments
    ids_r: np.ndarray  # token ids, int64 [row]
    places: list[np.ndarray]  # places in the row of each sequence's positions, [its length]


def _lay_out(
    sequences: Sequence[np.ndarray], starts: Sequence[int], device: torch.device, part: RowPart
) -> _Layout:
    """Lay sequences of token ids one after another, each without its prefix.

    starts[i] is the length of the prefix that sequence i shares with the sequence before.
    """
    added = [ids[start:] for ids, start in zip(sequences, starts, strict=True)]
    places = row_places(list(map(len, sequences)), starts)
    segments: list[tuple[int, int, np.ndarray]] = []  # (length, start, places) of each
    for ids, start, places_of_one in zip(added, starts, places, strict=True):
        # A sequence that adds nothing has no segment: it is the one before, or its beginning.
        if len(ids):
            segments.append((len(ids), start, places_of_one))

    # Ranks that divide a row have parts of equal size: a segment of zeros fills the last part.
    num_tokens = sum(map(len, added))
    padding = -num_tokens % part.size
    if padding:
        added.append(np.zeros(padding, np.int64))
        segments.append((padding, 0, np.arange(num_tokens, num_tokens + padding)))
    key_places = None
    if any(starts):
        key_places = torch.from_numpy(np.concatenate([seen for _, _, seen in segments]))
    return _Layout(
        segments=Segments(
            lengths=tuple(length for length, _, _ in segments),
            device=device,
            starts=tuple(start for _, start, _ in segments),
            key_places=key_places,
            part=part,
        ),
        ids_r=np.concatenate(added),
        places=places,
    )


def row_places(lengths: Sequence[int], starts: Sequence[int]) -> list[np.ndarray]:
    """List the places in the row of each sequence's positions: arrays of its length.

    The first starts[i] places of sequence i are those of the sequence before; the others follow in
    the row.
    """
    result: list[np.ndarray] = []
    places = np.arange(0)
    size = 0  # positions of the row so far
    for length, start in zip(lengths, starts, strict=True):
        end = size + length - start
        places = np.concatenate([places[:start], np.arange(size, end)])
        result.append(places)
        size = end
    return result


def _images(
    samples: Sequence[TrainSample], places: Sequence[np.ndarray], starts: Sequence[int]
) -> tuple[Image, ...]:
    """List the images of a row in order, those of a shared prefix once."""
    images = []
    for sample, sample_places, start in zip(samples, places, starts, strict=True):
        for image in sample.sequence.images:
            if image.start >= start:  # else the sequence before has it
                place = int(sample_places[image.start])
                images.append(dataclasses.replace(image, start=place))
    return tuple(images)


def _arrays(sample: TrainSample) -> dict[str, np.ndarray]:
    """Collect a sample's numbers, [tokens] each."""
    sequence = sample.sequence
    arrays = {
        "token_ids": np.array(sequence.token_ids, np.int64),
        "mask": np.frombuffer(bytes(sequence.mask), np.bool_),
    }
    for name, values in sample.numbers.items():
        arrays[name] = np.array(values, np.float32)
    return arrays


def unpack(
    batch: TrainBatch, columns: Mapping[str, Tensor]
) -> dict[int, dict[str, tuple[float, ...]]]:
    """Divide columns of a batch among its samples: result[place][column][token].

    A sample's first token, which nothing predicts, has 0.0.
    """
    result: dict[int, dict[str, tuple[float, ...]]] = {place: {} for place in batch.places}
    for name, values_bt in columns.items():
        parts = torch.split(values_bt[0].cpu(), list(batch.lengths))
        # A row without samples has a position, but no place.
        for place, values_t in zip(batch.places, parts, strict=False):
            result[place][name] = (0.0, *values_t.tolist())
    return result
