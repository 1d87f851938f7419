"""What episodes are played with: a model, environments; and rollouts for rewards to score."""

import asyncio
import dataclasses
import functools
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from transformers import AutoTokenizer

from hocket.client.batcher import Turn
from hocket.client.pool import Deadline
from hocket.config import DataConfig
from hocket.data.prompts import renderer_of
from hocket.data.renderer import Renderer
from hocket.envs import Action, Environment, Observation, Step
from hocket.protocol import Completion, ToolCall
from hocket.rewards import RewardScorer
from hocket.rollout.collect import Slot
from hocket.rollout.episode import Limits
from hocket.types import Message, Prompt, Rollout, Score, TokenSequence
from support.batches import SAMPLING
from support.processes import ROOT

Scorers = Callable[..., RewardScorer]
Scores = Callable[..., Awaitable[Sequence[Score]]]
Register = Callable[..., None]
"""Fixtures of tests/rewards."""
END = 1
"""The token that ends a turn in checkpoints/tiny-tools."""


@functools.cache
def renderer() -> Renderer:
    """Returns what renders the chats of checkpoints/tiny-tools."""
    return renderer_of(DataConfig(), AutoTokenizer.from_pretrained(ROOT / "checkpoints" / "tiny-tools"))


def user(content: Any) -> list[Message]:
    """Returns the messages of a user who says this."""
    return [{"role": "user", "content": content}]


def limits(**changes: Any) -> Limits:
    """Returns limits that a short episode stays within, with changes."""
    return Limits(**{"max_turns": 6, "max_length": 256, "timeout_s": 5.0} | changes)


def slot(id: str = "s/0/0") -> Slot:
    """Returns the place of an episode that has a minute."""
    return Slot(id=id, group=id.rpartition("/")[0], number=0, sampling=SAMPLING, deadline=Deadline(60))


def with_seed(slot: Slot, seed: int) -> Slot:
    """Returns the place with the random numbers of a seed."""
    return dataclasses.replace(slot, sampling=slot.sampling.model_copy(update={"seed": seed}))


def action(text: str = "", *tool_calls: ToolCall) -> Action:
    """Returns what a model wrote in a turn that ended by itself."""
    return Action(text=text, token_ids=(1,), finish_reason="stop", tool_calls=tool_calls)


def make_rollout(
    text: str = "abcd",
    *,
    answer: str | None = "abcd",
    id: str = "step 1/0/0",
    num_sampled: int = 3,
    reward: float | None = None,
) -> Rollout:
    """Returns a rollout of one turn to be scored."""
    chat = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sort: dbca"})
    prompt = Prompt(
        id="rows.jsonl:1", token_ids=(1, 2), messages=chat, text="Sort: dbca", answer=answer, meta={"level": 2}
    )
    sequence = TokenSequence(
        token_ids=(1, 2, *range(10, 10 + num_sampled)),
        mask=(False, False) + (True,) * num_sampled,
        logprobs=(0.0, 0.0) + (-0.5,) * num_sampled,
        text=text,
    )
    return Rollout(id=id, prompt=prompt, reward=reward, sequences=(sequence,))


async def until(holds: Callable[[], object]) -> None:
    """Returns when a condition holds."""
    async with asyncio.timeout(60):  # which only ends a test that fails anyway
        while not holds():
            await asyncio.sleep(0.01)


def sampled(seed: int, max_tokens: int) -> Completion:
    """Returns a turn of one to six tokens, which the seed decides."""
    rng = random.Random(seed)
    length = rng.randint(1, 6)
    body = [rng.randrange(5, 260) for _ in range(length)]
    token_ids = tuple([*body[:-1], END][:max_tokens])
    return Completion(
        token_ids=token_ids,
        logprobs=tuple(-rng.randrange(1 << 20) / (1 << 20) for _ in token_ids),
        finish_reason="stop" if token_ids[-1] == END else "length",
        versions=((seed % 3 + 1, 0, len(token_ids)),),
        text=f"text of {seed}",
    )


class FakeEngine:
    """Answers turns, in random order if it takes time; keeps each with its answer."""

    def __init__(
        self,
        says: Callable[[Turn], Completion] = lambda turn: sampled(turn.seed, turn.sampling.max_tokens),
        *,
        delay_s: float = 0.0,
    ) -> None:
        self.says, self.delay_s = says, delay_s
        self.turns: list[tuple[Turn, Completion]] = []

    async def ask(self, turn: Turn) -> Completion:
        assert turn.place.startswith(f"{turn.group}/")
        await asyncio.sleep(self.delay_s * random.random())
        completion = self.says(turn)
        self.turns.append((turn, completion))
        return completion

    def seen(self, turn: int) -> str:
        """Returns what the model saw before one of its turns."""
        return renderer().decode(self.turns[turn][0].token_ids)


class Scripted(Environment):
    """Says this in turn, whatever the model does; keeps what it did."""

    def __init__(self, *steps: Step, first: Observation | None = None) -> None:
        self.steps, self.first = list(steps), first
        self.actions: list[Action] = []

    async def reset(self, prompt: Prompt, seed: int) -> Observation | None:
        return self.first

    async def step(self, action: Action) -> Step:
        self.actions.append(action)
        return self.steps[len(self.actions) - 1] if len(self.actions) <= len(self.steps) else Step(done=True)
