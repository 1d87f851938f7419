import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest

from hocket import config as config_module
from hocket.algorithm.choices import check, credit
from hocket.algorithm.samples import shape
from hocket.config import AlgorithmConfig
from hocket.errors import ConfigError
from hocket.observe.rows import groups_of, lines_of
from hocket.types import Columns, Group, Rollout, TurnReward
from support.numbers import rounding
from support.samples import MAX_TOKENS, NORMALISED, episode, group_of, sampled, taken
from support.samples import algorithm as settings


def played(*turns: tuple[float, str], tokens: int = 2) -> Rollout:
    """An episode of one sequence: of each turn its reward, and the state before it."""
    return episode(taken(*(TurnReward(number, tokens, *turn) for number, turn in enumerate(turns))))


def group(*episodes: Rollout, outcomes: Sequence[float] = ()) -> Group:
    """A group whose rewards are those of the turns, and an outcome: what other rewards give for an episode."""
    totals = [sum(turn.reward for one in own.sequences for turn in one.turn_rewards) for own in episodes]
    return group_of(
        *episodes, rewards=[sum(both) for both in zip(totals, outcomes or [0.0] * len(totals), strict=True)]
    )


def of_turns(
    *groups: Group, algorithm: AlgorithmConfig, measured: Sequence[Columns] = (), env_weight: float = 1.0
) -> list[list[float]]:
    """The advantage of each turn of each sequence."""
    result = []
    for sample in sampled(groups, algorithm, measured, env_weight=env_weight)[0]:
        of_tokens = np.array(sample.advantages)[np.array(sample.sequence.mask)]
        ends = np.cumsum([turn.tokens for turn in sample.sequence.turn_rewards])
        parts = np.split(of_tokens, ends[:-1])
        assert all(len(set(part)) == 1 for part in parts)  # all tokens of a turn have its advantage
        result.append([float(part[0]) for part in parts])
    return result


def test_a_turn_is_compared_with_the_same_turn_and_what_follows_is_added_by_hand() -> None:
    """arXiv 2505.11821: the first of two turns has A(turn) + λ · A(outcome), the last one A(outcome); here λ = .5."""
    episodes = [played((reward, ""), (0.0, "")) for reward in (1.0, 0.0, 0.0, 0.0)]
    algorithm = settings("credit={name: turn, discount: 0.5}")
    found = of_turns(group(*episodes, outcomes=(0.0, 2.0, 2.0, 0.0)), algorithm=algorithm)
    of_turn = [1.5, -0.5, -0.5, -0.5]  # (R − .25) / .5, the unbiased deviation
    root = math.sqrt(4 / 3)
    of_outcome = [-1 / root, 1 / root, 1 / root, -1 / root]
    expected = [[one + 0.5 * other, other] for one, other in zip(of_turn, of_outcome, strict=True)]
    assert found == [pytest.approx(own, abs=2 * NORMALISED) for own in expected]  # numbers below 2


@pytest.mark.parametrize(
    ("turns", "outcomes", "expected"),
    [
        (
            [1.0, 0.5, 0.0, None],
            [0.0, 2.0, 1.5, 1.0],
            [[-0.0120010, -1.3173108], [1.2856370, 1.0245751], [-0.3440822, 0.4391036], [-0.7070068]],
        ),
        (
            [0.25, 0.5, 0.0, None, None],
            [1.0, 0.0, 1.0, 0.5, 0.0],
            [[1.4468137, 0.9998], [0.5647479, -0.9998], [0.3292795, 0.9998], [-0.3077303], [-1.3334982]],
        ),
    ],
)
def test_advantages_are_those_of_the_papers_own_code_also_for_an_episode_without_a_second_turn(
    turns: list[float | None], outcomes: list[float], expected: list[list[float]]
) -> None:
    """What _assign_advantages of Multi-Turn-RL-Agent's mt_grpo_env_trainer.py gave in float32, at its coefficient 1.

    It adds 1e-4 to a deviation, and these are .27 or more; an advantage is the sum of two that are below 1.5.
    """
    episodes = [played((0.0, "")) if turn is None else played((turn, ""), (0.0, "")) for turn in turns]
    found = of_turns(group(*episodes, outcomes=outcomes), algorithm=settings("credit=turn"))
    assert found == [pytest.approx(own, abs=2 * 1.5 * 1e-4 / 0.2) for own in expected]


