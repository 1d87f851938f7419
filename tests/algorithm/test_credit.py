import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest

from hocket import config as config_module
from hocket.algorithm.choices import check, credit
from hocket.algorithm.samples import shape, train_samples
from hocket.config import AlgorithmConfig
from hocket.errors import ConfigError
from hocket.observe.rows import groups_of, lines_of
from hocket.types import Columns, Group, Prompt, Rollout, Score, TokenSequence, TurnReward

Turn = tuple[float, str]  # its reward, and the state before it


def settings(*overrides: str) -> AlgorithmConfig:
    rewards = ["rewards.functions={env: 1, other: 1}", "plugins=[]"]
    return config_module.load(None, [*rewards, *(f"algorithm.{override}" for override in overrides)]).algorithm


def sequence(turns: Sequence[TurnReward]) -> TokenSequence:
    """A prompt of one token, then each turn's tokens and one of the environment."""
    mask = [False, *(flag for turn in turns for flag in (*[True] * turn.tokens, False))]
    zeros = (0.0,) * len(mask)
    return TokenSequence(token_ids=(1,) * len(mask), mask=tuple(mask), logprobs=zeros, turn_rewards=tuple(turns))


def episode(turns: Sequence[Turn], tokens: int = 2) -> Rollout:
    played = [TurnReward(number, tokens, reward, state) for number, (reward, state) in enumerate(turns)]
    return Rollout(id="a", prompt=Prompt(id="p", token_ids=(1,)), sequences=(sequence(played),))


def of_turns(
    *episodes: Rollout,
    algorithm: AlgorithmConfig,
    outcomes: Sequence[float] = (),
    measured: Sequence[Columns] = (),
) -> list[list[float]]:
    """The advantage of each turn of each sequence; an outcome is what other rewards give for an episode."""
    totals = [sum(turn.reward for one in own.sequences for turn in one.turn_rewards) for own in episodes]
    outcomes = outcomes or [0.0] * len(episodes)
    scores = tuple(Score(total=total + outcome) for total, outcome in zip(totals, outcomes, strict=True))
    shaped = shape(Group(id="g", rollouts=episodes, scores=scores), algorithm, 10)
    samples, _ = train_samples([shaped], measured, algorithm, 0.0)
    result = []
    for sample in samples:
        sampled = np.array(sample.advantages)[np.array(sample.sequence.mask)]
        ends = np.cumsum([turn.tokens for turn in sample.sequence.turn_rewards])
        parts = np.split(sampled, ends[:-1])
        assert all(len(set(part)) == 1 for part in parts)  # all tokens of a turn have its advantage
        result.append([float(part[0]) for part in parts])
    return result


def test_a_turn_is_compared_with_the_same_turn_and_what_follows_is_added_by_hand() -> None:
    """arXiv 2505.11821: the first of two turns has A(turn) + λ · A(outcome), the last one A(outcome); here λ = .5."""
    episodes = [episode([(reward, ""), (0.0, "")]) for reward in (1.0, 0.0, 0.0, 0.0)]
    algorithm = settings("credit={name: turn, discount: 0.5}")
    found = of_turns(*episodes, algorithm=algorithm, outcomes=(0.0, 2.0, 2.0, 0.0))
    of_turn = [1.5, -0.5, -0.5, -0.5]  # (R − .25) / .5, the unbiased deviation
    root = math.sqrt(4 / 3)
    of_outcome = [-1 / root, 1 / root, 1 / root, -1 / root]
    expected = [[one + 0.5 * other, other] for one, other in zip(of_turn, of_outcome, strict=True)]
    assert np.allclose(found, expected, atol=1e-5)


def test_episodes_of_other_lengths_are_compared_turn_by_turn() -> None:
    episodes = [episode([(1.0, ""), (1.0, "")]), episode([(0.0, "")])]
    found = of_turns(*episodes, algorithm=settings("credit=turn", "scale=none"))
    assert found == [[0.5 + 0.0, 0.0], [-0.5]]  # nothing is compared with the second turn


def test_returns_are_compared_among_equal_states_wherever_they_occur_by_hand() -> None:
    """arXiv 2505.10978: the state "b" is the second turn of one episode and the first of the other."""
    episodes = [episode([(0.0, "a"), (1.0, "b")]), episode([(0.0, "b"), (0.0, "c")])]
    algorithm = settings("credit={name: step_groups, discount: 0.5, weight: 2}", "scale=none")
    found = of_turns(*episodes, algorithm=algorithm)
    # Episodes: ±.5. Returns: a .5; b 1 and 0, so ±.5; c 0. Those of a and c are alone.
    assert found == [[0.5, 0.5 + 2 * 0.5], [-0.5 - 2 * 0.5, -0.5]]


def test_by_default_all_turns_have_the_episodes_advantage() -> None:
    episodes = [episode([(1.0, "a"), (0.0, "b")]), episode([(0.0, "a"), (0.0, "b")])]
    assert of_turns(*episodes, algorithm=settings("scale=none")) == [[0.5, 0.5], [-0.5, -0.5]]


def test_equal_episodes_whose_turns_differ_have_a_signal_with_credit_per_turn_alone() -> None:
    episodes = (episode([(1.0, ""), (0.0, "")]), episode([(0.0, ""), (1.0, "")]))
    group = Group(id="g", rollouts=episodes, scores=(Score(total=1.0), Score(total=1.0)))
    assert shape(group, settings(), 10).reason == "every reward is 1"
    assert shape(group, settings("credit=turn"), 10).reason is None
    assert of_turns(*episodes, algorithm=settings("credit=turn", "scale=none")) == [[0.0, -0.5], [0.0, 0.5]]


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_rewards_of_turns_count_with_the_weight_of_env(weight: float) -> None:
    episodes = (episode([(1.0, ""), (0.0, "")]), episode([(0.0, ""), (0.0, "")]))
    group = Group(id="g", rollouts=episodes, scores=(Score(total=weight), Score(total=0.0)))
    algorithm = settings("credit={name: turn, discount: 0.25}", "scale=none")
    samples, _ = train_samples([shape(group, algorithm, 10, weight)], (), algorithm, 0.0)
    assert samples[0].advantages[1] == weight / 2
    assert samples[0].advantages[4] == 0.0


