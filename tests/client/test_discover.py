"""Where servers are looked up: names through a resolver in memory, and files."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from hocket.client.discover import find_servers
from hocket.errors import ServerError
from support.processes import ROOT


def resolve(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[tuple[str, int]]:
    """Has the resolver answer with these addresses, or do that; returns what it is asked."""
    asked: list[tuple[str, int]] = []

    def getaddrinfo(name: str, port: int, *, type: int) -> list[tuple[Any, ...]]:
        asked.append((name, port))
        addresses = answer() if callable(answer) else answer
        family = {True: socket.AF_INET6, False: socket.AF_INET}
        return [(family[":" in one], type, 6, "", (one, port, *[0] * 2 * (":" in one))) for one in addresses]

    monkeypatch.setattr("hocket.client.discover.socket.getaddrinfo", getaddrinfo)
    return asked


async def test_every_address_of_a_name_is_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = resolve(monkeypatch, ["10.0.0.7", "10.0.0.5"])
    assert await find_servers("server:8000") == ["http://10.0.0.7:8000", "http://10.0.0.5:8000"]
    assert asked == [("server", 8000)]
    resolve(monkeypatch, ["fd00::1", "fd00::2"])
    assert await find_servers("server:8000") == ["http://[fd00::1]:8000", "http://[fd00::2]:8000"]
    resolve(monkeypatch, ["fd00::1", "10.0.0.5"])  # of one server
    assert await find_servers("server:8000") == ["http://10.0.0.5:8000"]


async def test_a_name_without_an_address_is_an_error_with_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> list[str]:
        raise socket.gaierror(-2, "Name or service not known")

    resolve(monkeypatch, unknown)
    says = r"server\.discover=server:8000 finds no server: .*Name or service not known"
    with pytest.raises(ServerError, match=says) as raised:
        await find_servers("server:8000")
    assert raised.value.code == "unreachable"


async def test_a_resolver_that_hangs_is_waited_for_until_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.client.discover.LOOK_UP_S", 0.05)
    ended = threading.Event()
    resolve(monkeypatch, lambda: [str(ended.wait(30))])
    try:
        with pytest.raises(ServerError, match=r"finds no server: there was no answer in 0\.05 s"):
            await find_servers("server:8000")
    finally:
        ended.set()


LOOK = """
import asyncio, sys, threading
from hocket.client import discover
discover.LOOK_UP_S = 0.1
for _ in range(3):
    try:
        asyncio.run(discover.find_servers(sys.argv[1]))
    except Exception as error:
        print(error)
print(threading.active_count())
"""


def test_a_pipe_that_nobody_writes_holds_up_neither_a_look_up_nor_the_end_of_the_process(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "servers")
    command = [sys.executable, "-c", LOOK, str(tmp_path / "servers")]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=env)
    *looks, threads = done.stdout.splitlines()
    assert [look.count("no answer in 0.1 s; is its disk gone?") for look in looks] == [1] * 3
    assert threads == "2"  # the three wait for one thread


async def test_a_file_has_a_url_per_line_with_comments_and_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "servers"
    file.write_text("# first rack\nhttp://10.0.0.5:8000\n\n  https://gpu.example/a/  # ours\n")
    assert await find_servers(str(file)) == ["http://10.0.0.5:8000", "https://gpu.example/a"]
    file.write_text("http://10.0.0.6:8000")
    assert await find_servers(str(file)) == ["http://10.0.0.6:8000"]
    for text, problem in (
        ("# none\n", "it names none"),
        ("http://a:80x0\n", "Port could not be cast to integer value as '80x0'"),
        ("http://a:1\n10.0.0.5:8000\n", "must begin with http:// or https:// and a host, got '10.0.0.5:80"),
        ("http://a b\n", "must begin with http:// or https:// and a host, got 'http://a b'"),
    ):
        file.write_text(text)
        with pytest.raises(ServerError) as raised:
            await find_servers(str(file))
        assert str(raised.value).startswith(f"server.discover={file} finds no server: {problem}")
    file.unlink()
    with pytest.raises(ServerError, match=f"server.discover={file} finds no server: .*No such file"):
        await find_servers(str(file))


async def test_a_file_without_an_end_is_an_error() -> None:
    with pytest.raises(ServerError, match="it has 1,048,576 characters or more: is it the right file"):
        await find_servers("/dev/zero")
