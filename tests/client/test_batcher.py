"""What a turn with images becomes on its way to a server, and what of the answer is compared."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from tests.client.test_pool import SAMPLING, FakeServer, make_pool

from hocket.client.batcher import Batcher, Turn
from hocket.client.pool import Deadline
from hocket.client.server import prompt_input
from hocket.errors import ServerError
from hocket.protocol import GenerateRequest, StreamLine
from hocket.types import Image
from support import fakes

TOKENS = (5, 8, 9, 9, 8, 6, 8, 9, 9, 8)  # two images of 4 tokens, whose placeholder is 9


def images(*files: bytes) -> tuple[Image, ...]:
    return tuple(fakes.image(data, start=start, length=4) for data, start in zip(files, (1, 6), strict=True))


async def turn(seed: int, *files: bytes) -> Turn:
    return Turn(
        token_ids=TOKENS,
        sampling=SAMPLING,
        seed=seed,
        deadline=Deadline(10.0),
        group="g",
        place=f"step 1/{seed}",
        images=images(*files),
    )


def test_images_travel_beside_one_placeholder_each() -> None:
    assert prompt_input(TOKENS, images(b"one", b"two")) == {"token_ids": [5, 9, 6, 9], "images": ["b25l", "dHdv"]}
    assert prompt_input(TOKENS, ()) == list(TOKENS)


class Seeing(FakeServer):
    """Says that it has read TOKENS, and what comes behind them."""

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> AsyncGenerator[StreamLine, None]:
        self.requests.append(request)
        for prompt, seeds in enumerate(request.seeds or ()):
            for index, seed in enumerate(seeds):
                done = fakes.completion(5, logprobs=(-0.5,), text=f"{request.prompts[prompt]['images'][0]} {seed}")
                read = {"prompt_token_ids": (*TOKENS, *request.prompts[prompt]["token_ids"][4:])}
                yield StreamLine(prompt=prompt, index=index, completion=done.model_copy(update=read))


async def asked(server: Seeing, turns: list[Turn]) -> list[Any]:
    async with make_pool([server]) as pool:
        batcher = Batcher(pool)
        return [done.text for done in await asyncio.gather(*map(batcher.ask, turns))]


async def test_equal_tokens_of_other_images_are_another_request() -> None:
    deadline = Deadline(10.0)
    turns = [await turn(seed, first, b"b") for seed, first in enumerate((b"a", b"c", b"a"))]
    for one in turns:
        one.deadline = deadline
    server = Seeing(0)
    assert await asked(server, turns) == ["YQ== 0", "Yw== 1", "YQ== 2"]
    assert sorted(request.seeds or () for request in server.requests) == [[[0, 2]], [[1]]]


async def test_a_request_has_room_for_the_images_of_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group's later turns have the same images and other tokens: each brings them along."""
    monkeypatch.setattr("hocket.client.batcher.IMAGE_BYTES", 5)
    turns = [await turn(seed, b"a", b"b") for seed in range(5)]
    for one in turns:
        one.deadline = turns[0].deadline
        one.token_ids = (*TOKENS, one.seed)
    server = Seeing(0)
    await asked(server, turns)
    assert sorted(len(request.prompts) for request in server.requests) == [1, 2, 2]


@pytest.mark.parametrize(
    ("read", "said"),
    [
        ((5, 8, 9, 9, 8, 6, 8, 9, 9, 7), "token 9 is 7, here 8"),
        ((*TOKENS, 9), "token 10 is 9, here None"),
        (TOKENS[:-1], "token 9 is None, here 8"),
        ((), "token 0 is None, here 5"),
    ],
)
async def test_what_the_engine_read_is_compared_with_what_was_meant(read: tuple[int, ...], said: str) -> None:
    done = fakes.completion(5, logprobs=(-0.5,)).model_copy(update={"prompt_token_ids": read})
    asks = await turn(3, b"a", b"b")
    with pytest.raises(ServerError, match=f"another prompt of step 1/3: {said}; do both") as caught:
        asks.check(done, "http://s")
    assert caught.value.code == "protocol"
    asks.check(done.model_copy(update={"prompt_token_ids": TOKENS}), "http://s")
