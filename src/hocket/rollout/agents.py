"""Episodes that the user's own code plays: it asks the model through an OpenAI-compatible URL, which records it.

Each episode has a session of its own on one of the servers. One that fails ends alone; one whose server was lost is
played again, and the time without any server does not count. Knows nothing of rewards, of HTTP and of how agents are
run.
"""

import asyncio
import copy
import ctypes
import dataclasses
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, runtime_checkable

from hocket.envs import Agent, Task
from hocket.errors import ServerError
from hocket.pool import MAX_LOSSES
from hocket.protocol import AgentRecord, SamplingParams
from hocket.rollout.budget import Budget
from hocket.rollout.coalescer import Generator
from hocket.rollout.episode import EpisodeError, Limits, Transcript
from hocket.rollout.joining import join
from hocket.rollout.played import Played, Wave
from hocket.system import as_completed, seed_of
from hocket.types import Prompt, Rollout

GRACE_S = 60.0
"""How long a server remembers a session after its agent's deadline: it is forgotten by us long before."""
CANCEL_S = 5.0
"""How long an agent that is cancelled may take to end."""


class Session(Protocol):
    """A base URL whose calls are recorded: hocket.pool.Session is one."""

    @property
    def base_url(self) -> str: ...
    @property
    def api_key(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def waited_s(self) -> float: ...
    async def close(self) -> AgentRecord: ...


@runtime_checkable
class Sessions(Protocol):
    """What agents need of a server: hocket.pool.ServerPool is one."""

    def session(
        self, sampling: SamplingParams, *, tokens: int, max_length: int, max_calls: int, idle_timeout_s: float
    ) -> AbstractAsyncContextManager[Session]: ...


class Agents:
    """Plays the episodes of a run.

    Args:
        agent: the user's code.
        limits: calls of an episode, tokens of each prompt with its completion, seconds until the agent must have ended.
        decode: writes tokens, for people.
        max_in_flight_tokens: as for `Episodes`; an agent counts with its prompt and one answer, as nobody here knows
            what it asks for.
    """

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(
        self,
        agent: Agent,
        *,
        limits: Limits,
        decode: Callable[[Sequence[int]], str],
        max_in_flight_tokens: int | None = None,
    ) -> None:
        self._agent = agent
        self._limits = limits
        self._decode = decode
        # Of all batches that are played at the same time:
        self._gate = asyncio.Semaphore(agent.concurrency)
        self._budget = Budget()
        self._max_in_flight_tokens = max_in_flight_tokens

    def play(self, wave: Wave, server: Generator) -> AsyncGenerator[Played, None]:
        """Yields every episode as it ends. One that is not over when its time is, has failed.

        Raises:
            ServerError: there is no server, or it refuses sessions.
        """
        assert isinstance(server, Sessions), "agents are played on servers with sessions"
        end = _Deadline(time.monotonic() + wave.timeout_s)
        self._budget.limit = lambda: self._max_in_flight_tokens or server.kv_tokens

        async def one(i: int, j: int) -> Played:
            prompt = wave.prompts[i]
            # Those who have passed these are done by the end.
            async with self._gate, self._budget.holding(len(prompt.token_ids) + wave.sampling.max_tokens):
                if end.over:
                    late = f"it could not begin within {wave.timeout_s:g} s (rollout.timeout_s)"
                    rollout = _rollout(prompt, (), None, f"agent: {late}: raise that, or env.concurrency")
                else:
                    rollout = await self._episode(prompt, server, wave.sampling, wave.number(i, j), end)
            return Played(prompt=i, sample=j, rollout=dataclasses.replace(rollout, id=wave.name(i, j)))

        return as_completed([one(i, j) for i, j in wave.pairs])

    async def _episode(
        self, prompt: Prompt, server: Sessions, sampling: SamplingParams, number: int, end: "_Deadline"
    ) -> Rollout:
        """Returns what was sampled, also where the agent failed."""
        before = ""
        for losses in itertools.count(1):
            returned: float | str | None = None
            error = None
            at = end.at
            async with server.session(
                sampling.model_copy(update={"seed": seed_of(sampling.seed, number)}),
                tokens=len(prompt.token_ids) + sampling.max_tokens,
                max_length=self._limits.max_length,
                max_calls=self._limits.max_turns,
                idle_timeout_s=self._limits.timeout_s + GRACE_S,
            ) as session:
                end.moves(at, session.waited_s)
                try:
                    returned = await self._run(prompt, session, seed_of(sampling.seed, number, 0), end)
                except EpisodeError as failed:
                    error = f"agent: {failed}"
                try:
                    record = await session.close()
                    break
                except ServerError as lost:
                    if losses == MAX_LOSSES or end.over:
                        error = f"{error}; " if error else "agent: "
                        return _rollout(prompt, (), returned, f"{error}what the model said is lost: {lost}")
                    before = f"; it was played again, as what the model had said was lost: {lost}"
        sequences = join(prompt, record.calls, self._decode)
        if error is None or not record.cut_off:
            return _rollout(prompt, sequences, returned, error and error + before)
        # Were it no part of its group, all that is short enough to end would look better than it is.
        return _rollout(prompt, sequences, 0.0, cut_off=True)

    async def _run(self, prompt: Prompt, session: Session, seed: int, end: "_Deadline") -> float | str | None:
        task = Task(
            messages=copy.deepcopy(prompt.messages or ()),  # others play the same prompt
            text=prompt.text,
            answer=prompt.answer,
            meta=copy.deepcopy(prompt.meta),
            seed=seed,
            base_url=session.base_url,
            api_key=session.api_key,
            model=session.model,
        )
        left_s = max(0.0, end.at - time.monotonic())
        running = asyncio.create_task(_contained(self._agent, task))
        try:
            in_time, _ = await asyncio.wait([running], timeout=min(self._limits.timeout_s, left_s))
        finally:  # also where the episode itself is cancelled
            ended = await _end(running)
        if not in_time:
            over = left_s < self._limits.timeout_s
            which = "rollout.timeout_s" if over else f"env.timeout_s={self._limits.timeout_s:g}"
            more = "" if ended else f"; nor had it {CANCEL_S:g} s after it was cancelled: it was left behind"
            raise EpisodeError(f"it was not done when {which} had passed{more}")
        if running.cancelled():
            raise EpisodeError("it was cancelled")
        return running.result()


@dataclasses.dataclass(slots=True)
class _Deadline:
    """When all episodes of a batch must be over, by time.monotonic; it moves by the time without any server."""

    at: float

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.at

    def moves(self, at: float, waited_s: float) -> None:
        """Says that an episode has waited so long for a server since the deadline was `at`.

        Those that many have waited for at the same time move it once.
        """
        self.at = max(self.at, at + waited_s)


async def _contained(agent: Agent, task: Task) -> float | str | None:
    try:
        return await agent.run(task)
    # An agent is anybody's code: whatever it raises ends this episode alone. A SystemExit would end the event loop.
    except (Exception, SystemExit) as error:
        raise EpisodeError(f"it raised {type(error).__name__}: {error}") from error


async def _end(running: "asyncio.Task[Any]") -> bool:
    """Cancels a task and returns whether it has ended; one that does not is nobody's any more."""
    if not running.done():
        running.cancel()
        await asyncio.wait([running], timeout=CANCEL_S)
    running.add_done_callback(lambda task: task.cancelled() or task.exception())  # or asyncio reports it as overlooked
    if not running.done():
        # The end of the event loop would wait for it, and that of the process for its code to take a GeneratorExit.
        asyncio._unregister_task(running)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(running))
    return running.done()


def _rollout(
    prompt: Prompt,
    transcripts: Sequence[Transcript],
    returned: float | str | None,
    error: str | None = None,
    *,
    cut_off: bool = False,
) -> Rollout:
    """Returns the episode, its id still empty; without any call it is the prompt alone."""
    *others, last = [transcript.sequence() for transcript in transcripts or [Transcript(prompt)]]
    if isinstance(returned, str):
        last = dataclasses.replace(last, text=returned)
    if cut_off:
        last = dataclasses.replace(last, finish_reason="length")
    reward = returned if isinstance(returned, float) else None
    return Rollout(id="", prompt=prompt, sequences=(*others, last), reward=reward, error=error)
