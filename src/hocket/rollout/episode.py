"""Play one episode: model and environment take turns in one flat sequence of tokens.

The model's tokens enter the sequence exactly as sampled. The environment's messages are rendered to
tokens that follow them.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
"""Requests a model turn and waits for its completion: Batcher.ask. Raises ServerError."""
MAX_SHORTENED = 16  # times that a history is shortened until it fits
_RENDERING = ThreadPoolExecutor(1, "render")  # two threads must not use a tokenizer at once


class EpisodeError(Exception):
    """The environment or agent failed; the episode ends with an error."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds at which an episode is cut off."""

    max_turns: int
    max_length: int  # tokens of the whole sequence
    timeout_s: float  # seconds in the environment, or of an agent
    # Shortens the conversation once it outgrows max_length. None: the episode ends there.
    history: History | None = None


class TokenBudget:
    """A budget of tokens that episodes hold, first come, first served.

    An episode starts when its tokens fit, or when no other is under way.
    """

    def __init__(self, limit: Callable[[], int] = lambda: 0) -> None:
        self._limit = limit  # returns the limit at the moment; 0 where there is none
        self.held = 0
        self._first_in_line = asyncio.Lock()
        self._changed = asyncio.Event()

    async def start(self, tokens: int) -> None:
        """Wait for room, and hold the tokens."""
        async with self._first_in_line:
            while self.held and not self._has_room(tokens):
                self._changed.clear()
                await self._changed.wait()
            self.held += tokens

    def _has_room(self, tokens: int) -> bool:
        limit = self._limit()
        return limit == 0 or self.held + tokens <= limit

    def change(self, tokens: int) -> None:
        """Hold more tokens, or fewer; an episode that has started never waits."""
        self.held += tokens
        self._changed.set()


class Added(NamedTuple):
    """The tokens that are added to a sequence before a turn."""

    token_ids: Sequence[int]
    images: Images = ()  # the images whose tokens are among them


NOTHING = Added(())


def most_tokens(prompt: Prompt, sampling: SamplingParams) -> int:
    """Count the tokens of a prompt with the longest completion."""
    return len(prompt.token_ids) + sampling.max_tokens


def too_late(slot: Slot, failed: ServerError) -> str:
    """Describe a failure of the servers that ends an episode after its deadline."""
    return (
        f"the episode was not over within {slot.deadline.seconds:g} s (rollout.timeout_s): {failed}"
    )


