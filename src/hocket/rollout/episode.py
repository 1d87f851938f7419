"""One episode: model and environment take turns, and every token of theirs ends up in one flat sequence.

The model's tokens go in exactly as they were sampled; the environment's messages are rendered to tokens of their own,
which follow. Nothing is ever encoded again. Knows nothing of other episodes, groups and rewards.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from hocket.data import Renderer
from hocket.data.prompts import TooLongError
from hocket.envs import Action, Environment, Observation, Step
from hocket.errors import ServerError
from hocket.protocol import Completion, SamplingParams
from hocket.system import seed_of
from hocket.types import FinishReason, Message, Prompt, Rollout, TokenSequence


class Ask(Protocol):
    """Has the model take a turn: Coalescer.ask."""

    def __call__(self, token_ids: list[int], sampling: SamplingParams, *, seed: int) -> Awaitable[Completion]: ...


class EpisodeError(Exception):
    """The environment failed; the message says how."""


_RENDERING = ThreadPoolExecutor(1, "render")
"""One thread of its own: two must not use a tokenizer at once, and those of `hocket.system` are the trainer's, too."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where an episode ends that is not done: turns, tokens of the whole sequence, seconds in the environment."""

    max_turns: int
    max_length: int
    timeout_s: float


class Transcript:
    """The sequence so far, which begins with the prompt. `text` and `finish_reason` are those of the last turn."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.token_ids, self.mask, self.logprobs = list[int](), list[bool](), list[float]()
        self.dialogue: list[Message] = []
        self.versions: set[int] = set()
        self.turns = 0
        self.reward: float | None = None
        self.text = ""
        self.finish_reason: FinishReason = "stop"
        self.told(prompt.token_ids)

    def told(self, token_ids: Sequence[int], observation: Observation | None = None) -> None:
        """Appends tokens that the policy did not sample: what the environment said, or the prompt."""
        self.token_ids += token_ids
        self.mask += [False] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)
        if observation is not None:
            self.dialogue += observation.messages
            self.dialogue += [{"role": "environment", "content": observation.text}] if observation.text else []

    def begins_with(self, token_ids: Sequence[int]) -> None:
        """Puts other tokens in the place of the prompt's."""
        for kept in (self.token_ids, self.mask, self.logprobs):
            kept.clear()
        self.told(token_ids)

    def sampled(self, completion: Completion) -> None:
        """Appends a turn of the policy. Raises ServerError where it is none."""
        if not completion.token_ids or not completion.versions:
            message = f"the server returned a completion without tokens or versions for prompt {self.prompt.id}"
            raise ServerError(message, code="protocol")
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

    def rollout(self, name: str, error: str | None = None) -> Rollout:
        """Return an episode of this sequence alone."""
        return Rollout(id=name, prompt=self.prompt, sequences=(self.sequence(),), reward=self.reward, error=error)


class Episode:
    """Plays one episode into its `transcript`, which is whole after every turn, also where the next one fails.

    Args:
        make: gives an environment of its own.
        ask: has the model take a turn.
        renderer: of the data that the prompt is from.
        sampling: of every turn that the environment does not want otherwise; its seed and `number` decide all random
            numbers.
    """

    def __init__(
        self,
        prompt: Prompt,
        make: Callable[[], Environment],
        *,
        ask: Ask,
        renderer: Renderer,
        sampling: SamplingParams,
        number: int,
        limits: Limits,
    ) -> None:
        self.transcript = Transcript(prompt)
        self._make = make
        self._ask = ask
        self._renderer = renderer
        self._sampling = sampling
        self._number = number
        self._limits = limits
        self._left_s = limits.timeout_s

    async def play(self, grown: Callable[[int], None] = lambda length: None) -> None:
        """Plays until the environment is done or a limit is reached.

        Args:
            grown: told the tokens that the sequence will have after each next turn, at most.

        Raises:
            EpisodeError: the environment raised, hung, or said what can't be rendered.
            ServerError: the model could not be asked.
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
        transcript = self.transcript
        transcript.reward = 0.0
        start = await self._call(environment.reset, transcript.prompt, self._seed(0), returns=(Observation, type(None)))
        observation: Observation = start or Observation()
        told = await self._before(observation)
        while told is not None and (room := self._room(told)) > 0:
            transcript.told(told, observation)
            sampling = self._next(observation, room)
            grown(len(transcript.token_ids) + sampling.max_tokens)
            completion = await self._ask(transcript.token_ids, sampling, seed=self._seed(transcript.turns + 1))
            transcript.sampled(completion)
            step: Step = await self._call(
                environment.step, _action(completion), returns=(Step,), own_s=environment.step_timeout_s
            )
            transcript.reward += step.reward
            if step.done:
                return
            observation, told = step, await self._between(step, completion)
        transcript.finish_reason = "length"
        transcript.reward += await self._call(environment.truncated, returns=(float, int))

    async def _close(self, environment: Environment) -> None:
        self._left_s = self._limits.timeout_s
        await self._call(environment.close, returns=(object,))

    def _room(self, told: Sequence[int]) -> int:
        """Returns how many tokens the next turn may have once the model has been told so much; below 1: none."""
        if self.transcript.turns == self._limits.max_turns:
            return 0
        return self._limits.max_length - len(self.transcript.token_ids) - len(told)

    def _next(self, observation: Observation, room: int) -> SamplingParams:
        wanted = self._sampling.max_tokens if observation.max_tokens is None else observation.max_tokens
        stop = self._sampling.stop if observation.stop is None else observation.stop
        return self._sampling.model_copy(update={"max_tokens": min(wanted, room), "stop": tuple(stop)})

    def _seed(self, turn: int) -> int:
        return seed_of(self._sampling.seed, self._number, turn)

    async def _before(self, observation: Observation) -> list[int] | None:
        """Returns what the environment says before the first turn; messages make the prompt another one."""
        if not observation.messages:
            return await self._text(observation)
        messages = [*(self.transcript.prompt.messages or ()), *observation.messages]
        prompt = await self._rendered(lambda: self._encode(self._renderer.render(messages)))
        if prompt is None or len(prompt) >= self._limits.max_length:
            length = "too many" if prompt is None else len(prompt)
            raise EpisodeError(f"reset: a prompt of {length} tokens leaves no room for a turn in model.max_length")
        self.transcript.begins_with(prompt)
        return []

    async def _between(self, step: Step, completion: Completion) -> list[int] | None:
        """Returns what the environment says after a turn; where it says nothing, the model goes on where it stopped."""
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
        """Returns the tokens of what the environment says, made in a thread; None: no sequence can hold so many."""
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
        """Returns what a method of the environment returns, within what is left of its time; `own_s` do not count."""
        name, start = method.__name__, time.monotonic()
        try:
            async with asyncio.timeout(self._left_s + own_s) as deadline:
                returned = await method(*arguments)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EpisodeError(f"{name} was cancelled") from error
        # An environment is anybody's code: whatever it raises ends this episode alone.
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


def _action(completion: Completion) -> Action:
    return Action(
        text=completion.text,
        token_ids=completion.token_ids,
        finish_reason=completion.finish_reason,
        tool_calls=completion.tool_calls,
    )
