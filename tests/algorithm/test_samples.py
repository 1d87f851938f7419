import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from hocket.algorithm.samples import (
    KlController,
    ScoredGroup,
    is_measured,
    outcome_of,
    overlong_penalty,
    shape,
    signal_metrics,
    train_samples,
)
from hocket.config import AdaptiveKl, AlgorithmConfig
from hocket.data.stream import PromptOutcome
from hocket.types import Group, Rollout, TrainSample, TurnReward
from support.samples import DEFAULT, MAX_TOKENS, NORMALISED, group_of, make_rollout, sampled
from support.samples import algorithm as settings


def group(name: str, rewards: list[float | None]) -> Group:
    """Rollouts of one token each, which is 10, 11, …"""
    rollouts = (make_rollout(-0.5, name=name, first=10 + i) for i in range(len(rewards)))
    return group_of(*rollouts, rewards=rewards, name=name)


def shaped(
    groups: Sequence[Group], algorithm: AlgorithmConfig = DEFAULT, pass_reward: str = "right"
) -> list[ScoredGroup]:
    return [shape(one, algorithm, MAX_TOKENS, pass_reward=pass_reward) for one in groups]


def joined(*episodes: Rollout) -> Rollout:
    """One episode with the sequences of them all; its name is the last one's."""
    return dataclasses.replace(episodes[-1], sequences=tuple(one.sequences[0] for one in episodes))


def last_advantages(samples: list[TrainSample]) -> list[float]:
    return [sample.advantages[-1] for sample in samples]


def test_each_rollout_with_a_score_gets_its_group_normalized_advantage() -> None:
    # mean 0.5, unbiased deviation of (0, 0, 1, 1) = √(4 · 0.25 / 3)
    samples, shaping = sampled([group("a", [0.0, 0.0, None, 1.0, 1.0])])
    one = 0.5 / math.sqrt(1 / 3)
    assert last_advantages(samples) == pytest.approx([-one, -one, one, one], rel=NORMALISED)
    assert [s.sequence.token_ids[-1] for s in samples] == [10, 11, 13, 14]
    assert list(samples[0].advantages[:2]) == [0.0, 0.0]
    assert samples[0].sequence == make_rollout(-0.5).sequences[0]
    assert (samples[0].columns, shaping) == ({}, {})


@pytest.mark.parametrize(
    ("overrides", "rewards", "said"),
    [
        ((), [0.0, 1.0], None),
        ((), [1.0, 1.0], "every reward is 1"),
        ((), [0.25, 0.25, None], "every reward is 0.25"),
        ((), [0.5, None], "one score alone"),
        ((), [None, None], "no score"),
        (("preset=reinforce_pp",), [1.0, 1.0], None),  # nothing is compared within a group
        (("preset=reinforce_pp_baseline",), [1.0, 1.0], None),  # it counts in the mean over all tokens
        (("preset=ppo",), [0.5, None], None),
        (("preset=ppo",), [None, None], "no score"),
    ],
)
def test_the_reason_of_a_group_without_signal(
    overrides: tuple[str, ...], rewards: list[float | None], said: str | None
) -> None:
    (found,) = shaped([group("a", rewards)], settings(*overrides))
    assert found.reason == said
    alike = len({reward for reward in rewards if reward is not None}) < 2
    signal = {"rollout/zero_variance": float(alike), "rollout/without_signal": float(said is not None)}
    assert signal_metrics([found]) == signal


def test_the_share_without_signal_counts_sampled_tokens_not_groups() -> None:
    long = group_of(make_rollout(*[-0.5] * 5), make_rollout(*[-0.5] * 4), rewards=[1.0, 1.0])
    short = group_of(make_rollout(-0.5), make_rollout(*[-0.5] * 2), rewards=[0.0, 1.0])
    metrics = signal_metrics(shaped([long, short], settings()))
    assert metrics == {"rollout/zero_variance": 0.5, "rollout/without_signal": 9 / 12}


