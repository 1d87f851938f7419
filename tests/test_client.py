"""The client against a scripted transport: what it sends, what it makes of answers, refusals and silence."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from hocket.client import ServerClient
from hocket.errors import ServerError
from hocket.types import Completion, SamplingParams

HEALTH = {
    "status": "ready",
    "version": 3,
    "model": "m",
    "dtype": "float32",
    "vocab_size": 10,
    "max_length": 64,
    "tokenizer_sha256": "ab",
    "session": "s1",
    "in_flight": 0,
    "root": "/runs",
    "error": None,
}
COMPLETION = {
    "token_ids": [4, 2],
    "logprobs": [-0.5, -0.25],
    "text": "d",
    "finish_reason": "stop",
    "versions": [[3, 0, 2]],
}
END = {"done": True, "version": 3, "model": "m", "error": None}


def client(handler: Callable[[httpx.Request], httpx.Response]) -> ServerClient:
    return ServerClient("http://server", token="secret-token", transport=httpx.MockTransport(handler))


def lines(*messages: object) -> bytes:
    return "".join(json.dumps(message) + "\n" for message in messages).encode()


async def generate(server: ServerClient, **kwargs: object) -> list[tuple[int, int, Completion]]:
    options = {"n": 1, "timeout_s": 5.0} | kwargs
    return [item async for item in server.generate([[1, 2]], SamplingParams(max_tokens=4, seed=7), **options)]  # type: ignore[arg-type]


async def test_a_step_is_one_streaming_request_with_token_ids_and_the_token() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, content=lines({"prompt": 0, "index": 0, "completion": COMPLETION}, END))

    async with client(handler) as server:
        answers = await generate(server)
    assert answers == [
        (
            0,
            0,
            Completion(token_ids=(4, 2), logprobs=(-0.5, -0.25), finish_reason="stop", versions=((3, 0, 2),), text="d"),
        )
    ]
    body = json.loads(seen[0].content)
    assert (seen[0].url.path, seen[0].headers["authorization"]) == ("/generate", "Bearer secret-token")
    assert (body["prompts"], body["stream"], body["n"]) == ([[1, 2]], True, 1)
    assert body["sampling"] == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": 4,
        "stop": [],
        "stop_token_ids": [],
        "seed": 7,
    }


async def test_a_refusal_carries_the_servers_words_code_and_hint() -> None:
    error = {"error": {"code": "too_long", "message": "prompt 0 is too long", "hint": "shorten it"}}
    async with client(lambda _: httpx.Response(422, json=error)) as server:
        with pytest.raises(ServerError, match=r"prompt 0 is too long \(shorten it\)") as raised:
            await generate(server)
    assert (raised.value.code, raised.value.status) == ("too_long", 422)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cut after 0 of 1"),
        (lines({"prompt": 0, "index": 0, "completion": COMPLETION}), "cut after 1 of 1"),
        (lines(END), "0 of 1 completions"),
        (lines(END | {"error": {"code": "dead", "message": "engine died", "hint": "restart"}}), "engine died"),
    ],
)
async def test_an_incomplete_stream_is_an_error(content: bytes, message: str) -> None:
    async with client(lambda _: httpx.Response(200, content=content)) as server:
        with pytest.raises(ServerError, match=message):
            await generate(server)


class Stalling(httpx.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield lines({"prompt": 0, "index": 0, "completion": COMPLETION})
        await asyncio.sleep(60)


async def test_a_stream_that_stalls_ends_at_the_deadline() -> None:
    async with client(lambda _: httpx.Response(200, stream=Stalling())) as server:
        with pytest.raises(ServerError, match=r"/generate did not finish in 0.1 s") as raised:
            await generate(server, timeout_s=0.1, n=2)
    assert raised.value.code == "timeout"


async def test_waiting_goes_on_until_the_server_is_ready_and_says_for_what() -> None:
    states = iter(["refused", "loading", "ready"])
    said: list[str] = []

    def handler(_: httpx.Request) -> httpx.Response:
        state = next(states)
        if state == "refused":
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json=HEALTH | {"status": state})

    async with client(handler) as server:
        health = await server.wait_ready(30, lambda text, _: said.append(text))
    assert health.version == 3
    assert said[0].endswith("nothing answers there yet")
    assert said[1].endswith("it is loading")


async def test_waiting_ends_at_the_deadline_with_the_fix() -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    async with client(refuse) as server:
        with pytest.raises(ServerError, match=r"gave up after .* nothing answers .*refused.*run.py serve"):
            await server.wait_ready(0.0)


async def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps(HEALTH).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        async with ServerClient(f"http://127.0.0.1:{port}") as server:
            assert (await server.health()).session == "s1"


async def test_waiting_ends_at_once_where_the_server_failed_or_is_another_program() -> None:
    async with client(lambda _: httpx.Response(200, json=HEALTH | {"status": "failed", "error": "boom"})) as server:
        with pytest.raises(ServerError, match="failed: boom"):
            await server.wait_ready(30)
    async with client(lambda _: httpx.Response(200, text="hello")) as server:
        with pytest.raises(ServerError, match="is it a hocket server"):
            await server.wait_ready(30)
    async with client(lambda _: httpx.Response(502, text="bad gateway")) as server:
        with pytest.raises(ServerError, match="502"):
            await server.wait_ready(30)


async def test_reload_sends_version_and_folder_and_returns_what_the_server_holds() -> None:
    seen: list[dict[str, object]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content))
        return httpx.Response(200, json={"version": 4, "seconds": 0.1, "num_tensors": 2, "checksum": "cc"})

    async with client(handler) as server:
        answer = await server.reload_weights(4, "run/weights/v000004", timeout_s=5)
    assert seen == [{"version": 4, "source": {"kind": "disk", "name": "run/weights/v000004"}}]
    assert (answer.version, answer.checksum) == (4, "cc")