@pytest.mark.parametrize(
    ("episodes", "expected"),
    [
        # One score at the end of each: 0, 0, 0 and 1, less their mean, whatever the number of turns.
        ([[0, 0], [0, 0], [0, 0], [0, 0, 1]], [[-0.25] * 2, [-0.25] * 2, [-0.25] * 2, [0.75] * 3]),
        ([[0, 0, 0], [1]], [[-0.5] * 3, [0.5]]),
        ([[0, 0, 0, 2], [0], [0, 0, 1]], [[1.0] * 4, [-1.0], [0.0] * 3]),
        # First turns gave 0 (an episode of one turn has no such reward), 1, 1; second ones 0, 0, 1. From the first
        # turn on there are 0, 1, 2; from the second on 0 (of the one that had ended), 0, 1; from the third on 0.
        (
            [[0], [1, 0], [1, 1, 0]],
            [[0 - 1], [(1 - 2 / 3) + (0 - 1 / 3), 0 - 1 / 3], [(1 - 2 / 3) + (1 - 1 / 3), 1 - 1 / 3, 0]],
        ),
        # What a longer episode pays for each of its turns: 0, −1, −1 and then, at its end, 4, 4, 4 + 1.
        ([[4], [-1, 4], [-1, 6]], [[4 - 4], [(-1 + 2 / 3) + (4 - 14 / 3), 4 - 14 / 3], [-1 + 2 / 3 + 4 / 3, 4 / 3]]),
    ],
)
def test_episodes_of_other_lengths_are_all_compared_by_hand(
    episodes: list[list[float]], expected: list[list[float]]
) -> None:
    own = group(*(played(*((float(reward), "") for reward in rewards)) for rewards in episodes))
    found = of_turns(own, algorithm=settings("credit=turn", "scale=none"))
    assert found == [pytest.approx(own, abs=2 * rounding(8)) for own in expected]


def test_equal_scores_at_the_ends_of_episodes_of_any_length_have_no_signal() -> None:
    own = group(*(played(*[(0.0, "")] * turns, (1.0, "")) for turns in range(4)))
    shaped = shape(own, settings("credit=turn"), MAX_TOKENS)
    assert (shaped.reason, shaped.has_equal_rewards) == ("every reward is 1", True)


def test_returns_are_compared_among_equal_states_wherever_they_occur_by_hand() -> None:
    """arXiv 2505.10978: the state "b" is the second turn of one episode and the first of the other."""
    episodes = [played((0.0, "a"), (1.0, "b")), played((0.0, "b"), (0.0, "c"))]
    algorithm = settings("credit={name: step_groups, discount: 0.5, weight: 2}", "scale=none")
    found = of_turns(group(*episodes), algorithm=algorithm)
    # Episodes: ±.5. Returns: a .5; b 1 and 0, so ±.5; c 0. Those of a and c are alone.
    assert found == [[0.5, 0.5 + 2 * 0.5], [-0.5 - 2 * 0.5, -0.5]]


def test_by_default_returns_shrink_by_a_twentieth_a_turn_and_count_like_the_episode() -> None:
    episodes = [played((0.0, "a"), (1.0, "b")), played((0.0, "a"), (0.0, "c"))]
    found = of_turns(group(*episodes), algorithm=settings("credit=step_groups", "scale=none"))
    # Episodes: ±.5. Returns in the state a: .95 and 0.
    assert found == [pytest.approx(own) for own in ([0.5 + 0.475, 0.5], [-0.5 - 0.475, -0.5])]


@pytest.mark.parametrize("credit", ["turn", "step_groups"])
def test_turns_are_compared_within_their_group_alone(credit: str) -> None:
    groups = [group(*(played((reward, "a"), (0.0, "b")) for reward in rewards)) for rewards in ((1.0, 0.0), (8.0, 4.0))]
    algorithm = settings(f"credit={credit}", "scale=none")
    found = of_turns(*groups, algorithm=algorithm)
    assert found == [turns for one in groups for turns in of_turns(one, algorithm=algorithm)]


