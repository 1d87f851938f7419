"""Attention where the kernel for packed rows can't run: on CPUs, in float32, with sinks or chunks.

One mask over a whole row would compute (Σ n)² pairs of tokens, and only Σ n² are needed: a step of
a small model on a CPU would take 2 to 9 times as long. Here segments of similar lengths are padded
to one length and computed together, group by group.

In the names of tensors s is the segments of a group, q and k their queries and keys, l either of
them; r is the row, h the heads, d the dimension of a head.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

# Segments are in one group if their lengths are equal once rounded up to a multiple of this.
ROUND = 32


@dataclasses.dataclass(frozen=True)
class Reach:
    """How far back a position sees within its sequence."""

    window: int | None = None  # number of positions that a position sees, itself included; or all
    chunk: int | None = None  # size of the chunks of a sequence, which don't see each other

    @property
    def is_unbounded(self) -> bool:
        """Whether a position sees all positions before it."""
        return self.window is None and self.chunk is None

    def within(self, length: int) -> "Reach":
        """Leave out the bounds that don't matter in sequences of up to `length` positions."""
        return Reach(_smaller(self.window, length), _smaller(self.chunk, length))


def _smaller(bound: int | None, length: int) -> int | None:
    if bound is None or bound >= length:
        return None
    return bound


