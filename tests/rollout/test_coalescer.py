"""Single turns that travel together, against a server that remembers its requests."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from hocket.errors import ServerError
from hocket.protocol import Completion, SamplingParams, Toolbox
from hocket.rollout.coalescer import MAX_REQUESTS, MAX_TURNS, Coalescer

SAMPLING = SamplingParams(max_tokens=4, seed=1)
TOOLBOX = Toolbox(parser="hermes", tools=({"type": "function"},))


class FakeServer:
    """Answers each prompt with its own first token, once `hold` is set."""

    kv_tokens = 4096

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.running = self.most = 0
        self.error: Exception | None = None

    async def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, timeout_s: float, **rest: Any
    ) -> AsyncIterator[tuple[int, int, Completion]]:
        self.requests.append({"prompts": [list(p) for p in prompts], "sampling": sampling, **rest})
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.hold.wait()
            for i, prompt in reversed(list(enumerate(prompts))):
                if self.error is not None:
                    raise self.error
                yield (
                    i,
                    0,
                    Completion(
                        token_ids=(prompt[0],),
                        logprobs=(-1.0,),
                        finish_reason="stop",
                        versions=((1, 0, 1),),
                        text="",
                    ),
                )
        finally:
            self.running -= 1


async def test_turns_of_one_moment_are_one_request_per_kind_of_sampling() -> None:
    server = FakeServer()
    async with Coalescer(server, timeout_s=5, tools=TOOLBOX) as coalescer:
        other = SamplingParams(max_tokens=9, seed=1)
        asks = [coalescer.ask([i, 0], other if i == 3 else SAMPLING, seed=100 + i) for i in range(5)]
        answers = await asyncio.gather(*asks)
    assert [answer.token_ids for answer in answers] == [(i,) for i in range(5)]  # to each its own
    first, second = server.requests
    assert (first["prompts"], first["seeds"]) == ([[0, 0], [1, 0], [2, 0], [4, 0]], [[100], [101], [102], [104]])
    assert (second["prompts"], second["seeds"], second["sampling"].max_tokens) == ([[3, 0]], [[103]], 9)
    assert first["tools"] is second["tools"] is TOOLBOX
    assert first["sampling"].seed is None


async def test_a_request_has_no_more_turns_than_a_server_takes() -> None:
    server = FakeServer()
    async with Coalescer(server, timeout_s=5) as coalescer:
        await asyncio.gather(*(coalescer.ask([i], SAMPLING, seed=i) for i in range(MAX_TURNS + 10)))
    assert [len(request["prompts"]) for request in server.requests] == [MAX_TURNS, 10]


async def test_while_many_requests_are_under_way_turns_wait_for_company() -> None:
    server = FakeServer()
    server.hold.clear()
    async with Coalescer(server, timeout_s=60) as coalescer:
        asks = []
        for i in range(MAX_REQUESTS + 20):
            asks.append(asyncio.create_task(coalescer.ask([i], SAMPLING, seed=i)))
            while len(server.requests) <= min(i, MAX_REQUESTS - 1):
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.2)
        assert server.running == MAX_REQUESTS
        server.hold.set()
        assert [answer.token_ids[0] for answer in await asyncio.gather(*asks)] == list(range(MAX_REQUESTS + 20))
    assert server.most == MAX_REQUESTS
    assert len(server.requests[-1]["prompts"]) == 20  # together


async def test_turns_that_are_all_sampled_differently_wait_for_their_turn_too() -> None:
    server = FakeServer()
    server.hold.clear()
    async with Coalescer(server, timeout_s=60) as coalescer:
        wanted = range(MAX_REQUESTS + 30)
        asks = [coalescer.ask([i], SamplingParams(max_tokens=i + 1), seed=i) for i in wanted]
        together = asyncio.gather(*asks)
        while server.running < MAX_REQUESTS:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        server.hold.set()
        assert [answer.token_ids[0] for answer in await together] == list(wanted)
    assert server.most == MAX_REQUESTS


async def test_a_failed_request_is_the_error_of_every_turn_in_it_and_of_no_other() -> None:
    server = FakeServer()
    async with Coalescer(server, timeout_s=5) as coalescer:
        server.error = ServerError("refused", code="x")
        failed = await asyncio.gather(*(coalescer.ask([i], SAMPLING, seed=i) for i in range(3)), return_exceptions=True)
        assert [str(error) for error in failed] == ["refused"] * 3
        server.error = None
        assert (await coalescer.ask([7], SAMPLING, seed=7)).token_ids == (7,)


async def test_a_turn_that_was_given_up_is_not_sent_and_leaving_ends_the_rest() -> None:
    server = FakeServer()
    server.hold.clear()
    async with Coalescer(server, timeout_s=5) as coalescer:
        early = asyncio.create_task(coalescer.ask([1], SAMPLING, seed=1))
        await asyncio.sleep(0)
        early.cancel()
        late = asyncio.create_task(coalescer.ask([2], SAMPLING, seed=2))
        while not server.running:
            await asyncio.sleep(0.001)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
    assert [request["prompts"] for request in server.requests] == [[[2]]]
    assert server.running == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
