"""Measure in training whether tokens were drawn from the policy's distribution p."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hocket.config import Config
from hocket.trainer.batching import TrainBatch
from hocket.trainer.logprobs import TokenStatistics, token_statistics

DRAWN = ("sampling/surprise", "sampling/variance", "sampling/greedy")
"""Names of the sums."""


@token_statistics("draws")
def draws(config: Config) -> TokenStatistics | None:
    return Draws() if config.sync.check_share and config.pipeline.replay is None else None


class Draws(TokenStatistics):
    """Sums over a batch, which `sampling.farthest` compares with those of independent draws."""

    def of_tokens(
        self, logprobs_cv: Tensor, entropies_cv: Tensor, entropy_c: Tensor
    ) -> Sequence[Tensor]:
        """Compute Var(log p) of a draw from p, and the highest log p, [c] each."""
        squares_c = -entropies_cv.mul_(logprobs_cv).nansum(dim=-1)  # 0 · −inf where p is 0
        return squares_c - entropy_c.square(), logprobs_cv.amax(dim=-1)

    @torch.no_grad()
    def sums(
        self, batch: TrainBatch, logprobs_bt: Tensor, entropy_bt: Tensor, *of_tokens: Tensor
    ) -> dict[str, Tensor]:
        """Sum −log p − entropy and Var(log p) over unbiased samples, and the log of the odds of
        greedy answers that `sampling.certain_odds` can't see.

        Those are Σ log(1 + 1/7 / p) over the sequences whose every token is the likeliest, where
        not each p is above 1/2.
        """
        variance_bt, highest_bt = of_tokens
        greedy_bt = (-logprobs_bt).where(logprobs_bt >= highest_bt, -torch.inf)
        unsure_bt = batch.rollout_logprobs_bt <= math.log(0.5)
        values_2t = torch.cat([greedy_bt, unsure_bt]).where(batch.mask_bt, 0.0).double()
        greedy_n, unsure_n = torch.zeros_like(values_2t).index_add(1, batch.sample_bt[0], values_2t)
        surprise = ((-logprobs_bt - entropy_bt) * batch.unbiased_bt).sum(dtype=torch.float64)
        variance = (variance_bt * batch.unbiased_bt).sum(dtype=torch.float64)
        greedy = softplus(greedy_n - math.log(7)).where(unsure_n > 0, 0.0).sum()
        return dict(zip(DRAWN, (surprise, variance, greedy), strict=True))