def test_a_group_without_any_rollout_to_train_says_so_whatever_its_rewards() -> None:
    cut = [make_rollout(-0.5, finish_reason="length") for _ in range(2)]
    empty = [make_rollout(None) for _ in range(2)]
    groups = [group_of(*cut, rewards=[0.0, 1.0]), group_of(*empty, rewards=[0.0, 1.0])]
    reasons = [one.reason for one in shaped(groups, settings("mask_truncated=true"))]
    assert reasons == ["no rollout to train: cut off, or nothing sampled"] * 2
    assert shaped(groups)[0].reason is None


def scored(*rewards: dict[str, float] | None) -> Group:
    return group_of(*(make_rollout(-0.5) for _ in rewards), rewards=rewards)


def result_of(group: Group, untrained: str | None = None) -> PromptOutcome:
    return outcome_of(shaped([group])[0], untrained)


def test_an_outcome_has_the_pass_rate_of_one_reward_and_a_reason_if_it_is_not_trained() -> None:
    right = {"format": 1.0, "right": 1.0}
    rows = [{"format": 1.0, "right": 0.0}, right, {"format": 0.0, "right": 1.0}, None]
    assert result_of(scored(*rows)) == PromptOutcome(state="trained", pass_rate=pytest.approx(2 / 3))
    skipped = result_of(scored(*rows[:2]), "its update was not finite")
    assert skipped == PromptOutcome(state="failed", why="its update was not finite", pass_rate=0.5)
    assert result_of(scored(right, right, None)) == PromptOutcome(
        state="filtered", why="every reward is 2", pass_rate=1.0
    )
    untrained = result_of(scored(right, right), "its update was not finite")
    assert (untrained.state, untrained.why) == ("filtered", "every reward is 2")
    assert result_of(scored(None, None)) == PromptOutcome(state="failed", why="no score")


def test_rewards_that_are_no_pass_rates_are_counted() -> None:
    groups = [scored({"points": 10.0, "right": 1.0}, {"points": -2.0, "right": 0.0}), scored({"points": 1.0}, None)]
    for reward, share in (("points", 2 / 3), ("right", 0.0)):
        found = signal_metrics(shaped(groups, pass_reward=reward), uses_pass_rates=True)
        assert found["rollout/no_pass_rate"] == pytest.approx(share)
    two = [*shaped(groups[:1], pass_reward="right"), *shaped(groups[1:], pass_reward="points")]
    assert signal_metrics(two, uses_pass_rates=True)["rollout/no_pass_rate"] == 0  # two sources, each with its own
    assert signal_metrics([], uses_pass_rates=True) == {}
    assert "rollout/no_pass_rate" not in signal_metrics(two)


def test_the_kl_of_all_tokens_is_taken_from_a_reward_and_tells_equal_scores_apart() -> None:
    groups = [group_of(make_rollout(-1.0, None, -2.0), make_rollout(-3.0), rewards=[1.0, 1.0])]
    # k2: ½ · (1² + 3²) = 5 and ½ · 2² = 2; the token between was not sampled. Rewards 1 − 0.5, 1 − 0.2; mean 0.65
    measured = [{"ref_logprobs": (0.0, 0.0, -2.0, 0.0, -5.0)}, {"ref_logprobs": (0.0, 0.0, -5.0)}]
    algorithm = settings("kl=k2", "kl_in=reward", "kl_coef=0.1", "scale=none")
    assert shaped(groups, algorithm)[0].reason is None
    samples, shaping = sampled(groups, algorithm, measured, 0.1)
    assert samples[0].advantages == pytest.approx((0.0, 0.0, -0.15, 0.0, -0.15))
    assert samples[1].advantages == pytest.approx((0.0, 0.0, 0.15))
    assert samples[0].columns == measured[0]
    assert shaping == {"rollout/kl": pytest.approx(7 / 3), "rollout/kl_coef": 0.1}


@pytest.mark.parametrize(("rewards", "trained"), [([0.0, 0.2], False), ([0.0, 0.3], True), ([0.8, 1.0], False)])
def test_groups_are_trained_whose_mean_reward_lies_within_the_range(rewards: list[float], trained: bool) -> None:
    found = shaped([group("a", list(rewards))], settings("reward_range=[0.1,0.9]"))[0]
    assert found.reason == (
        None if trained else f"the mean reward, {sum(rewards) / 2:g}, is outside algorithm.reward_range"
    )


