"""Episodes with tools."""

import asyncio

import pytest
from tests.rollout.test_episodes import played_one

from hocket.client.batcher import Turn
from hocket.envs import tool
from hocket.extras.tools.tools import Tools
from hocket.protocol import Completion, ToolCall
from support import fakes
from support.episodes import FakeEngine, sampled


async def test_tools_that_hang_are_told_to_the_model_however_often_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = fakes.Clock()
    monkeypatch.setattr("hocket.rollout.episode.time", clock)

    @tool
    async def hang_of_episodes() -> None:
        """Hangs."""
        clock.now += 30.0
        raise TimeoutError  # as call_timeout_s does

    def says(turn: Turn) -> Completion:
        call = ToolCall(name="hang_of_episodes", arguments="{}")
        return sampled(turn.seed, turn.sampling.max_tokens).model_copy(update={"tool_calls": (call,)})

    class Patient(Tools):
        async def truncated(self) -> float:
            await asyncio.sleep(0)  # fails if no time is left
            return 0.0

    make = lambda: Patient(tools=["hang_of_episodes"], parser="hermes", call_timeout_s=30.0)  # noqa: E731
    rollout = await played_one(make, FakeEngine(says), max_turns=4, max_length=10_000, timeout_s=50.0)
    (sequence,) = rollout.sequences
    assert rollout.error is None
    told = [message["content"] for message in sequence.dialogue if message["role"] == "tool"]
    assert told == ["error: no result within 30 s"] * 3  # nobody reads the fourth
    assert (sequence.turns, sequence.finish_reason) == (4, "length")
