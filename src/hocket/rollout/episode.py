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
from typing import Any, NamedTuple

from hocket.client.batcher import Turn
from hocket.common.tasks import seed_of
from hocket.data.renderer import Images, Renderer, TooLongError
from hocket.envs import Action, Environment, Observation, Step
from hocket.envs.base import History
from hocket.errors import ServerError
from hocket.protocol import Completion, SamplingParams
from hocket.rollout.collect import Slot
from hocket.rollout.history import Conversation
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
    history: History | None = (
        None  # shortens what outgrows max_length; None: the episode ends there
    )


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


class Added(NamedTuple):
    """What is added to a sequence before a turn."""

    token_ids: Sequence[int]
    images: Images = ()  # whose tokens are among them


NOTHING = Added(())


def most_tokens(prompt: Prompt, sampling: SamplingParams) -> int:
    return len(prompt.token_ids) + sampling.max_tokens


def late(slot: Slot, failed: ServerError) -> str:
    """Return the error of an episode that a failure of the servers ends after its deadline; raise an earlier one."""
    if not slot.deadline.over:
        raise failed
    return (
        f"the episode was not over within {slot.deadline.seconds:g} s (rollout.timeout_s): {failed}"
    )


@dataclasses.dataclass
class Episode:
    """One episode; it is a whole sequence after every turn, also where the next one fails.

    It waits until its tokens fit (`budget`), makes its environment and has it reset. Then it takes
    turns: what the environment says is rendered and added to the transcript, the model completes
    that, the environment answers by a step. A step that is done ends it; where a limit does, the
    environment is asked once more (`truncated`). In the end it is closed, whatever has failed.

    Two things outlast a turn: the transcript, which a shorter history replaces, and the conversation
    that history is made of (history.py). What else an observation brings, its pictures too, goes
    from method to method.
    """

    prompt: Prompt
    slot: Slot
    make: Callable[[], Environment]  # for it alone
    ask: RequestTurn
    renderer: Renderer  # of the prompt's data
    limits: Limits
    budget: TokenBudget

    def __post_init__(self) -> None:
        self._transcript = Transcript(
            self.prompt.token_ids, self.prompt.opening, self.prompt.images
        )
        self._finished: list[TokenSequence] = []  # before history was shortened
        self._conversation = Conversation(self.prompt.messages or ())
        self._environment = Environment()  # until it is made
        self._reward = 0.0
        self._left_s = self.limits.timeout_s
        self._num_asked = 0
        self._held = most_tokens(self.prompt, self.slot.sampling)

    async def play(self) -> Rollout:
        """Play it; one that fails or is late has an error. Raise only ServerError."""
        error = None
        await self.budget.start(self._held)
        try:
            await self._play()
        except EpisodeError as failed:
            error = f"environment: {failed}"
        except ServerError as failed:
            error = late(self.slot, failed)
        finally:
            self._hold(0)
        return Rollout(
            id=self.slot.id,
            prompt=self.prompt,
            sequences=(*self._finished, self._transcript.sequence()),
            reward=self._reward if self._environment.gives_reward else None,
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
        """Have model and environment take turns: an observation's tokens, a completion, a step."""
        seed = seed_of(self.slot.sampling.seed, self.slot.number, 0)
        start = await self._call(
            environment.reset, self.prompt, seed, returns=(Observation, type(None))
        )
        observation, pictures = self._split(start or Observation())
        added = await self._at_start(observation, pictures)
        while added is not None and (room := self._room(added, observation)) > 0:
            self._transcript.add_observation(added.token_ids, observation, added.images)
            completion = await self._turn(observation, room)
            self._transcript.add_completion(completion)
            if (
                self.renderer.placeholder in completion.token_ids
            ):  # read again, it would be taken for an image
                break
            action = Action(
                text=completion.text,
                token_ids=tuple(completion.token_ids),
                finish_reason=completion.finish_reason,
                tool_calls=completion.tool_calls,
            )
            step: Step = await self._call(
                environment.step, action, returns=(Step,), own_s=environment.step_timeout_s
            )
            self._add_reward(step.reward)
            if step.done:
                return
            observation, pictures = self._split(step)
            added = await self._after_turn(observation, pictures, completion)
            history = self.limits.history
            if history is not None and self._outgrows(added, observation):
                added = await self._shortened(history, added, observation, pictures)
        if not self._transcript.number:
            raise EpisodeError(
                "reset: the prompt with what it adds leaves no room for a turn in model.max_length"
            )
        self._transcript.cut_off()
        self._add_reward(await self._call(environment.truncated, returns=(float, int)))

    def _add_reward(self, reward: float) -> None:
        self._reward += reward
        self._transcript.add_reward(reward)

    async def _turn(self, observation: Observation, room: int) -> Completion:
        """Have the model take a turn, or go on with one, of at most `room` tokens."""
        usual = self.slot.sampling
        most = min(self._wanted(observation), room)
        stop = usual.stop if observation.stop is None else observation.stop
        self._hold(len(self._transcript.token_ids) + most)
        self._num_asked += 1
        turn = Turn(
            token_ids=self._transcript.token_ids[:],
            images=tuple(self._transcript.images),
            begun=self._transcript.begun,
            sampling=usual.model_copy(update={"max_tokens": most, "stop": stop}),
            seed=seed_of(usual.seed, self.slot.number, self._num_asked),
            deadline=self.slot.deadline,
            group=self.slot.group,
            place=f"{self.slot.id} (prompt {self.prompt.id})",
        )
        return await self.ask(turn)

    async def _close(self) -> None:
        self._left_s = self.limits.timeout_s
        await self._call(self._environment.close, returns=(object,))

    def _wanted(self, observation: Observation) -> int:
        """Count the tokens that the next turn is to have, where there is room."""
        return observation.max_tokens or self.slot.sampling.max_tokens

    def _room(self, added: Added, observation: Observation) -> int:
        """Count the tokens that the next turn may have behind what is added; below 1: no turn."""
        if self._transcript.number == self.limits.max_turns and not observation.goes_on:
            return 0
        return self.limits.max_length - len(self._transcript.token_ids) - len(added.token_ids)

    def _split(self, observation: Observation) -> tuple[Observation, Sequence[Any]]:
        """Take an observation apart: what is rendered as text, and the pictures in it."""
        try:
            return self.renderer.observed(observation)
        except ValueError as error:
            raise EpisodeError(f"the environment's messages can't be rendered: {error}") from error

    async def _at_start(self, observation: Observation, pictures: Sequence[Any]) -> Added | None:
        """Render what reset adds to the prompt; with messages, that is rendered anew."""
        if not observation.messages:
            return await self._text(observation, pictures)
        self._conversation.begin(observation.messages)
        pictures = [*(image.data for image in self.prompt.images), *pictures]
        prompt = await self._chat(self._conversation.began, pictures)
        if prompt is None or len(prompt.token_ids) >= self.limits.max_length:
            return None
        self._transcript = Transcript(prompt.token_ids, self.prompt.opening, prompt.images)
        return NOTHING

    async def _after_turn(
        self,
        step: Observation,
        pictures: Sequence[Any],
        completion: Completion,
    ) -> Added | None:
        """Render what a step adds behind a completion; without any the model goes on there."""
        if not step.messages:
            return await self._text(step, pictures)
        ended = completion.token_ids[-1] if completion.finish_reason == "stop" else None
        following = partial(
            self.renderer.following, step.messages, self.prompt.options, ended=ended
        )
        following = partial(following, at_most=self.limits.max_length)
        return await self._rendered(following, pictures, before=self._transcript.images)

    def _outgrows(self, added: Added | None, step: Observation) -> bool:
        """Check whether the next turn has too little room, and may have more with less history."""
        if self._transcript.number >= self.limits.max_turns or step.goes_on:
            return False
        return added is None or self._room(added, step) < self._wanted(step)

    async def _shortened(
        self, history: History, added: Added | None, step: Observation, pictures: Sequence[Any]
    ) -> Added | None:
        """Begin a new transcript with a shorter history, to which nothing is added.

        Where none is short enough the old one stays, and gets `added`.
        """
        dialogue = self._conversation.since(self._transcript.dialogue, step.messages)
        has_text = bool(step.text) or any(message["role"] == "environment" for message in dialogue)
        if has_text or pictures or self._transcript.images:
            raise EpisodeError(
                "env.history can shorten messages alone, no texts or images: set env.history=keep"
            )
        for _ in range(MAX_SHORTENED):
            began = self._conversation.began
            dialogue = await self._call(history, began, dialogue, returns=(list, tuple))
            prompt = await self._chat([*began, *dialogue])
            wanted = self._wanted(step)
            if prompt is not None and len(prompt.token_ids) + wanted <= self.limits.max_length:
                self._finished.append(self._transcript.sequence())
                self._conversation.shorten(dialogue, step.messages)
                number = self._transcript.number
                self._transcript = Transcript(prompt.token_ids, self.prompt.opening, number=number)
                return NOTHING
        return added

    async def _chat(
        self, messages: Sequence[Message], pictures: Sequence[Any] = ()
    ) -> Added | None:
        options = self.prompt.options
        return await self._rendered(
            lambda: self._encode(self.renderer.render(messages, options)),
            pictures,
        )

    async def _text(self, observation: Observation, pictures: Sequence[Any]) -> Added | None:
        if not observation.text:
            return NOTHING
        return await self._rendered(lambda: self._encode(observation.text), pictures)

    def _encode(self, text: str) -> list[int]:
        return self.renderer.encode([text], at_most=self.limits.max_length)[0]

    async def _rendered(
        self, render: Callable[[], list[int]], pictures: Sequence[Any], before: Sequence[Image] = ()
    ) -> Added | None:
        """Render tokens in a thread, with those of pictures. Returns None if no sequence can hold them."""

        def expanded() -> Added:
            return Added(*self.renderer.expanded(render(), pictures, before))

        try:
            return await asyncio.get_running_loop().run_in_executor(_RENDERING, expanded)
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
                message = (
                    f"{name} was not done when env.timeout_s={self.limits.timeout_s:g} had passed"
                )
                raise EpisodeError(message) from error
            raise EpisodeError(f"{name} raised {type(error).__name__}: {error}") from error
        finally:
            self._left_s -= max(0.0, time.monotonic() - start - own_s)
        if not isinstance(returned, returns):
            raise EpisodeError(f"{name} returned {type(returned).__name__}, which it may not")
        return returned
