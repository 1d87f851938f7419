"""The client against a scripted transport: what it sends, what it makes of answers, refusals and silence."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from hocket import protocol
from hocket.client.server import ServerClient
from hocket.errors import ErrorOutcome, ServerError, SyncError
from support import fakes

HEALTH = fakes.health(session="s1", version=3).model_dump(mode="json")
DONE = fakes.completion(4, 2, logprobs=(-0.5, -0.25), version=3, text="d")
LINE: dict[str, Any] = {"prompt": 0, "index": 0, "completion": DONE.model_dump(mode="json")}
END = {"done": True, "version": 3, "model": "m", "error": None}


def client(handler: Callable[[httpx.Request], httpx.Response]) -> ServerClient:
    return ServerClient("http://server", token="secret-token", trainer="mine-1", transport=httpx.MockTransport(handler))


def lines(*messages: object) -> bytes:
    return "".join(json.dumps(message) + "\n" for message in messages).encode()


async def generate(server: ServerClient, timeout_s: float = 5.0, **fields: Any) -> list[protocol.StreamLine]:
    request = protocol.GenerateRequest(
        prompts=[[1, 2]], sampling=protocol.SamplingParams(max_tokens=4, seed=7), **fields
    )
    return [line async for line in server.generate(request, timeout_s=timeout_s)]


async def test_a_step_is_one_streaming_request_with_token_ids_and_the_token() -> None:
    seen: list[httpx.Request] = []
    call = {"name": "f", "arguments": '{"x": 1}', "id": ""}
    text = "d\u2028e"  # a line separator, which the server escapes

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        done = LINE["completion"] | {"tool_calls": [call], "text": text}
        return httpx.Response(200, content=lines(LINE | {"completion": done}, END))

    toolbox = protocol.Toolbox(
        parser="hermes", tools=({"type": "function", "function": {"name": "f", "parameters": {}}},)
    )
    async with client(handler) as server:
        answers = await generate(server, seeds=[[11]], session="s1", tools=toolbox)
    done = DONE.model_copy(update={"text": text, "tool_calls": (protocol.ToolCall(name="f", arguments='{"x": 1}'),)})
    assert answers == [protocol.StreamLine(prompt=0, index=0, completion=done)]
    body = json.loads(seen[0].content)
    assert (seen[0].url.path, seen[0].headers["authorization"]) == ("/generate", "Bearer secret-token")
    assert (body["prompts"], body["stream"], body["n"], body["trainer"]) == ([[1, 2]], True, 1, "mine-1")
    assert (body["seeds"], body["session"], body["tools"]) == ([[11]], "s1", toolbox.model_dump(mode="json"))
    assert body["sampling"] == protocol.SamplingParams(max_tokens=4, seed=7).model_dump(mode="json")


ERROR = {"code": "too_long", "message": "prompt 0 is too long", "hint": "shorten it"}


@pytest.mark.parametrize(
    ("status", "content", "message", "code"),
    [
        (422, lines({"error": ERROR}), r"422: prompt 0 is too long \(shorten it\)", "too_long"),
        (200, lines(END | {"error": ERROR}), r"broke off: prompt 0 is too long \(shorten it\)", "too_long"),
        (401, lines({"error": ERROR}), "answered 401: it has a token: set the same server.token here", "too_long"),
        (200, b"", "was cut before its end", "cut"),
        (200, lines(LINE), "was cut before its end", "cut"),
    ],
)
async def test_a_refusal_or_an_incomplete_stream_is_an_error(
    status: int, content: bytes, message: str, code: str
) -> None:
    async with client(lambda _: httpx.Response(status, content=content)) as server:
        with pytest.raises(ServerError, match=message) as raised:
            await generate(server)
    assert (raised.value.code, raised.value.status) == (code, status if status > 400 else None)


class Stalling(httpx.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield lines(LINE)
        await asyncio.sleep(60)


async def test_a_stream_that_stalls_ends_at_the_deadline() -> None:
    async with client(lambda _: httpx.Response(200, stream=Stalling())) as server:
        with pytest.raises(ServerError, match=r"/generate did not finish in 0.1 s") as raised:
            await generate(server, timeout_s=0.1, n=2)
    assert raised.value.code == "timeout"


async def test_only_a_connection_that_fails_counts_as_nobody_there() -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    async with client(refuse) as server:
        with pytest.raises(ServerError) as raised:
            await server.health()
    assert raised.value.code == "unreachable"
    async with client(lambda _: httpx.Response(502, text="bad gateway")) as server:
        with pytest.raises(ServerError, match=r"502.*bad gateway") as raised:
            await server.health()
    assert (raised.value.code, raised.value.status) == ("protocol", 502)
    async with client(lambda _: httpx.Response(413, text="too large for nginx")) as server:
        with pytest.raises(ServerError, match="413: 'too large for nginx'") as raised:
            await generate(server)
    assert raised.value.outcome is ErrorOutcome.REFUSED  # any other server gets it by the same way


@pytest.mark.parametrize(
    ("answer", "headers", "says"),
    [
        (b"hello", {}, "http://server/.* answered what no hocket server of this version does: .*'hello'"),
        (b'{"x": 1}', {}, "'x': 1"),
        (b"not packed", {"Content-Encoding": "gzip"}, "incorrect header check"),
    ],
)
@pytest.mark.parametrize("call", [generate, ServerClient.health])
async def test_an_answer_of_something_else_than_hocket_is_the_servers_failure_and_no_refusal(
    call: Callable[[ServerClient], Awaitable[object]], answer: bytes, headers: dict[str, str], says: str
) -> None:
    there = lambda _: httpx.Response(200, headers=headers, stream=httpx.ByteStream(answer))  # noqa: E731
    async with client(there) as server:
        with pytest.raises(ServerError, match=says) as raised:
            await call(server)
    assert (raised.value.code, raised.value.outcome) == ("protocol", ErrorOutcome.LOST)


async def test_control_calls_do_not_wait_behind_rollouts_and_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    playing = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (line := await reader.readline()).strip():  # requests here are short: one read has the rest
            rest = await reader.read(65536)
            if b"/generate" in line:
                playing.set()
                await reader.read()  # until the client leaves
                break
            body = json.dumps(HEALTH).encode()
            assert rest
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with listening, ServerClient(url) as server:
        rollouts = asyncio.create_task(generate(server, timeout_s=30.0))
        await asyncio.wait_for(playing.wait(), 10)
        assert (await server.health(timeout_s=10.0)).version == 3
        assert not rollouts.done()
        rollouts.cancel()
        await asyncio.gather(rollouts, return_exceptions=True)


async def test_a_call_to_a_server_that_has_left_the_pool_fails_as_if_it_could_not_be_reached() -> None:
    server = client(lambda request: httpx.Response(200, json=HEALTH))
    assert not server.is_closed
    await server.close()
    assert server.is_closed
    with pytest.raises(ServerError, match="can't reach http://server/health: the server has left") as raised:
        await server.health()
    assert raised.value.code == "unreachable"
    with pytest.raises(ServerError, match="the server has left"):
        await generate(server)


RELOAD = protocol.ReloadRequest(version=4, source=protocol.DiskSource(name="run/weights/v000004"), in_flight="drain")
SESSION = protocol.SessionRequest(
    sampling=protocol.SamplingParams(stop=("x",)), max_length=64, max_calls=3, idle_timeout_s=9.0
)
ASLEEP = fakes.health(status="asleep")


@pytest.mark.parametrize(
    ("route", "asked", "answer"),
    [
        ("/reload_weights", RELOAD, fakes.reloaded(4, "cc")),
        ("/sleep", protocol.SleepRequest(level=2), ASLEEP),
        ("/sessions", SESSION, protocol.SessionResponse(id="ab", key="its own", model="m")),
    ],
)
async def test_a_request_goes_to_its_route_and_returns_its_answer(route: str, asked: Any, answer: Any) -> None:
    seen: list[tuple[str, object]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.path, json.loads(request.content)))
        return httpx.Response(200, json=answer.model_dump(mode="json"))

    async with client(handler) as server:
        assert await server.ask(asked, timeout_s=5) == answer
    assert seen == [(route, asked.model_dump(mode="json") | {"trainer": "mine-1"})]


async def test_a_version_is_sent_file_by_file_and_its_marker_last(tmp_path: Path) -> None:
    for name in ("COMPLETE", "config.json", "manifest.json", "model-2.safetensors", "model-1.safetensors"):
        (tmp_path / name).write_text(name)
    large = b"x" * (3 << 20)
    (tmp_path / "model-2.safetensors").write_bytes(large)
    seen: list[tuple[str, str, bytes]] = []

    async def handler(request: httpx.Request) -> httpx.Response:
        seen.append((request.method, request.url.path, await request.aread()))
        assert request.headers["authorization"] == "Bearer secret-token"
        return httpx.Response(200, json={"name": "there/v1"})

    async with client(handler) as server:  # type: ignore[arg-type]
        assert await server.upload(tmp_path, "v1", timeout_s=5) == "there/v1"
    assert seen == [
        ("PUT", "/upload/v1/model-1.safetensors", b"model-1.safetensors"),
        ("PUT", "/upload/v1/model-2.safetensors", large),
        ("PUT", "/upload/v1/manifest.json", b"manifest.json"),
        ("PUT", "/upload/v1/COMPLETE", b"COMPLETE"),
    ]


async def test_after_a_refused_file_no_more_are_sent(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    seen: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.path)
        return httpx.Response(507, json={"error": ERROR})

    async with client(handler) as server:
        with pytest.raises(ServerError, match="507: prompt 0 is too long"):
            await server.upload(tmp_path, "v1", timeout_s=5)
    assert seen == ["/upload/v1/model.safetensors"]


async def test_a_file_that_can_not_be_read_is_an_error_of_the_version_that_names_it(tmp_path: Path) -> None:
    async def handler(request: httpx.Request) -> httpx.Response:
        await request.aread()
        return httpx.Response(200, json={"name": "there/v1"})

    async with client(handler) as server:  # type: ignore[arg-type]
        with pytest.raises(SyncError, match=r"can't read .*v1/manifest\.json: .*No such file"):
            await server.upload(tmp_path / "v1", "v1", timeout_s=5)