@dataclasses.dataclass
class Episode:
    """One episode; its sequence is complete after every turn, also if the next turn fails.

    `play` has these steps:

    1. Wait until the episode's tokens fit into the budget.
    2. Make the environment and reset it.
    3. Take turns: render the observation and add it to the transcript, have the model complete it,
       and pass the completion to the environment's step.
    4. Stop once a step is done. If a limit ends the episode, `truncated` gives the last reward.
    5. Close the environment, whatever has failed.

    Two things outlast a turn: the transcript, which a shorter history replaces by a new one, and
    the conversation that histories are made from (history.py). All else in an observation, its
    images too, is passed from method to method.
    """

    prompt: Prompt
    slot: Slot
    make: Callable[[], Environment]  # makes an environment for this episode alone
    ask: RequestTurn
    renderer: Renderer  # renderer of the prompt's data
    limits: Limits
    budget: TokenBudget

    def __post_init__(self) -> None:
        prompt = self.prompt
        self._transcript = Transcript(prompt.token_ids, prompt.opening, prompt.images)
        self._finished: list[TokenSequence] = []  # sequences before the history was shortened
        self._conversation = Conversation(prompt.messages or ())
        self._environment = Environment()  # stands in until the episode's own is made
        self._reward = 0.0
        self._remaining_s = self.limits.timeout_s  # seconds that the environment may still take
        self._num_requests = 0
        self._held = most_tokens(prompt, self.slot.sampling)  # tokens in the budget

    async def play(self) -> Rollout:
        """Play the episode. One that fails or is late becomes a rollout with an error.

        Raise ServerError if the servers failed before the deadline.
        """
        error = None
        await self.budget.start(self._held)
        try:
            await self._play()
        except EpisodeError as failed:
            error = f"environment: {failed}"
        except ServerError as failed:
            if not self.slot.deadline.over:
                raise
            error = too_late(self.slot, failed)
        finally:
            self._hold(0)
        sequences = self._finished.copy()
        sequences.append(self._transcript.sequence())
        return Rollout(
            id=self.slot.id,
            prompt=self.prompt,
            sequences=tuple(sequences),
            reward=self._reward if self._environment.gives_reward else None,
            error=error,
            metrics=self._environment.metrics,
        )

    def _hold(self, tokens: int) -> None:
        self.budget.change(tokens - self._held)
        self._held = tokens

    async def _play(self) -> None:
        """Make the environment, take the turns, close the environment."""
        try:
            self._environment = self.make()
        except Exception as error:  # a user's code may raise anything
            raise EpisodeError(f"it could not be made: {type(error).__name__}: {error}") from error
        self._environment.decode = self.renderer.decode
        try:
            await self._take_turns(self._environment)
        except BaseException:
            with contextlib.suppress(EpisodeError):  # the first failure is the one to report
                await self._close()
            raise
        await self._close()

    async def _close(self) -> None:
        self._remaining_s = self.limits.timeout_s
        await self._call(self._environment.close, returns=(object,))

    # Turns

    async def _take_turns(self, environment: Environment) -> None:
        """Have model and environment take turns: an observation's tokens, a completion, a step."""
        seed = seed_of(self.slot.sampling.seed, self.slot.number, 0)
        start = await self._call(
            environment.reset, self.prompt, seed, returns=(Observation, type(None))
        )
        observation, raw_images = self._split(start or Observation())
        added = await self._at_start(observation, raw_images)

        while added is not None:
            room = self._room(added, observation)
            if room < 1:
                break
            self._transcript.add_observation(added.token_ids, observation, added.images)
            completion = await self._turn(observation, room)
            self._transcript.add_completion(completion)
            if self.renderer.placeholder in completion.token_ids:
                break  # in the next prompt this token would be taken for an image
            step: Step = await self._call(
                environment.step,
                _action(completion),
                returns=(Step,),
                extra_s=environment.step_timeout_s,
            )
            self._add_reward(step.reward)
            if step.done:
                return

            # Render what the next turn begins with, with a shorter history if it does not fit.
            observation, raw_images = self._split(step)
            added = await self._after_turn(observation, raw_images, completion)
            history = self.limits.history
            if history is not None and self._outgrows(added, observation):
                added = await self._shortened(history, added, observation, raw_images)

        # A limit has ended the episode.
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
        """Have the model take a turn, or continue its turn, with at most `room` tokens."""
        usual = self.slot.sampling
        max_tokens = min(self._wanted(observation), room)
        stop = usual.stop if observation.stop is None else observation.stop
        self._hold(len(self._transcript.token_ids) + max_tokens)
        self._num_requests += 1
        turn = Turn(
            token_ids=self._transcript.token_ids[:],  # a copy, as the transcript grows
            images=tuple(self._transcript.images),
            begun=self._transcript.begun,
            sampling=usual.model_copy(update={"max_tokens": max_tokens, "stop": stop}),
            seed=seed_of(usual.seed, self.slot.number, self._num_requests),
            deadline=self.slot.deadline,
            group=self.slot.group,
            place=f"{self.slot.id} (prompt {self.prompt.id})",
        )
        return await self.ask(turn)

    def _wanted(self, observation: Observation) -> int:
        """Count the tokens that the next turn may have if there is room."""
        return observation.max_tokens or self.slot.sampling.max_tokens

    def _room(self, added: Added, observation: Observation) -> int:
        """Count the tokens that the next turn may have after `added`; below 1 there is no turn."""
        if self._transcript.number == self.limits.max_turns and not observation.goes_on:
            return 0
        return self.limits.max_length - len(self._transcript.token_ids) - len(added.token_ids)

    # Rendering. A method returns None if the tokens are too many for a sequence, so that no turn
    # can follow. A method that begins a new transcript with the tokens returns NOTHING.

    def _split(self, observation: Observation) -> tuple[Observation, Sequence[Any]]:
        """Take the images out of an observation, as the renderer reads them."""
        try:
            return self.renderer.split_observation(observation)
        except ValueError as error:
            raise EpisodeError(f"the environment's messages can't be rendered: {error}") from error

    async def _at_start(self, observation: Observation, raw_images: Sequence[Any]) -> Added | None:
        """Render what reset adds to the prompt. If it adds messages, the whole chat is rendered."""
        if not observation.messages:
            return await self._text(observation, raw_images)
        self._conversation.begin(observation.messages)
        all_images = [image.data for image in self.prompt.images]
        all_images += raw_images
        prompt = await self._chat(self._conversation.began, all_images)
        if prompt is None or len(prompt.token_ids) >= self.limits.max_length:
            return None
        # The new transcript begins with all of that: nothing is to be added to it.
        self._transcript = Transcript(prompt.token_ids, self.prompt.opening, prompt.images)
        return NOTHING

    async def _after_turn(
        self, step: Observation, raw_images: Sequence[Any], completion: Completion
    ) -> Added | None:
        """Render what a step adds after a completion. If it adds nothing, the model continues."""
        if not step.messages:
            return await self._text(step, raw_images)
        ended = completion.token_ids[-1] if completion.finish_reason == "stop" else None

        def following() -> list[int]:
            return self.renderer.following(
                step.messages, self.prompt.options, ended=ended, at_most=self.limits.max_length
            )

        return await self._rendered(following, raw_images, before=self._transcript.images)

    async def _chat(
        self, messages: Sequence[Message], raw_images: Sequence[Any] = ()
    ) -> Added | None:
        def render() -> list[int]:
            return self._encode(self.renderer.render(messages, self.prompt.options))

        return await self._rendered(render, raw_images)

    async def _text(self, observation: Observation, raw_images: Sequence[Any]) -> Added | None:
        if not observation.text:
            return NOTHING
        return await self._rendered(lambda: self._encode(observation.text), raw_images)

    def _encode(self, text: str) -> list[int]:
        return self.renderer.encode([text], at_most=self.limits.max_length)[0]

    async def _rendered(
        self,
        render: Callable[[], list[int]],
        raw_images: Sequence[Any],
        before: Sequence[Image] = (),
    ) -> Added | None:
        """Render tokens in a thread, and put in those of the images.

        render: returns the token ids, with a placeholder for each raw image. before: the images
        that the sequence has already.
        """

        def render_with_images() -> Added:
            token_ids, images = self.renderer.insert_images(render(), raw_images, before)
            return Added(token_ids, images)

        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(_RENDERING, render_with_images)
        except TooLongError:
            return None
        except ValueError as error:
            raise EpisodeError(f"the environment's messages can't be rendered: {error}") from error

    # A history that outgrows the context

    def _outgrows(self, added: Added | None, step: Observation) -> bool:
        """Check whether the next turn has too little room, and a shorter history may give more."""
        if self._transcript.number >= self.limits.max_turns or step.goes_on:
            return False
        return added is None or self._room(added, step) < self._wanted(step)

    async def _shortened(
        self, history: History, added: Added | None, step: Observation, raw_images: Sequence[Any]
    ) -> Added | None:
        """Begin a new transcript with a shorter history, to which nothing is to be added.

        If no history is short enough, the old transcript stays, and `added` is to be added.
        """
        dialogue = self._conversation.since(self._transcript.dialogue, step.messages)
        has_text = bool(step.text) or any(message["role"] == "environment" for message in dialogue)
        if has_text or raw_images or self._transcript.images:
            raise EpisodeError(
                "env.history can shorten messages alone, no texts or images: set env.history=keep"
            )
        for _ in range(MAX_SHORTENED):
            began = self._conversation.began
            dialogue = await self._call(history, began, dialogue, returns=(list, tuple))
            prompt = await self._chat(list(began) + list(dialogue))
            wanted = self._wanted(step)
            if prompt is not None and len(prompt.token_ids) + wanted <= self.limits.max_length:
                self._finished.append(self._transcript.sequence())
                self._conversation.shorten(dialogue, step.messages)
                number = self._transcript.number
                self._transcript = Transcript(prompt.token_ids, self.prompt.opening, number=number)
                return NOTHING
        return added

    # The user's code

    async def _call(
        self,
        method: Callable[..., Awaitable[Any]],
        *arguments: Any,
        returns: tuple[type, ...],
        extra_s: float = 0.0,
    ) -> Any:
        """Call a method of the environment, or a history, within the episode's remaining time.

        returns: the types that it may return. extra_s: seconds that this call may take and
        env.timeout_s does not count. Raise EpisodeError if the method raised, took too long or
        returned another type.
        """
        name = method.__name__
        start = time.monotonic()
        try:
            async with asyncio.timeout(self._remaining_s + extra_s) as deadline:
                returned = await method(*arguments)
        except asyncio.CancelledError as error:
            # Either this task is cancelled, or the method has cancelled itself.
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
            self._remaining_s -= max(0.0, time.monotonic() - start - extra_s)
        if not isinstance(returned, returns):
            raise EpisodeError(f"{name} returned {type(returned).__name__}, which it may not")
        return returned


def _action(completion: Completion) -> Action:
    """Make the action that an environment gets for a completion."""
    return Action(
        text=completion.text,
        token_ids=tuple(completion.token_ids),
        finish_reason=completion.finish_reason,
        tool_calls=completion.tool_calls,
    )
