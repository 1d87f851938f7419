"""Variational sequence-level soft policy optimization (arXiv 2602.10693): a gamma-shaped weight per sequence.

Settings: algorithm.objective=vespo algorithm.aggregate=token_mean algorithm.correction=none algorithm.minibatches=2
"""

import math

from hocket.algorithm.choices import objective, sequence_sums


@objective("vespo")
def vespo(
    ratio_bt,
    advantages_bt,
    logprobs_bt,
    mask_bt,
    sample_bt,
    power: float = 2.0,
    rate: float = 3.0,
    power_negative: float = 3.0,
    rate_negative: float = 2.0,
):
    """Return φ(w) · A · log-prob with φ(w) = exp(rate · (1 − w)) · w^power held constant, w the sequence's ratio."""
    log_bt = ratio_bt.detach().log().clamp(-20, 20) * mask_bt
    log_w_bt = sequence_sums(log_bt, sample_bt).to(ratio_bt.dtype).clamp(math.log(1e-8), 20)
    gains_bt = advantages_bt >= 0
    power_bt = ratio_bt.new_full((), power).where(gains_bt, power_negative)
    rate_bt = ratio_bt.new_full((), rate).where(gains_bt, rate_negative)
    return (rate_bt + power_bt * log_w_bt - rate_bt * log_w_bt.exp()).exp() * advantages_bt * logprobs_bt
