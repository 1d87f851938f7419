import dataclasses
import math

import pytest

from hocket import config as config_module
from hocket.algorithm.samples import informative, is_measured, outcome, overlong_penalty, silence, train_samples
from hocket.config import Config
from hocket.data.stream import Outcome
from hocket.types import FinishReason, Group, Measured, Prompt, Rollout, Score, TokenSequence, TrainSample


def settings(*overrides: str) -> Config:
    return config_module.load(None, [f"algorithm.{override}" for override in overrides])


def make_rollout(
    *logprobs: float | None, name: str = "a", finish_reason: FinishReason = "stop", first: int = 10
) -> Rollout:
    """A prompt of two tokens, then one per log-prob; None is a token that the policy did not sample."""
    return Rollout(
        id=name,
        prompt=Prompt(id=name, token_ids=(1, 2)),
        sequences=(
            TokenSequence(
                token_ids=(1, 2, *(first + i for i in range(len(logprobs)))),
                mask=(False, False, *(logprob is not None for logprob in logprobs)),
                logprobs=(0.0, 0.0, *(logprob or 0.0 for logprob in logprobs)),
                finish_reason=finish_reason,
                version_min=3,
                version_max=4,
                text="x",
            ),
        ),
    )


def joined(*episodes: Rollout) -> Rollout:
    """One episode with the sequences of them all; its name is the last one's."""
    return dataclasses.replace(episodes[-1], sequences=tuple(one.sequences[0] for one in episodes))


def score(reward: float | None) -> Score:
    return Score(total=0.0, error="broke") if reward is None else Score(total=reward)


def group(name: str, rewards: list[float | None]) -> Group:
    """Rollouts of one token each, which is 10, 11, …"""
    rollouts = tuple(make_rollout(-0.5, name=name, first=10 + i) for i in range(len(rewards)))
    return Group(id=name, rollouts=rollouts, scores=tuple(map(score, rewards)))


def of_rollouts(*rollouts: Rollout, rewards: list[float | None]) -> Group:
    return Group(id="g", rollouts=rollouts, scores=tuple(map(score, rewards)))


def last_advantages(samples: list[TrainSample]) -> list[float]:
    return [sample.advantages[-1] for sample in samples]


def test_each_rollout_gets_its_group_normalised_advantage() -> None:
    # mean 0.5, unbiased deviation of (0, 0, 1, 1) = sqrt(4 * 0.25 / 3) = 0.57735; 0.5 / 0.57735 = 0.866025
    samples, shaping = train_samples([group("a", [0.0, 0.0, 1.0, 1.0])], [], Config(), 0.0)
    assert last_advantages(samples) == pytest.approx([-0.866025, -0.866025, 0.866025, 0.866025], abs=1e-5)
    assert [s.sequence.token_ids[-1] for s in samples] == [10, 11, 12, 13]
    assert samples[0].advantages[:2] == (0.0, 0.0)
    assert samples[0].sequence.mask == (False, False, True)
    assert samples[0].sequence.logprobs == (0.0, 0.0, -0.5)
    assert samples[0].sequence.version_min == 3
    assert (samples[0].ref_logprobs, samples[0].values, samples[0].returns) == ((), (), ())
    assert shaping == {}


def test_a_group_whose_scores_are_alike_is_left_out() -> None:
    groups = [group("a", [1.0, 1.0]), group("b", [0.0, 1.0]), group("c", [0.0, None])]
    kept, signal = informative(groups, Config())
    assert [g.id for g in kept] == ["b"]
    assert signal == pytest.approx({"rollout/zero_variance": 2 / 3})


