"""Causal attention within each of the sequences that lie one after another in a row.

It costs the sum of their n², not the square of the row, and needs no mask: transformers calls
`attend` in every layer, with the row's `Segments`. On GPUs torch's `varlen_attn` computes it
(FlashAttention); where that can't, grouped_attention.py does.

In the names of tensors r is the row, h the heads, d the dimension of a head, b is 1.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface

from hocket.errors import TrainerError
from hocket.trainer import grouped_attention
from hocket.trainer.grouped_attention import Reach, SegmentGroup, SegmentGroups, attend_in_groups

NAME = "hocket_segments"
ADVICE = "it can't be trained here: docs/reference/models.md names the families that can"


@dataclasses.dataclass(frozen=True)
class RowPart:
    """The part of a row that this rank computes: in this class, all of it.

    extras/ulysses.py has a subclass for ranks that divide a row (trainer.sequence_parallel). Each
    has a part of the positions. In attention it has all positions, and a part of the heads:
    `by_heads` and `by_positions` are the all-to-alls before and after.
    """

    size: int = 1  # number of ranks that compute the row together
    number: int = 0  # which of its parts this is, from 0

    def of_row(self, row_br: Tensor) -> Tensor:
        """Select this rank's positions from [1, row]."""
        return row_br.chunk(self.size, dim=1)[self.number]

    def by_heads(self, tensor_bhrd: Tensor) -> Tensor:
        """Exchange all heads of this rank's positions for all positions of its heads.

        Returns [row, heads of this rank, d].
        """
        return tensor_bhrd[0].transpose(0, 1)

    def by_positions(self, tensor_rhd: Tensor) -> Tensor:
        """Exchange all positions of this rank's heads for all heads of its positions.

        Returns [1, positions of this rank, heads, d].
        """
        return tensor_rhd[None]

    def whole(self, column_bt: Tensor) -> Tensor:
        """Fill in the numbers of other ranks' positions, where `column_bt` has 0."""
        return column_bt


WHOLE = RowPart()


@dataclasses.dataclass(frozen=True)
class Segments:
    """The segments of a row, which attention and positions depend on.

    A segment is a sequence. Where sequences share a prefix (prefixes.py), the row has the prefix
    once: the segment of a later sequence has only its positions behind the prefix. `starts` is the
    length of the prefix, and `key_places` has its places in the row.

    Example: a row of two sequences, of 5 and of 3 positions.

        segments = Segments((5, 3), torch.device("cpu"))
        positions_br = segments.positions_br  # 0 to 4, then 0 to 2
    """

    lengths: tuple[int, ...]  # positions of each segment, at least 1
    device: torch.device
    starts: tuple[int, ...] = ()  # length of the prefix that each segment shares; (): 0 for all
    key_places: Tensor | None = None
    """Places in the row of all keys that each segment sees, one segment after another, int64.

    None where no prefix is shared: each segment sees its own positions.
    """
    part: RowPart = WHOLE  # the part of the row that this rank computes; all else is of the row

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """Positions of each segment with its prefix: the number of keys its last position sees."""
        if not self.starts:
            return self.lengths
        spans = zip(self.starts, self.lengths, strict=True)
        return tuple(start + length for start, length in spans)

    @property
    def longest(self) -> int:
        """Positions of the longest segment with its prefix."""
        return max(self.ends)

    @functools.cached_property
    def positions_br(self) -> Tensor:
        """Position of each token in its sequence, from 0: int64 [1, row], of this rank's part."""
        spans = zip(self.lengths, self.ends, strict=True)
        row_br = torch.cat([torch.arange(end - length, end) for length, end in spans])[None]
        return self._on_device(self.part.of_row(row_br))

    @functools.cached_property
    def offsets(self) -> Tensor:
        """Places in the row where segments begin, and the end of the last: int32 [segments + 1]."""
        return self._on_device(_offsets(self.lengths))

    @functools.cached_property
    def shared_keys(self) -> tuple[Tensor, Tensor] | None:
        """`key_places`, and the offsets of each segment in them: int32 [segments + 1].

        None where no prefix is shared.
        """
        if self.key_places is None:
            return None
        return self._on_device(self.key_places), self._on_device(_offsets(self.ends))

    @functools.cached_property
    def groups(self) -> SegmentGroups:
        """Segments that are computed together where there is no kernel."""
        groups, restore = grouped_attention.divide(self.lengths, self.ends, self.key_places)
        moved = []
        for group in groups:
            queries = self._on_device(group.queries)
            keys = self._on_device(group.keys)
            positions = None if group.positions is None else self._on_device(group.positions)
            moved.append(SegmentGroup(queries, keys, positions))
        return SegmentGroups(moved, self._on_device(restore))

    def inputs(self, ids_br: Tensor) -> dict[str, Any]:
        """Make the arguments of a model's forward pass for a row of these segments."""
        # Without a mask, transformers would look for sequences in the positions, for which the host
        # would wait for the GPU.
        mask_br = torch.ones_like(ids_br)
        return {
            "input_ids": ids_br,
            "attention_mask": mask_br,
            "position_ids": self.positions_br,
            "segments": self,
        }

    def _on_device(self, tensor: Tensor) -> Tensor:
        # A blocking copy would have the host wait for the micro-batch before.
        return tensor.to(self.device, non_blocking=True)


