"""Look up the servers there are now: addresses of a DNS name, or lines of a file."""

import asyncio
import socket
from pathlib import Path

from hocket.common.machine import url_of
from hocket.common.tasks import look_up
from hocket.config.deployment import web_url
from hocket.errors import ServerError

LOOK_UP_S = 10.0
MAX_CHARACTERS = 1 << 20  # of a file: a device may have no end


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
