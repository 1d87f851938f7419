"""Tools of MCP servers: real servers of the package's own classes, over stdio and HTTP, that are killed meanwhile."""

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hocket.common.redaction import redacted
from hocket.envs import tool
from hocket.envs.base import bind
from hocket.errors import ConfigError
from hocket.extras.tools.mcp import LostError
from hocket.extras.tools.tools import Tools
from hocket.protocol import ToolCall
from support.episodes import action, until
from support.processes import ROOT, START_S, free_port, is_gone, wait_for

PROGRAM = Path(__file__).with_name("mcp_server.py")
COMMAND = f"{sys.executable} {PROGRAM}"
STDIO: dict[str, Any] = {"command": COMMAND, "env": ["PYTHONPATH"]}
needs_mcp = pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="the package mcp is not installed")


def call(tool: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=tool, arguments=json.dumps(arguments))


def tools(*servers: dict[str, Any], **options: Any) -> Tools:
    made = bind("tools", {"mcp": servers, "parser": "hermes", **options})()
    assert isinstance(made, Tools)
    return made


async def said(episode: Tools, *calls: ToolCall) -> Sequence[str]:
    return [message["content"] for message in (await episode.step(action("", *calls))).messages]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), *sys.path]))
    monkeypatch.setenv("A_KEY", "abcdefgh-1234")


@contextlib.contextmanager
def serving(way: str) -> Iterator[dict[str, Any]]:
    """Gives the settings of a server; that over HTTP is started again whenever it was killed."""
    if way == "stdio":
        yield STDIO
        return
    port = free_port()
    running: list[subprocess.Popen[bytes]] = []
    ends = threading.Event()

    def serve() -> None:
        while not ends.is_set():
            command = [sys.executable, str(PROGRAM), str(port)]
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            running[-1].wait()

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        wait_for(answers, "the server answers")
        yield {"url": f"http://127.0.0.1:{port}/mcp"}
    finally:
        ends.set()
        while thread.is_alive():  # it may be starting another one
            running[-1].kill()
            thread.join(0.1)


@needs_mcp
async def test_tools_of_a_server_stand_beside_functions_and_answer_with_their_text(environment: None) -> None:
    stdio = {**STDIO, "env": ["PYTHONPATH", "A_KEY"], "tools": ["counted", "variable", "sleep", "pid"]}
    first, second = (tools(stdio, tools=["calculate"], call_timeout_s=60) for _ in range(2))
    assert first.toolbox is not None
    names = [tool["function"]["name"] for tool in first.toolbox.tools]
    assert names == ["calculate", "counted", "variable", "sleep", "pid"]
    assert first.toolbox.tools[2]["function"]["parameters"]["required"] == ["name"]
    calls = (call("calculate", expression="2*3"), call("counted"), call("variable", name="A_KEY"))
    assert await said(first, *calls) == ["6", "1", "abcdefgh-1234"]
    assert redacted("abcdefgh-1234") == "[secret]"
    assert await said(first, call("counted"), call("variable", name="HOCKET")) == ["2", "none"]
    assert await said(second, call("counted")) == ["1"]  # a session of its own, so a process
    first.step_timeout_s = 0.5
    assert await said(first, call("sleep", seconds=20)) == ["error: no result within 0.5 s"]
    first.step_timeout_s = 60
    (wrong,) = await said(first, call("variable", nome="x"))
    assert wrong.startswith("error: ")
    assert (first.metrics["tool/variable/calls"], first.metrics["tool/variable/errors"]) == (3, 1)
    (pid,) = await said(first, call("pid"))
    await asyncio.gather(first.close(), second.close())
    await until(lambda: not Path(f"/proc/{pid}").exists())  # the process ends with its session


@needs_mcp
@pytest.mark.parametrize("way", ["stdio", "http"])
async def test_episodes_whose_server_is_killed_twice_all_end_and_later_ones_have_a_new_session(
    way: str, environment: None, tmp_path: Path
) -> None:
    ends: Counter[str] = Counter()
    pids: list[int] = []
    at_once = asyncio.Semaphore(8)
    stays: list[Path] = []  # of calls that the server receives, and does not answer before it is killed

    async def episode() -> None:
        async with at_once:
            playing = tools({**server, "session": "shared"}, call_timeout_s=60)
            try:
                for _ in range(3):
                    (pid,) = await said(playing, call("pid"))
                    pids.append(int(pid))
                    one = call("stay", file=str(stays[-1])) if stays else call("sleep", seconds=0.05)
                    await said(playing, one)
                ends["whole"] += 1
            except LostError:
                ends["lost"] += 1
            finally:
                await playing.close()

    async def kill_twice() -> None:
        for received in (tmp_path / "first", tmp_path / "second"):
            stays.append(received)  # until one is received: the first may meet the server that has just been killed
            pid = ""
            while not pid:
                await asyncio.sleep(0.02)
                pid = received.read_text(encoding="utf-8") if received.exists() else ""
            stays.clear()
            pids.append(int(pid))  # its first call may have been the one that stays: then no episode has read its pid
            os.kill(int(pid), signal.SIGKILL)

    with serving(way) as server:
        async with asyncio.timeout(START_S):
            await asyncio.gather(kill_twice(), *(episode() for _ in range(40)))
    assert sum(ends.values()) == 40
    assert min(ends["lost"], ends["whole"]) >= 2
    assert len({*pids}) == 3


