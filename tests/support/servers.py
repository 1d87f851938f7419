"""A server in memory, and pools of them."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from hocket import protocol
from hocket.client.discover import follow
from hocket.client.member import Member
from hocket.client.pool import ServerPool
from hocket.client.take_over import claim
from hocket.errors import ServerError
from hocket.protocol import Completion, ErrorBody, GenerateRequest, Health, ReloadResponse, SamplingParams, StreamLine
from support import fakes

SAMPLING = SamplingParams(max_tokens=10)


def error(code: str, status: int | None = None) -> ServerError:
    return ServerError(f"it is {code}", code=code, status=status)


def says_prompt_and_seed(prompt: Any, seed: int) -> Completion:
    """A text that tells the prompt's first token and the seed."""
    return fakes.completion(5, logprobs=(-0.5,), text=f"{prompt[0]} {seed}")


class FakeServer:
    """What ServerClient is to a real server: answers, and fails as it is told to. What loads weights is a subclass."""

    def __init__(
        self,
        url: str = "http://server",
        *,
        session: str = "s1",
        complete: Callable[[Any, int], Completion] = says_prompt_and_seed,
    ) -> None:
        self.url, self.session, self.complete = url, session, complete
        self.version, self.workers, self.status = 0, 1, "ready"
        self.failure: ErrorBody | None = None  # in /health
        self.is_closed = False  # it has left the pool
        self.dead = self.mute = False
        self.errors: dict[str, Exception] = {}  # to "health", "generate" or "reload"
        self.requests: list[Any] = []  # to generate or to reload
        self.played: list[str] = []  # texts of all completions
        self.looks = 0  # how often /health was asked
        self.beats: list[tuple[bool, bool]] = []  # take_over and leaving of each heartbeat
        self.works_for: str | None = None  # another trainer, until it is taken over
        self.go = asyncio.Event()  # completions wait for it
        self.go.set()
        self.cut: tuple[int, Exception | None] | None = None  # ends one answer after this many completions, and how

    def die(self) -> None:
        self.dead = True
        self.go.set()

    async def close(self) -> None:
        self.is_closed = True

    def check(self, asked: str) -> None:
        if self.dead:
            raise ServerError(f"can't reach {self.url}", code="unreachable")
        if asked in self.errors:
            raise self.errors[asked]

    async def health(self, *, timeout_s: float = 10.0) -> Health:
        self.looks += 1
        self.check("health")
        if self.mute:
            await asyncio.sleep(timeout_s)
            raise error("timeout")
        return fakes.health(
            status=self.status, version=self.version, session=self.session, workers=self.workers, error=self.failure
        )

    async def ask(self, request: Any, *, timeout_s: float) -> Any:
        if isinstance(request, protocol.HeartbeatRequest):
            self.beats.append((request.take_over, request.leaving))
            self.works_for = None if request.take_over else self.works_for
            if self.works_for is not None:
                raise error("other_trainer", 409)
            return await self.health(timeout_s=timeout_s)
        if isinstance(request, GenerateRequest):
            completions: list[list[Completion]] = [[] for _ in request.prompts]
            async for line in self.generate(request, timeout_s=timeout_s):
                completions[line.prompt].append(line.completion)
            return protocol.GenerateResponse(version=self.version, model="", completions=completions)
        self.requests.append(request)
        self.check("reload")
        return await self.reload(request, timeout_s)

    async def reload(self, request: protocol.ReloadRequest, timeout_s: float) -> ReloadResponse:
        raise NotImplementedError

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> AsyncGenerator[StreamLine, None]:
        self.requests.append(request)
        self.check("generate")
        if request.session != self.session:
            raise error("other_session", 409)
        seeds = request.seeds or [[request.sampling.seed or 0]] * len(request.prompts)
        asked = [(i, j, seed) for i, of_prompt in enumerate(seeds) for j, seed in enumerate(of_prompt)]
        for number, (i, j, seed) in enumerate(asked):
            if self.cut is not None and number == self.cut[0]:
                (_, failure), self.cut = self.cut, None
                if failure is None:
                    return  # as if the answer were whole
                raise failure
            try:
                await asyncio.wait_for(self.go.wait(), timeout_s)
            except TimeoutError:
                raise error("timeout") from None
            self.check("generate")
            done = self.complete(request.prompts[i], seed)
            self.played.append(done.text)
            yield StreamLine(prompt=i, index=j, completion=done)


class Pool(ServerPool):
    """Keeps what it says."""

    def __init__(
        self,
        servers: Sequence[FakeServer],
        *,
        find: Callable[[], Awaitable[Sequence[str]]] | None = None,
        trainer: str | None = None,
        take_over: bool = False,
        **options: Any,
    ) -> None:
        self.said: list[str] = []
        super().__init__([], **{"start_timeout_s": 10.0, "say": self.said.append} | options)
        self.members = [Member(server) for server in servers]  # type: ignore[arg-type]
        if find is not None:
            follow(self, find)
        if trainer is not None:
            claim(self, trainer, take_over=take_over)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)
