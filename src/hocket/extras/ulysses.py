"""Sequence parallelism: several ranks compute a row together (Ulysses, arXiv 2309.14509).

Each has a part of its positions, in all layers but attention; for that, an all-to-all gives it all
positions of a part of the heads. Every rank gets the log-probs of the whole row, and so its loss.
"""

import dataclasses
import datetime
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_reduce, all_to_all_single

from hocket.trainer.attention import RowPart
from hocket.trainer.choices import row_division
from hocket.trainer.ranks import Ranks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split(RowPart):
    """This rank's part of rows, and its exchange with the other ranks."""

    group: Any  # of the ranks that divide the row

    def by_heads(self, tensor_bhrd: Tensor) -> Tensor:
        tensor_hrd = tensor_bhrd[0]
        heads = len(tensor_hrd)
        # Several ranks need a copy of a key or value head if there are fewer of them than ranks.
        copies = math.lcm(heads, self.size) // heads
        return self._exchanged(tensor_hrd.repeat_interleave(copies, dim=0)).transpose(0, 1)

    def by_positions(self, tensor_rhd: Tensor) -> Tensor:
        return self._exchanged(tensor_rhd)[None]

    def whole(self, column_bt: Tensor) -> Tensor:
        summed: Tensor = all_reduce(column_bt, group=self.group)  # type: ignore[no-untyped-call]
        return summed

    def _exchanged(self, tensor_xyd: Tensor) -> Tensor:
        """Divide x among ranks and gather y from them; return [x / size, y · size, d]."""
        parts = tensor_xyd.contiguous().view(self.size, -1, *tensor_xyd.shape[1:])
        received: Tensor = all_to_all_single(torch.empty_like(parts), parts, group=self.group)  # type: ignore[no-untyped-call]
        return received.transpose(0, 1).flatten(1, 2)


@row_division("ulysses")
def split(size: int, ranks: Ranks) -> Split:
    """Make the groups of `size` neighboring ranks that divide rows, and return this rank's."""
    timeout = datetime.timedelta(seconds=ranks.timeout_s)
    group, _ = dist.new_subgroups(size, timeout=timeout)  # type: ignore[no-untyped-call]
    return Split(size, ranks.rank % size, group=group)