def test_reinforce_pp_whitens_the_returns_of_penalised_tokens_over_the_batch() -> None:
    groups = [group_of(make_rollout(-1.0, None, -1.0), make_rollout(-1.0), rewards=[1.0, 0.0])]
    measured = [{"ref_logprobs": (0.0, 0.0, -2.0, 0.0, 0.0)}, {"ref_logprobs": (0.0, 0.0, -1.0)}]
    # k1 = 1, −1 | 0; token rewards with coefficient ½: −½, 1 + ½ | 0; returns with discount 1: 1, 1.5 | 0
    # mean 2.5/3, unbiased variance (1/36 + 16/36 + 25/36) / 2 = 42/72
    samples, shaping = sampled(groups, settings("preset=reinforce_pp", "kl_coef=0.5"), measured, 0.5)
    deviation = math.sqrt(42 / 72)
    assert samples[0].advantages == pytest.approx((0.0, 0.0, (1 / 6) / deviation, 0.0, (4 / 6) / deviation))
    assert samples[1].advantages == pytest.approx((0.0, 0.0, (-5 / 6) / deviation))
    assert shaping["rollout/kl"] == pytest.approx(0.0)
    # with discount ½: 1.5 and −½ + ½ · 1.5 = ¼; not whitened
    knobs = settings("preset=reinforce_pp", "advantage={name: none, discount: 0.5}", "scale=none")
    samples, _ = sampled(groups, knobs, measured, 0.5)
    assert list(samples[0].advantages) == [0.0, 0.0, 0.25, 0.0, 1.5]


def test_distillation_has_the_teachers_log_ratio_as_the_advantage_of_each_token_alone() -> None:
    groups = [
        group_of(make_rollout(-1.0, None, -1.0), rewards=[0.0]),
        group_of(make_rollout(-1.0), rewards=[0.0]),
    ]
    measured = [{"ref_logprobs": (0.0, 0.0, -2.0, 0.0, -0.5)}, {"ref_logprobs": (0.0, 0.0, -1.0)}]
    algorithm = settings("preset=distill", "reference=teacher")
    samples, shaping = sampled(groups, algorithm, measured, algorithm.kl_coef)
    assert [list(sample.advantages) for sample in samples] == [[0.0, 0.0, -1.0, 0.0, 0.5], [0.0, 0.0, 0.0]]
    assert shaping["rollout/kl"] == pytest.approx((1 - 0.5 + 0) / 3)


@pytest.mark.parametrize(
    ("preset", "rewards", "expected"),
    [  # 1 − (2 + 6)/2, 2 − (1 + 6)/2, 6 − (1 + 2)/2; only centred
        ("rloo", ([1.0, 2.0, 6.0], [0.0, 3.0]), [-3.0, -1.5, 4.5, -3.0, 3.0]),
        ("dr_grpo", ([1.0, 2.0, 6.0],), [-2.0, -1.0, 3.0]),
    ],
)
def test_advantages_of_presets_by_hand(preset: str, rewards: list[list[float | None]], expected: list[float]) -> None:
    groups = [group(str(index), one) for index, one in enumerate(rewards)]
    samples, _ = sampled(groups, settings(f"preset={preset}"))
    assert last_advantages(samples) == expected
    assert [sample.group for sample in samples] == [number for number, one in enumerate(rewards) for _ in one]
    backwards, _ = sampled(groups[::-1], settings(f"preset={preset}"))  # the order of groups is free
    assert sorted(last_advantages(backwards)) == sorted(expected)


