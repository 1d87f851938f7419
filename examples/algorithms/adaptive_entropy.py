"""Adaptive entropy control of Skywork-OR1 (arXiv 2505.22312): a bonus while the entropy is too low.

Settings: algorithm.objective=adaptive_entropy
"""

import math

from hocket.algorithm.choices import objective, ppo

state = {"coef": 0.0, "entropy": math.inf}  # of this rank, after its last micro-batch; a resumed run begins anew


@objective("adaptive_entropy", clips="pessimistic")
def adaptive_entropy(
    ratio_bt,
    advantages_bt,
    entropy_bt,
    mask_bt,
    low: float,
    high: float,
    target: float = 0.2,
    step: float = 0.005,
    most: float = 0.1,
):
    """Return PPO's objective + coefficient · entropy; the coefficient grows by `step` while the entropy is too low."""
    bonus = state["coef"] if state["entropy"] <= target else 0.0
    if mask_bt.any():
        state["entropy"] = entropy_bt.detach()[mask_bt].mean().item()
        change = step if state["entropy"] <= target else -step
        state["coef"] = min(max(state["coef"] + change, 0.0), most)
    return ppo(ratio_bt, advantages_bt, low, high) + bonus * entropy_bt
