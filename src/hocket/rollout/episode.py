"""Play one episode: model and environment take turns, and all their tokens end up in one flat sequence.

The model's tokens go in exactly as they were sampled; the environment's messages are rendered to tokens of their own,
which follow. Nothing is ever encoded again.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hocket.data import Renderer
from hocket.data.prompts import TooLongError
from hocket.envs import Action, Environment, Observation, Step
from hocket.errors import ServerError
from hocket.protocol import Completion
from hocket.rollout.collect import Seat
from hocket.system import seed_of
from hocket.types import FinishReason, Message, Prompt, Rollout, TokenSequence

Ask = Callable[..., Awaitable[Completion]]
"""Has the model take a turn: Batcher.ask."""
_RENDERING = ThreadPoolExecutor(1, "render")
"""One thread of its own: two must not use a tokenizer at once, and those of `hocket.system` are the trainer's, too."""


class EpisodeError(Exception):
    """Environment or agent failed; the message says how."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where an episode ends that is not done."""

    max_turns: int
    max_length: int  # tokens of the whole sequence
    timeout_s: float  # seconds in the environment, or until an agent must have ended


class Transcript:
    """The sequence so far, which begins with the prompt; tokens are only ever appended."""

    def __init__(self, prompt: Prompt, token_ids: Sequence[int] | None = None) -> None:
        self.prompt = prompt
        self.token_ids, self.mask, self.logprobs = list[int](), list[bool](), list[float]()
        self.dialogue: list[Message] = []
        self.versions: set[int] = set()
        self.turns = 0
        self.text = ""  # of the last turn
        self.finish_reason: FinishReason = "stop"
        self.add_observation(prompt.token_ids if token_ids is None else token_ids)

    def add_observation(self, token_ids: Sequence[int], observation: Observation | None = None) -> None:
        """Append tokens that the policy did not sample: what the environment said, or the prompt."""
        self.token_ids += token_ids
        self.mask += [False] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)
        if observation is not None:
            self.dialogue += observation.messages
            self.dialogue += [{"role": "environment", "content": observation.text}] if observation.text else []

    def add_completion(self, completion: Completion) -> None:
        """Append a turn of the policy. Raise ServerError if it is empty."""
        refuse_empty(completion, self.prompt)
        self.token_ids += completion.token_ids
        self.mask += [True] * len(completion.token_ids)
        self.logprobs += completion.logprobs
        self.versions |= {version for version, _, _ in completion.versions}
        self.dialogue.append({"role": "assistant", "content": completion.text})
        self.turns += 1
        self.text, self.finish_reason = completion.text, completion.finish_reason

    def sequence(self) -> TokenSequence:
        """Return what there is, frozen."""
        return TokenSequence(
            token_ids=tuple(self.token_ids),
            mask=tuple(self.mask),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            version_min=min(self.versions, default=0),
            version_max=max(self.versions, default=0),
            turns=self.turns,
            text=self.text,
            dialogue=tuple(self.dialogue) if self.turns > 1 else (),
        )


def one_turn(prompt: Prompt, completion: Completion) -> TokenSequence:
    """Return the sequence of a Transcript with one turn, at a fifth of its cost. Raise as `refuse_empty`."""
    refuse_empty(completion, prompt)
    told, sampled = len(prompt.token_ids), len(completion.token_ids)
    versions = [version for version, _, _ in completion.versions]
    return TokenSequence(
        token_ids=prompt.token_ids + completion.token_ids,
        mask=(False,) * told + (True,) * sampled,
        logprobs=(0.0,) * told + completion.logprobs,
        finish_reason=completion.finish_reason,
        version_min=min(versions),
        version_max=max(versions),
        text=completion.text,
    )


def refuse_empty(completion: Completion, prompt: Prompt) -> None:
    """Raise ServerError if the completion has no tokens or versions."""
    if not completion.token_ids or not completion.versions:
        message = f"the server returned a completion without tokens or versions for prompt {prompt.id}"
        raise ServerError(message, code="protocol")


