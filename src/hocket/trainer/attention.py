"""Causal attention within each of the sequences that share a row: no mask, and the cost of Σ n², not of (Σ n)²."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

from hocket.errors import TrainerError

NAME = "hocket_segments"
_ROUND = 32  # segments whose lengths round up to the same multiple of this are computed together without a kernel


@dataclasses.dataclass(frozen=True, slots=True)
class Segments:
    """The places of the sequences in one row."""

    lengths: tuple[int, ...]
    offsets: Tensor  # int32 [segments + 1], the first position of each and the end of the last

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Self:
        """Return the segments of a row of sequences of these lengths."""
        return cls(tuple(lengths), torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).to(device))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    segments: Segments | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return softmax(scaling · q kᵀ) v as [1, row, heads, d]; each position sees its segment up to itself.

    Args:
        query: [1, heads, row, d]; keys and values may have fewer heads (grouped-query attention).
        segments: default: the row is one segment.
        sliding_window: number of positions that one sees, itself included.

    Raises:
        TrainerError: the model uses a kind of attention that this function doesn't compute.
    """
    asked = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if attention_mask is not None or asked:
        what = " and ".join(asked) or "a mask of its own"
        raise TrainerError(
            f"{type(module).__name__} uses {what} in its attention; its architecture can't be trained here"
        )
    segments = segments or Segments.of([query.shape[2]], query.device)
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    query_rhd, key_rhd, value_rhd = (tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value))
    longest = max(segments.lengths)
    window = longest if sliding_window is None else min(sliding_window, longest)
    if not has_kernel(query.device, dtype):
        return _by_groups(query_rhd, key_rhd, value_rhd, segments.lengths, scaling, window)[None], None
    result_rhd = varlen_attn(
        query_rhd,
        key_rhd,
        value_rhd,
        segments.offsets,
        segments.offsets,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window == longest else window - 1, 0),
        enable_gqa=True,
    )
    assert isinstance(result_rhd, Tensor)
    return result_rhd[None], None


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch's varlen flash attention runs there."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def _by_groups(
    query_rhd: Tensor, key_rhd: Tensor, value_rhd: Tensor, lengths: Sequence[int], scaling: float, window: int
) -> Tensor:
    """Compute segments of about the same length together, padded at the end, which causal attention can't see."""
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        groups.setdefault(-(-length // _ROUND), []).append(index)
    parts = [torch.split(tensor, list(lengths)) for tensor in (query_rhd, key_rhd, value_rhd)]
    results: dict[int, Tensor] = {}
    for members in groups.values():
        query_shld, key_shld, value_shld = (
            pad_sequence([part[i] for i in members], batch_first=True).transpose(1, 2) for part in parts
        )
        size, band = query_shld.shape[2], None
        if size > window:
            band = torch.ones(size, size, dtype=torch.bool, device=query_rhd.device).tril().triu(1 - window)
        result_shld = nn.functional.scaled_dot_product_attention(
            query_shld, key_shld, value_shld, attn_mask=band, is_causal=band is None, scale=scaling, enable_gqa=True
        )
        results |= {i: one[: lengths[i]] for i, one in zip(members, result_shld.transpose(1, 2), strict=True)}
    return torch.cat([results[i] for i in range(len(lengths))])


AttentionInterface.register(NAME, attend)
