"""Gather one batch: play the episodes of its prompts, score each as it ends, return whole groups.

A batch has the stream's next prompts, whichever episodes end first. To drop slow episodes would
favor short answers.
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping

from hocket.client.pool import Deadline
from hocket.common.tasks import cancel
from hocket.protocol import SamplingParams
from hocket.rewards.scorer import Scorer
from hocket.types import Group, Prompt, Rollout, Score


@dataclasses.dataclass(slots=True)
class Batch:
    """The groups of one step, with a signal or without."""

    # Complete groups: as they end while the batch is gathered, then in the order of the prompts.
    groups: list[Group] = dataclasses.field(default_factory=list)
    num_drawn: int = 0  # number of prompts drawn
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    started: float = dataclasses.field(default_factory=time.perf_counter)
    generated: float = 0.0  # time at which its last token was sampled, by time.perf_counter


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """An episode's place in its batch."""

    id: str  # name of the episode: "step 3/7/1"
    group: str  # name of its group: "step 3/7"
    number: int  # number of the episode: prompt x group_size + sample
    sampling: SamplingParams
    deadline: Deadline


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The size of a batch, and how to sample it."""

    label: str  # name, unique in a run: "step 3" gives groups "step 3/0", ...
    sampling: SamplingParams  # its seed and the episode's number decide the random numbers
    group_size: int  # number of episodes per prompt
    wanted: int  # number of groups with a signal that end the batch
    at_most: int  # number of groups, with a signal or without, that end it in any case
    deadline: Deadline
    batch: Batch = dataclasses.field(default_factory=Batch)  # the batch as far as it is gathered


Take = Callable[[int], Mapping[int, Prompt]]
"""Draws this many prompts, by the number of the draw. At the stream's end there are fewer."""
Play = Callable[[Prompt, Slot], Awaitable[Rollout]]
"""Plays an episode of a prompt. Raises only ServerError; other failures are in `Rollout.error`."""


@dataclasses.dataclass(slots=True)
class _OpenGroup:
    """A group some of whose episodes are under way."""

    prompt: Prompt
    draw: int  # number of the prompt in the stream
    index: int  # number of the group in its batch
    # The episodes that have ended, by their number in the group, each with its rewards by name.
    ended: dict[int, tuple[Rollout, Mapping[str, Score]]] = dataclasses.field(default_factory=dict)


async def collect(
    plan: Plan,
    take: Take,
    play: Play,
    scorer: Scorer,
    *,
    has_signal: Callable[[Group], bool] = lambda group: True,
) -> Batch:
    """Draw prompts until `wanted` groups have a signal or `at_most` are drawn. Returns all groups.

    They are in `plan.batch`, which is filled while they are gathered.

    has_signal: whether a group can be learned from. If not, another prompt is drawn. Raise
    ServerError if the servers failed before the deadline, and RewardError if rewards failed again
    and again.
    """
    batch = plan.batch
    missing = plan.wanted  # prompts still to be drawn, if each under way gives a signal
    tasks: list[asyncio.Task[Group | None]] = []
    ended_tasks: asyncio.Queue[asyncio.Task[Group | None]] = asyncio.Queue()
    try:
        while True:
            # Start the episodes of as many prompts as groups with a signal are missing.
            for draw, prompt in take(min(missing, plan.at_most - batch.num_drawn)).items():
                open_group = _OpenGroup(prompt, draw, index=batch.num_drawn)
                for sample in range(plan.group_size):
                    task = asyncio.create_task(_episode(open_group, sample, plan, play, scorer))
                    task.add_done_callback(ended_tasks.put_nowait)
                    tasks.append(task)
                batch.num_drawn += 1
                missing -= 1
            if len(batch.groups) == batch.num_drawn:
                break  # none is under way: there are enough, or no prompts are left

            # Wait for the next episode. A group without a signal makes room for another prompt.
            ended = await ended_tasks.get()
            group = ended.result()
            if group is not None:
                batch.groups.append(group)
                if not has_signal(group):
                    missing += 1
    finally:
        await cancel(tasks)
    batch.groups.sort(key=lambda group: group.draw)
    return batch


async def _episode(
    open_group: _OpenGroup, sample: int, plan: Plan, play: Play, scorer: Scorer
) -> Group | None:
    """Play and score one episode. The last one of a group returns the complete group."""
    group_id = f"{plan.label}/{open_group.index}"
    slot = Slot(
        id=f"{group_id}/{sample}",
        group=group_id,
        number=open_group.index * plan.group_size + sample,
        sampling=plan.sampling,
        deadline=plan.deadline,
    )
    rollout = await play(open_group.prompt, slot)
    plan.batch.generated = time.perf_counter()
    rewards = await scorer.ask(rollout)  # at once, while other episodes are played
    open_group.ended[sample] = rollout, rewards
    if len(open_group.ended) < plan.group_size:
        return None

    # The group is complete. Rewards that compare its rollouts are asked now.
    in_order = [open_group.ended[number] for number in range(plan.group_size)]
    rollouts = tuple(rollout for rollout, _ in in_order)
    scores = await scorer.settle(rollouts, [rewards for _, rewards in in_order])
    return Group(id=group_id, rollouts=rollouts, scores=scores, draw=open_group.draw)