def test_reinforce_pp_baseline_whitens_centred_rewards_over_tokens_as_the_code_of_its_authors_does() -> None:
    # Three groups of two with 1 3 | 2 4 | 1 1 tokens. Centred: −½ ½ | −1 1 | 0 0, the last group of equal rewards.
    # Tokens: −½, 3 of ½, 2 of −1, 4 of 1, 2 of 0: sum 3, mean ¼; squares 1/4 + 3/4 + 2 + 4 = 7
    rollouts = [make_rollout(*[-1.0] * length, name=str(length)) for length in (1, 3, 2, 4, 1, 1)]
    rewards = [0.0, 1.0, 0.0, 2.0, 1.0, 1.0]
    groups = [group_of(*rollouts[i : i + 2], rewards=[*rewards[i : i + 2]], name=str(i)) for i in (0, 2, 4)]
    samples, _ = sampled(groups, settings("preset=reinforce_pp_baseline"))
    unbiased = math.sqrt((7 - 12 / 16) / 11)
    centred = (-0.5, 0.5, -1.0, 1.0, 0.0, 0.0)
    assert last_advantages(samples) == pytest.approx([(value - 0.25) / unbiased for value in centred])
    assert [len(set(sample.advantages[2:])) for sample in samples] == [1] * 6  # the same for all tokens of a rollout
    # OpenRLHF (89308a0, experience_maker.py, reinforce_baseline) divides by the biased deviation: √(12/11) times that
    theirs = [-1.039230, 0.346410, -1.732051, 1.039230, -0.346410, -0.346410]
    assert [value * math.sqrt(12 / 11) for value in last_advantages(samples)] == pytest.approx(
        theirs, abs=1e-6
    )  # 6 digits
    # With scale=batch nothing but the group's mean is subtracted, rollouts count alike, and equal ones are left out.
    by_rollout, _ = sampled(groups[:2], settings("preset=reinforce_pp_baseline", "scale=batch"))
    expected = [value / math.sqrt(2.5 / 3) for value in centred[:4]]
    assert last_advantages(by_rollout) == pytest.approx(expected, rel=NORMALISED)


def test_ppo_passes_over_tokens_of_the_environment() -> None:
    groups = [group_of(make_rollout(-1.0, None, None, -1.0), rewards=[3.0])]
    values = (0.0, 0.0, 2.0, 0.0, 0.0, 1.0)
    # λ ½ and discount ½ over the two sampled tokens: δ = 0 + ½ · 1 − 2 = −1.5, 3 − 1 = 2; A = −1.5 + ¼ · 2 = −1, 2;
    # returns A + V = 1, 3
    knobs = "preset=ppo", "advantage={name: critic, gae_lambda: 0.5, discount: 0.5}"
    measured = [{"values": values}]
    (sample,), _ = sampled(groups, settings(*knobs, "scale=none"), measured)
    assert measured == [{"values": values}]
    assert list(sample.advantages) == [0.0, 0.0, -1.0, 0.0, 0.0, 2.0]
    assert list(sample.columns["returns"]) == [0.0, 0.0, 1.0, 0.0, 0.0, 3.0]
    assert sample.columns["values"] == values
    # whitened: mean ½, deviations ∓1.5, the unbiased one √4.5; the critic's targets stay
    (white,), _ = sampled(groups, settings(*knobs), measured)
    assert white.advantages == pytest.approx((0.0, 0.0, -1 / math.sqrt(2), 0.0, 0.0, 1 / math.sqrt(2)))
    assert white.columns["returns"] == sample.columns["returns"]


def test_the_overlong_penalty_grows_over_the_end_of_the_longest_turn_and_is_taken_from_the_reward() -> None:
    for length, penalty in ((1, 0.0), (6, 0.0), (7, 0.25), (9, 0.75), (10, 1.0), (11, 1.0)):
        rollout = make_rollout(*[-1.0] * length)
        assert overlong_penalty(rollout, 0.4, 10) == pytest.approx(penalty)
        assert overlong_penalty(rollout, 0.0, 10) == 0.0
    # 14 tokens, but no turn with more than 8, also where nothing was said between two of them
    (first,), (second,) = make_rollout(*[-1.0] * 13).sequences, make_rollout(-1.0).sequences
    first = dataclasses.replace(first, turn_rewards=(TurnReward(0, 5), TurnReward(1, 8)))
    several = dataclasses.replace(rollout, sequences=(first, second))
    assert overlong_penalty(several, 0.4, 10) == pytest.approx(0.5)
    algorithm = settings("overlong_share=0.4", "scale=none")
    equal = group_of(make_rollout(-1.0), make_rollout(*[-1.0] * 8), rewards=[1.0, 1.0])
    assert shaped([equal], algorithm)[0].reason is None  # rewards 1 and 1 − 0.5
    samples, shaping = sampled([equal], algorithm)
    assert last_advantages(samples) == pytest.approx([0.25, -0.25])
    assert shaping == pytest.approx({"rollout/overlong_penalty": 0.25})


