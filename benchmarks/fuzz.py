"""Send odd requests to every route of a server: none may stay without an answer or a closed connection.

Without a URL, at hocket's own `serve-reward`. The server listens on another address than loopback, where late heads
are closed. Bodies are made from examples, methods and paths also from the server's
own list of routes; heads, lengths, chunks, tokens, encodings and JSON are bent, cut off, repeated, or sent slowly.

Prints how often each status came, and the slowest answer. The status is 1 where one was 5xx, none came in time, or the
server does not answer as before: a generation server is asked greedily before and after.
"""

import asyncio
import collections
import contextlib
import json
import os
import random
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared import parser

if __name__ == "__main__":  # --help does not wait for what follows
    OPTIONS = parser(
        __doc__,
        url=("", "of the server; its token is read from HOCKET_TOKEN"),
        number=(10_000, "requests"),
        seed=(0, "of the requests"),
        deadline=(90.0, "seconds for an answer, or for the connection to be closed"),
        at_once=(128, "connections"),
    ).parse_args()

from support.processes import Command, free_port, wait_for

TOKEN = os.environ.setdefault("HOCKET_TOKEN", "token-of-the-fuzzer")
CLOSED, LATE = "closed", "none in time"
GREEDY = {"prompts": ["cba", "dacb", "zyx"], "sampling": {"temperature": 0.0, "max_tokens": 8}}
SAMPLED = {"temperature": 1.0, "max_tokens": 4}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "cba"}], "max_tokens": 4}
EXAMPLES: dict[str, Any] = {  # that are answered well, or would be
    "/generate": {"prompts": ["cba"], "sampling": SAMPLED, "n": 2, "stream": True},
    "/score": {"samples": [{"prompt": "p", "completion": "5", "answer": "5", "meta": {"a": 1}}]},
    "/sessions": {"sampling": SAMPLED, "max_calls": 2, "max_length": 64, "idle_timeout_s": 60.0},
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "m", "prompt": "cba", "max_tokens": 4},
    "/tokenize": {"model": "m", "prompt": "cba"},
    "/detokenize": {"model": "m", "tokens": [1, 2]},
    "/sleep": {}, "/heartbeat": {}, "/reload_weights": {}, "/v1/responses": {"input": "a"},
}  # fmt: skip
OTHER_PATHS = ("/", "/health", "/metrics", "/docs", "/openapi.json", "/upload/a/b", "/data",
    "/events?since=[]", "/curves?run=9&first=0&last=1", "/rollouts?run=0&name=..", "/tokens?run=0&name=a&id=b",
)  # fmt: skip
ODD_PATHS = ("//health", "/health/", "/%2e%2e/%2e%2e/etc/passwd", "/../etc/passwd", "/health%00", "/%ff%fe", "*", "",
    "http://evil.example/health", "/" + "a" * 9000, "/v1/../health", "/sessions//v1/models", "/health?" + "a=b&" * 900,
    "/sessions/%0a/v1/models", "/upload/..%2f..%2fx/COMPLETE", "/v1/models/%s%s%n", "/;/health", "/\u00e9")  # fmt: skip
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "get", "PRI", "\u00ff")
ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1e308, 10**400, 2**63, -(2**63), "", "a" * 5000, "\x00", "\ud800", [], {}, [[]],
    ["a"] * 500, {"a": {"b": []}}, "NaN", float("nan"), float("inf"), "../../x", 1.5, [None], "<script>")  # fmt: skip
ODD_HEADERS = ("Host: evil.example", "Origin: http://evil.example", "Content-Type: text/plain", "Accept: \u00ff",
    "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Content-Encoding: gzip", "Expect: 100-continue",
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: a\r\nSec-WebSocket-Version: 13", "Range: bytes=9-",
    "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings", "Content-Length: 0", "Content-Length: -1",
    "Content-Length: 99999999999", "X: " + "a" * 70_000, "\r\n".join(f"X-{i}: a" for i in range(300)), "No colon",
    "X : a", " folded", "X: a\x00b", "Authorization: Bearer", "Authorization: Basic YTpi", "Cookie: a=\u00ff",
    "X-Request-Id: \ud7ff", "Connection: close", "Content-Type: multipart/form-data; boundary=", "Accept-Encoding: *",
    "X-HTTP-Method-Override: DELETE", "Forwarded: for=127.0.0.1")  # fmt: skip


