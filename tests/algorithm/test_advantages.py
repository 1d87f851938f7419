import functools
import math
import operator
import random
from typing import Any

import pytest
import torch

from hocket.algorithm.advantages import group_advantages
from hocket.algorithm.choices import total
from hocket.algorithm.samples import are_equal, whiten
from support.samples import NORMALISED


@pytest.mark.parametrize(
    ("rewards", "group_ids", "knobs", "expected"),
    [
        # group 0: mean 2, deviations −1 0 1, unbiased variance (1 + 0 + 1) / 2 = 1
        # group 1: mean 5, deviations −3 3, unbiased variance 18 / 1, std 4.2426…
        ([1.0, 2.0, 8.0, 3.0, 2.0], [0, 0, 1, 0, 1], {}, [-1.0, 0.0, 3 / math.sqrt(18), 1.0, -3 / math.sqrt(18)]),
        # equal rewards, or one alone: zero, not NaN
        ([0.3] * 8, [0] * 8, {}, [0.0] * 8),
        ([1.0], [0], {"advantage": "leave_one_out"}, [0.0]),
        # deviations ∓1e-6, their own √2 · 1e-6, and 1e-6 beside it: 1 / (√2 + 1)
        ([0.0, 2e-6], [0, 0], {}, [1 - math.sqrt(2), math.sqrt(2) - 1]),
        ([0.0, 2e-6], [0, 0], {"scale": "batch"}, [1 - math.sqrt(2), math.sqrt(2) - 1]),
        # small differences of large rewards survive
        ([1e6, 1e6 + 1e-3], [0, 0], {"scale": "none"}, [-5e-4, 5e-4]),
        # all centred rewards −1 1 | −3 3: mean 0, unbiased variance (1 + 1 + 9 + 9) / 3
        ([0.0, 2.0, 4.0, 10.0], [0, 0, 1, 1], {"scale": "batch"}, [x / math.sqrt(20 / 3) for x in (-1, 1, -3, 3)]),
        ([0.0, 2.0, 4.0, 10.0], [0, 0, 1, 1], {"scale": "tokens"}, [-1.0, 1.0, -3.0, 3.0]),  # only centred
    ],
)
def test_advantages_by_hand(
    rewards: list[float], group_ids: list[int], knobs: dict[str, Any], expected: list[float]
) -> None:
    found = group_advantages(rewards, group_ids, **{"advantage": "mean", "scale": "group"} | knobs)
    assert found.tolist() == pytest.approx(expected, rel=NORMALISED)


def test_whitening_leaves_mean_zero_and_an_unbiased_deviation_of_one() -> None:
    # mean 2, deviations −2 0 2, unbiased variance 8 / 2 = 4
    assert whiten(torch.tensor([0.0, 2.0, 4.0])).tolist() == [-1.0, 0.0, 1.0]
    assert whiten(torch.tensor([3.0, 3.0])).tolist() == [0.0, 0.0]
    assert whiten(torch.tensor([3.0])).tolist() == [0.0]
    small = torch.tensor([0.0, 0.002], dtype=torch.float64)  # of variance 2e-6, above the least one
    assert whiten(small).tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


def test_rewards_are_added_in_their_order_so_that_every_machine_has_the_same_sum(rng: random.Random) -> None:
    values = [rng.gauss(0, 1) * 10 ** rng.randint(-9, 9) for _ in range(64)]
    assert total(torch.tensor(values, dtype=torch.float64)).item() == functools.reduce(operator.add, values)


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [
        ([0.5, 0.5], True),
        ([0.5, 0.5 + 5e-7], True),
        ([0.0, 1e-6], True),
        ([0.5, 0.5 + 5e-6], False),
        ([1e6] * 2, True),
        ([1.0], True),
        ([], True),
    ],
)
def test_a_group_without_spread_is_found_by_its_range(rewards: list[float], equal: bool) -> None:
    assert are_equal(rewards) is equal
