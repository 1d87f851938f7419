"""What the tests of rollouts have in common."""

from collections.abc import Callable, Mapping, Sequence

from hocket.pool import Deadline
from hocket.protocol import SamplingParams
from hocket.rollout.collect import Batch, Plan, Play, ScoreOne, collect
from hocket.types import Prompt

SAMPLING = SamplingParams(max_tokens=8, seed=77)


def drawing(prompts: Sequence[Prompt]) -> Callable[[int], Mapping[int, Prompt]]:
    """Gives each prompt once, in their order."""
    left = dict(enumerate(prompts))
    return lambda count: {number: left.pop(number) for number in list(left)[:count]}


async def gathered(
    prompts: Sequence[Prompt], play: Play, score: ScoreOne, *, group_size: int = 1, timeout_s: float = 60.0
) -> Batch:
    """Collects one batch of all prompts."""
    plan = Plan(
        label="s",
        sampling=SAMPLING,
        group_size=group_size,
        wanted=len(prompts),
        at_most=len(prompts),
        deadline=Deadline(timeout_s),
    )
    return await collect(plan, drawing(prompts), play, score)
