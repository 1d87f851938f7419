"""Give turns of episodes advantages: the same to all turns of an episode, or one to each turn.

Suffixes: k turns of a batch, episode by episode and in the order in which they were taken; n
episodes of a batch.
"""

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Annotated, Protocol

import torch
from pydantic import Field
from torch import Tensor

from hocket.algorithm.advantages import checked
from hocket.algorithm.choices import Discount, choose, credit
from hocket.config.sections import Chosen
from hocket.types import Rollout, TurnReward

Turns = Sequence[Sequence[TurnReward]]
"""The model's turns in an episode, sequence by sequence."""


class Compare(Protocol):
    """Compare values within their groups, as algorithm.advantage and algorithm.scale say."""

    def __call__(self, values: Sequence[float], group_ids: Sequence[int], /) -> Tensor:
        """Compute the advantage of each value; `group_ids` has the number of each value's group."""


def turns_of(rollout: Rollout, weight: float) -> Turns:
    """List the turns of an episode, with their rewards times `weight`.

    A sequence that has no turns counts as one of its own, with a reward of 0.
    """
    episode_turns: list[list[TurnReward]] = []
    for number, sequence in enumerate(rollout.sequences):
        turns = [turn._replace(reward=weight * turn.reward) for turn in sequence.turn_rewards]
        if not turns:
            turns.append(TurnReward(number, sequence.mask.count(True)))
        episode_turns.append(turns)
    return episode_turns


def in_order(turns: Turns, total: float) -> list[TurnReward]:
    """Sort an episode's turns as they were taken, and have their rewards add up to its `total`.

    The environment rewards turns; other rewards and penalties are of the episode as a whole. The
    last turn gets these: the total less the rewards of the turns before it.
    """
    ordered = sorted(itertools.chain.from_iterable(turns))
    before_last = sum(turn.reward for turn in ordered[:-1])
    ordered[-1] = ordered[-1]._replace(reward=total - before_last)
    return ordered


def advantages(
    chosen: Chosen,
    episodes: Sequence[Turns],
    totals: Sequence[float],
    group_ids: Sequence[int],
    compare: Compare,
) -> list[dict[int, float]]:
    """Compute the advantages of all turns of a batch by a credit function.

    Args:
        chosen: algorithm.credit, a name or {name: NAME, option: value}.
        episodes: the turns of each episode.
        totals: the reward of each episode, [n].
        group_ids: the number of each episode's group, [n].
        compare: what the credit function compares rewards by.

    Returns:
        For each episode, number of the turn → its advantage. Raises ConfigError as `checked`.
    """
    # A credit function gets columns, one item per turn of the batch.
    owner_k: list[int] = []
    place_k: list[int] = []
    turns_k: list[TurnReward] = []
    for owner, (turns, total) in enumerate(zip(episodes, totals, strict=True)):
        for place, turn_reward in enumerate(in_order(turns, total)):
            owner_k.append(owner)
            place_k.append(place)
            turns_k.append(turn_reward)
    rewards_k = [turn_reward.reward for turn_reward in turns_k]
    returned = choose("credit", chosen)(
        rewards_k=rewards_k,
        owner_k=owner_k,
        place_k=place_k,
        state_k=[turn_reward.state for turn_reward in turns_k],
        totals_n=totals,
        group_n=group_ids,
        compare=compare,
    )
    inputs = [torch.tensor(rewards_k), torch.tensor(totals)]
    values_k = checked(f"credit={chosen}", returned, inputs)

    # Back to a table per episode, as sequences refer to turns by their numbers.
    by_episode: list[dict[int, float]] = [{} for _ in episodes]
    for owner, turn_reward, value in zip(owner_k, turns_k, values_k.tolist(), strict=True):
        by_episode[owner][turn_reward.number] = value
    return by_episode


@credit("episode")
def episode(
    totals_n: Sequence[float], group_n: Sequence[int], owner_k: Sequence[int], compare: Compare
) -> Tensor:
    """Give every turn the advantage of its episode."""
    return compare(totals_n, group_n)[list(owner_k)].double()