@needs_mcp
async def test_calls_that_a_dead_server_never_received_are_made_again(environment: None) -> None:
    with serving("http") as server:
        first, second = (tools({**server, "session": "shared"}) for _ in range(2))
        (pid,) = await said(first, call("pid"))
        os.kill(int(pid), signal.SIGKILL)
        await until(lambda: is_gone(pid))
        await asyncio.sleep(0.1)  # in which the client reads that its connection has ended, before it sends anything
        assert {pid, *await said(second, call("pid"), call("pid"))} > {pid}
        ends = await asyncio.gather(*(said(first, call("die")) for _ in range(2)), return_exceptions=True)
        assert [type(end) for end in ends] == [LostError] * 2  # they may have been received


@needs_mcp
async def test_with_a_lost_server_the_turns_other_calls_end_and_the_error_has_what_it_wrote(environment: None) -> None:
    ended = []

    @tool
    async def slow_of_mcp_tests() -> None:
        """Waits."""
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("slow")

    playing = tools(STDIO, tools=["slow_of_mcp_tests"])
    with pytest.raises(LostError, match=r"is lost: MCPError: Connection closed \| .*RuntimeError: too much"):
        await said(playing, call("slow_of_mcp_tests"), call("die"))
    assert ended == ["slow"]
    await playing.close()


@needs_mcp
@pytest.mark.parametrize("way", ["stdio", "http"])
async def test_an_answer_of_megabytes_is_an_answer(way: str, environment: None) -> None:
    with serving(way) as server:
        playing = tools(server, max_result=10**7)
        (answer,) = await said(playing, call("letters", number=3_000_000))
        await playing.close()
    assert len(answer) == 3_000_000


@needs_mcp
async def test_a_server_that_does_not_start_again_is_lost_within_the_time_of_a_call(
    environment: None, tmp_path: Path
) -> None:
    mark = tmp_path / "started"
    command = f"sh -c 'if [ -e {mark} ]; then exec sleep 99; fi; touch {mark}; exec {COMMAND}'"
    playing = tools({**STDIO, "command": command}, call_timeout_s=0.5)
    async with asyncio.timeout(60):
        with pytest.raises(LostError, match=r"is lost: TimeoutError"):
            await said(playing, call("pid"))


@needs_mcp
async def test_what_a_server_writes_to_stderr_does_not_fill_the_disk(environment: None) -> None:
    playing = tools(STDIO)
    (pid,) = await said(playing, call("pid"))
    kept = []
    for _ in range(8):
        await said(playing, call("complain", bytes=1 << 19))
        kept.append(Path(f"/proc/{pid}/fd/2").stat().st_size)
    assert max(kept) < 3 << 20
    with pytest.raises(LostError, match=r"Connection closed \| (x+ \| )?thinking \| RuntimeError"):
        await said(playing, call("die"))


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ({}, "set either command or url"),
        ({"command": "a", "url": "b"}, "set either command or url"),
        ({"comand": "a"}, "no option 'comand' .did you mean 'command'"),
        ({"command": "a", "session": "each"}, "session"),
        ({"command": "a", "env": "NOT_SET"}, "the environment variable NOT_SET, which is not set: export it"),
        ({"url": "http://[", "headers": {"Authorization": "NOT_SET"}}, "NOT_SET, which is not set"),
        ({"command": "no-such-program"}, "is lost: .* FileNotFoundError: .*; try by hand whether it starts"),
        ({"url": "http://127.0.0.1:9/mcp"}, "is lost: ConnectError: .*, or answers at that URL"),
    ],
)
@needs_mcp
def test_wrong_settings_are_refused_at_the_start(server: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        tools(server)


def test_without_the_package_the_fix_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"env\.mcp needs the package mcp: \.venv/bin/pip install mcp"):
        tools({"command": "a"})
    with pytest.raises(ConfigError, match="it has no tools: name some under tools, or servers under mcp"):
        tools()
