"""Causal attention within each of the sequences of a row: no mask, and the cost of Σ n², not of (Σ n)²."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface

from hocket.errors import TrainerError

NAME = "hocket_segments"
ADVICE = "it can't be trained here: docs/architectures.md names the families that can"
_ROUND = 32  # without a kernel, segments whose lengths round up alike go together


@dataclasses.dataclass(frozen=True)
class RowPart:
    """A rank's part of a row: here all of it (`ulysses.Split`: ranks divide it)."""

    size: int = 1  # ranks that compute it together
    number: int = 0  # of this part

    def of_row(self, row_br: Tensor) -> Tensor:
        """Return this rank's positions, of [1, row]."""
        return row_br.chunk(self.size, dim=1)[self.number]

    def by_heads(self, tensor_bhrd: Tensor) -> Tensor:
        """Return all positions of this rank's heads, [row, heads, d], from all heads of its positions."""
        return tensor_bhrd[0].transpose(0, 1)

    def by_positions(self, tensor_rhd: Tensor) -> Tensor:
        """Return all heads of this rank's positions, [1, row, heads, d], from all positions of its heads."""
        return tensor_rhd[None]

    def whole(self, column_bt: Tensor) -> Tensor:
        """Return numbers of all positions, from one with 0 where others have theirs."""
        return column_bt


WHOLE = RowPart()


