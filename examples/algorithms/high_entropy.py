"""Train on the tokens of the highest entropy alone, the forks of a text (arXiv 2506.01939).

Settings: algorithm.objective=high_entropy
"""

from hocket.algorithm.choices import objective, ppo


@objective("high_entropy", clips="pessimistic")
def high_entropy(ratio_bt, advantages_bt, entropy_bt, mask_bt, low: float, high: float, share: float = 0.2):
    """Return PPO's objective of those tokens of a micro-batch whose entropy is in the highest `share`; 0 elsewhere."""
    entropy_bt = entropy_bt.detach()
    if not mask_bt.any():
        return ratio_bt * 0
    threshold = entropy_bt[mask_bt].float().quantile(1 - share)
    return ppo(ratio_bt, advantages_bt, low, high) * (entropy_bt >= threshold)