def test_masked_truncated_rollouts_count_in_the_baseline_and_are_not_trained() -> None:
    algorithm = settings("mask_truncated=true", "scale=none")
    cut = make_rollout(-1.0, finish_reason="length")
    samples, _ = sampled([group_of(make_rollout(-1.0), cut, rewards=[1.0, 0.0])], algorithm)
    assert last_advantages(samples) == [0.5]
    assert shaped([group_of(cut, cut, rewards=[1.0, 0.0])], algorithm)[0].reason is not None


@pytest.mark.parametrize(
    ("overrides", "measured"),
    [
        (("kl=k2", "kl_coef=0.1"), (True, True, False)),
        (("kl=k2", "kl_coef=0.1", "mask_truncated=true"), (True, False, False)),
        # the penalty of a rollout that is not trained is in the baseline of those that are
        (("kl=k1", "kl_in=reward", "kl_coef=0.5", "scale=none", "mask_truncated=true"), (True, True, False)),
        (("preset=ppo", "kl=k1", "kl_in=reward", "kl_coef=0.5", "mask_truncated=true"), (True, False, False)),
    ],
)
def test_models_measure_only_what_something_depends_on(overrides: tuple[str, ...], measured: tuple[bool, ...]) -> None:
    rollouts = make_rollout(-1.0), make_rollout(-1.0, finish_reason="length"), make_rollout(None)
    assert tuple(is_measured(r.sequences[0], settings(*overrides)) for r in rollouts) == measured


def test_a_masked_rollout_of_which_nothing_is_known_is_passed_over() -> None:
    algorithm = settings("preset=reinforce_pp", "kl=k1", "kl_in=reward", "kl_coef=0.5", "mask_truncated=true")
    rollouts = make_rollout(-1.0), make_rollout(-1.0, finish_reason="length"), make_rollout(-1.0)
    known = [{"ref_logprobs": (0.0, 0.0, -2.0)}, {}, {"ref_logprobs": (0.0, 0.0, -1.0)}]
    # k1 = 1 and 0: returns 1 − 0.5 and 0; mean 0.25, unbiased deviation √(2 · 0.25²)
    samples, _ = sampled([group_of(*rollouts, rewards=[1.0, 1.0, 0.0])], algorithm, known, 0.5)
    assert last_advantages(samples) == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])


def test_an_episode_of_several_sequences_counts_once_and_all_of_them_are_trained() -> None:
    # Rewards 1, 0, 0: mean 1/3, unbiased deviation √(((2/3)² + 2 · (1/3)²) / 2) = √(1/3).
    # Were each sequence an episode of its own, the mean would be 3/5.
    other, third = make_rollout(-0.1, -0.2, name="x"), make_rollout(-0.3, None, -0.4, name="y", finish_reason="length")
    several = joined(other, third, make_rollout(-0.5, name="z"))
    groups = [group_of(several, make_rollout(-0.5), make_rollout(-0.5), rewards=[1.0, 0.0, 0.0])]
    samples, _ = sampled(groups)
    assert [sample.id for sample in samples] == ["z.0", "z.1", "z", "a", "a"]
    high, low = 2 / 3 / math.sqrt(1 / 3), -1 / 3 / math.sqrt(1 / 3)
    assert last_advantages(samples) == pytest.approx([high] * 3 + [low] * 2, rel=NORMALISED)
    assert samples[1].sequence.mask == (False, False, True, False, True)
    assert samples[1].advantages == pytest.approx((0.0, 0.0, high, 0.0, high), rel=NORMALISED)
    cut, _ = sampled(groups, settings("mask_truncated=true"))
    assert [sample.id for sample in cut] == ["z.0", "z", "a", "a"]