class SegmentGroup(NamedTuple):
    """Segments that are computed together. Padding repeats the last position of a shorter one."""

    queries: Tensor  # places of the queries in the row, [segments, queries]
    keys: Tensor  # places in the row of the keys that each segment sees, [segments, keys]
    positions: Tensor | None
    """Positions of the queries in their sequences, [segments, queries].

    None where no segment shares a prefix: query i sees the keys up to i.
    """

    def mask(self, reach: Reach) -> Tensor:
        """Mark the keys that each query sees.

        Returns bool that broadcasts to [segments, heads, queries, keys].
        """
        keys = torch.arange(self.keys.shape[1], device=self.keys.device)  # [keys]
        positions = keys[:, None]  # [queries, 1]: query i is at position i
        if self.positions is not None:
            positions = self.positions[:, None, :, None]  # [segments, 1, queries, 1]
        mask = keys <= positions
        if reach.window is not None:
            mask = mask & (keys > positions - reach.window)
        if reach.chunk is not None:
            mask = mask & (keys // reach.chunk == positions // reach.chunk)
        return mask


class SegmentGroups(NamedTuple):
    """All groups of a row, and the way back from their results to the row."""

    groups: list[SegmentGroup]
    restore: Tensor
    """Where each position of the row is in the concatenated results of all groups: [row]."""


def divide(lengths: Sequence[int], ends: Sequence[int], key_places: Tensor | None) -> SegmentGroups:
    """Divide the segments of a row into groups, on the CPU.

    `lengths`, `ends` and `key_places` are those of `Segments`.
    """
    # Group the segments by their numbers of queries and of keys, both rounded up.
    members_of: dict[tuple[int, int], list[int]] = {}
    for number, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        size = (_rounded_up(length), _rounded_up(end))
        members_of.setdefault(size, []).append(number)

    lengths_s = torch.tensor(lengths)
    ends_s = torch.tensor(ends)
    last_query_s = lengths_s.cumsum(0) - 1  # in the row
    last_key_s = ends_s.cumsum(0) - 1  # in `key_places`
    restore = torch.empty(sum(lengths), dtype=torch.long)
    groups = []
    num_results = 0  # results of the groups so far, padding included
    for _, members in sorted(members_of.items()):
        members_s1 = torch.tensor(members)[:, None]
        lengths_s1 = lengths_s[members_s1]
        ends_s1 = ends_s[members_s1]

        # Count each place from the segment's last one backwards. So the padding, 0 steps back,
        # repeats the last position.
        steps_back_sq = _steps_back(lengths_s1)
        queries_sq = last_query_s[members_s1] - steps_back_sq
        keys_sk = queries_sq  # each segment sees its own positions
        if key_places is not None:
            keys_sk = key_places[last_key_s[members_s1] - _steps_back(ends_s1)]
        positions_sq = None
        if bool((lengths_s1 != ends_s1).any()):  # a prefix is shared
            positions_sq = ends_s1 - 1 - steps_back_sq
        groups.append(SegmentGroup(queries_sq, keys_sk, positions_sq))

        # Tell each position of the row where its result will be; padding has no place in the row.
        is_real_sq = torch.arange(queries_sq.shape[1]) < lengths_s1
        restore[queries_sq[is_real_sq]] = num_results + is_real_sq.flatten().nonzero()[:, 0]
        num_results += is_real_sq.numel()
    return SegmentGroups(groups, restore)


def _rounded_up(length: int) -> int:
    return (length + ROUND - 1) // ROUND


def _steps_back(lengths_s1: Tensor) -> Tensor:
    """Count the steps from each position to its segment's last, [segments, longest]; 0: padding."""
    return (lengths_s1 - 1 - torch.arange(int(lengths_s1.max()))).clamp(min=0)


def attend_in_groups(
    query_rhd: Tensor,
    key_rhd: Tensor,
    value_rhd: Tensor,
    groups: SegmentGroups,
    scaling: float,
    reach: Reach,
    sinks_h: Tensor | None,
) -> Tensor:
    """Compute `attend` group by group; returns [row, heads, d].

    CPUs compute it in float32 at least.
    """
    on_gpu = query_rhd.device.type == "cuda"
    dtype = query_rhd.dtype
    if not on_gpu and dtype.itemsize < 4:
        # In 16 bits, the backward pass of torch's kernel for CPUs takes several times as long.
        query_rhd = query_rhd.float()
        key_rhd = key_rhd.float()
        value_rhd = value_rhd.float()
    results = []
    for group in groups.groups:
        query_shld = _gathered(query_rhd, group.queries)
        key_shld = _gathered(key_rhd, group.keys)
        value_shld = _gathered(value_rhd, group.keys)

        # Padding needs no mask: it stands behind, where no real position looks.
        is_unbounded = reach.within(group.keys.shape[1]).is_unbounded
        is_causal = group.positions is None and is_unbounded and sinks_h is None
        mask = None if is_causal else group.mask(reach)
        if sinks_h is not None:
            # A sink is one more key, before all others, that each position sees, with value 0. A
            # further dimension gives its logit: sink / scaling in queries, 1 in the sink's key, 0
            # in all other keys. The width grows by 8, as kernels want multiples of it.
            query_shld = pad(query_shld, (0, 8))
            key_shld = pad(key_shld, (0, 8, 1, 0))
            query_shld[..., -1] = sinks_h[:, None] / scaling
            key_shld[..., 0, -1] = 1.0
            value_shld = pad(value_shld, (0, 0, 1, 0))
            mask = pad(cast(Tensor, mask), (1, 0), value=True)
        if on_gpu:
            # The only GPU kernel that needs no n² memory wants as many heads of keys as of queries.
            repeats = query_shld.shape[1] // key_shld.shape[1]
            key_shld = key_shld.repeat_interleave(repeats, dim=1)
            value_shld = value_shld.repeat_interleave(repeats, dim=1)
        options: dict[str, Any] = {
            "attn_mask": mask,
            "is_causal": is_causal,
            "scale": scaling,
            "enable_gqa": not on_gpu,
        }
        attention = nn.functional.scaled_dot_product_attention
        with torch.autocast("cpu", enabled=False):  # which would cast them to 16 bits
            result_shld = attention(query_shld, key_shld, value_shld, **options)
        results.append(result_shld.transpose(1, 2).flatten(0, 1))
    return torch.cat(results).index_select(0, groups.restore).to(dtype)


def _gathered(tensor_rhd: Tensor, places_sl: Tensor) -> Tensor:
    """Gather places of the row, [segments, length], into [segments, heads, length, d]."""
    chosen = tensor_rhd.index_select(0, places_sl.flatten())
    return chosen.view(*places_sl.shape, *tensor_rhd.shape[1:]).transpose(1, 2)