def bent(value: Any, dice: random.Random) -> Any:
    """Returns a JSON value with another one at a random place."""
    if isinstance(value, dict) and value and dice.random() < 0.8:
        name = dice.choice([*value])
        if dice.random() < 0.15:
            return {**value, dice.choice(["x", "", "n", "logprobs", "stop", "stream", "echo", "tools"]): bent(0, dice)}
        changed = {**value, name: bent(value[name], dice)}
        return changed if dice.random() < 0.8 else {k: v for k, v in value.items() if k != name}
    if isinstance(value, list) and value and dice.random() < 0.7:
        return [bent(value[0], dice), *value[1:]] * dice.choice([1, 1, 2, 60])
    return dice.choice(ODD_VALUES)


def body_for(path: str, dice: random.Random) -> bytes:
    example = EXAMPLES.get(path[path.find("/v1/") :] if "/v1/" in path else path) or dice.choice([*EXAMPLES.values()])
    for _ in range(dice.choice([0, 1, 1, 1, 2, 4])):
        example = bent(example, dice)
    text = json.dumps(example).encode()
    kind = dice.random()
    if kind < 0.05:
        return text[: dice.randrange(len(text) + 1)]
    if kind < 0.1:
        return bytes(byte ^ (dice.random() < 0.02) * dice.randrange(256) for byte in text)
    if kind < 0.13:
        return dice.choice([b"[" * 90_000, b'{"a":' * 9000, b"\xff\xfe", dice.randbytes(200), b"1" * 9000, b"null"])
    return text


def request(dice: random.Random, routes: list[tuple[str, str]]) -> list[bytes]:
    """Returns a request in the parts that are sent after one another."""
    method, path = dice.choice(routes)
    if dice.random() < 0.1:
        method = dice.choice(METHODS)
    body = b"" if method in ("GET", "HEAD") and dice.random() < 0.9 else body_for(path.partition("?")[0], dice)
    if dice.random() < 0.1:
        path = dice.choice(ODD_PATHS)
    lines = ["Host: localhost", *dice.sample(ODD_HEADERS, dice.choice([0, 0, 0, 1, 2]))]
    if TOKEN and dice.random() < 0.95:
        lines.append(f"Authorization: {dice.choice(['Bearer'] * 9 + ['bearer', 'Bearer Bearer', ''])} {TOKEN}")
    length = len(body)
    if dice.random() < 0.06:
        length += dice.choice([-1, 1, 5, 10**9])
    chunked = dice.random() < 0.1
    lines.append("Transfer-Encoding: chunked" if chunked else f"Content-Length: {length}")
    if chunked:
        size = dice.choice([b"%x" % len(body), b"%x;a=b" % len(body), b"-1", b"g", b"ffffffffffffffff", b"0"])
        body = size + b"\r\n" + body + dice.choice([b"\r\n0\r\n\r\n", b"\r\n0\r\nX: a\r\n\r\n", b"0", b"\r\n"])
    version = dice.choice(["HTTP/1.1"] * 12 + ["HTTP/1.0", "HTTP/2.0", "HTTP/9", ""])
    end = dice.choice(["\r\n"] * 15 + ["\n"])
    head = (end.join([f"{method} {path} {version}", *lines]) + end * 2).encode("utf-8", "replace")
    whole = head + body
    kind = dice.random()
    if kind < 0.03:
        return [whole[: dice.randrange(len(whole))]]  # nothing more comes
    if kind < 0.06:
        cut = dice.randrange(len(whole))
        return [whole[:cut], whole[cut:]]
    return [whole * 3] if kind < 0.08 else [whole]