def test_by_default_all_turns_have_the_episodes_advantage() -> None:
    episodes = [played((1.0, "a"), (0.0, "b")), played((0.0, "a"), (0.0, "b"))]
    assert of_turns(group(*episodes), algorithm=settings("scale=none")) == [[0.5, 0.5], [-0.5, -0.5]]


def test_equal_episodes_whose_turns_differ_have_a_signal_with_credit_per_turn_alone() -> None:
    own = group(played((1.0, ""), (0.0, ""), (0.0, "")), played((0.0, ""), (1.0, ""), (0.0, "")))
    assert shape(own, settings(), MAX_TOKENS).reason == "every reward is 1"
    assert shape(own, settings("credit=turn"), MAX_TOKENS).reason is None
    assert of_turns(own, algorithm=settings("credit=turn", "scale=none")) == [[0.0, -0.5, 0.0], [0.0, 0.5, 0.0]]
    alike = group(*[played((0.5, ""), (0.5, ""))] * 2)
    assert shape(alike, settings("credit=turn"), MAX_TOKENS).reason == "every reward is 1"


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_rewards_of_turns_count_with_the_weight_of_env(weight: float) -> None:
    episodes = (played((1.0, ""), (0.0, "")), played((0.0, ""), (0.0, "")))
    algorithm = settings("credit={name: turn, discount: 0.25}", "scale=none")
    own = group_of(*episodes, rewards=[weight, 0.0])
    assert of_turns(own, algorithm=algorithm, env_weight=weight) == [[weight / 2, 0.0], [-weight / 2, 0.0]]


def test_turns_of_an_agents_sequences_are_in_the_order_of_its_calls() -> None:
    """Its first call and its third one are one sequence, the second another."""
    first, second = taken(TurnReward(0, 1, 0.0), TurnReward(2, 1, 1.0)), taken(TurnReward(1, 2, 0.5))
    other = taken(TurnReward(0, 1), TurnReward(1, 1), TurnReward(2, 1))
    own = group(episode(second, first), episode(other))
    found = of_turns(own, algorithm=settings("credit=turn", "scale=none"))
    assert found == [[0.25 + 0.5], [0.75, 0.5], [-0.75, -0.75, -0.5]]


def test_a_sequence_that_tells_of_no_turns_is_one() -> None:
    silent = [dataclasses.replace(taken(TurnReward(0, 1)), turn_rewards=()) for _ in range(4)]
    own = group_of(episode(*silent[:2]), episode(*silent[2:]), rewards=[1.0, 0.0])
    samples, _ = sampled([own], settings("credit={name: turn, discount: 0.5}", "scale=none"))
    assert [sample.advantages[1] for sample in samples] == [0.25, 0.5, -0.25, -0.5]


def test_advantages_over_turns_with_a_critic_by_hand() -> None:
    """One step is a turn: its value is that of its first token, its target the same for all its tokens."""
    values = [0.0, 0.5, 9.0, 0.0, 0.25, 9.0, 0.0]
    algorithm = settings(
        "advantage={name: critic, discount: 0.5, gae_lambda: 0.5}", "scale=none", "credit=turn", "correction=none"
    )
    (sample,), _ = sampled([group(played((0.1, ""), (2.0, "")))], algorithm, [{"values": values}])
    last = 2.0 - 0.25
    first = (0.1 + 0.5 * 0.25 - 0.5) + 0.25 * last
    returns = [0.0, first + 0.5, first + 0.5, 0.0, 2.0, 2.0, 0.0]
    assert sample.advantages == pytest.approx([0.0, first, first, 0.0, last, last, 0.0])
    assert sample.columns["returns"] == pytest.approx(returns)


