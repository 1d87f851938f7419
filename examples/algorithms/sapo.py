"""Soft adaptive policy optimization (arXiv 2511.20347): a sigmoid of the ratio in place of its clip.

Settings: algorithm.objective=sapo algorithm.aggregate=seq_mean_token_mean algorithm.minibatches=2
"""

from hocket.algorithm.choices import objective


@objective("sapo")
def sapo(ratio_bt, advantages_bt, positive: float = 1.0, negative: float = 1.05):
    """Return 4 / τ · sigmoid(τ · (r − 1)) · A, whose gradient is that of r · A at r = 1; τ by the sign of A."""
    temperature_bt = advantages_bt.new_full((), negative).where(advantages_bt <= 0, positive)
    return (temperature_bt * (ratio_bt - 1)).sigmoid() * 4 / temperature_bt * advantages_bt