def test_a_kl_in_the_reward_of_an_episode_is_that_of_all_its_sequences() -> None:
    algorithm = settings("kl=k1", "kl_in=reward", "kl_coef=0.5", "scale=none")
    several = joined(make_rollout(-0.5, name="x"), make_rollout(-0.5))
    groups = [group_of(several, make_rollout(-0.5, name="b"), rewards=[1.0, 1.0])]
    # x = −0.5 − ref = 1 and 3 in the first episode, 1 in the second: rewards 1 − 0.5 · 4 = −1 and 0.5; mean −0.25
    measured = [{"ref_logprobs": (0.0, 0.0, ref)} for ref in (-1.5, -3.5, -1.5)]
    samples, shaping = sampled(groups, algorithm, measured, 0.5)
    assert last_advantages(samples) == pytest.approx([-0.75, -0.75, 0.75])
    assert shaping["rollout/kl"] == pytest.approx(5 / 3)
    assert [sample.columns["ref_logprobs"][-1] for sample in samples] == [-1.5, -3.5, -1.5]


def test_a_fixed_coefficient_stays_and_an_adaptive_one_follows_the_distance_within_bounds() -> None:
    controller = KlController(AlgorithmConfig(kl="k1", kl_in="reward", scale="none", kl_coef=0.3))
    controller.update(100.0, 1000)
    controller.restore({"coef": 0.9})  # a run that goes on with another coefficient
    assert controller.coef == 0.3
    kl_in = AdaptiveKl(name="reward", target=0.1, horizon=1000)
    config = AlgorithmConfig(kl="k1", kl_in=kl_in, scale="none", kl_coef=0.5)
    controller = KlController(config)
    controller.update(0.11, 100)  # 10 % too far: 0.5 · (1 + 0.1 · 100 / 1000)
    assert controller.coef == pytest.approx(0.505)
    controller.update(5.0, 100)  # far too far counts as 20 %: · (1 + 0.2 · 0.1)
    assert controller.coef == pytest.approx(0.505 * 1.02)
    controller.update(-1.0, 500)  # · (1 − 0.2 · 0.5)
    assert controller.coef == pytest.approx(0.505 * 1.02 * 0.9)
    controller.update(None, 500)
    assert controller.coef == pytest.approx(0.505 * 1.02 * 0.9)
    other = KlController(config)
    other.restore(controller.state())
    assert other.coef == controller.coef


def moments(algorithm: AlgorithmConfig, count: int = 3) -> tuple[float, float, float, float]:
    """Returns means over all draws of `count` answers of one token, a, b or c, of which a alone is right.

    Of Σ −log p − H of unbiased samples, its square, their Σ Var(log p), and the first of all that are trained.
    """
    chances = {"a": 0.7, "b": 0.2, "c": 0.1}
    entropy = -math.fsum(p * math.log(p) for p in chances.values())
    variance = math.fsum(p * (math.log(p) + entropy) ** 2 for p in chances.values())
    found = np.zeros(4)
    for tokens in itertools.product(chances, repeat=count):
        rollouts = [make_rollout(math.log(chances[token]), name=str(index)) for index, token in enumerate(tokens)]
        rewards: list[float | None] = [float(token == "a") for token in tokens]
        groups = [one for one in shaped([group_of(*rollouts, rewards=rewards)], algorithm) if one.reason is None]
        samples = train_samples(groups, [], algorithm, 0.0)[0] if groups else []
        surprise = {one.id: -one.sequence.logprobs[2] - entropy for one in samples}
        own = math.fsum(surprise[one.id] for one in samples if one.is_unbiased)
        number = sum(one.is_unbiased for one in samples)
        row = (own, own**2, number * variance, math.fsum(surprise.values()))
        found += np.array(row) * math.prod(chances[token] for token in tokens)
    return tuple(found.tolist())


def test_unbiased_samples_are_a_fair_draw_though_groups_are_trained_by_their_rewards() -> None:
    mean, square, variance, of_trained = moments(DEFAULT)
    # Of three, the third is unbiased where the first two differ: 2 · .7 · .3 = .42 of Var(log p) = .494387, 6 digits
    assert (mean, square, variance) == pytest.approx((0.0, 0.42 * 0.494387, 0.42 * 0.494387), abs=1e-6)
    assert of_trained > 0.2  # those whose group has a signal hold more of the rare answers
    mean, square, variance, _ = moments(settings("scale=tokens"))  # equal rewards are trained, too
    assert (mean, square, variance) == pytest.approx((0.0, 3 * 0.494387, 3 * 0.494387), abs=3e-6)
