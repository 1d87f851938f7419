"""Geometric-mean policy optimization (arXiv 2507.20673): the geometric mean of a sequence's clipped ratios.

Settings: algorithm.objective=gmpo algorithm.aggregate=seq_mean_token_mean algorithm.minibatches=2
"""

from hocket.algorithm.choices import objective, sequence_means


@objective("gmpo", clips="pessimistic")
def gmpo(ratio_bt, advantages_bt, mask_bt, sample_bt, width: float = 0.4):
    """Return exp(mean of the log ratios) · A; those on the side of A are clipped at ± width."""
    log_bt = ratio_bt.log()
    clipped_bt = log_bt.clamp(-width, width)
    smaller_bt = log_bt.minimum(clipped_bt).where(advantages_bt > 0, log_bt.maximum(clipped_bt))
    return sequence_means(smaller_bt * mask_bt, mask_bt, sample_bt).exp() * advantages_bt
