"""An MCP server of the package's own classes: `mcp_server.py` answers over stdio, `mcp_server.py PORT` over HTTP."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from mcp.server import MCPServer

from hocket.common.arithmetic import compute

server = MCPServer("tests", log_level="ERROR")
count = 0


@server.tool()
def calculate(expression: str) -> str:
    """Computes an arithmetic expression."""
    return str(compute(expression)[0])


@server.tool()
def counted() -> int:
    """Tells how often it was called in this process."""
    global count
    count += 1
    return count


@server.tool()
def variable(name: str) -> str:
    """Tells an environment variable."""
    return os.environ.get(name, "none")


@server.tool()
def pid() -> int:
    """Tells the process."""
    return os.getpid()


@server.tool()
def sleep(seconds: float) -> None:
    """Waits."""
    time.sleep(seconds)


@server.tool()
def stay(file: str) -> None:
    """Writes the process into a file, and answers nothing."""
    Path(file).write_text(str(os.getpid()), encoding="utf-8")
    time.sleep(3600)


@server.tool()
def letters(number: int) -> str:
    """Tells many letters."""
    return "x" * number


@server.tool()
def complain(bytes: int) -> None:
    """Writes to stderr."""
    print("x" * bytes, file=sys.stderr, flush=True)


@server.tool()
def die() -> None:
    """Ends the server."""
    print("thinking\nRuntimeError: too much", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    http: dict[str, Any] = {"transport": "streamable-http", "port": int(sys.argv[1])} if sys.argv[1:] else {}
    server.run(**http)
