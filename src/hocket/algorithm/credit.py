"""Give turns of episodes advantages: all those of an episode the same, or each its own.

Suffixes: k turns of a batch, episode by episode and in their order; n episodes of a batch.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from hocket.algorithm.advantages import checked
from hocket.algorithm.choices import Discount, choose, credit
from hocket.config.sections import Chosen
from hocket.types import Rollout, TurnReward

Compare = Callable[[Sequence[float], Sequence[int]], Tensor]
"""(values, number of the group of each) → their advantages (algorithm.advantage, algorithm.scale)."""
Turns = Sequence[Sequence[TurnReward]]
"""Of an episode, by sequence."""


def turns_of(rollout: Rollout, weight: float) -> Turns:
    """Return the turns of an episode with their rewards times `weight`; a sequence without any is one turn."""
    return [
        [turn._replace(reward=weight * turn.reward) for turn in sequence.turn_rewards]
        or [TurnReward(number, sequence.mask.count(True))]
        for number, sequence in enumerate(rollout.sequences)
    ]


def in_order(turns: Turns, total: float) -> list[TurnReward]:
    """Return an episode's turns as they were taken; the last one has what the total has beside their rewards."""
    *before, last = sorted(itertools.chain(*turns))
    return [*before, last._replace(reward=total - sum(turn.reward for turn in before))]


def advantages(
    chosen: Chosen,
    episodes: Sequence[Turns],
    totals: Sequence[float],
    group_ids: Sequence[int],
    compare: Compare,
) -> list[dict[int, float]]:
    """Return each episode's advantages by the number of the turn."""
    owner_k, place_k, turns = zip(
        *(
            (owner, place, turn)
            for owner, (own, total) in enumerate(zip(episodes, totals, strict=True))
            for place, turn in enumerate(in_order(own, total))
        ),
        strict=True,
    )
    rewards_k = [turn.reward for turn in turns]
    returned = choose("credit", chosen)(
        rewards_k=rewards_k,
        owner_k=owner_k,
        place_k=place_k,
        state_k=[turn.state for turn in turns],
        totals_n=totals,
        group_n=group_ids,
        compare=compare,
    )
    values_k = checked(f"credit={chosen}", returned, torch.tensor(rewards_k), torch.tensor(totals))
    result: list[dict[int, float]] = [{} for _ in episodes]
    for owner, turn, value in zip(owner_k, turns, values_k.tolist(), strict=True):
        result[owner][turn.number] = value
    return result


@credit("episode")
def episode(
    totals_n: Sequence[float], group_n: Sequence[int], owner_k: Sequence[int], compare: Compare
) -> Tensor:
    """Return the advantage of the episode."""
    return compare(totals_n, group_n)[list(owner_k)].double()


@credit("turn")
def turn(
    rewards_k: Sequence[float],
    owner_k: Sequence[int],
    group_n: Sequence[int],
    compare: Compare,
    discount: Discount = 1.0,
) -> Tensor:
    """Return Σ_{j≥k} discount^(j−k) · A_j, whose A_j compare all episodes of a group, however long (arXiv 2505.11821).

    Before the last turn A_j is of reward j, 0 for an episode that had ended by then, or ends with it. At the last turn
    it is of all rewards from there on; an episode that had ended before has the reward of its own last turn.
    """
    episodes = [list[float]() for _ in group_n]  # rewards of their turns
    for owner, reward in zip(owner_k, rewards_k, strict=True):
        episodes[owner].append(reward)
    groups = defaultdict[int, list[int]](list)
    for owner, group in enumerate(group_n):
        groups[group].append(owner)
    values: list[float] = []
    rows: list[int] = []  # a value is compared with those of its row
    starts: dict[
        tuple[int, int, bool], int
    ] = {}  # of the row in which a group's turns of a place are compared
    index_k: list[int] = []
    for owner, group in enumerate(group_n):
        for place in range(len(episodes[owner])):
            row = group, place, place == len(episodes[owner]) - 1
            if row not in starts:
                starts[row] = len(values)
                rows += [starts[row]] * len(groups[group])
                values += [_counted(episodes[other], *row[1:]) for other in groups[group]]
            index_k.append(starts[row] + groups[group].index(owner))
    return _returns(compare(values, rows).double()[index_k], owner_k, discount)


def _counted(rewards: Sequence[float], place: int, to_the_end: bool) -> float:
    """Return the reward with which `turn` compares an episode at this place."""
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
    """Return A(episode) + weight · A(return beside those of the group's equal states) (arXiv 2505.10978).

    The return of turn k is Σ_{j≥k} discount^(j−k) · reward_j.
    """
    returns_k = _returns(torch.tensor(rewards_k, dtype=torch.float64), owner_k, discount)
    same_state = [(group_n[owner], state) for owner, state in zip(owner_k, state_k, strict=True)]
    return episode(totals_n, group_n, owner_k, compare) + weight * _among(
        compare, returns_k.tolist(), same_state
    )


def _among(compare: Compare, values_k: Sequence[float], keys: Iterable[Hashable]) -> Tensor:
    """Compare values with those of the same key."""
    numbers: dict[Hashable, int] = {}
    return compare(values_k, [numbers.setdefault(key, len(numbers)) for key in keys]).double()


def _returns(values_k: Tensor, owner_k: Sequence[int], discount: float) -> Tensor:
    """Return the discounted sums of each episode's values from every turn on."""
    returns = values_k.tolist()
    for later in range(len(returns) - 1, 0, -1):
        if owner_k[later] == owner_k[later - 1]:
            returns[later - 1] += discount * returns[later]
    return values_k.new_tensor(returns)
