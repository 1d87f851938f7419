"""Compare log-probabilities: masked log-ratios, and their sums over sequences that are packed into rows."""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # e^20 is far outside every clip range and still finite


def masked_log_ratio(numerator_bt: Tensor, denominator_bt: Tensor, mask_bt: Tensor) -> Tensor:
    """Return numerator − denominator of log-probs, clamped to ±20, and 0 where the mask is False."""
    # Masked before exp: padding may hold -inf, and a mask after exp would turn that into NaN gradients.
    difference_bt = numerator_bt.where(mask_bt, 0.0) - denominator_bt.where(mask_bt, 0.0)
    return difference_bt.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_means(values_bt: Tensor, mask_bt: Tensor, sample_bt: Tensor) -> Tensor:
    """Return at every position the mean over the trained tokens of its sequence; values are 0 elsewhere."""
    lengths_bt = sequence_sums(mask_bt, sample_bt).clamp(min=1)
    return (sequence_sums(values_bt, sample_bt) / lengths_bt).to(values_bt.dtype)


def sequence_sums(values_bt: Tensor, sample_bt: Tensor) -> Tensor:
    """Return at every position the sum over its sequence, float64."""
    _, index_bt = torch.unique(sample_bt, return_inverse=True)
    index_n, values_n = index_bt.flatten(), values_bt.double().flatten()
    return torch.zeros_like(values_n).index_add(0, index_n, values_n)[index_bt]
