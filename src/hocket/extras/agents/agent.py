"""Run the user's own code as an episode: a function or a program that asks the model through a URL
like OpenAI's."""

import asyncio
import contextlib
import json
import numbers
import os
import re
import shlex
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import IO, Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field

from hocket.common.files import last_lines
from hocket.common.processes import contained, without_secrets
from hocket.common.registry import Registry
from hocket.common.shell import bypass_proxies
from hocket.envs.base import Environment, environment, invoke
from hocket.errors import ConfigError
from hocket.extras.agents.task import Task

AGENTS: Registry[Callable[..., Any]] = Registry("agent")
agent = AGENTS.register
"""Register a function, plain or async, as an agent (decorator).

It is called with a Task, and plays one episode. It returns the reward (a number), a text to score,
or None: then the last turn is scored.

Args:
    name: its name in `env.function`, with `env.name=agent`.

Example: a plugin file whose agent sends the prompt once.

    import openai

    from hocket.envs import Task, agent

    client = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")


    @agent("one_call")
    async def one_call(task: Task) -> str:
        policy = client.with_options(base_url=task.base_url, api_key=task.api_key)
        answer = await policy.chat.completions.create(model=task.model, messages=task.messages)
        return answer.choices[0].message.content or ""
"""
MAX_OUTPUT_MIB = 256  # of stdout and stderr of a program
LOOK_S = 1.0  # seconds between checks of its size


@environment("agent")
class Agent(Environment):
    """The environment `agent`: a function or a program of the user plays the episode.

    Args:
        function: name of a function that `agent` has registered; or
        command: a program. It reads the task as JSON, and finds the URL in its environment.
        concurrency: most episodes at a time.
    """

    keeps_messages = False

    def __init__(
        self,
        function: str | None = None,
        command: str | None = None,
        concurrency: Annotated[int, Field(ge=1)] = 64,
    ) -> None:
        if (function is None) == (command is None):
            raise ValueError("set either function or command")
        self.concurrency = concurrency
        self._play: Callable[[Task], Awaitable[Any]]
        if function is not None:
            self._play = partial(_call, AGENTS.get(function))
        if command is not None:
            words = shlex.split(command)
            if shutil.which(next(iter(words), "")) is None:
                raise ValueError(
                    f"there is no program {command!r}; is it installed, and on the PATH?"
                )
            self._play = partial(_run, words)

    def player(self, **parts: Any) -> Callable[..., Awaitable[Any]]:
        """Play episodes in sessions of the server, which record what is asked."""
        from hocket.extras.agents.play import Agents

        if parts["limits"].history is not None:
            raise ConfigError("env.history: an agent shortens its chat itself; leave it out")
        return Agents(agent=self, **parts).play

    async def run(self, task: Task) -> float | str | None:
        """Play one episode; cancellation ends a program."""
        bypass_proxies([urlsplit(task.base_url).hostname or ""])
        returned = await self._play(task)
        if isinstance(returned, numbers.Real):
            return float(returned)
        if isinstance(returned, str | None):
            return returned
        raise TypeError(f"an agent returns a number, text or None, not {type(returned).__name__}")


async def _call(function: Callable[..., Any], task: Task) -> Any:
    return await invoke(function, task=task)


async def _run(command: Sequence[str], task: Task) -> float | str | None:
    """Run a program: JSON on stdin, the model in its environment, the result as its last line."""
    request = {
        "messages": task.messages,
        "text": task.text,
        "answer": task.answer,
        "meta": task.meta,
        "seed": task.seed,
    }
    variables = {
        "OPENAI_BASE_URL": task.base_url,
        "OPENAI_API_KEY": task.api_key,
        "OPENAI_MODEL": task.model,
        "ANTHROPIC_BASE_URL": task.anthropic_url,
        "ANTHROPIC_API_KEY": task.api_key,
        "ANTHROPIC_MODEL": task.model,
    }
    variables["PYTHONIOENCODING"] = "utf-8"  # its output is read so
    # Files, not pipes: the end of a pipe waits for every process that the program leaves running.
    with (
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,
    ):
        stdin.write(json.dumps(request, default=str).encode())
        stdin.seek(0)
        process = await asyncio.create_subprocess_exec(
            *contained(command),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=without_secrets() | variables,
            start_new_session=True,
        )
        try:
            status = await _status(process, stdout, stderr)
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                process.terminate()
            await process.wait()
            # The process that contains it has killed what the program left running. Where the
            # program killed that process first, its group may still run.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if status != 0:
            raise RuntimeError(
                f"{shlex.join(command)} ended with status {status}: {last_lines(stderr)}"
            )
        line = last_lines(stdout)
        reward = re.fullmatch(r"reward:\s*(\S+)", line)
        if reward:
            return float(reward[1])
        return line or None  # any other line is an answer, even a number


async def _status(process: asyncio.subprocess.Process, *outputs: IO[bytes]) -> int:
    """Wait for a program and return its status. Raise RuntimeError if it writes too much."""
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                return await process.wait()
        if sum(os.fstat(file.fileno()).st_size for file in outputs) > MAX_OUTPUT_MIB << 20:
            raise RuntimeError(f"it wrote more than {MAX_OUTPUT_MIB} MiB to stdout and stderr")
