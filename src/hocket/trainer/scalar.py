"""A model that gives positions one number each, as critics and reward models do."""

from typing import Any

import torch
from torch import Tensor

from hocket.trainer.batching import TrainBatch
from hocket.trainer.policy import Policy
from hocket.trainer.weights import head_of


class ScalarModel(Policy):
    """A model whose head has one output."""

    def forward(self, batch: TrainBatch) -> Any:  # in place of log-probs and entropies
        """Return values_bt, float32, of what is read before a token; 0 where the batch's mask is false."""
        hidden_brh = self._hidden(batch.input_ids_br, batch.segments, batch.images)
        values_n1: Tensor = head_of(self.model)(hidden_brh[0].index_select(0, batch.row_n))
        zeros_t = torch.zeros(batch.mask_bt.numel(), device=values_n1.device)
        values_bt = zeros_t.index_copy(0, batch.trained_n, values_n1.squeeze(-1).float())[None]
        return batch.segments.part.whole(values_bt)
