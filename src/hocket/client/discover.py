"""Follow the servers that come and go (server.discover): addresses of a DNS name, or lines of a file."""

import asyncio
import functools
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from hocket.client.pool import ServerPool
from hocket.common.machine import url_of
from hocket.common.tasks import look_up
from hocket.config.deployment import web_url
from hocket.errors import ServerError

FIND_S = 5.0  # between look-ups
LOOK_UP_S = 10.0
MAX_CHARACTERS = 1 << 20  # of a file: a device may have no end


def follow(pool: ServerPool, find: Callable[[], Awaitable[Sequence[str]]]) -> None:
    """Have a pool follow what `find` returns: base URLs. It raises ServerError where there are none."""
    pool.is_listed = False
    pool.not_found = "none is found yet"
    pool.repeat(FIND_S, functools.partial(_look_up, pool, find))


async def _look_up(pool: ServerPool, find: Callable[[], Awaitable[Sequence[str]]]) -> None:
    try:
        await _update(pool, await find())
        pool.not_found = ""
    except Exception as error:  # noqa: BLE001 - the run goes on with what it has
        if not pool.not_found:
            pool.say(f"{error}. Those known so far are kept")
        pool.not_found = str(error)


async def _update(pool: ServerPool, urls: Sequence[str]) -> None:
    """Add servers; drop those that have left and are out: a scheduler also takes out one that is slow to answer."""
    known = {member.url for member in pool.members}
    for url in dict.fromkeys(urls):
        if url not in known:
            pool.add(url)
    for member in [*pool.members]:
        if member.is_resting and not member.in_flight and member.url not in urls:
            pool.say(f"server {member.url} has left: {member.reason}")
            await pool.drop(member)


async def find_servers(where: str) -> list[str]:
    """Return URLs. Raises ServerError where there are none."""
    problem = "it names none"
    try:
        async with asyncio.timeout(LOOK_UP_S):
            if found := await look_up(_in_file if "/" in where else _at_name, where):
                return found
    except TimeoutError:
        problem = f"there was no answer in {LOOK_UP_S:g} s; is its disk gone?"
    except (OSError, ValueError) as error:
        problem = str(error)
    raise ServerError(f"server.discover={where} finds no server: {problem}", code="unreachable")


def _in_file(path: str) -> list[str]:
    with Path(path).open(encoding="utf-8") as file:
        text = file.read(MAX_CHARACTERS)
    if len(text) == MAX_CHARACTERS:
        raise ValueError(f"it has {MAX_CHARACTERS:,} characters or more: is it the right file?")
    urls = (line.partition("#")[0].strip().rstrip("/") for line in text.splitlines())
    return [web_url(url) for url in urls if url]


def _at_name(name_and_port: str) -> list[str]:
    name, _, port = name_and_port.rpartition(":")
    found = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
    family = min(entry[0] for entry in found)  # IPv4 if any: a server with both would count twice
    addresses = [str(entry[4][0]) for entry in found if entry[0] == family]
    return [url_of(address, int(port)) for address in addresses]