def _offsets(lengths: Sequence[int]) -> Tensor:
    """Sum up lengths, from 0 to their total: int32 [lengths + 1]."""
    return torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: "Tensor | Reach | None",
    *,
    scaling: float,
    segments: Segments | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute softmax(scaling · q kᵀ) v, where each position sees its segment up to itself.

    The signature is that of transformers' AttentionInterface.

    Args:
        module: the attention layer, which an error names.
        query: [1, heads, row, d]; keys and values may have fewer heads.
        attention_mask: the result of `reach_of_mask`; it overrides sliding_window, as it does in
            transformers' own attention.
        scaling: factor on the products of queries and keys.
        segments: the row's segments; by default the row is one segment.
        sliding_window: number of positions that a position sees, itself included.
        s_aux: [heads], logits of gpt-oss's attention sinks, which take their part of each softmax.
        softcap, position_bias: refused.
        others: arguments of other kinds of attention, which don't change this one.

    Returns:
        [1, row, heads, d], and None in place of the weights.
    """
    reach = attention_mask if isinstance(attention_mask, Reach) else Reach(sliding_window)
    mask = None if isinstance(attention_mask, Reach) else attention_mask
    _refuse(module, {"a mask of its own": mask, "softcap": softcap, "position_bias": position_bias})
    if segments is None:
        segments = Segments((query.shape[2],), query.device)
    reach = reach.within(segments.longest)

    # Each rank that computes the row attends from all positions, with its part of the heads. Under
    # autocast the layer's tensors may still be in float32.
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    part = segments.part
    query_rhd = part.by_heads(query).to(dtype)
    key_rhd = part.by_heads(key).to(dtype)
    value_rhd = part.by_heads(value).to(dtype)
    row = (query_rhd, key_rhd, value_rhd)
    sinks_h = None if s_aux is None else s_aux.chunk(part.size)[part.number]

    # The kernel knows windows, but neither sinks nor chunks.
    is_plain = sinks_h is None and reach.chunk is None
    if is_plain and has_kernel(*row):
        result_rhd = _attend_by_kernel(*row, segments, scaling, reach.window)
    else:
        result_rhd = attend_in_groups(*row, segments.groups, scaling, reach, sinks_h)
    return part.by_positions(result_rhd), None


def _refuse(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Raise TrainerError for a model whose attention computes something else.

    `arguments` must all be None.
    """
    used = " and ".join(name for name, value in arguments.items() if value is not None)
    if used:
        raise TrainerError(f"{type(module).__name__} uses {used} in its attention; {ADVICE}")


def reach_of_mask(
    *,
    config: Any,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **others: Any,
) -> Reach:
    """Make the `Reach` of a mask, in place of the mask.

    transformers calls this function for a mask, and passes the result on to each layer's attention.
    Raises TrainerError for a mask that is not one of a Reach.

    Args:
        config: the model's config.
        local_size: positions of a window or of a chunk.
        allow_is_causal_skip: False for a mask that lets some tokens see more than causal attention.
        use_vmap: True for a mask that a function computes, with which tokens may see less.
        others: arguments that don't change the result.
    """
    if use_vmap or not allow_is_causal_skip:
        name = type(config).__name__.removesuffix("Config")
        raise TrainerError(f"{name} uses a mask of its own in its attention; {ADVICE}")
    if local_size is not None and local_size == getattr(config, "attention_chunk_size", None):
        return Reach(chunk=local_size)
    return Reach(window=local_size)


# The kernel


def choose_kernel(device: torch.device) -> str:
    """Switch `varlen_attn` to FlashAttention 3 where that works; returns the kernel's name."""
    if device.type != "cuda":
        return "torch's for CPUs"
    if torch.cuda.get_device_capability(device) != (9, 0):  # not a Hopper
        return "FlashAttention 2"
    try:
        activate_flash_attention_impl("FA3")
        _try_kernel(device)  # fails for a package that was built for another torch
    except (ImportError, OSError, RuntimeError, TypeError) as error:
        restore_flash_attention_impl(_raise_warn=False)
        return f"FlashAttention 2 (3, of the package flash-attn-3, can't be used: {error})"
    return "FlashAttention 3"


def _try_kernel(device: torch.device) -> None:
    """Run the kernel forward and backward on 8 positions."""
    query_rhd = torch.zeros(8, 1, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    offsets = torch.tensor([0, 8], dtype=torch.int32, device=device)
    row = (query_rhd, query_rhd, query_rhd)
    result = varlen_attn(*row, offsets, offsets, 8, 8, window_size=(-1, 0))
    torch.autograd.grad(cast(Tensor, result).sum(), query_rhd)


def has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Check whether `varlen_attn` takes these tensors, [row, heads, d] each."""
    size = query.shape[-1]
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.bfloat16, torch.float16)
        and size == key.shape[-1] == value.shape[-1]
        and size <= 256
        and size % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _attend_by_kernel(
    query_rhd: Tensor,
    key_rhd: Tensor,
    value_rhd: Tensor,
    segments: Segments,
    scaling: float,
    window: int | None,
) -> Tensor:
    key_offsets = segments.offsets
    if segments.shared_keys is not None:
        # The kernel wants the keys of each segment side by side: a shared prefix is copied.
        places, key_offsets = segments.shared_keys
        key_rhd = key_rhd.index_select(0, places)
        value_rhd = value_rhd.index_select(0, places)
    positions_back = -1 if window is None else window - 1  # without the position itself; -1: all
    result = varlen_attn(
        query_rhd,
        key_rhd,
        value_rhd,
        segments.offsets,
        key_offsets,
        max(segments.lengths),
        segments.longest,
        scale=scaling,
        window_size=(positions_back, 0),
        enable_gqa=True,
    )
    return cast(Tensor, result)


# Rows differ in their segments: compiled, each would be another program.
uncompiled = torch.compiler.disable(attend)  # type: ignore[no-untyped-call]
AttentionInterface.register(NAME, uncompiled)
AttentionMaskInterface.register(NAME, reach_of_mask)
