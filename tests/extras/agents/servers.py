"""Fake servers of agents, whose calls are what the agents ask there."""

import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

from hocket.client.member import Member
from hocket.client.pool import ServerPool
from hocket.envs import Task
from hocket.errors import ServerError
from hocket.extras.agents.play import Agents
from hocket.protocol import AgentCall, AgentRecord, Health, SessionRequest, SessionResponse
from hocket.rollout.episode import TokenBudget
from support import fakes
from support.episodes import limits


class FakeSession:
    """Answers every call of an agent with the tokens that its seed and its number decide."""

    def __init__(self, request: SessionRequest) -> None:
        self.request = request
        self.calls: list[AgentCall] = []
        self.cut_off = False

    def ask(self, *asked: int) -> list[int]:
        rng = random.Random(f"{self.request.sampling.seed}:{len(self.calls)}")
        token_ids = tuple(rng.randrange(100, 999) for _ in range(3))
        said = f"said {len(self.calls)}"
        completion = fakes.completion(*token_ids, logprobs=(-0.5, -0.25, -1.0), version=2 + len(self.calls), text=said)
        self.calls.append(AgentCall(id=f"answer {len(self.calls)}", prompt_token_ids=asked, completion=completion))
        return [*asked, *token_ids]


class FakeServers:
    """One server of agents, or several alike; their sessions by URL."""

    def __init__(self, servers: int = 1) -> None:
        self.sessions: dict[str, FakeSession] = {}
        self.open: list[str] = []
        self.most_open = 0
        self.lost = 0  # times that one is lost with its calls
        self.fails: dict[str, ServerError] = {}  # by server: why it opens no session, once
        self.opens = asyncio.Event()  # sessions wait for it
        self.opens.set()
        self.dead = False  # after that, until it is waited for
        self.down = lambda: None  # called then
        self.said: list[str] = []
        self.pool = ServerPool([], on_wait=self.waited, say=self.said.append)
        urls = [f"http://{name}" for name in "abc"[:servers]]
        self.pool.members = [Member(FakeServer(self, url)) for url in urls]  # type: ignore[arg-type]

    def waited(self, what: str, seconds: float) -> None:
        self.dead = False
        self.down()

    def agents(
        self,
        plays: Callable[[Task, FakeSession], Awaitable[Any]],
        *,
        timeout_s: float = 5.0,
        concurrency: int = 64,
        decode: Callable[[Sequence[int]], str] = str,
        budget: int = 0,
    ) -> Agents:
        """Returns what has an agent, a function of its task and session, play on these servers."""
        agent: Any = SimpleNamespace(
            run=lambda task: plays(task, self.sessions[task.base_url]), concurrency=concurrency
        )
        bounds, tokens = limits(max_length=64, timeout_s=timeout_s), TokenBudget(lambda: budget)
        return Agents(agent=agent, pool=self.pool, limits=bounds, decode=decode, budget=tokens)


@dataclasses.dataclass
class FakeServer:
    """One of the servers."""

    servers: FakeServers
    url: str

    async def health(self, *, timeout_s: float) -> Health:
        if self.servers.dead:
            raise ServerError("can't reach it", code="unreachable")
        return fakes.health(session=self.url)

    async def ask(self, request: SessionRequest, *, timeout_s: float) -> SessionResponse:
        if self.url in self.servers.fails:
            raise self.servers.fails.pop(self.url)
        number = str(len(self.servers.sessions))
        self.servers.sessions[f"{self.url}/sessions/{number}/v1"] = FakeSession(request)
        self.servers.open.append(number)
        self.servers.most_open = max(self.servers.most_open, len(self.servers.open))
        await self.servers.opens.wait()
        await asyncio.sleep(0)
        return SessionResponse(id=number, key=f"key {number}", model="the model")

    async def close_session(self, name: str, *, timeout_s: float) -> AgentRecord:
        await asyncio.sleep(0)
        self.servers.open.remove(name)
        if self.servers.lost:
            self.servers.lost -= 1
            self.servers.dead = True
            raise ServerError("can't reach http://a", code="unreachable")
        session = self.servers.sessions[f"{self.url}/sessions/{name}/v1"]
        return AgentRecord(calls=tuple(session.calls), cut_off=session.cut_off)
