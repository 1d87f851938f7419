import pytest

from hocket.algorithm.samples import train_samples
from hocket.config import AlgorithmConfig
from hocket.types import Group, Prompt, Rollout, Score


def group(name: str, rewards: list[float | None]) -> Group:
    prompt = Prompt(id=name, token_ids=(1, 2))
    rollouts = tuple(
        Rollout(
            id=f"{name}/{i}",
            group_id=name,
            prompt=prompt,
            token_ids=(1, 2, 10 + i),
            mask=(False, False, True),
            logprobs=(0.0, 0.0, -0.5),
            finish_reason="stop",
            version_min=3,
            version_max=4,
            text="x",
        )
        for i in range(len(rewards))
    )
    scores = tuple(Score(total=0.0, error="broke") if r is None else Score(total=r) for r in rewards)
    return Group(id=name, rollouts=rollouts, scores=scores)


def test_each_rollout_gets_its_group_normalised_advantage() -> None:
    # mean 0.5, unbiased deviation of (0, 0, 1, 1) = sqrt(4 * 0.25 / 3) = 0.57735; 0.5 / 0.57735 = 0.866025
    samples, signal = train_samples([group("a", [0.0, 0.0, 1.0, 1.0])], AlgorithmConfig())
    assert [s.advantage for s in samples] == pytest.approx([-0.866025, -0.866025, 0.866025, 0.866025], abs=1e-5)
    assert [s.token_ids[-1] for s in samples] == [10, 11, 12, 13]
    assert samples[0].mask == (False, False, True)
    assert samples[0].rollout_logprobs == (0.0, 0.0, -0.5)
    assert samples[0].version_min == 3
    assert signal == {"rollout/zero_variance": 0.0}


def test_a_group_whose_scores_are_alike_is_left_out() -> None:
    samples, signal = train_samples([group("a", [1.0, 1.0]), group("b", [0.0, 1.0])], AlgorithmConfig())
    assert len(samples) == 2
    assert signal == {"rollout/zero_variance": 0.5}


def test_a_rollout_without_a_score_is_left_out_of_samples_and_mean() -> None:
    # scored rewards 0 and 1: mean 0.5, deviation sqrt(0.5) = 0.707107
    samples, _ = train_samples([group("a", [0.0, None, 1.0])], AlgorithmConfig())
    assert [s.token_ids[-1] for s in samples] == [10, 12]
    assert [s.advantage for s in samples] == pytest.approx([-0.707106, 0.707106], abs=1e-5)


def test_groups_without_any_signal_give_no_samples() -> None:
    assert train_samples([group("a", [None, None]), group("b", [0.0, 0.0])], AlgorithmConfig()) == (
        [],
        {"rollout/zero_variance": 1.0},
    )
