"""Gather one batch: play the episodes of its prompts, score each as it ends, return complete groups.

A batch has the stream's next prompts, whichever episodes end first: to drop slow ones would favour short answers.
"""

import asyncio
import dataclasses
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping

from hocket.client.pool import Deadline
from hocket.common.tasks import cancel
from hocket.protocol import SamplingParams
from hocket.rewards.scorer import RewardScorer
from hocket.types import Group, Prompt, Rollout, Score


@dataclasses.dataclass(slots=True)
class Batch:
    """The groups of one step, with a signal or without."""

    groups: list[Group] = dataclasses.field(
        default_factory=list
    )  # complete; in the end, in the prompts' order
    num_drawn: int = 0
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    started: float = dataclasses.field(default_factory=time.perf_counter)
    generated: float = 0.0  # when its last token was sampled


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """An episode's place in its batch."""

    id: str  # "step 3/7/1"
    group: str  # "step 3/7"
    number: int  # of the episode: prompt x group_size + sample
    sampling: SamplingParams
    deadline: Deadline


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    label: str  # unique in a run: "step 3" gives groups "step 3/0", ...
    sampling: SamplingParams  # its seed and the episode's number decide the random numbers
    group_size: int  # episodes per prompt
    wanted: int  # groups with a signal
    at_most: int  # groups of any kind
    deadline: Deadline
    batch: Batch = dataclasses.field(default_factory=Batch)  # as far as it is gathered


Take = Callable[
    [int], Mapping[int, Prompt]
]  # n prompts by the number of the draw; fewer at the end
Play = Callable[
    [Prompt, Slot], Awaitable[Rollout]
]  # raises only ServerError, else sets `Rollout.error`


async def collect(
    plan: Plan,
    take: Take,
    play: Play,
    scorer: RewardScorer,
    *,
    has_signal: Callable[[Group], bool] = lambda group: True,
) -> Batch:
    """Draw prompts until `wanted` groups have a signal or `at_most` are drawn; return all."""
    batch = plan.batch
    done = defaultdict[str, dict[int, tuple[Rollout, Mapping[str, Score]]]](dict)  # of each group
    missing = plan.wanted
    tasks: list[asyncio.Task[Group | None]] = []
    ended: asyncio.Queue[asyncio.Task[Group | None]] = asyncio.Queue()

    async def episode(prompt: Prompt, draw: int, index: int, sample: int) -> Group | None:
        """Play and score one episode; a group's last returns the group."""
        group = f"{plan.label}/{index}"
        number = index * plan.group_size + sample
        slot = Slot(
            id=f"{group}/{sample}",
            group=group,
            number=number,
            sampling=plan.sampling,
            deadline=plan.deadline,
        )
        rollout = await play(prompt, slot)
        batch.generated = time.perf_counter()
        done[group][sample] = rollout, await scorer.ask(rollout)  # at once, while others are played
        if len(done[group]) < plan.group_size:
            return None
        rollouts, given = zip(
            *(done[group][sample] for sample in range(plan.group_size)), strict=True
        )
        return Group(
            id=group, rollouts=rollouts, scores=await scorer.settle(rollouts, given), draw=draw
        )

    try:
        while True:
            for draw, prompt in take(min(missing, plan.at_most - batch.num_drawn)).items():
                for sample in range(plan.group_size):
                    task = asyncio.create_task(episode(prompt, draw, batch.num_drawn, sample))
                    task.add_done_callback(ended.put_nowait)
                    tasks.append(task)
                batch.num_drawn += 1
                missing -= 1
            if len(batch.groups) == batch.num_drawn:
                break
            if (group := (await ended.get()).result()) is not None:
                batch.groups.append(group)
                missing += not has_signal(group)  # the next prompt takes its place
    finally:
        await cancel(tasks)
    batch.groups.sort(key=lambda group: group.draw)
    return batch
