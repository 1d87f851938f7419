"""What episodes are played with: a model, environments, servers of agents; and rollouts for rewards to score."""

import asyncio
import dataclasses
import functools
import random
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer

from hocket.client.batcher import Turn
from hocket.client.pool import Deadline, Member, ServerPool
from hocket.config import DataConfig
from hocket.data.prompts import renderer_of
from hocket.data.renderer import Renderer
from hocket.envs import Action, Environment, Observation, Step, Task
from hocket.errors import ServerError
from hocket.extras.agents.play import Agents
from hocket.protocol import AgentCall, AgentRecord, Completion, Health, SessionRequest, SessionResponse, ToolCall
from hocket.rewards import RewardScorer
from hocket.rollout.collect import Seat
from hocket.rollout.episode import Limits, TokenBudget
from hocket.types import Message, Prompt, Rollout, Score, TokenSequence
from support import fakes
from support.batches import SAMPLING
from support.processes import ROOT

Scorers = Callable[..., RewardScorer]
Scores = Callable[..., Awaitable[Sequence[Score]]]
Register = Callable[..., None]
"""Fixtures of tests/rewards."""
END = 1
"""The token that ends a turn in checkpoints/tiny-tools."""


@functools.cache
def renderer() -> Renderer:
    """Returns what renders the chats of checkpoints/tiny-tools."""
    return renderer_of(DataConfig(), AutoTokenizer.from_pretrained(ROOT / "checkpoints" / "tiny-tools"))


def user(content: Any) -> list[Message]:
    """Returns the messages of a user who says this."""
    return [{"role": "user", "content": content}]


def limits(**changes: Any) -> Limits:
    """Returns limits that a short episode stays within, with changes."""
    return Limits(**{"max_turns": 6, "max_length": 256, "timeout_s": 5.0} | changes)


def seat(id: str = "s/0/0") -> Seat:
    """Returns the place of an episode that has a minute."""
    return Seat(id=id, group=id.rpartition("/")[0], number=0, sampling=SAMPLING, deadline=Deadline(60))


def seated(seat: Seat, seed: int) -> Seat:
    """Returns the place with the random numbers of a seed."""
    return dataclasses.replace(seat, sampling=seat.sampling.model_copy(update={"seed": seed}))


def action(text: str = "", *tool_calls: ToolCall) -> Action:
    """Returns what a model wrote in a turn that ended by itself."""
    return Action(text=text, token_ids=(1,), finish_reason="stop", tool_calls=tool_calls)


def make_rollout(
    text: str = "abcd",
    *,
    answer: str | None = "abcd",
    id: str = "step 1/0/0",
    num_sampled: int = 3,
    reward: float | None = None,
) -> Rollout:
    """Returns a rollout of one turn to be scored."""
    chat = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sort: dbca"})
    prompt = Prompt(
        id="rows.jsonl:1", token_ids=(1, 2), messages=chat, text="Sort: dbca", answer=answer, meta={"level": 2}
    )
    sequence = TokenSequence(
        token_ids=(1, 2, *range(10, 10 + num_sampled)),
        mask=(False, False) + (True,) * num_sampled,
        logprobs=(0.0, 0.0) + (-0.5,) * num_sampled,
        text=text,
    )
    return Rollout(id=id, prompt=prompt, reward=reward, sequences=(sequence,))


async def until(holds: Callable[[], object]) -> None:
    """Returns when a condition holds."""
    async with asyncio.timeout(60):  # which only ends a test that fails anyway
        while not holds():
            await asyncio.sleep(0.01)


def sampled(seed: int, max_tokens: int) -> Completion:
    """Returns a turn of one to six tokens, which the seed decides."""
    rng = random.Random(seed)
    length = rng.randint(1, 6)
    body = [rng.randrange(5, 260) for _ in range(length)]
    token_ids = tuple([*body[:-1], END][:max_tokens])
    return Completion(
        token_ids=token_ids,
        logprobs=tuple(-rng.randrange(1 << 20) / (1 << 20) for _ in token_ids),
        finish_reason="stop" if token_ids[-1] == END else "length",
        versions=((seed % 3 + 1, 0, len(token_ids)),),
        text=f"text of {seed}",
    )


class FakeEngine:
    """Answers turns, in random order if it takes time; keeps each with its answer."""

    def __init__(
        self,
        says: Callable[[Turn], Completion] = lambda turn: sampled(turn.seed, turn.sampling.max_tokens),
        *,
        delay_s: float = 0.0,
    ) -> None:
        self.says, self.delay_s = says, delay_s
        self.turns: list[tuple[Turn, Completion]] = []

    async def ask(self, turn: Turn) -> Completion:
        assert turn.place.startswith(f"{turn.group}/")
        await asyncio.sleep(self.delay_s * random.random())
        completion = self.says(turn)
        self.turns.append((turn, completion))
        return completion

    def seen(self, turn: int) -> str:
        """Returns what the model saw before one of its turns."""
        return renderer().decode(self.turns[turn][0].token_ids)


class Scripted(Environment):
    """Says this in turn, whatever the model does; keeps what it did."""

    def __init__(self, *steps: Step, first: Observation | None = None) -> None:
        self.steps, self.first = list(steps), first
        self.actions: list[Action] = []

    async def reset(self, prompt: Prompt, seed: int) -> Observation | None:
        return self.first

    async def step(self, action: Action) -> Step:
        self.actions.append(action)
        return self.steps[len(self.actions) - 1] if len(self.actions) <= len(self.steps) else Step(done=True)


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
