"""Compute one advantage per token: returns without a baseline, or with a critic's values.

All functions take the sampled tokens of one sequence, [t]: tokens of an environment between them are left out.
"""

from torch import Tensor

MIN_VARIANCE = 1e-8


def discounted_returns(rewards_t: Tensor, *, discount: float) -> Tensor:
    """Return Σ_{s≥t} discount^(s−t) · reward_s of each token, [t] (arXiv 2501.03262)."""
    returns, following = [], 0.0
    for reward in reversed(rewards_t.tolist()):
        following = reward + discount * following
        returns.append(following)
    return rewards_t.new_tensor(returns[::-1])


def gae(rewards_t: Tensor, values_t: Tensor, *, discount: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Return (generalised advantages, returns) of each token, [t] each (arXiv 1506.02438).

    δ_t = reward_t + discount · V_{t+1} − V_t;  A_t = δ_t + discount · λ · A_{t+1};  returns = A + V. The value after
    the last token is 0.
    """
    advantages, following, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards_t.tolist()), reversed(values_t.tolist()), strict=True):
        following = reward + discount * next_value - value + discount * gae_lambda * following
        advantages.append(following)
        next_value = value
    advantages_t = rewards_t.new_tensor(advantages[::-1])
    return advantages_t, advantages_t + values_t


def whiten(values_n: Tensor) -> Tensor:
    """Return (x − mean) / √max(unbiased variance, 1e-8), [n]."""
    centred_n = values_n - values_n.mean()
    variance = centred_n.square().sum() / max(len(values_n) - 1, 1)
    return centred_n / variance.clamp(min=MIN_VARIANCE).sqrt()
