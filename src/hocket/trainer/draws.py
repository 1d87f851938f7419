"""Tell from log-probs whether tokens were drawn from the policy's distribution p."""

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hocket.trainer.batching import TrainBatch


@torch.no_grad()
def draw_sums(
    batch: TrainBatch, logprobs_bt: Tensor, entropy_bt: Tensor, variance_bt: Tensor, highest_bt: Tensor
) -> dict[str, Tensor]:
    """Return Σ −log p − entropy and Σ Var(log p) over witnesses, and what `certain_odds` lacks.

    That is Σ log(1 + 1/7 / p) over sequences whose tokens are the likeliest, which not each p above 1/2 tells.
    """
    greedy_bt = (-logprobs_bt).where(logprobs_bt >= highest_bt, -torch.inf)
    unsure_bt = batch.rollout_logprobs_bt <= math.log(0.5)
    values_2t = torch.cat([greedy_bt, unsure_bt]).where(batch.mask_bt, 0.0).double()
    greedy_n, unsure_n = torch.zeros_like(values_2t).index_add(1, batch.sample_bt[0], values_2t)
    return {
        "surprise": ((-logprobs_bt - entropy_bt) * batch.witness_bt).sum(dtype=torch.float64),
        "variance": (variance_bt * batch.witness_bt).sum(dtype=torch.float64),
        "greedy": softplus(greedy_n - math.log(7)).where(unsure_n > 0, 0.0).sum(),
    }