async def answer(port: int, parts: list[bytes], deadline: float, leaves: bool) -> str:
    """Returns the status, CLOSED or LATE; a client that leaves waits for neither."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    line = b""
    try:
        async with asyncio.timeout(deadline):
            with contextlib.suppress(ConnectionError):
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0.01)
                if leaves:
                    return "client left"
                line = await reader.readline()
                ends = "HTTP/1.1" in repr(line) and await reader.read(1 << 16)
                del ends
    except TimeoutError:
        return LATE if not line else line.split()[1].decode()
    finally:
        writer.transport.abort()
    return line.split()[1].decode(errors="replace") if line.startswith(b"HTTP/1.") else CLOSED


def asked(url: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {TOKEN}"} if TOKEN else {}
    with urllib.request.urlopen(urllib.request.Request(f"{url}{path}", data, headers), timeout=120) as answered:
        return json.load(answered)


def known(url: str) -> Any:
    """Returns what must stay as it is."""
    if "/generate" in routes_of(url):
        return [[one["token_ids"] for one in many] for many in asked(url, "/generate", GREEDY)["completions"]]
    return asked(url, "/score", EXAMPLES["/score"])


def routes_of(url: str) -> dict[str, list[str]]:
    return {path: [*how] for path, how in asked(url, "/openapi.json")["paths"].items()}


async def fuzz(url: str, options: Any) -> bool:
    """Sends all; prints the figures; returns whether all is well."""
    port = int(url.rpartition(":")[2])
    routes = [(method.upper(), path) for path, how in routes_of(url).items() for method in how]
    routes += [("GET", path) for path in OTHER_PATHS]
    if ("POST", "/sessions") in routes:
        session = asked(url, "/sessions", {**EXAMPLES["/sessions"], "max_calls": 10**6})["id"]
        routes += [("POST", f"/sessions/{session}/v1/{what}") for what in ("chat/completions", "completions")]
    before = known(url)
    counts = collections.Counter[str]()
    bad = list[tuple[str, bytes]]()
    took = list[tuple[float, bytes]]()
    room = asyncio.Semaphore(options.at_once)

    async def one(number: int) -> None:
        dice = random.Random(f"{options.seed} {number}")
        parts = request(dice, routes)
        async with room:
            start = time.perf_counter()
            status = await answer(port, parts, options.deadline, leaves=dice.random() < 0.03)
            took.append((time.perf_counter() - start, parts[0][:80]))
        counts[status] += 1
        if status == LATE or status.startswith("5"):
            bad.append((status, b"".join(parts)))

    await asyncio.gather(*map(one, range(options.number)))
    print(", ".join(f"{status}: {count}" for status, count in sorted(counts.items())))
    for status, sent in bad[:40]:
        print(f"{status}: {sent[:600]!r}")
    is_as_before = known(url) == before
    print(f"{options.number} requests with seed {options.seed}, slowest {max(took)[0]:.2f} s: {max(took)[1]!r}")
    print(f"answers as before: {is_as_before}; 5xx or without an answer: {len(bad) or 'none'}")
    return is_as_before and not bad


@contextlib.contextmanager
def rewards() -> Iterator[str]:
    """Serves the reward exact_match during the body."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        config = Path(folder, "rewards.yaml")
        config.write_text("rewards: {functions: {exact_match: 1.0}}")
        with Command(
            ["serve-reward", str(config), "server.host=0.0.0.0", f"server.port={port}"], Path(folder, "log")
        ) as served:
            wait_for(lambda: "at http" in served.output(), "rewards are served")
            yield f"http://127.0.0.1:{port}"
            assert "Traceback" not in served.output(), served.output()[-3000:]


def main(options: Any) -> int:
    with contextlib.nullcontext(options.url) if options.url else rewards() as url:
        return 0 if asyncio.run(fuzz(url, options)) else 1


if __name__ == "__main__":
    sys.exit(main(OPTIONS))
