import math

import pytest
import torch

from hocket.algorithm.advantages import group_advantages, zero_variance_groups

NAN = math.nan


def test_rewards_are_centred_and_divided_by_the_unbiased_deviation_of_their_group() -> None:
    # group 0: mean 2, deviations −1 0 1, unbiased variance (1 + 0 + 1) / 2 = 1
    # group 1: mean 5, deviations −3 3, unbiased variance 18 / 1, std 4.2426…
    advantages = group_advantages([1.0, 2.0, 8.0, 3.0, 2.0], [0, 0, 1, 0, 1], eps=0.0)
    expected = torch.tensor([-1.0, 0.0, 3 / math.sqrt(18), 1.0, -3 / math.sqrt(18)])
    torch.testing.assert_close(advantages, expected)


def test_eps_is_added_to_the_deviation() -> None:
    torch.testing.assert_close(group_advantages([1.0, 2.0, 3.0], [0, 0, 0], eps=1.0), torch.tensor([-0.5, 0.0, 0.5]))


def test_scale_none_only_centres() -> None:
    advantages = group_advantages([1.0, 4.0, 10.0], [7, 7, 7], scale="none")
    torch.testing.assert_close(advantages, torch.tensor([-4.0, -1.0, 5.0]))


def test_a_failed_rollout_leaves_mean_and_deviation() -> None:
    advantages = group_advantages([0.0, NAN, 2.0], [0, 0, 0], eps=0.0)  # mean 1, unbiased std √2
    torch.testing.assert_close(advantages, torch.tensor([-1 / math.sqrt(2), 0.0, 1 / math.sqrt(2)]))


def test_equal_rewards_have_advantage_zero_not_nan() -> None:
    assert group_advantages([0.3] * 8, [0] * 8).tolist() == [0.0] * 8
    assert group_advantages([1.0, NAN, NAN], [0, 1, 1]).tolist() == [0.0, 0.0, 0.0]


def test_small_differences_of_large_rewards_survive() -> None:
    advantages = group_advantages([1e6, 1e6 + 1e-3], [0, 0], scale="none")
    torch.testing.assert_close(advantages, torch.tensor([-5e-4, 5e-4]), rtol=1e-5, atol=0)


def test_lists_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="equal lists"):
        group_advantages([1.0, 2.0], [0])
    with pytest.raises(ValueError, match="unknown advantage"):
        group_advantages([1.0], [0], scale="batch")  # type: ignore[arg-type]


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