def test_with_a_critic_a_turn_that_is_not_trained_has_its_reward_counted_for_the_one_before_it() -> None:
    """Turns 0 and 3 are one sequence, 1 was cut off, 2 is another. Before all that is trained it counts for none."""
    cut = taken(TurnReward(1, 1, 0.5), finish_reason="length")
    sequences = cut, taken(TurnReward(2, 1, 4.0)), taken(TurnReward(0, 1, 1.0), TurnReward(3, 1, 0.0))
    overrides = ("advantage=critic", "scale=none", "credit=turn", "correction=none", "mask_truncated=true")
    other = taken(TurnReward(0, 1, 0.5), finish_reason="length"), taken(TurnReward(1, 1, 1.0))
    measured = [{"values": [0.0] * len(one.mask)} for one in (*sequences, *other)]
    own = group(episode(*sequences), episode(*other), outcomes=[8.0, 0.0])
    # Steps 0, 2, 3 have the rewards 1 + 0.5, 4 and the outcome 8; each has the sum from it on.
    assert of_turns(own, algorithm=settings(*overrides), measured=measured) == [[12.0], [13.5, 8.0], [1.0]]


def test_with_a_critic_a_turn_pays_for_the_kl_of_all_its_tokens() -> None:
    sequences = taken(TurnReward(1, 2)), taken(TurnReward(2, 1)), taken(TurnReward(0, 1))  # not in the turns' order
    measured = [
        {"values": [0.0, 0.25, 9.0, 0.0], "ref_logprobs": [0.0, -1.0, -3.0, 0.0]},
        {"values": [0.0, 1.0, 0.0], "ref_logprobs": [0.0, 0.0, 0.0]},
        {"values": [0.0, 0.5, 0.0], "ref_logprobs": [0.0, -2.0, 0.0]},
    ]
    algorithm = settings("advantage=critic", "scale=none", "credit=turn", "kl=k1", "kl_in=reward", "kl_coef=0.5")
    samples, _ = sampled([group(episode(*sequences), outcomes=[8.0])], algorithm, measured, 0.5)
    # k1 = 1 and 3 | 0 | 2. Turn 2 has the outcome, 8; turn 1 that and −.5 · 4; turn 0 that and −.5 · 2; minus values.
    found = [list(sample.advantages) for sample in samples]
    assert found == [[0.0, 6 - 0.25, 6 - 0.25, 0.0], [0.0, 8 - 1.0, 0.0], [0.0, 5 - 0.5, 0.0]]


def test_a_replay_gives_each_turn_the_advantage_of_the_run() -> None:
    """An episode of one turn, too, is compared with the states of the others."""
    own = group(played((1.0, "a")), played((0.0, "a"), (0.0, "b")), played((0.0, "c")))
    algorithm = settings("credit=step_groups", "scale=none")
    (again,) = groups_of(lines_of([own]).splitlines())
    found = of_turns(own, algorithm=algorithm)
    assert found[0] != found[1][:1]
    assert found == of_turns(again, algorithm=algorithm)


def test_an_own_credit_is_a_function_and_baselines_that_compare_no_turns_are_refused() -> None:
    @credit("last")
    def last(owner_k: Sequence[int], rewards_k: Sequence[float], scale: float = 1.0) -> np.ndarray:
        return np.array(rewards_k) * scale

    own = group(played((1.0, ""), (2.0, "")), played((0.0, "")))
    assert of_turns(own, algorithm=settings("credit={name: last, scale: 2}")) == [[2.0, 4.0], [0.0]]

    @credit("so_many")
    def so_many(owner_k: Sequence[int], count: int) -> np.ndarray:
        return np.zeros(count)

    for count in (2, 4):
        with pytest.raises(ConfigError, match=f"returned {count} for 3 advantages: have it return one for each"):
            of_turns(own, algorithm=settings(f"credit={{name: so_many, count: {count}}}"))
    with pytest.raises(ConfigError, match="compares turns of a group"):
        check(settings("credit=step_groups", "advantage=critic", "scale=none"), 8)
    for env in ("other: 1", "env: {normalize: true}", "env: {clip: [0, 1]}"):  # the last turn would pay for the rest
        with pytest.raises(ConfigError, match=r"needs rewards of turns .* add rewards\.functions\.env, with a weight"):
            config_module.load(None, ["algorithm.credit=turn", f"rewards.functions={{{env}}}"])