@dataclasses.dataclass(frozen=True)
class Segments:
    """How a row is divided into segments: what attention and positions depend on.

    A segment is a sequence, or what follows on `starts` positions that it shares with sequences before it.
    """

    lengths: tuple[int, ...]  # positions, none of 0
    device: torch.device
    starts: tuple[int, ...] = ()  # shared positions before each; (): none
    shared: Tensor | None = None  # places in the row of the positions that each segment sees, one segment after another
    part: RowPart = WHOLE  # of the row

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """Positions that each segment's last one sees."""
        return tuple(map(sum, zip(self.lengths, self.starts or itertools.repeat(0), strict=False)))

    @property
    def longest(self) -> int:
        return max(self.ends)

    @functools.cached_property
    def positions_br(self) -> Tensor:
        """Places within sequences, [1, row], of this rank's part."""
        spans = zip(self.lengths, self.ends, strict=True)
        row_br = torch.cat([torch.arange(end - length, end) for length, end in spans])[None]
        return self._there(self.part.of_row(row_br))

    @functools.cached_property
    def offsets(self) -> Tensor:
        """Bounds of segments, int32 [segments + 1]."""
        return self._there(_bounds(self.lengths))

    @functools.cached_property
    def seen(self) -> tuple[Tensor, Tensor] | None:
        """Places of the keys that segments see, and their bounds, as `offsets`; None where nothing is shared."""
        if self.shared is None:
            return None
        return self._there(self.shared), self._there(_bounds(self.ends))

    @functools.cached_property  # FlashAttention takes the offsets alone
    def groups(self) -> "tuple[list[Alike], Tensor]":
        """Segments that are computed together, and each position's place [row] in the results."""
        lengths_s = torch.tensor(self.lengths)
        ends_s = torch.tensor(self.ends)
        last_s = lengths_s.cumsum(0) - 1
        last_seen_s = ends_s.cumsum(0) - 1
        classes_s = -(-lengths_s // _ROUND) * (self.longest + _ROUND) + -(-ends_s // _ROUND)
        restore = torch.empty(sum(self.lengths), dtype=torch.long)
        groups = []
        done = 0
        for alike in torch.unique(classes_s).tolist():
            members = (classes_s == alike).nonzero()  # [segments of the group, 1]
            back = _back(lengths_s[members])
            queries = last_s[members] - back
            back_seen = _back(ends_s[members])
            keys = queries if self.shared is None else self.shared[last_seen_s[members] - back_seen]
            is_shared = bool((lengths_s != ends_s)[members].any())
            positions = ends_s[members] - 1 - back
            groups.append(Alike(self._there(queries), self._there(keys), self._there(positions) if is_shared else None))
            real = torch.arange(queries.shape[1]) < lengths_s[members]
            restore[queries[real]] = done + real.flatten().nonzero()[:, 0]
            done += real.numel()
        return groups, self._there(restore)

    def inputs(self, ids_br: Tensor) -> dict[str, Any]:
        """Return the arguments of a model's forward pass for a row of such segments."""
        # With a mask, transformers does not look for sequences in the positions, for which the host would wait.
        mask_br = torch.ones_like(ids_br)
        return {"input_ids": ids_br, "attention_mask": mask_br, "position_ids": self.positions_br, "segments": self}

    def _there(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)  # or the host would wait for the micro-batch before


class Alike(NamedTuple):
    """Segments of similar lengths; the last position of a shorter one is repeated."""

    queries: Tensor  # places in the row, [segments, queries]
    keys: Tensor  # places of what they see, [segments, keys]
    positions: Tensor | None  # of the queries; None: nothing is shared, and keys are queries

    def band(self, reach: "Reach") -> Tensor:
        """Return a mask of what queries see, which broadcasts to [segments, heads, queries, keys]."""
        keys = torch.arange(self.keys.shape[1], device=self.keys.device)
        positions = (keys if self.positions is None else self.positions[:, None])[..., None]
        band = keys <= positions
        if reach.window is not None:
            band = band & (keys > positions - reach.window)
        if reach.chunk is not None:
            band = band & (keys // reach.chunk == positions // reach.chunk)
        return band


@dataclasses.dataclass(frozen=True)
class Reach:
    """How far back a position sees within its sequence; None: without a bound."""

    window: int | None = None  # positions, itself included
    chunk: int | None = None  # positions; a sequence is divided into chunks that don't see each other

    def within(self, length: int) -> "Reach":
        """Return the bounds that matter to sequences of up to `length` positions."""
        window = None if self.window is None or self.window >= length else self.window
        chunk = None if self.chunk is None or self.chunk >= length else self.chunk
        return Reach(window, chunk)


def _bounds(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def _back(lengths: Tensor) -> Tensor:
    """Return by how much each step lies before the last one, [segments, steps], of lengths [segments, 1]."""
    return (lengths - 1 - torch.arange(int(lengths.max()))).clamp(min=0)


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
    """Return softmax(scaling · q kᵀ) v as [1, row, heads, d]; each position sees its segment up to itself.

    Args:
        query: [1, heads, row, d]; keys and values may have fewer heads.
        segments: default: one.
        attention_mask: of `reach_of_mask`; it counts before sliding_window, as transformers' own attention has it.
        sliding_window: positions that one sees, itself included.
        s_aux: [heads], logits of gpt-oss's attention sinks, which take their part of each softmax.
    """
    reach = attention_mask if isinstance(attention_mask, Reach) else Reach(sliding_window)
    a_mask = None if isinstance(attention_mask, Reach) else attention_mask
    unknown = {"a mask of its own": a_mask, "softcap": softcap, "position_bias": position_bias}
    used = " and ".join(name for name, value in unknown.items() if value is not None)
    if used:
        raise TrainerError(f"{type(module).__name__} uses {used} in its attention; {ADVICE}")
    segments = segments or Segments((query.shape[2],), query.device)
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    part = segments.part
    query_rhd, key_rhd, value_rhd = (part.by_heads(tensor).to(dtype) for tensor in (query, key, value))
    s_aux = None if s_aux is None else s_aux.chunk(part.size)[part.number]
    reach = reach.within(segments.longest)
    if s_aux is None and reach.chunk is None and has_kernel(query_rhd, key_rhd, value_rhd):
        result_rhd = _by_kernel(query_rhd, key_rhd, value_rhd, segments, scaling, reach.window)
    else:
        result_rhd = _by_groups(query_rhd, key_rhd, value_rhd, segments, scaling, reach, s_aux)
    return part.by_positions(result_rhd), None


def reach_of_mask(
    *,
    config: Any,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **others: Any,
) -> Reach:
    """Return in place of a mask what it allows: transformers has each layer's attention get it.

    Args:
        local_size: of transformers' windows and chunks.
        allow_is_causal_skip, use_vmap: tell that tokens may see others, too, or fewer.
    """
    if use_vmap or not allow_is_causal_skip:
        name = type(config).__name__.removesuffix("Config")
        raise TrainerError(f"{name} uses a mask of its own in its attention; {ADVICE}")
    if local_size is not None and local_size == getattr(config, "attention_chunk_size", None):
        return Reach(chunk=local_size)
    return Reach(window=local_size)


def choose_kernel(device: torch.device) -> str:
    """Have `varlen_attn` run FlashAttention 3 where that works; return what it runs."""
    if device.type != "cuda":
        return "torch's for CPUs"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "FlashAttention 2"
    try:
        activate_flash_attention_impl("FA3")
        _probe(device)
    except (ImportError, OSError, RuntimeError, TypeError) as error:  # it was built for another torch, say
        restore_flash_attention_impl(_raise_warn=False)
        return f"FlashAttention 2 (3, of the package flash-attn-3, can't be used: {error})"
    return "FlashAttention 3"


def _probe(device: torch.device) -> None:
    query_rhd = torch.zeros(8, 1, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    offsets = torch.tensor([0, 8], dtype=torch.int32, device=device)
    result = cast(Tensor, varlen_attn(query_rhd, query_rhd, query_rhd, offsets, offsets, 8, 8, window_size=(-1, 0)))
    torch.autograd.grad(result.sum(), query_rhd)


def has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Check whether `varlen_attn` takes tensors like these, [row, heads, d] each."""
    size = query.shape[-1]
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.bfloat16, torch.float16)
        and size == key.shape[-1] == value.shape[-1]
        and size <= 256
        and size % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _by_kernel(
    query_rhd: Tensor, key_rhd: Tensor, value_rhd: Tensor, segments: Segments, scaling: float, window: int | None
) -> Tensor:
    seen = segments.offsets
    if segments.seen is not None:  # the kernel wants each segment's keys side by side
        places, seen = segments.seen
        key_rhd = key_rhd.index_select(0, places)
        value_rhd = value_rhd.index_select(0, places)
    bounds = (segments.offsets, seen, max(segments.lengths), segments.longest)
    left = -1 if window is None else window - 1
    options: dict[str, Any] = {"scale": scaling, "window_size": (left, 0), "enable_gqa": True}
    return cast(Tensor, varlen_attn(query_rhd, key_rhd, value_rhd, *bounds, **options))


def _by_groups(
    query_rhd: Tensor,
    key_rhd: Tensor,
    value_rhd: Tensor,
    segments: Segments,
    scaling: float,
    reach: Reach,
    sinks_h: Tensor | None,
) -> Tensor:
    """Compute similar segments together, padded at the end, which causal attention can't see."""
    results = []
    groups, restore = segments.groups
    for group in groups:
        query_shld = _of_group(query_rhd, group.queries)
        key_shld, value_shld = (_of_group(tensor, group.keys) for tensor in (key_rhd, value_rhd))
        is_causal = group.positions is None and reach.within(group.keys.shape[1]) == Reach() and sinks_h is None
        band = None if is_causal else group.band(reach)
        if sinks_h is not None:  # one more key, of value 0, that each position sees; kernels want sizes of 8
            query_shld = pad(query_shld, (0, 8))
            key_shld = pad(key_shld, (0, 8, 1, 0))
            query_shld[..., -1] = sinks_h[:, None] / scaling
            key_shld[..., 0, -1] = 1.0
            value_shld = pad(value_shld, (0, 0, 1, 0))
            band = pad(cast(Tensor, band), (1, 0), value=True)
        shares = query_shld.device.type != "cuda"
        if not shares:  # the only kernel there without n² memory wants as many keys as queries
            repeats = query_shld.shape[1] // key_shld.shape[1]
            key_shld, value_shld = (part.repeat_interleave(repeats, dim=1) for part in (key_shld, value_shld))
        options: dict[str, Any] = {"attn_mask": band, "is_causal": is_causal, "scale": scaling, "enable_gqa": shares}
        result_shld = nn.functional.scaled_dot_product_attention(query_shld, key_shld, value_shld, **options)
        results.append(result_shld.transpose(1, 2).flatten(0, 1))
    return torch.cat(results).index_select(0, restore)


def _of_group(tensor_rhd: Tensor, places: Tensor) -> Tensor:
    """Return the rows at places [segments, length] as [segments, heads, length, d]."""
    chosen = tensor_rhd.index_select(0, places.flatten())
    return chosen.view(*places.shape, *tensor_rhd.shape[1:]).transpose(1, 2)


uncompiled = torch.compiler.disable(attend)  # type: ignore[no-untyped-call]  # rows differ in their segments
AttentionInterface.register(NAME, uncompiled)
AttentionMaskInterface.register(NAME, reach_of_mask)