def test_turns_of_an_agents_sequences_are_in_the_order_of_its_calls() -> None:
    """Its first call and its third one are one sequence, the second another."""
    first = sequence([TurnReward(0, 1, 0.0), TurnReward(2, 1, 1.0)])
    second = sequence([TurnReward(1, 2, 0.5)])
    own = Rollout(id="a", prompt=Prompt(id="p", token_ids=(1,)), sequences=(second, first))
    other = Rollout(
        id="b",
        prompt=own.prompt,
        sequences=(sequence([TurnReward(0, 1), TurnReward(1, 1), TurnReward(2, 1)]),),
    )
    found = of_turns(own, other, algorithm=settings("credit=turn", "scale=none"))
    assert found == [[0.25 + 0.5], [0.75, 0.5], [-0.75, -0.75, -0.5]]


def test_advantages_over_turns_with_a_critic_by_hand() -> None:
    """One step is a turn: its value is that of its first token, its target the same for all its tokens."""
    own = episode([(0.1, ""), (2.0, "")])
    values = [0.0, 0.5, 9.0, 0.0, 0.25, 9.0, 0.0]
    algorithm = settings(
        "baseline={name: critic, discount: 0.5, gae_lambda: 0.5}", "scale=none", "credit=turn", "correction=none"
    )
    scores = (Score(total=2.1),)
    shaped = shape(Group(id="g", rollouts=(own,), scores=scores), algorithm, 10)
    (sample,), _ = train_samples([shaped], [{"values": values}], algorithm, 0.0)
    last = 2.0 - 0.25
    first = (0.1 + 0.5 * 0.25 - 0.5) + 0.25 * last
    returns = [0.0, first + 0.5, first + 0.5, 0.0, 2.0, 2.0, 0.0]
    assert sample.advantages == pytest.approx([0.0, first, first, 0.0, last, last, 0.0], abs=1e-14)
    assert sample.columns["returns"] == pytest.approx(returns, abs=1e-14)


def test_with_a_critic_a_turn_that_is_not_trained_has_its_reward_counted_for_the_one_before_it() -> None:
    """Turns 0 and 3 are one sequence, 1 was cut off, 2 is another."""
    cut = sequence([TurnReward(1, 1, 0.5)])
    sequences = (
        dataclasses.replace(cut, finish_reason="length"),
        sequence([TurnReward(2, 1, 4.0)]),
        sequence([TurnReward(0, 1, 1.0), TurnReward(3, 1, 0.0)]),
    )
    own = Rollout(id="a", prompt=Prompt(id="p", token_ids=(1,)), sequences=sequences)
    overrides = ("baseline=critic", "scale=none", "credit=turn", "correction=none", "mask_truncated=true")
    measured = [{"values": [0.0] * len(one.mask)} for one in sequences]
    found = of_turns(own, algorithm=settings(*overrides), outcomes=[8.0], measured=measured)
    # Steps 0, 2, 3 have the rewards 1 + 0.5, 4 and the outcome 8; each has the sum from it on.
    assert found == [[12.0], [13.5, 8.0]]


def test_a_replay_gives_each_turn_the_advantage_of_the_run() -> None:
    """An episode of one turn, too, is compared with the states of the others."""
    episodes = (episode([(1.0, "a")]), episode([(0.0, "a"), (0.0, "b")]), episode([(0.0, "c")]))
    group = Group(id="g", rollouts=episodes, scores=tuple(Score(total=total) for total in (1.0, 0.0, 0.0)))
    algorithm = settings("credit=step_groups", "scale=none")
    samples, again = (
        train_samples([shape(one, algorithm, 10)], (), algorithm, 0.0)[0]
        for one in (group, *groups_of(lines_of([group]).splitlines()))
    )
    assert samples[0].advantages[1] != samples[1].advantages[1]
    assert [[*one.advantages] for one in again] == [[*one.advantages] for one in samples]


def test_an_own_credit_is_a_function_and_baselines_that_compare_no_turns_are_refused() -> None:
    @credit("last")
    def last(owner_k: Sequence[int], rewards_k: Sequence[float], scale: float = 1.0) -> np.ndarray:
        return np.array(rewards_k) * scale

    found = of_turns(
        episode([(1.0, ""), (2.0, "")]), episode([(0.0, "")]), algorithm=settings("credit={name: last, scale: 2}")
    )
    assert found == [[2.0, 4.0], [0.0]]

    @credit("short")
    def short(owner_k: Sequence[int]) -> np.ndarray:
        return np.zeros(len(owner_k) - 1)

    with pytest.raises(ConfigError, match=r"credit=short returned 2 advantages for 3 turns: have it return one for"):
        of_turns(episode([(1.0, ""), (2.0, "")]), episode([(0.0, "")]), algorithm=settings("credit=short"))
    with pytest.raises(ConfigError, match="compares turns of a group"):
        check(settings("credit=step_groups", "baseline=critic", "scale=none"), 8)
    for env in ("other: 1", "env: {normalize: true}", "env: {clip: [0, 1]}"):  # the last turn would pay for the rest
        with pytest.raises(ConfigError, match=r"needs rewards of turns .* add rewards\.functions\.env, with a weight"):
            config_module.load(None, ["algorithm.credit=turn", f"rewards.functions={{{env}}}"])