class Episode:
    """Plays one episode; what there is of it is a whole sequence after every turn, also where the next one fails."""

    def __init__(
        self,
        prompt: Prompt,
        seat: Seat,
        make: Callable[[], Environment],  # gives an environment of its own
        *,
        ask: Ask,
        renderer: Renderer,  # of the data that the prompt is from
        limits: Limits,
    ) -> None:
        self.transcript = Transcript(prompt)
        self.reward: float | None = None
        self._prompt = prompt
        self._seat = seat
        self._make = make
        self._ask = ask
        self._renderer = renderer
        self._limits = limits
        self._left_s = limits.timeout_s

    def rollout(self, error: str | None = None) -> Rollout:
        """Return what there is as a rollout."""
        sequences = (self.transcript.sequence(),)
        return Rollout(id=self._seat.id, prompt=self._prompt, sequences=sequences, reward=self.reward, error=error)

    async def play(self, grown: Callable[[int], None]) -> None:
        """Play until the environment is done or a limit is reached; raise EpisodeError or ServerError.

        `grown` is called before each turn with the most tokens that the sequence may have after it.
        """
        try:
            environment = self._make()
        except Exception as error:  # as for its methods
            raise EpisodeError(f"it could not be made: {type(error).__name__}: {error}") from error
        try:
            await self._take_turns(environment, grown)
        except BaseException:
            with contextlib.suppress(EpisodeError):  # the first failure is the one to tell
                await self._close(environment)
            raise
        await self._close(environment)

    async def _take_turns(self, environment: Environment, grown: Callable[[int], None]) -> None:
        if environment.gives_reward:
            self.reward = 0.0
        start = await self._call(environment.reset, self._prompt, self._seed(0), returns=(Observation, type(None)))
        observation: Observation = start or Observation()
        token_ids = await self._before(observation)
        while token_ids is not None and (room := self._room(token_ids)) > 0:
            transcript = self.transcript
            transcript.add_observation(token_ids, observation)
            completion = await self._turn(observation, room, grown)
            transcript.add_completion(completion)
            action = Action(
                text=completion.text,
                token_ids=completion.token_ids,
                finish_reason=completion.finish_reason,
                tool_calls=completion.tool_calls,
            )
            step: Step = await self._call(environment.step, action, returns=(Step,), own_s=environment.step_timeout_s)
            self._add_reward(step.reward)
            if step.done:
                return
            observation, token_ids = step, await self._between(step, completion)
        self.transcript.finish_reason = "length"
        self._add_reward(await self._call(environment.truncated, returns=(float, int)))

    async def _turn(self, observation: Observation, room: int, grown: Callable[[int], None]) -> Completion:
        transcript, sampling = self.transcript, self._seat.sampling
        max_tokens = sampling.max_tokens if observation.max_tokens is None else observation.max_tokens
        stop = sampling.stop if observation.stop is None else observation.stop
        max_tokens = min(max_tokens, room)
        grown(len(transcript.token_ids) + max_tokens)
        return await self._ask(
            transcript.token_ids,
            sampling.model_copy(update={"max_tokens": max_tokens, "stop": tuple(stop)}),
            seed=self._seed(transcript.turns + 1),
            deadline=self._seat.deadline,
            group=self._seat.group,
            place=f"{self._seat.id} (prompt {self._prompt.id})",
        )

    def _add_reward(self, reward: float) -> None:
        if self.reward is not None:
            self.reward += reward

    async def _close(self, environment: Environment) -> None:
        self._left_s = self._limits.timeout_s
        await self._call(environment.close, returns=(object,))

    def _room(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens the next turn may have after these; below 1: there is no next turn."""
        if self.transcript.turns == self._limits.max_turns:
            return 0
        return self._limits.max_length - len(self.transcript.token_ids) - len(token_ids)

    def _seed(self, turn: int) -> int:
        return seed_of(self._seat.sampling.seed, self._seat.number, turn)

    async def _before(self, observation: Observation) -> list[int] | None:
        """Return the tokens that reset adds to the prompt; messages are rendered together with it, as a new prompt."""
        if not observation.messages:
            return await self._text(observation)
        messages = [*(self._prompt.messages or ()), *observation.messages]
        token_ids = await self._rendered(lambda: self._encode(self._renderer.render(messages)))
        if token_ids is None or len(token_ids) >= self._limits.max_length:
            length = "too many" if token_ids is None else len(token_ids)
            raise EpisodeError(f"reset: a prompt of {length} tokens leaves no room for a turn in model.max_length")
        self.transcript = Transcript(self._prompt, token_ids)
        return []

    async def _between(self, step: Step, completion: Completion) -> list[int] | None:
        """Return the tokens of a step; where the environment says nothing, the model goes on where it stopped."""
        if not step.messages:
            return await self._text(step)
        ended = completion.token_ids[-1] if completion.finish_reason == "stop" else None
        at_most = self._limits.max_length
        return await self._rendered(lambda: self._renderer.following(step.messages, ended=ended, at_most=at_most))

    async def _text(self, observation: Observation) -> list[int] | None:
        return await self._rendered(lambda: self._encode(observation.text)) if observation.text else []

    def _encode(self, text: str) -> list[int]:
        return self._renderer.encode([text], at_most=self._limits.max_length)[0]

    async def _rendered(self, render: Callable[[], list[int]]) -> list[int] | None:
        """Return the tokens of a message, rendered in a thread; None if they are more than a sequence can hold."""
        try:
            return await asyncio.get_running_loop().run_in_executor(_RENDERING, render)
        except TooLongError:
            return None
        # A template is a small program: besides its own refusals it fails in these ways on what it did not expect.
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise EpisodeError(f"the environment's messages can't be rendered: {error}") from error

    async def _call(
        self,
        method: Callable[..., Awaitable[Any]],
        *arguments: Any,
        returns: tuple[type, ...],
        own_s: float = 0.0,
    ) -> Any:
        """Call a method of the environment within the time that is left; `own_s` of it do not count."""
        name, start = method.__name__, time.monotonic()
        try:
            async with asyncio.timeout(self._left_s + own_s) as deadline:
                returned = await method(*arguments)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EpisodeError(f"{name} was cancelled") from error
        # An environment is the user's code: whatever it raises ends this episode alone.
        except (Exception, SystemExit) as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                message = f"{name} was not done when env.timeout_s={self._limits.timeout_s:g} had passed"
                raise EpisodeError(message) from error
            raise EpisodeError(f"{name} raised {type(error).__name__}: {error}") from error
        finally:
            counted_s = max(0.0, time.monotonic() - start - own_s)
            self._left_s = max(0.0, self._left_s - counted_s)
        if not isinstance(returned, returns):
            raise EpisodeError(f"{name} returned {type(returned).__name__}, which it may not")
        return returned