@credit("turn")
def turn(
    rewards_k: Sequence[float],
    owner_k: Sequence[int],
    group_n: Sequence[int],
    compare: Compare,
    discount: Discount = 1.0,
) -> Tensor:
    """Compute Σ_{j≥k} discount^(j−k) · A_j, as the code of arXiv 2505.11821 does.

    A_j compares all episodes of a group, however long they are. Before an episode's last turn,
    A_j compares its reward j; an episode that ended at turn j or before counts as 0. At its last
    turn, A_j compares the sum of all rewards from turn j on; an episode that ended before counts
    with the reward of its own last turn.
    """
    rewards_n: list[list[float]] = [[] for _ in group_n]  # of each episode's turns
    for owner, reward in zip(owner_k, rewards_k, strict=True):
        rewards_n[owner].append(reward)
    episodes_of_group = defaultdict[int, list[int]](list)
    for owner, group in enumerate(group_n):
        episodes_of_group[group].append(owner)

    # A comparison has one value of each episode of a group. Turns at the same place share one, and
    # those that are the last of their episode share another.
    values: list[float] = []
    comparisons: list[tuple[int, int, bool]] = []  # of each value: (group, place, is last)
    indices: dict[tuple[tuple[int, int, bool], int], int] = {}  # (comparison, episode) → its value
    index_k: list[int] = []  # of each turn's own value
    for owner, group in enumerate(group_n):
        for place in range(len(rewards_n[owner])):
            is_last = place == len(rewards_n[owner]) - 1
            comparison = (group, place, is_last)
            if (comparison, owner) not in indices:
                for other in episodes_of_group[group]:
                    indices[comparison, other] = len(values)
                    values.append(_compared_reward(rewards_n[other], place, to_the_end=is_last))
                    comparisons.append(comparison)
            index_k.append(indices[comparison, owner])
    advantages_k = _compare_by_key(compare, values, comparisons)[index_k]
    return _discounted_sums(advantages_k, owner_k, discount)


def _compared_reward(rewards: Sequence[float], place: int, *, to_the_end: bool) -> float:
    """Compute the value that an episode has where `turn` compares this place."""
    last = len(rewards) - 1
    if to_the_end:
        return sum(rewards[min(place, last) :])
    return rewards[place] if place < last else 0.0


@credit("step_groups")
def step_groups(
    rewards_k: Sequence[float],
    owner_k: Sequence[int],
    state_k: Sequence[str],
    totals_n: Sequence[float],
    group_n: Sequence[int],
    compare: Compare,
    discount: Discount = 0.95,
    weight: Annotated[float, Field(ge=0)] = 1.0,
) -> Tensor:
    """Compute A(episode) + weight · A(return of the turn), as in arXiv 2505.10978.

    The return of turn k is Σ_{j≥k} discount^(j−k) · reward_j. It is compared with the returns of
    those turns of the group that began in an equal state.
    """
    returns_k = _discounted_sums(torch.tensor(rewards_k, dtype=torch.float64), owner_k, discount)
    same_state = [(group_n[owner], state) for owner, state in zip(owner_k, state_k, strict=True)]
    episodes_k = episode(totals_n, group_n, owner_k, compare)
    return episodes_k + weight * _compare_by_key(compare, returns_k.tolist(), same_state)


def _compare_by_key(
    compare: Compare, values_k: Sequence[float], keys: Iterable[Hashable]
) -> Tensor:
    """Compare each value with those of the same key, float64 [k]."""
    numbers: dict[Hashable, int] = {}  # key → number of its group
    group_ids = [numbers.setdefault(key, len(numbers)) for key in keys]
    return compare(values_k, group_ids).double()


def _discounted_sums(values_k: Tensor, owner_k: Sequence[int], discount: float) -> Tensor:
    """Sum the values from each turn to the end of its episode: Σ_{j≥k} discount^(j−k) · value_j."""
    sums = values_k.tolist()
    for later in range(len(sums) - 1, 0, -1):
        if owner_k[later] == owner_k[later - 1]:
            sums[later - 1] += discount * sums[later]
    return values_k.new_tensor(sums)