@pytest.mark.parametrize("preset", ["reinforce_pp", "ppo"])
def test_where_nothing_is_compared_within_a_group_only_groups_without_any_score_are_left_out(preset: str) -> None:
    groups = [group("a", [1.0, 1.0]), group("b", [None, None]), group("c", [0.5, None])]
    kept, signal = informative(groups, settings(f"preset={preset}"))
    assert [g.id for g in kept] == ["a", "c"]
    assert signal == {"rollout/zero_variance": 1.0}


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([0.0, 1.0], None),
        ([1.0, 1.0], "every reward is 1"),
        ([0.25, 0.25, None], "every reward is 0.25"),
        ([0.5, None], "one score alone"),
        ([None, None], "no score"),
    ],
)
def test_why_a_group_teaches_nothing_is_told(rewards: list[float | None], said: str | None) -> None:
    assert silence(group("a", rewards), Config()) == said


def test_a_group_without_any_rollout_to_train_says_so_whatever_its_rewards() -> None:
    cut = [make_rollout(-0.5, finish_reason="length") for _ in range(2)]
    groups = (
        of_rollouts(*cut, rewards=[0.0, 1.0]),
        of_rollouts(make_rollout(None), make_rollout(None), rewards=[0.0, 1.0]),
    )
    for silent in groups:
        assert silence(silent, settings("mask_truncated=true")) == "no rollout to train: cut off, or nothing sampled"
    assert silence(groups[0], Config()) is None


def scored(*parts: dict[str, float] | None) -> Group:
    """The total is the sum of the parts; None is a failed score."""
    scores = [Score(total=math.nan, error="x") if p is None else Score(total=sum(p.values()), parts=p) for p in parts]
    return Group(id="g", rollouts=tuple(make_rollout(-0.5) for _ in parts), scores=tuple(scores))


def test_the_outcome_of_a_group_has_the_pass_rate_of_the_reward_that_is_the_accuracy() -> None:
    functions = "rewards.functions={format: 0.1, right: 1.0}"
    rows = [{"format": 1.0, "right": 0.0}, {"format": 1.0, "right": 1.0}, {"format": 0.0, "right": 1.0}, None]
    for eval_reward, rate in (("right", 2 / 3), ("null", 2 / 3), ("exact_match", 2 / 3)):
        config = config_module.load(None, [functions, f"eval.reward={eval_reward}"])
        assert outcome(scored(*rows), config) == Outcome(state="trained", pass_rate=pytest.approx(rate))
    config = config_module.load(None, ["rewards.functions={right: 1.0, format: 0.1}"])
    assert outcome(scored(*rows[:2]), config).pass_rate == 0.5
    assert outcome(scored(*rows[:2]), config, skipped=True) == Outcome(
        state="failed", why="its step was not finite", pass_rate=0.5
    )


@pytest.mark.parametrize(
    ("curriculum", "told"),
    [("{name: window}", True), ("{name: shuffle, retire_after: 2}", True), ("{name: shuffle}", False)],
)
def test_rewards_that_make_no_pass_rate_are_told_where_a_curriculum_judges_by_it(curriculum: str, told: bool) -> None:
    groups = [scored({"points": 10.0, "right": 1.0}, {"points": -2.0, "right": 0.0}), scored({"points": 1.0}, None)]
    functions = "rewards.functions={points: 1.0, right: 0.0}"
    config = config_module.load(None, [functions, f"curriculum={curriculum}"])
    assert informative(groups, config)[1].get("rollout/no_pass_rate") == (pytest.approx(2 / 3) if told else None)
    config = config_module.load(None, [functions, f"curriculum={curriculum}", "eval.reward=right"])
    assert informative(groups, config)[1].get("rollout/no_pass_rate") == (0.0 if told else None)


def test_an_outcome_is_filtered_where_a_group_is_silent_and_failed_without_a_score() -> None:
    right = {"exact_match": 1.0}
    assert outcome(scored(right, right, None), Config()) == Outcome(
        state="filtered", why="every reward is 1", pass_rate=1.0
    )
    assert outcome(scored(right, right), Config(), skipped=True).state == "filtered"
    assert outcome(scored(None, None), Config()) == Outcome(state="failed", why="no score")


