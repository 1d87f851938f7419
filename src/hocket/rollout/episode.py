"""Play one episode: model and environment take turns in one flat sequence of tokens.

The model's go in exactly as sampled; the environment's messages are rendered to tokens that follow.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from hocket.client.batcher import Turn
from hocket.common.tasks import seed_of
from hocket.data.renderer import Images, Renderer, TooLongError
from hocket.envs import Action, Environment, Observation, Step
from hocket.envs.base import History
from hocket.errors import ServerError
from hocket.protocol import Completion, SamplingParams
from hocket.rollout.collect import Seat
from hocket.rollout.transcript import Transcript
from hocket.types import Image, Message, Prompt, Rollout, TokenSequence

RequestTurn = Callable[[Turn], Awaitable[Completion]]
"""Has the model take a turn: Batcher.ask."""
MAX_SHORTENED = 16  # times that history is shortened until it fits
_RENDERING = ThreadPoolExecutor(1, "render")  # two threads must not use a tokenizer at once


class EpisodeError(Exception):
    """Environment or agent failed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where an episode is cut off."""

    max_turns: int
    max_length: int  # tokens of the whole sequence
    timeout_s: float  # in the environment, or of an agent
    history: History | None = None  # shortens what outgrows max_length; None: the episode ends there


class TokenBudget:
    """FIFO token budget: an episode starts when its tokens fit, or when no other is under way."""

    def __init__(self, limit: Callable[[], int] = lambda: 0) -> None:
        self._limit = limit  # at the moment; 0 where there is none
        self.held = 0
        self._first_in_line = asyncio.Lock()
        self._changed = asyncio.Event()

    async def start(self, tokens: int) -> None:
        """Wait for room, and hold the tokens."""
        async with self._first_in_line:
            while self.held and 0 < self._limit() < self.held + tokens:
                self._changed.clear()
                await self._changed.wait()
            self.held += tokens

    def change(self, tokens: int) -> None:
        """Hold more tokens, or fewer; an episode that has begun never waits."""
        self.held += tokens
        self._changed.set()


def most_tokens(prompt: Prompt, sampling: SamplingParams) -> int:
    return len(prompt.token_ids) + sampling.max_tokens


def late(seat: Seat, failed: ServerError) -> str:
    """Return the error of an episode that a failure of the servers ends after its deadline; raise an earlier one."""
    if not seat.deadline.over:
        raise failed
    return f"the episode was not over within {seat.deadline.seconds:g} s (rollout.timeout_s): {failed}"


@dataclasses.dataclass
class Episode:
    """One episode; it is a whole sequence after every turn, also where the next one fails."""

    prompt: Prompt
    seat: Seat
    make: Callable[[], Environment]  # for it alone
    ask: RequestTurn
    renderer: Renderer  # of the prompt's data
    limits: Limits
    budget: TokenBudget

    def __post_init__(self) -> None:
        self.transcript = Transcript(self.prompt.token_ids, self.prompt.opening, self.prompt.images)
        self._pictures: Sequence[Any] = ()  # of an observation, as the environment gives them
        self._images: Images = ()  # made of them
        self._ended: list[TokenSequence] = []  # whose history was shortened
        self._began = [*(self.prompt.messages or ())]
        self._since: Sequence[Message] = ()  # messages after these, in the prompt of the transcript,
        self._known = 0  # and how many of its dialogue, too
        self.reward = 0.0
        self._environment = Environment()  # until it is made
        self._left_s = self.limits.timeout_s
        self._num_asked = 0
        self._held = most_tokens(self.prompt, self.seat.sampling)

    async def play(self) -> Rollout:
        """Play it; one that fails or is late has an error. Raise only ServerError."""
        error = None
        await self.budget.start(self._held)
        try:
            await self._play()
        except EpisodeError as failed:
            error = f"environment: {failed}"
        except ServerError as failed:
            error = late(self.seat, failed)
        finally:
            self._hold(0)
        return Rollout(
            id=self.seat.id,
            prompt=self.prompt,
            sequences=(*self._ended, self.transcript.sequence()),
            reward=self.reward if self._environment.gives_reward else None,
            error=error,
            metrics=self._environment.metrics,
        )

    def _hold(self, tokens: int) -> None:
        self.budget.change(tokens - self._held)
        self._held = tokens

    async def _play(self) -> None:
        try:
            self._environment = self.make()
        except Exception as error:  # as for its methods
            raise EpisodeError(f"it could not be made: {type(error).__name__}: {error}") from error
        self._environment.decode = self.renderer.decode
        try:
            await self._take_turns(self._environment)
        except BaseException:
            with contextlib.suppress(EpisodeError):  # the first failure counts
                await self._close()
            raise
        await self._close()

    async def _take_turns(self, environment: Environment) -> None:
        seed = seed_of(self.seat.sampling.seed, self.seat.number, 0)
        start = await self._call(environment.reset, self.prompt, seed, returns=(Observation, type(None)))
        observation = self._seen(start or Observation())
        token_ids = await self._before(observation)
        while token_ids is not None and (room := self._room(token_ids, observation)) > 0:
            self.transcript.add_observation(token_ids, observation, self._images)
            completion = await self._turn(observation, room)
            self.transcript.add_completion(completion)
            if self.renderer.placeholder in completion.token_ids:  # read again, it would be taken for an image
                break
            action = Action(
                text=completion.text,
                token_ids=tuple(completion.token_ids),
                finish_reason=completion.finish_reason,
                tool_calls=completion.tool_calls,
            )
            step: Step = await self._call(environment.step, action, returns=(Step,), own_s=environment.step_timeout_s)
            self._reward(step.reward)
            if step.done:
                return
            observation = self._seen(step)
            token_ids = await self._within(await self._between(observation, completion), observation)
        if not self.transcript.number:
            raise EpisodeError("reset: the prompt with what it adds leaves no room for a turn in model.max_length")
        self.transcript.finish_reason = "length"
        self._reward(await self._call(environment.truncated, returns=(float, int)))

    def _reward(self, reward: float) -> None:
        self.reward += reward
        self.transcript.add_reward(reward)

    async def _turn(self, observation: Observation, room: int) -> Completion:
        usual = self.seat.sampling
        most = min(observation.max_tokens or usual.max_tokens, room)
        stop = usual.stop if observation.stop is None else observation.stop
        self._hold(len(self.transcript.token_ids) + most)
        self._num_asked += 1
        turn = Turn(
            token_ids=tuple(self.transcript.token_ids),
            images=tuple(self.transcript.images),
            begun=self.transcript.begun,
            sampling=usual.model_copy(update={"max_tokens": most, "stop": stop}),
            seed=seed_of(usual.seed, self.seat.number, self._num_asked),
            deadline=self.seat.deadline,
            group=self.seat.group,
            place=f"{self.seat.id} (prompt {self.prompt.id})",
        )
        return await self.ask(turn)

    async def _close(self) -> None:
        self._left_s = self.limits.timeout_s
        await self._call(self._environment.close, returns=(object,))

    def _room(self, token_ids: Sequence[int], observation: Observation) -> int:
        """Count the tokens that the next turn may have after these; below 1: there is none."""
        if self.transcript.number == self.limits.max_turns and not observation.goes_on:
            return 0
        return self.limits.max_length - len(self.transcript.token_ids) - len(token_ids)

    def _seen(self, observation: Observation) -> Observation:
        """Return an observation without its pictures, which wait for its tokens."""
        self._images = ()
        try:
            observation, self._pictures = self.renderer.observed(observation)
        except ValueError as error:
            raise EpisodeError(f"the environment's messages can't be rendered: {error}") from error
        return observation

    async def _before(self, observation: Observation) -> list[int] | None:
        """Return the tokens that reset adds to the prompt; with messages, that is rendered anew."""
        if not observation.messages:
            return await self._text(observation)
        self._began += observation.messages
        self._known = len(observation.messages)
        self._pictures = [*(image.data for image in self.prompt.images), *self._pictures]
        token_ids = await self._chat(self._began)
        if token_ids is None or len(token_ids) >= self.limits.max_length:
            return None
        self.transcript = Transcript(token_ids, self.prompt.opening, self._images)
        self._images = ()
        return []

    async def _between(self, step: Observation, completion: Completion) -> list[int] | None:
        """Return a step's tokens; without any the model goes on where it stopped."""
        if not step.messages:
            return await self._text(step)
        ended = completion.token_ids[-1] if completion.finish_reason == "stop" else None
        following = partial(self.renderer.following, step.messages, self.prompt.options, ended=ended)
        return await self._rendered(partial(following, at_most=self.limits.max_length), self.transcript.images)

    async def _within(self, token_ids: list[int] | None, step: Observation) -> list[int] | None:
        """Return a step's tokens; none, where history outgrows the context: a new sequence has a shorter one."""
        wanted = step.max_tokens or self.seat.sampling.max_tokens
        is_over = token_ids is None or self._room(token_ids, step) < wanted
        has_turn = self.transcript.number < self.limits.max_turns and not step.goes_on
        if self.limits.history is None or not (is_over and has_turn):
            return token_ids
        dialogue: Sequence[Message] = [*self._since, *self.transcript.dialogue[self._known :], *step.messages]
        if step.text or self._pictures or self.transcript.images or any(m["role"] == "environment" for m in dialogue):
            raise EpisodeError("env.history can shorten messages alone, no texts or images: set env.history=keep")
        for _ in range(MAX_SHORTENED):
            dialogue = await self._call(self.limits.history, self._began, dialogue, returns=(list, tuple))
            asked = await self._chat([*self._began, *dialogue])
            if asked is not None and len(asked) + wanted <= self.limits.max_length:
                self._ended.append(self.transcript.sequence())
                self._since = dialogue
                self._known = len(step.messages)
                self.transcript = Transcript(asked, self.prompt.opening, number=self.transcript.number)
                return []
        return token_ids

    async def _chat(self, messages: Sequence[Message]) -> list[int] | None:
        return await self._rendered(lambda: self._encode(self.renderer.render(messages, self.prompt.options)))

    async def _text(self, observation: Observation) -> list[int] | None:
        return await self._rendered(lambda: self._encode(observation.text)) if observation.text else []

    def _encode(self, text: str) -> list[int]:
        return self.renderer.encode([text], at_most=self.limits.max_length)[0]

    async def _rendered(self, render: Callable[[], list[int]], before: Sequence[Image] = ()) -> list[int] | None:
        """Return tokens rendered in a thread, those of pictures among them; None if a sequence can't hold them."""

        def expanded() -> tuple[list[int], Images]:
            return self.renderer.expanded(render(), self._pictures, before)

        try:
            token_ids, self._images = await asyncio.get_running_loop().run_in_executor(_RENDERING, expanded)
            return token_ids
        except TooLongError:
            return None
        except ValueError as error:
            raise EpisodeError(f"the environment's messages can't be rendered: {error}") from error

    async def _call(
        self,
        method: Callable[..., Awaitable[Any]],
        *arguments: Any,
        returns: tuple[type, ...],
        own_s: float = 0.0,
    ) -> Any:
        """Call a method of the environment in the time that is left; `own_s` do not count."""
        name = method.__name__
        start = time.monotonic()
        try:
            async with asyncio.timeout(self._left_s + own_s) as deadline:
                returned = await method(*arguments)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EpisodeError(f"{name} was cancelled") from error
        # Whatever the user's code raises ends this episode alone.
        except (Exception, SystemExit) as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                message = f"{name} was not done when env.timeout_s={self.limits.timeout_s:g} had passed"
                raise EpisodeError(message) from error
            raise EpisodeError(f"{name} raised {type(error).__name__}: {error}") from error
        finally:
            self._left_s -= max(0.0, time.monotonic() - start - own_s)
        if not isinstance(returned, returns):
            raise EpisodeError(f"{name} returned {type(returned).__name__}, which it may not")
        return returned
