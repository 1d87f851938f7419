"""Follow servers that come and go (server.discover): a DNS name's addresses, or a file's lines."""

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

FIND_S = 5.0  # seconds between look-ups
LOOK_UP_S = 10.0  # seconds that one look-up may take
MAX_CHARACTERS = 1 << 20  # longest file that is read: a device in its place may have no end


def follow(pool: ServerPool, find: Callable[[], Awaitable[Sequence[str]]]) -> None:
    """Keep a pool's servers to those that `find` lists.

    Args:
        pool: The pool, before it is opened.
        find: Looks up the base URLs of all servers. Raises ServerError where there are none.
    """
    pool.is_listed = False
    pool.not_found = "none is found yet"
    pool.repeat(FIND_S, functools.partial(_look_up, pool, find))


async def _look_up(pool: ServerPool, find: Callable[[], Awaitable[Sequence[str]]]) -> None:
    try:
        await _update(pool, await find())
        pool.not_found = ""
    except Exception as error:  # noqa: BLE001 - the run goes on with the servers that it has
        # A look-up that fails again and again is reported once, until one succeeds.
        is_first_failure = not pool.not_found
        if is_first_failure:
            pool.say(f"{error}. Those known so far are kept")
        pool.not_found = str(error)


async def _update(pool: ServerPool, urls: Sequence[str]) -> None:
    """Add new servers, and drop those that are no longer listed and do not work.

    One that still works is kept: a scheduler also unlists a server that is slow to answer.
    """
    member_urls = {member.url for member in pool.members}
    for url in dict.fromkeys(urls):  # without doubles, in order
        if url not in member_urls:
            pool.add(url)
    for member in list(pool.members):  # a copy, as `drop` changes the list
        if member.is_resting and not member.in_flight and member.url not in urls:
            pool.say(f"server {member.url} has left: {member.reason}")
            await pool.drop(member)


async def find_servers(where: str) -> list[str]:
    """Look up base URLs: the lines of a file if `where` has a slash, else a name's addresses.

    Raises:
        ServerError: There are none, or the look-up failed or took longer than LOOK_UP_S.
    """
    problem = "it names none"
    try:
        async with asyncio.timeout(LOOK_UP_S):
            urls = await look_up(_in_file if "/" in where else _at_name, where)
        if urls:
            return urls
    except TimeoutError:
        problem = f"there was no answer in {LOOK_UP_S:g} s; is its disk gone?"
    except (OSError, ValueError) as error:
        problem = str(error)
    raise ServerError(f"server.discover={where} finds no server: {problem}", code="unreachable")


def _in_file(path: str) -> list[str]:
    """Read base URLs, a line each; the text after a # is a comment."""
    with Path(path).open(encoding="utf-8") as file:
        text = file.read(MAX_CHARACTERS)
    if len(text) == MAX_CHARACTERS:
        raise ValueError(f"it has {MAX_CHARACTERS:,} characters or more: is it the right file?")
    urls = []
    for line in text.splitlines():
        url = line.partition("#")[0].strip().rstrip("/")
        if url:
            urls.append(web_url(url))
    return urls


def _at_name(name_and_port: str) -> list[str]:
    """Resolve a DNS name: every address is a server, all at the same port."""
    name, _, port = name_and_port.rpartition(":")
    entries = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
    family = min(entry[0] for entry in entries)  # IPv4 if any: a server with both counts once
    addresses = [str(entry[4][0]) for entry in entries if entry[0] == family]
    return [url_of(address, int(port)) for address in addresses]