def test_a_kl_in_the_rewards_tells_rollouts_of_equal_scores_apart() -> None:
    config = settings("kl=k1", "kl_in=reward", "kl_coef=0.5", "scale=none")
    kept, _ = informative([group("a", [1.0, 1.0])], config)
    # x = −0.5 − ref = 1, 3: rewards 1 − 0.5 · x = 0.5, −0.5; mean 0
    measured = [Measured(ref_logprobs=(0.0, 0.0, -1.5)), Measured(ref_logprobs=(0.0, 0.0, -3.5))]
    samples, shaping = train_samples(kept, measured, config, 0.5)
    assert last_advantages(samples) == pytest.approx([0.5, -0.5])
    assert samples[0].ref_logprobs == (0.0, 0.0, -1.5)
    assert shaping == {"rollout/kl": 2.0, "rollout/kl_coef": 0.5}


def test_the_kl_of_all_tokens_of_a_rollout_is_taken_from_its_reward_before_it_is_compared() -> None:
    config = settings("kl=k2", "kl_in=reward", "kl_coef=0.1", "scale=none")
    rollouts = make_rollout(-1.0, None, -2.0), make_rollout(-3.0)
    # k2: ½ · (1² + 3²) = 5 and ½ · 2² = 2; the token between was not sampled. Rewards 1 − 0.5, 0 − 0.2; mean 0.15
    measured = [
        Measured(ref_logprobs=(0.0, 0.0, -2.0, 0.0, -5.0)),
        Measured(ref_logprobs=(0.0, 0.0, -5.0)),
    ]
    samples, shaping = train_samples([of_rollouts(*rollouts, rewards=[1.0, 0.0])], measured, config, 0.1)
    assert samples[0].advantages == pytest.approx((0.0, 0.0, 0.35, 0.0, 0.35))
    assert samples[1].advantages == pytest.approx((0.0, 0.0, -0.35))
    assert shaping["rollout/kl"] == pytest.approx(7 / 3)


def test_a_rollout_without_a_score_is_left_out_of_samples_and_mean() -> None:
    # scored rewards 0 and 1: mean 0.5, deviation sqrt(0.5) = 0.707107
    samples, _ = train_samples([group("a", [0.0, None, math.nan, 1.0])], [], Config(), 0.0)
    assert [s.sequence.token_ids[-1] for s in samples] == [10, 13]
    assert last_advantages(samples) == pytest.approx([-0.707106, 0.707106], abs=1e-5)


def test_only_scored_rollouts_of_a_group_are_kept() -> None:
    kept, _ = informative([group("a", [0.0, None, math.nan, 1.0])], Config())
    assert [[r.sequences[0].token_ids[-1] for r in g.rollouts] for g in kept] == [[10, 13]]
    assert [[s.total for s in g.scores] for g in kept] == [[0.0, 1.0]]


def test_groups_without_any_signal_give_no_samples() -> None:
    kept, signal = informative([group("a", [None, None]), group("b", [0.0, 0.0])], Config())
    assert (kept, signal) == ([], {"rollout/zero_variance": 1.0})


