"""Compare each rollout's reward with those of its group.

The functions that `algorithm.advantage` names, such as the mean of a group, are in choices.py.

Suffixes: n rollouts of a batch, g rollouts of a group; in the last functions, t tokens of a
sequence, n its sampled tokens.
"""

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hocket.algorithm.choices import choose, deviation
from hocket.config.algorithm import Scale
from hocket.config.sections import Chosen
from hocket.errors import ConfigError
from hocket.types import TokenSequence

EPS = 1e-6


def group_advantages(
    rewards: Sequence[float],
    group_ids: Sequence[int],
    *,
    advantage: Chosen,
    scale: Scale,
    parts: Sequence[Mapping[str, float]] = (),
) -> Tensor:
    """Compute A = (R − baseline) / (deviation + 1e-6) of each rollout, float32 [n].

    Args:
        rewards: R of each rollout.
        group_ids: the number of each rollout's group.
        advantage: algorithm.advantage, which computes R − baseline.
        scale: which unbiased deviation divides. "group": that of the group's rewards; "batch": that
            of R − baseline over the whole batch (arXiv 2510.13786); "none": none (arXiv
            2503.20783). "tokens": none here, samples.py whitens the advantages of all tokens.
        parts: for each rollout the values of its reward functions, by name; an advantage of the
            batch may read them.

    Raises ConfigError as `checked`.
    """
    choice = choose("advantage", advantage)
    setting = f"advantage={advantage}"
    # In float64, since float32 loses small differences of large rewards.
    rewards_n = torch.tensor(rewards, dtype=torch.float64)
    ids_n = torch.tensor(group_ids)
    if choice.per == "group":

        def compare(rewards_g: Tensor) -> Tensor:
            return checked(setting, choice(rewards_g=rewards_g), [rewards_g])

        advantages_n = _by_group(compare, rewards_n, ids_n)
    else:
        parts_n = _columns_of_parts(parts)
        returned = choice(rewards_n=rewards_n, group_n=ids_n, parts_n=parts_n)
        advantages_n = checked(setting, returned, [rewards_n])
    if scale == "group":
        advantages_n = advantages_n / (_by_group(deviation, rewards_n, ids_n) + EPS)
    if scale == "batch":
        advantages_n = advantages_n / (deviation(advantages_n) + EPS)
    return advantages_n.float()


def _columns_of_parts(parts: Sequence[Mapping[str, float]]) -> dict[str, Tensor]:
    """Arrange the values of reward functions by name, float64 [n]; NaN where a rollout has none."""
    names: dict[str, None] = {}  # a dict keeps the order in which they first occur
    for part in parts:
        # A name with a slash is a part of a reward function, which counts in that function already.
        names.update((name, None) for name in part if "/" not in name)
    columns = {}
    for name in names:
        values = [part.get(name, math.nan) for part in parts]
        columns[name] = torch.tensor(values, dtype=torch.float64)
    return columns


def checked(setting: str, returned: Any, inputs: Sequence[Tensor]) -> Tensor:
    """Check what a user's function returned as advantages, and convert it to float64.

    Args:
        setting: the function as the config names it, "advantage=mean".
        returned: what it returned.
        inputs: the numbers that it computed this from; the first one has as many as are expected.

    Raises ConfigError where the shape is another one, and where a value is not finite although all
    inputs are.
    """
    begins = f"algorithm.{setting} returned"
    size = len(inputs[0])
    try:
        values_n = torch.as_tensor(returned, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(returned).__name__
        raise ConfigError(f"{begins} {kind}: have it return a tensor of {size} numbers") from error
    if values_n.shape != (size,):
        count = len(values_n) if values_n.dim() == 1 else f"the shape {list(values_n.shape)}"
        advice = "have it return one for each, in the order given"
        raise ConfigError(f"{begins} {count} for {size} advantages: {advice}")
    finite_n = values_n.isfinite()
    if not finite_n.all() and all(bool(numbers.isfinite().all()) for numbers in inputs):
        place = int(finite_n.int().argmin())  # of the first that is not finite
        raise ConfigError(
            f"{begins} {values_n[place]:g} as advantage {place + 1} of {size}: have it handle "
            "equal rewards, a single reward, and reward functions that a source lacks (NaN in parts_n)"
        )
    return values_n


def _by_group(function: Callable[[Tensor], Tensor], values_n: Tensor, ids_n: Tensor) -> Tensor:
    """Apply a function to the values of each group."""
    result_n = torch.empty_like(values_n)
    for group in torch.unique(ids_n):
        result_n[ids_n == group] = function(values_n[ids_n == group])
    return result_n


def at_sampled(values_t: Sequence[float], sequence: TokenSequence) -> Tensor:
    """Select the values at a sequence's sampled tokens, float64 [n]."""
    return torch.from_numpy(np.array(values_t, np.float64)[_mask_array(sequence)])


def along_sequence(values_n: Tensor, sequence: TokenSequence) -> Sequence[float]:
    """Spread the values of sampled tokens over a sequence, [t]; 0.0 where none was sampled."""
    values_t = np.zeros(len(sequence.mask))
    values_t[_mask_array(sequence)] = values_n.numpy()
    return array("d", values_t.tobytes())


def _mask_array(sequence: TokenSequence) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """View a mask as an array; through bytes, since numpy reads a tuple of bools slowly."""
    return np.frombuffer(bytes(sequence.mask), np.bool_)
