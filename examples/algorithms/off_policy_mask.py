"""The off-policy sequence mask of DeepSeek-V3.2 (arXiv 2512.02556).

Settings: algorithm.objective=off_policy_mask algorithm.minibatches=2
"""

from hocket.algorithm.choices import objective, ppo, sequence_means


@objective("off_policy_mask", clips="pessimistic")
def off_policy_mask(
    ratio_bt,
    advantages_bt,
    logprobs_bt,
    rollout_logprobs_bt,
    mask_bt,
    sample_bt,
    low: float,
    high: float,
    threshold: float = 0.1,
):
    """Return PPO's objective without sequences of a negative advantage that the policy has left behind.

    Left behind: the mean log-prob of the engine less that of the policy is above the threshold.
    """
    drift_bt = sequence_means((rollout_logprobs_bt - logprobs_bt.detach()) * mask_bt, mask_bt, sample_bt)
    kept_bt = (advantages_bt >= 0) | (drift_bt <= threshold)
    return ppo(ratio_bt, advantages_bt, low, high) * kept_bt