def test_reinforce_pp_whitens_the_returns_of_penalised_tokens_over_the_batch() -> None:
    rollouts = make_rollout(-1.0, None, -1.0), make_rollout(-1.0)
    measured = [Measured(ref_logprobs=(0.0, 0.0, -2.0, 0.0, 0.0)), Measured(ref_logprobs=(0.0, 0.0, -1.0))]
    # k1 = 1, −1 | 0; token rewards with coefficient ½: −½, 1 + ½ | 0; returns with discount 1: 1, 1.5 | 0
    # mean 2.5/3, unbiased variance (1/36 + 16/36 + 25/36) / 2 = 42/72
    config = settings("preset=reinforce_pp", "kl_coef=0.5")
    samples, shaping = train_samples([of_rollouts(*rollouts, rewards=[1.0, 0.0])], measured, config, 0.5)
    deviation = math.sqrt(42 / 72)
    assert samples[0].advantages == pytest.approx((0.0, 0.0, (1 / 6) / deviation, 0.0, (4 / 6) / deviation))
    assert samples[1].advantages == pytest.approx((0.0, 0.0, (-5 / 6) / deviation))
    assert shaping["rollout/kl"] == pytest.approx(0.0)
    # with discount ½: 1.5 and −½ + ½ · 1.5 = ¼; not whitened
    plain = settings("preset=reinforce_pp", "discount=0.5", "scale=none")
    samples, _ = train_samples([of_rollouts(*rollouts, rewards=[1.0, 0.0])], measured, plain, 0.5)
    assert samples[0].advantages == (0.0, 0.0, 0.25, 0.0, 1.5)


def test_reinforce_pp_baseline_divides_by_the_deviation_of_the_batch() -> None:
    # centred −1 1 | −3 3: unbiased deviation √(20/3)
    groups = [group("a", [0.0, 2.0]), group("b", [4.0, 10.0])]
    samples, _ = train_samples(groups, [], settings("preset=reinforce_pp_baseline"), 0.0)
    expected = [x / math.sqrt(20 / 3) for x in (-1, 1, -3, 3)]
    assert last_advantages(samples) == pytest.approx(expected, abs=1e-5)


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    samples, _ = train_samples([group("a", [1.0, 2.0, 6.0])], [], settings("preset=rloo"), 0.0)
    assert last_advantages(samples) == pytest.approx([-3.0, -1.5, 4.5])


def test_dr_grpo_only_centres() -> None:
    samples, _ = train_samples([group("a", [1.0, 2.0, 6.0])], [], settings("preset=dr_grpo"), 0.0)
    assert last_advantages(samples) == pytest.approx([-2.0, -1.0, 3.0])


def test_ppo_passes_over_tokens_of_the_environment() -> None:
    rollout = make_rollout(-1.0, None, None, -1.0, finish_reason="stop")
    values = (0.0, 0.0, 2.0, 0.0, 0.0, 1.0)
    # λ ½ over the two sampled tokens: δ = 0 + 1 − 2 = −1, 3 − 1 = 2; A = −1 + ½ · 2 = 0, 2; returns A + V = 2, 3
    config = settings("preset=ppo", "gae_lambda=0.5", "scale=none")
    (sample,), _ = train_samples([of_rollouts(rollout, rewards=[3.0])], [Measured(values=values)], config, 0.0)
    assert sample.advantages == (0.0, 0.0, 0.0, 0.0, 0.0, 2.0)
    assert sample.returns == (0.0, 0.0, 2.0, 0.0, 0.0, 3.0)
    assert sample.values == values
    # whitened: mean 1, unbiased deviation √2; the critic's targets stay
    (white,), _ = train_samples(
        [of_rollouts(rollout, rewards=[3.0])],
        [Measured(values=values)],
        settings("preset=ppo", "gae_lambda=0.5"),
        0.0,
    )
    assert white.advantages == pytest.approx((0.0, 0.0, -1 / math.sqrt(2), 0.0, 0.0, 1 / math.sqrt(2)))
    assert white.returns == sample.returns


def test_what_was_not_measured_is_asked_for() -> None:
    with pytest.raises(ValueError, match="critic's values"):
        train_samples([group("a", [0.0, 1.0])], [], settings("preset=ppo"), 0.0)
    with pytest.raises(ValueError, match="reference's log-probs"):
        train_samples([group("a", [0.0, 1.0])], [], settings("preset=reinforce_pp"), 0.01)


