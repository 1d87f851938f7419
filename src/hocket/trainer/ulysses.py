"""Sequence parallelism: several ranks compute a row together (Ulysses, arXiv 2309.14509).

Each has a part of its positions, in all layers but attention; for that, an all-to-all gives it all positions of a part
of the heads. Every rank gets the log-probs of the whole row, and so its loss.
"""

import dataclasses
import datetime
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_to_all_single

from hocket.errors import ConfigError
from hocket.trainer.ranks import Ranks


@dataclasses.dataclass(frozen=True)
class Split:
    """This rank's part of each row."""

    size: int  # ranks that divide it
    number: int  # of this part, from 0
    group: Any  # these ranks

    def padding(self, row: int) -> np.ndarray:
        """Return token ids that make a row's length a multiple of the parts."""
        return np.zeros(-row % self.size, np.int64)

    def part(self, row_br: Tensor) -> Tensor:
        """Return this rank's positions, of [1, row]."""
        return row_br.chunk(self.size, dim=1)[self.number]

    def own(self, input_ids_br: Tensor, trained_n: Tensor, row_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's tokens, and those of the trained places that lie there."""
        part_br = self.part(input_ids_br)
        row_n = row_n - self.number * part_br.shape[1]
        is_own = (row_n >= 0) & (row_n < part_br.shape[1])
        return part_br, trained_n[is_own], row_n[is_own]

    def by_heads(self, tensor_bhrd: Tensor) -> Tensor:
        """Return all positions of this rank's heads, from all heads of its positions; fewer heads are repeated."""
        tensor_hrd = tensor_bhrd[0].repeat_interleave(max(1, self.size // tensor_bhrd.shape[1]), dim=0)
        return self._exchanged(tensor_hrd).transpose(0, 1).flatten(1, 2)[None]

    def by_positions(self, tensor_brhd: Tensor) -> Tensor:
        """Return all heads of this rank's positions, from all positions of its heads."""
        return self._exchanged(tensor_brhd[0]).transpose(0, 1).flatten(1, 2)[None]

    def of_heads(self, sinks_h: Tensor) -> Tensor:
        return sinks_h.chunk(self.size)[self.number]

    def whole(self, column_bt: Tensor) -> Tensor:
        """Return the sum over ranks of numbers that each has at its own positions; each keeps the gradient of those."""
        summed: Tensor = _Sum.apply(column_bt, self.group)  # type: ignore[no-untyped-call]
        return summed

    def _exchanged(self, tensor: Tensor) -> Tensor:
        """Send part i along the first dimension to rank i; return [ranks, ...] of what each has sent."""
        parts = tensor.contiguous().view(self.size, -1, *tensor.shape[1:])
        received: Tensor = all_to_all_single(torch.empty_like(parts), parts, group=self.group)  # type: ignore[no-untyped-call]
        return received


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, column: Tensor, group: Any) -> Tensor:
        total = column.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None  # all ranks compute the same loss of the sum


def split(size: int, ranks: Ranks, config: Any) -> Split | None:
    """Return how neighbouring ranks divide rows; None for 1. Raise ConfigError where they can't."""
    if size == 1:
        return None
    heads = config.get_text_config().num_attention_heads
    for number, what in ((ranks.size, "ranks"), (heads, "attention heads")):
        if number % size:
            raise ConfigError(f"trainer.sequence_parallel={size} does not divide the {number} {what}: set a divisor")
    timeout = datetime.timedelta(seconds=ranks.timeout_s)
    group, _ = dist.new_subgroups(size, timeout=timeout)  # type: ignore[no-untyped-call]
    return Split(size, ranks.rank % size, group)
