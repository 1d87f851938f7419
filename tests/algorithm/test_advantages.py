import math
from typing import Any

import pytest
import torch

from hocket.algorithm.advantages import group_advantages, zero_variance_groups
from hocket.algorithm.samples import discounted_returns, gae, whiten

NAN = math.nan


@pytest.mark.parametrize(
    ("rewards", "group_ids", "knobs", "expected"),
    [
        # group 0: mean 2, deviations −1 0 1, unbiased variance (1 + 0 + 1) / 2 = 1
        # group 1: mean 5, deviations −3 3, unbiased variance 18 / 1, std 4.2426…
        (
            [1.0, 2.0, 8.0, 3.0, 2.0],
            [0, 0, 1, 0, 1],
            {"eps": 0.0},
            [-1.0, 0.0, 3 / math.sqrt(18), 1.0, -3 / math.sqrt(18)],
        ),
        # eps is added to the deviation
        ([1.0, 2.0, 3.0], [0, 0, 0], {"eps": 1.0}, [-0.5, 0.0, 0.5]),
        # only centred
        ([1.0, 4.0, 10.0], [7, 7, 7], {"scale": "none"}, [-4.0, -1.0, 5.0]),
        # a failed rollout leaves mean and deviation: mean 1, unbiased std √2
        ([0.0, NAN, 2.0], [0, 0, 0], {"eps": 0.0}, [-1 / math.sqrt(2), 0.0, 1 / math.sqrt(2)]),
        # equal rewards, or one alone: zero, not NaN
        ([0.3] * 8, [0] * 8, {}, [0.0] * 8),
        ([1.0, NAN, NAN], [0, 1, 1], {}, [0.0] * 3),
        # small differences of large rewards survive
        ([1e6, 1e6 + 1e-3], [0, 0], {"scale": "none"}, [-5e-4, 5e-4]),
        # minus the mean of the others, a failed one aside: 1 − (2 + 6)/2 = −3, 2 − (1 + 6)/2, 6 − (1 + 2)/2
        ([1.0, 2.0, NAN, 6.0], [4] * 4, {"baseline": "leave_one_out", "scale": "none"}, [-3.0, -1.5, 0.0, 4.5]),
        # all centred rewards −1 1 | −3 3: mean 0, unbiased variance (1 + 1 + 9 + 9) / 3
        (
            [0.0, 2.0, 4.0, 10.0, NAN],
            [0, 0, 1, 1, 1],
            {"scale": "batch", "eps": 0.0},
            [value / math.sqrt(20 / 3) for value in (-1.0, 1.0, -3.0, 3.0, 0.0)],
        ),
        # without a baseline the reward stays, and is divided around its mean 2: deviations ∓1, unbiased deviation √2
        ([1.0, 3.0], [0, 1], {"baseline": "none", "scale": "none"}, [1.0, 3.0]),
        ([1.0, 3.0], [0, 1], {"baseline": "none", "scale": "batch", "eps": 0.0}, [1 / math.sqrt(2), 3 / math.sqrt(2)]),
    ],
)
def test_advantages_by_hand(
    rewards: list[float], group_ids: list[int], knobs: dict[str, Any], expected: list[float]
) -> None:
    found = group_advantages(rewards, group_ids, **knobs)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=0)


def test_lists_of_different_length_and_unknown_knobs_are_refused() -> None:
    with pytest.raises(ValueError, match="equal lists"):
        group_advantages([1.0, 2.0], [0])
    with pytest.raises(ValueError, match="unknown advantage"):
        group_advantages([1.0], [0], scale="rank")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown advantage"):
        group_advantages([1.0], [0], baseline="critic")


def test_returns_sum_what_is_still_to_come() -> None:
    # from the end: 4; 2 + ½·4 = 4; 1 + ½·4 = 3
    assert discounted_returns(torch.tensor([1.0, 2.0, 4.0]), discount=0.5).tolist() == [3.0, 4.0, 4.0]
    assert discounted_returns(torch.tensor([1.0, 2.0, 4.0]), discount=1.0).tolist() == [7.0, 6.0, 4.0]


def test_generalised_advantages_of_three_tokens_by_hand() -> None:
    # discount ½, λ ½. δ = 1 + ½·2 − 4 = −2, 0 + ½·1 − 2 = −1.5, 3 − 1 = 2
    # A from the end: 2; −1.5 + ¼·2 = −1; −2 + ¼·(−1) = −2.25. Returns A + V
    rewards, values = torch.tensor([1.0, 0.0, 3.0]), torch.tensor([4.0, 2.0, 1.0])
    advantages, returns = gae(rewards, values, discount=0.5, gae_lambda=0.5)
    assert advantages.tolist() == [-2.25, -1.0, 2.0]
    assert returns.tolist() == [1.75, 1.0, 3.0]


def test_whitening_leaves_mean_zero_and_an_unbiased_deviation_of_one() -> None:
    # mean 2, deviations −2 0 2, unbiased variance 8 / 2 = 4
    assert whiten(torch.tensor([0.0, 2.0, 4.0])).tolist() == [-1.0, 0.0, 1.0]
    assert whiten(torch.tensor([3.0, 3.0])).tolist() == [0.0, 0.0]
    assert whiten(torch.tensor([3.0])).tolist() == [0.0]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.5, 0.5], True),
        ([0.5, 0.5 + 5e-7], True),
        ([0.5, 0.5 + 5e-6], False),
        ([1e6, 1e6], True),
        ([1.0, NAN], True),  # one scored rollout has nothing to be compared with
        ([NAN, NAN], True),
        ([0.0, NAN, 1.0], False),
    ],
)
def test_a_group_without_spread_is_found_by_its_range(rewards: list[float], expected: bool) -> None:
    group_ids = [0] * len(rewards) + [1, 1]
    found = zero_variance_groups([*rewards, 0.0, 1.0], group_ids).tolist()
    assert found == [expected] * len(rewards) + [False, False]