@pytest.mark.parametrize(("length", "penalty"), [(1, 0.0), (6, 0.0), (7, 0.25), (9, 0.75), (10, 1.0)])
def test_the_overlong_penalty_grows_over_the_last_part_of_the_length(length: int, penalty: float) -> None:
    config = config_module.load(None, ["rollout.max_tokens=10", "algorithm.overlong_share=0.4"])
    assert overlong_penalty(make_rollout(*[-1.0] * length), config) == pytest.approx(penalty)
    assert overlong_penalty(make_rollout(*[-1.0] * length), settings()) == 0.0


def test_of_several_turns_the_longest_counts_for_the_overlong_penalty() -> None:
    config = config_module.load(None, ["rollout.max_tokens=10", "algorithm.overlong_share=0.4"])
    turns = [*[-1.0] * 5, None, *[-1.0] * 8, None, None, -1.0]  # 14 tokens, but no turn with more than 8
    assert overlong_penalty(make_rollout(*turns), config) == pytest.approx(0.5)


def test_the_overlong_penalty_is_taken_from_the_reward_before_it_is_compared() -> None:
    config = config_module.load(None, ["rollout.max_tokens=10", "algorithm.overlong_share=0.4", "algorithm.scale=none"])
    equal = of_rollouts(make_rollout(-1.0), make_rollout(*[-1.0] * 8), rewards=[1.0, 1.0])
    kept, _ = informative([equal], config)  # rewards 1 and 1 − 0.5
    samples, shaping = train_samples(kept, [], config, 0.0)
    assert last_advantages(samples) == pytest.approx([0.25, -0.25])
    assert shaping == pytest.approx({"rollout/overlong_penalty": 0.25})


def test_masked_truncated_rollouts_count_in_the_baseline_and_are_not_trained() -> None:
    config = settings("mask_truncated=true", "scale=none")
    cut = make_rollout(-1.0, finish_reason="length")
    samples, _ = train_samples([of_rollouts(make_rollout(-1.0), cut, rewards=[1.0, 0.0])], [], config, 0.0)
    assert last_advantages(samples) == [0.5]
    kept, _ = informative([of_rollouts(cut, dataclasses.replace(cut, id="b"), rewards=[1.0, 0.0])], config)
    assert kept == []


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
def test_what_models_say_is_asked_for_only_where_something_depends_on_it(
    overrides: tuple[str, ...], measured: tuple[bool, ...]
) -> None:
    rollouts = make_rollout(-1.0), make_rollout(-1.0, finish_reason="length"), make_rollout(None)
    assert tuple(is_measured(r.sequences[0], settings(*overrides).algorithm) for r in rollouts) == measured


def test_a_masked_rollout_of_which_nothing_is_known_is_passed_over() -> None:
    config = settings("preset=reinforce_pp", "kl=k1", "kl_in=reward", "kl_coef=0.5", "mask_truncated=true")
    rollouts = make_rollout(-1.0), make_rollout(-1.0, finish_reason="length"), make_rollout(-1.0)
    known = [Measured(ref_logprobs=(0.0, 0.0, -2.0)), Measured(), Measured(ref_logprobs=(0.0, 0.0, -1.0))]
    # k1 = 1 and 0: returns 1 - 0.5 and 0; mean 0.25, unbiased deviation sqrt(2 * 0.25^2) = 0.353553
    samples, _ = train_samples([of_rollouts(*rollouts, rewards=[1.0, 1.0, 0.0])], known, config, 0.5)
    assert last_advantages(samples) == pytest.approx([0.707107, -0.707107], abs=1e-5)


