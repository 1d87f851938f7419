"""What a turn with images becomes on its way to a server, and what of the answer is compared."""

import asyncio
from array import array
from typing import Any

import pytest

from hocket.client.batcher import Batcher, Turn
from hocket.client.pool import Deadline
from hocket.client.server import prompt_input
from hocket.errors import ServerError
from hocket.protocol import Completion
from hocket.types import Image
from support import fakes
from support.servers import SAMPLING, FakeServer, Pool

TOKENS = array("I", (5, 8, 9, 9, 8, 6, 8, 9, 9, 8))  # two images of 4 tokens, whose placeholder is 9


def images(*files: bytes) -> tuple[Image, ...]:
    return tuple(fakes.image(data, start=start, length=4) for data, start in zip(files, (1, 6), strict=True))


async def turn(seed: int, *files: bytes, deadline: Deadline | None = None) -> Turn:
    return Turn(
        token_ids=TOKENS,
        sampling=SAMPLING,
        seed=seed,
        deadline=deadline or Deadline(10.0),
        group="g",
        place=f"step 1/{seed}",
        images=images(*files),
    )


def test_images_travel_beside_one_placeholder_each() -> None:
    assert prompt_input(TOKENS, images(b"one", b"two")) == {"token_ids": [5, 9, 6, 9], "images": ["b25l", "dHdv"]}
    assert prompt_input(TOKENS, ()) == list(TOKENS)


def sees(prompt: Any, seed: int) -> Completion:
    """Says that it has read TOKENS, and what comes behind them."""
    done = fakes.completion(5, logprobs=(-0.5,), text=f"{prompt['images'][0]} {seed}")
    return done.model_copy(update={"prompt_token_ids": (*TOKENS, *prompt["token_ids"][4:])})


async def asked(server: FakeServer, turns: list[Turn]) -> list[Any]:
    async with Pool([server]) as pool:
        batcher = Batcher(pool)
        return [done.text for done in await asyncio.gather(*map(batcher.ask, turns))]


async def test_equal_tokens_of_other_images_are_another_request() -> None:
    deadline, server = Deadline(10.0), FakeServer(complete=sees)
    turns = [await turn(seed, first, b"b", deadline=deadline) for seed, first in enumerate((b"a", b"c", b"a"))]
    assert await asked(server, turns) == ["YQ== 0", "Yw== 1", "YQ== 2"]
    assert sorted(request.seeds or () for request in server.requests) == [[[0, 2]], [[1]]]


async def test_each_prompt_says_how_much_of_its_turn_it_has() -> None:
    """Equal tokens of which another part was sampled are another prompt: their texts differ."""
    deadline = Deadline(10.0)
    server = FakeServer(complete=lambda prompt, seed: fakes.completion(5, logprobs=(-0.5,), text=str(seed)))
    turns = [await turn(seed, b"a", b"b", deadline=deadline) for seed in range(3)]
    for one in turns:
        one.images = ()
    turns[1].begun = 4
    assert await asked(server, turns) == ["0", "1", "2"]
    (request,) = server.requests
    assert (request.begun, request.seeds) == ([0, 4], [[0, 2], [1]])


async def test_a_request_has_room_for_the_images_of_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group's later turns have the same images and other tokens: each brings them along."""
    monkeypatch.setattr("hocket.client.batcher.IMAGE_BYTES", 5)
    deadline, server = Deadline(10.0), FakeServer(complete=sees)
    turns = [await turn(seed, b"a", b"b", deadline=deadline) for seed in range(5)]
    for one in turns:
        one.token_ids = array("I", (*TOKENS, one.seed))
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
    asks.check(done.model_copy(update={"prompt_token_ids": tuple(TOKENS)}), "http://s")
