"""Causal attention within each of the sequences that share a row: no mask, and the cost of Σ n², not of (Σ n)².

Takes queries, keys and values as transformers' models hand them to an attention function, and a Segments that travels
beside the hidden states. Never knows the model or the batch.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from hocket.errors import TrainerError

NAME = "hocket_segments"
_ROUND = 32
"""Where no kernel takes unequal lengths, those that round up to the same multiple of this are attended to together."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Where the sequences of one row lie.

    Attributes:
        offsets: int32 [segments + 1], the first position of each and the end of the last.
        longest: positions of the longest.
        groups: segments to attend to together, as int64 [segments of the group, length]: positions in the row, a
            shorter segment's last one repeated.
        restore: int64 [row], where each position is in the groups' results, put one after the other.
    """

    offsets: Tensor
    longest: int
    groups: tuple[Tensor, ...]
    restore: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Self:
        """Returns the segments of a row that has sequences of these lengths, one after the other."""
        lengths_s = torch.tensor(lengths)
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths_s.cumsum(0)])
        classes_s = -(-lengths_s // _ROUND)
        restore = torch.empty(int(offsets[-1]), dtype=torch.long)
        groups, done = [], 0
        for rounded in sorted(set(classes_s.tolist())):
            members = (classes_s == rounded).nonzero()  # [segments of the group, 1]
            steps = torch.arange(int(lengths_s[members].max()))
            groups.append(offsets[members] + torch.minimum(steps, lengths_s[members] - 1))
            real = steps < lengths_s[members]
            restore[groups[-1][real]] = done + real.flatten().nonzero()[:, 0]
            done += real.numel()
        return cls(
            offsets=offsets.int().to(device),
            longest=max(lengths),
            groups=tuple(group.to(device) for group in groups),
            restore=restore.to(device),
        )


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
    """Returns softmax(scaling · q kᵀ) v as [1, row, heads, d]; each position sees its segment up to itself.

    Args:
        query: [1, heads, row, d]; of keys and values there may be fewer heads, each for as many heads of the query.
        segments: default: the row is one.
        sliding_window: how many positions one sees, itself included.

    Raises:
        TrainerError: the model asks for what this function does not do.
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
    window = segments.longest if sliding_window is None else min(sliding_window, segments.longest)
    if has_kernel(query.device, dtype):
        result_rhd = varlen_attn(
            query_rhd,
            key_rhd,
            value_rhd,
            segments.offsets,
            segments.offsets,
            segments.longest,
            segments.longest,
            scale=scaling,
            window_size=(-1 if window == segments.longest else window - 1, 0),
            enable_gqa=True,
        )
        assert isinstance(result_rhd, Tensor)
        return result_rhd[None], None
    return _by_groups(query_rhd, key_rhd, value_rhd, segments, scaling, window)[None], None


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether torch's flash attention, which takes segments as they are, runs there."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def _by_groups(
    query_rhd: Tensor, key_rhd: Tensor, value_rhd: Tensor, segments: Segments, scaling: float, window: int
) -> Tensor:
    """Attends to segments of about the same length together, padded at their ends, which nothing before can see."""
    results = []
    for group in segments.groups:
        length = group.shape[1]
        query_shld, key_shld, value_shld = (
            tensor.index_select(0, group.flatten()).view(*group.shape, *tensor.shape[1:]).transpose(1, 2)
            for tensor in (query_rhd, key_rhd, value_rhd)
        )
        band = None
        if length > window:
            band = torch.ones(length, length, dtype=torch.bool, device=group.device).tril().triu(1 - window)
        result_shld = nn.functional.scaled_dot_product_attention(
            query_shld,
            key_shld,
            value_shld,
            attn_mask=band,
            is_causal=band is None,
            scale=scaling,
            enable_gqa=True,
        )
        results.append(result_shld.transpose(1, 2).flatten(0, 1))
    return torch.cat(results).index_select(0, segments.restore)


AttentionInterface.register(NAME, attend)