def test_only_tokens_of_the_highest_entropy_keep_their_advantage() -> None:
    # 5 sampled tokens, 0.4 of them: the two with 3.0 and 2.5; another 2.5 would stay, too
    rollouts = make_rollout(-1.0, None, -1.0, -1.0), make_rollout(-1.0, -1.0)
    measured = [
        Measured(entropies=(0.0, 0.0, 1.0, 0.0, 3.0, 0.5)),
        Measured(entropies=(0.0, 0.0, 2.5, 2.4)),
    ]
    config = settings("top_entropy=0.4", "scale=none")
    samples, _ = train_samples([of_rollouts(*rollouts, rewards=[1.0, 0.0])], measured, config, 0.0)
    assert samples[0].advantages == (0.0, 0.0, 0.0, 0.0, 0.5, 0.0)
    assert samples[1].advantages == (0.0, 0.0, -0.5, 0.0)
    assert samples[0].sequence.mask == rollouts[0].sequences[0].mask  # the denominators count them all


def test_advantages_do_not_depend_on_the_order_of_groups() -> None:
    groups = [group("a", [0.0, 2.0]), group("b", [4.0, 10.0, 5.0])]
    config = settings("preset=reinforce_pp_baseline")
    one, other = (train_samples(order, [], config, 0.0)[0] for order in (groups, groups[::-1]))
    assert last_advantages(one) == pytest.approx(last_advantages(other)[3:] + last_advantages(other)[:3])


def test_an_episode_of_several_sequences_counts_once_and_all_of_them_are_trained() -> None:
    # Rewards 1, 0, 0: mean 1/3, unbiased deviation sqrt(((2/3)² + 2 · (1/3)²) / 2) = 0.57735; 2/3 / 0.57735 = 1.154701.
    # Were each sequence an episode of its own, the mean would be 3/5.
    other, third = make_rollout(-0.1, -0.2, name="x"), make_rollout(-0.3, None, -0.4, name="y", finish_reason="length")
    several = joined(other, third, make_rollout(-0.5, name="z"))
    groups = [of_rollouts(several, make_rollout(-0.5), make_rollout(-0.5), rewards=[1.0, 0.0, 0.0])]
    assert informative(groups, Config())[0] == groups
    samples, _ = train_samples(groups, [], Config(), 0.0)
    assert [sample.id for sample in samples] == ["z.0", "z.1", "z", "a", "a"]
    assert last_advantages(samples) == pytest.approx([1.154701] * 3 + [-0.577350] * 2, abs=1e-5)
    assert samples[1].sequence.mask == (False, False, True, False, True)
    assert samples[1].advantages == pytest.approx((0.0, 0.0, 1.154701, 0.0, 1.154701), abs=1e-5)
    cut, _ = train_samples(groups, [], settings("mask_truncated=true"), 0.0)
    assert [sample.id for sample in cut] == ["z.0", "z", "a", "a"]


def test_a_kl_in_the_reward_of_an_episode_is_that_of_all_its_sequences() -> None:
    config = settings("kl=k1", "kl_in=reward", "kl_coef=0.5", "scale=none")
    several = joined(make_rollout(-0.5), make_rollout(-0.5))
    groups = [of_rollouts(several, make_rollout(-0.5, name="b"), rewards=[1.0, 1.0])]
    # x = −0.5 − ref = 1 and 3 in the first episode, 1 in the second: rewards 1 − 0.5 · 4 = −1 and 0.5; mean −0.25
    measured = [Measured(ref_logprobs=(0.0, 0.0, ref)) for ref in (-1.5, -3.5, -1.5)]
    samples, shaping = train_samples(groups, measured, config, 0.5)
    assert last_advantages(samples) == pytest.approx([-0.75, -0.75, 0.75])
    assert shaping["rollout/kl"] == pytest.approx(5 / 3)
    assert [sample.ref_logprobs[-1] for sample in samples] == [-1.5, -3.5, -1.5]


def test_the_longest_turn_of_an_episode_may_be_in_any_of_its_sequences() -> None:
    several = joined(make_rollout(*[-0.5] * 90, None, *[-0.5] * 30), make_rollout(-0.5))
    config = config_module.load(None, ["algorithm.overlong_share=0.5", "rollout.max_tokens=100"])
    assert overlong_penalty(several, config) == pytest.approx(0.8)  # (90 − 50) / 50
