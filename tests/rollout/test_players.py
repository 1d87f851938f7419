"""Episodes of one turn: what is asked and written down is what an episode of the environment single_turn has."""

import dataclasses
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from hocket.client.batcher import Turn
from hocket.client.pool import Deadline, ServerPool
from hocket.envs.base import SingleTurn
from hocket.errors import ServerError
from hocket.protocol import Completion, SamplingParams
from hocket.rollout.collect import Slot
from hocket.rollout.episode import Episode, Limits, TokenBudget
from hocket.rollout.players import player
from hocket.types import FinishReason, Prompt, Rollout
from support.episodes import renderer

PROMPT = Prompt(id="p", token_ids=array("I", (5, 6, 7)), text="?", opening="<think>\n")
LIMITS = Limits(max_turns=8, max_length=100, timeout_s=60.0)
Answer = Callable[[Turn], Completion]


def slot(seconds: float = 60.0) -> Slot:
    sampling = SamplingParams(max_tokens=4, seed=9, stop=("\n",))
    return Slot(id="step 3/1/2", number=14, sampling=sampling, group="step 3/1", deadline=Deadline(seconds))


def completion(finish: FinishReason = "stop", **changes: Any) -> Completion:
    known = {"token_ids": (8, 9), "logprobs": (-0.5, -0.25), "text": "ab", "versions": ((3, 0, 2),)}
    return Completion(**(known | {"finish_reason": finish} | changes))


async def both(answer: Answer, place: Slot, limits: Limits = LIMITS) -> tuple[list[Rollout], list[Turn]]:
    """Plays the prompt as one turn and as an episode; returns the rollouts, and what was asked."""
    asked: list[Turn] = []

    async def ask(turn: Turn) -> Completion:
        asked.append(turn)
        return answer(turn)

    rendering = renderer()
    alone = player(SingleTurn, ServerPool([]), ask, rendering, limits)
    episode = Episode(PROMPT, place, SingleTurn, ask, rendering, limits, TokenBudget())
    return [await alone(PROMPT, place), await episode.play()], asked


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("max_length", [100, 5])
async def test_it_asks_and_writes_down_what_an_episode_of_the_environment_does(
    finish: FinishReason, max_length: int
) -> None:
    limits = dataclasses.replace(LIMITS, max_length=max_length)
    (alone, episode), asked = await both(lambda turn: completion(finish), slot(), limits)
    assert alone == episode
    assert alone.sequences[0].mask == (False, False, False, True, True)
    names = [field.name for field in dataclasses.fields(Turn) if field.name != "answer"]
    first, second = ([getattr(turn, name) for name in names] for turn in asked)
    assert first == second
    assert asked[0].sampling.max_tokens == min(4, max_length - 3)


async def test_a_late_one_has_an_error_and_one_that_fails_in_time_raises() -> None:
    def fail(turn: Turn) -> Completion:
        raise ServerError("no server is up", code="unreachable")

    (alone, episode), _ = await both(fail, slot(seconds=0.0))
    assert alone == episode
    assert (alone.error or "").startswith("the episode was not over within 0 s (rollout.timeout_s): no server is up")
    with pytest.raises(ServerError, match="no server is up"):
        await both(fail, slot())


async def test_a_prompt_that_fills_the_context_is_not_asked() -> None:
    (alone, episode), asked = await both(lambda turn: completion(), slot(), dataclasses.replace(LIMITS, max_length=3))
    assert asked == []
    assert alone.error == "the prompt leaves no room for an answer in 3 tokens"
    assert episode.error is not None


async def test_a_subclass_of_the_environment_takes_its_own_steps() -> None:
    class Mine(SingleTurn):
        gives_reward = True

        async def step(self, action: Any) -> Any:
            done = await super().step(action)
            return dataclasses.replace(done, reward=float(len(action.text)))

    async def ask(turn: Turn) -> Completion:
        return completion()

    play = player(Mine, ServerPool([]), ask, renderer(), LIMITS)
    assert (await play(PROMPT, slot())).reward == 2.0
