"""Tell from log-probs whether tokens were drawn from the policy's distribution p."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hocket.observe.metrics import HALF, ODDS
from hocket.trainer.batching import TrainBatch


@torch.no_grad()
def draw_sums(batch: TrainBatch, logprobs_bt: Tensor, *others: Tensor) -> dict[str, Tensor]:
    """Return Σ −log p − entropy of witnesses, Σ Var(log p) of these, and what training adds to `certain_odds`.

    That is, of each sequence whose tokens are the likeliest, which not each p > 1/2 tells: log(1 + odds / p).

    Args:
        others: entropy, Var(log p), and the highest log-prob.
    """
    entropy_bt, variance_bt, highest_bt = others
    greedy_bt = (-logprobs_bt).where(logprobs_bt >= highest_bt, -torch.inf)
    unsure_bt = batch.rollout_logprobs_bt <= HALF
    values_2n = torch.stack([greedy_bt, unsure_bt]).where(batch.mask_bt, 0.0).double().flatten(1)
    sums_2n = torch.zeros_like(values_2n).index_add(1, batch.sample_bt.flatten(), values_2n)
    return {
        "surprise": ((-logprobs_bt - entropy_bt) * batch.witness_bt).sum(dtype=torch.float64),
        "variance": (variance_bt * batch.witness_bt).sum(dtype=torch.float64),
        "greedy": softplus(sums_2n[0] + ODDS).where(sums_2n[1] > 0, 0.0).sum(),
    }
