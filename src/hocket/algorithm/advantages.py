"""Compare each rollout's reward with those of its group. Suffixes: n rollouts, g group."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.algorithm.choices import choose, deviation
from hocket.config.algorithm import Scale
from hocket.config.sections import Chosen
from hocket.errors import ConfigError

EPS = 1e-6


def group_advantages(
    rewards: Sequence[float],
    group_ids: Sequence[int],
    *,
    advantage: Chosen,
    scale: Scale,
    parts: Sequence[Mapping[str, float]] = ({},),
) -> Tensor:
    """Return A = (R − baseline) / (deviation + 1e-6) per rollout, float32 [n].

    Deviations, unbiased: of the "group", of all R − baseline in the "batch" (2510.13786), "none" (2503.20783); with
    "tokens" samples.py divides. `parts`: the values of each reward function, and of its parts.
    """
    choice = choose("advantage", advantage)
    setting = f"advantage={advantage}"
    rewards_n = torch.tensor(
        rewards, dtype=torch.float64
    )  # float32 loses small differences of large rewards
    ids_n = torch.tensor(group_ids)
    if choice.per == "group":
        advantages_n = _by_group(
            lambda rewards_g: checked(setting, choice(rewards_g=rewards_g), rewards_g),
            rewards_n,
            ids_n,
        )
    else:
        names = dict.fromkeys(
            name for part in parts for name in part if "/" not in name
        )  # parts count in their reward
        parts_n = {
            name: rewards_n.new_tensor([part.get(name, math.nan) for part in parts])
            for name in names
        }
        advantages_n = checked(
            setting, choice(rewards_n=rewards_n, group_n=ids_n, parts_n=parts_n), rewards_n
        )
    if scale == "group":
        advantages_n = advantages_n / (_by_group(deviation, rewards_n, ids_n) + EPS)
    if scale == "batch":
        advantages_n = advantages_n / (deviation(advantages_n) + EPS)
    return advantages_n.float()


def checked(setting: str, returned: Any, *given: Tensor) -> Tensor:
    """Return the advantages that a function returned for numbers that it was given, float64, of the same shape.

    Raise ConfigError for another shape, and for numbers that are not finite where all that were given are.
    """
    what = f"algorithm.{setting} returned"
    size = len(given[0])
    try:
        values_n = torch.as_tensor(returned, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{what} {type(returned).__name__}: have it return a tensor of {size} numbers"
        ) from error
    if values_n.shape != (size,):
        count = len(values_n) if values_n.dim() == 1 else f"the shape {list(values_n.shape)}"
        raise ConfigError(
            f"{what} {count} for {size} advantages: have it return one for each, in the order given"
        )
    finite_n = values_n.isfinite()
    if not finite_n.all() and all(bool(numbers_n.isfinite().all()) for numbers_n in given):
        place = int(finite_n.int().argmin())
        cases = (
            "equal rewards, one alone, and reward functions that a source lacks (NaN in parts_n)"
        )
        raise ConfigError(
            f"{what} {values_n[place]:g} as advantage {place + 1} of {size}: have it meet {cases}"
        )
    return values_n


def _by_group(function: Callable[[Tensor], Tensor], values_n: Tensor, ids_n: Tensor) -> Tensor:
    result_n = torch.empty_like(values_n)
    for group in torch.unique(ids_n):
        result_n[ids_n == group] = function(values_n[ids_n == group])
    return result_n
