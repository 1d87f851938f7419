"""Compare each rollout's reward with those of its group. Suffixes: n rollouts, g group."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hocket.algorithm.choices import choose, deviation
from hocket.config.algorithm import Chosen, Scale

EPS = 1e-6


def group_advantages(
    rewards: Sequence[float],
    group_ids: Sequence[int],
    *,
    baseline: Chosen,
    scale: Scale,
    parts: Sequence[Mapping[str, float]] = ({},),
) -> Tensor:
    """Return A = (R − baseline) / (deviation + 1e-6) per rollout, float32 [n].

    Deviations, unbiased: of the "group", of all R − baseline in the "batch" (2510.13786), "none" (2503.20783); with
    "tokens" samples.py divides. `parts`: the values of each reward function.
    """
    choice = choose("baseline", baseline)
    rewards_n = torch.tensor(rewards, dtype=torch.float64)  # float32 loses small differences of large rewards
    ids_n = torch.tensor(group_ids)
    if choice.per == "group":
        advantages_n = _by_group(lambda rewards_g: choice(rewards_g=rewards_g), rewards_n, ids_n)
    else:
        names = {*itertools.chain.from_iterable(parts)}  # those of another source are NaN
        parts_n = {name: rewards_n.new_tensor([part.get(name, math.nan) for part in parts]) for name in names}
        advantages_n = torch.empty_like(rewards_n)
        advantages_n[:] = choice(rewards_n=rewards_n, group_n=ids_n, parts_n=parts_n)
    if scale == "group":
        advantages_n = advantages_n / (_by_group(deviation, rewards_n, ids_n) + EPS)
    if scale == "batch":
        advantages_n = advantages_n / (deviation(advantages_n) + EPS)
    return advantages_n.float()


def _by_group(function: Callable[[Tensor], Tensor], values_n: Tensor, ids_n: Tensor) -> Tensor:
    result_n = torch.empty_like(values_n)
    for group in torch.unique(ids_n):
        result_n[ids_n == group] = function(values_n[ids_n == group])
    return result_n
