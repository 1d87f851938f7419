"""Play episodes of the user's own code, which asks the model through an OpenAI-compatible URL that
records its calls.

Each has a session on one server, and is played again where that is lost.
"""

import asyncio
import contextlib
import copy
import dataclasses
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from hocket.client.member import Member
from hocket.client.pool import MAX_LOSSES, ServerPool
from hocket.common.tasks import retrieve, seed_of
from hocket.data.renderer import opening_of
from hocket.envs import Observation
from hocket.errors import ServerError
from hocket.extras.agents.task import Playable, Task
from hocket.protocol import AgentCall, AgentRecord, SessionRequest, SessionResponse
from hocket.rollout.collect import Slot
from hocket.rollout.episode import Limits, TokenBudget, most_tokens
from hocket.rollout.transcript import Transcript, state_of
from hocket.types import Image, Message, Prompt, Rollout, TurnReward

OPENING_TOKENS = 16  # tokens at a prompt's end that hold the opening of a thought
GRACE_S = 60.0  # seconds that a session outlives its agent's deadline
CANCEL_S = 5.0  # seconds that a cancelled agent may take to end
_ABANDONED = set["asyncio.Task[Any]"]()
"""Agents that did not end: asyncio itself keeps no task from being collected as garbage."""
UNASKED = AgentRecord(calls=(), cut_off=False)


@dataclasses.dataclass(kw_only=True)
class Agents:
    """Plays the episodes of an agent, each in a session on one server."""

    agent: Playable
    pool: ServerPool
    limits: Limits  # max_turns counts calls, max_length bounds each
    decode: Callable[[Sequence[int]], str]  # makes text for people to read
    budget: TokenBudget  # counts an agent as its prompt and one answer: its calls are not known yet

    def __post_init__(self) -> None:
        self._gate = asyncio.Semaphore(self.agent.concurrency)  # shared by all batches under way

    async def play(self, prompt: Prompt, slot: Slot) -> Rollout:
        """Play one episode; one that fails or is late has an error. Raise only ServerError."""
        tokens = most_tokens(prompt, slot.sampling)
        async with self._gate:
            await self.budget.start(tokens)
            try:
                if not slot.deadline.over:
                    return await self._episode(prompt, slot, tokens)
            finally:
                self.budget.change(-tokens)
        late = f"it could not begin within {slot.deadline.seconds:g} s (rollout.timeout_s)"
        return self._rollout(prompt, slot, error=f"{late}: raise that, or env.concurrency")

    async def _episode(self, prompt: Prompt, slot: Slot, tokens: int) -> Rollout:
        """Play one episode; keep what was sampled also where the agent fails."""
        again = ""
        # An episode whose server is lost is played again on another, MAX_LOSSES times at most.
        for losses in itertools.count(1):
            member, session = await self._open(slot, tokens)
            close = partial(member.server.close_session, session.id, timeout_s=self.pool.silence_s)
            task = _task(prompt, slot, member.url, session)
            try:
                returned, error = await self._run(task, slot)
                if error:
                    error += again
            except BaseException:
                with contextlib.suppress(ServerError):
                    await close()
                raise
            finally:
                member.in_flight -= tokens
            try:
                record = await close()
                break
            except ServerError as lost:
                self.pool.loses(member, lost)
                again = f"; it was played again, as what the model had said was lost: {lost}"
                if losses == MAX_LOSSES or slot.deadline.over:
                    why = f"{error}; " if error else ""
                    why += f"what the model said is lost: {lost}"
                    return self._rollout(prompt, slot, error=why)
        unknown = task.rewards.keys() - {call.id for call in record.calls}
        if unknown and error is None:
            error = f"it gave a reward to {min(unknown)!r}, which is the id of none of its answers"
        return self._rollout(prompt, slot, record, returned, error, task.rewards)

    def _rollout(
        self,
        prompt: Prompt,
        slot: Slot,
        record: AgentRecord = UNASKED,
        returned: float | str | None = None,  # the agent's reward, or the text to score
        error: str | None = None,
        rewards: Mapping[str, float] = {},
    ) -> Rollout:
        """Make the rollout of an episode from the calls that its session recorded."""
        transcripts = join(record.calls, self.decode, rewards)
        if not transcripts:
            # Its reward would not be the policy's, but count in the group's mean.
            error = error or f"it ended without a token of the model, {_unanswered(record)}"
            transcripts = [Transcript(prompt.token_ids, images=prompt.images)]
        elif error is not None and record.cut_off:
            # Dropping truncated episodes would bias the group towards short answers.
            transcripts[-1].cut_off()
            returned = 0.0
            error = None
        if isinstance(returned, str):
            # An answer of the model that is returned as it was has the opening of its own prompt.
            calls = {call.completion.text.strip(): call for call in record.calls if call.completion}
            call = calls.get(returned.strip())
            transcripts[-1].opening = _opening(call, self.decode) if call else ""
            transcripts[-1].text = returned
        values = list(rewards.values())
        if isinstance(returned, float):
            values.append(returned)
        return Rollout(
            id=slot.id,
            prompt=prompt,
            sequences=tuple(transcript.sequence() for transcript in transcripts),
            reward=sum(values) if values else None,
            error=error and f"agent: {error}",
        )

    async def _open(self, slot: Slot, tokens: int) -> tuple[Member, SessionResponse]:
        """Open a session on the server with the fewest tokens in flight, and count these."""
        seed = seed_of(slot.sampling.seed, slot.number)
        sampling = slot.sampling.model_copy(update={"seed": seed})
        while True:
            with self.pool.waiting(slot.deadline):
                up = await self.pool.wait_up()
            member = min(up, key=lambda member: member.in_flight)
            request = SessionRequest(
                sampling=sampling,
                max_length=self.limits.max_length,
                max_calls=self.limits.max_turns,
                idle_timeout_s=self.limits.timeout_s + GRACE_S,
                session=member.session,
            )
            member.in_flight += tokens  # at once: others that open go elsewhere
            try:
                return member, await member.server.ask(request, timeout_s=self.pool.silence_s)
            except BaseException as error:
                member.in_flight -= tokens
                if not isinstance(error, ServerError) or not self.pool.loses(member, error):
                    raise

    async def _run(self, task: Task, slot: Slot) -> tuple[float | str | None, str | None]:
        """Run the agent until the earlier of two deadlines; return its result and its failure."""
        episode_s = self.limits.timeout_s
        step_s = slot.deadline.left_s
        first = f"env.timeout_s={episode_s:g}" if episode_s <= step_s else "rollout.timeout_s"
        running = asyncio.create_task(_contained(self.agent, task))
        try:
            in_time, _ = await asyncio.wait([running], timeout=min(episode_s, step_s))
        finally:  # also where the episode itself is cancelled
            ended = await _cancel(running)
        if not in_time:
            error = f"it was not done when {first} had passed"
            if not ended:
                error += f"; nor had it {CANCEL_S:g} s after it was cancelled: it was left behind"
            return None, error
        if running.cancelled():
            return None, "it was cancelled"
        return running.result()


def with_images(messages: Iterable[Message], images: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield messages as OpenAI's API has them: each part {"type": "image"} gets the next image."""
    from hocket.common.vision import part_of

    image_parts = map(part_of, images)
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            content = [next(image_parts) if part["type"] == "image" else part for part in content]
        yield dict(message) | {"content": content}


def _task(prompt: Prompt, slot: Slot, url: str, session: SessionResponse) -> Task:
    # A copy, as other agents play the same prompt.
    messages: Iterable[Message] = copy.deepcopy(prompt.messages or ())
    if prompt.images:
        messages = with_images(messages, [image.data for image in prompt.images])
    return Task(
        messages=tuple(messages),
        text=prompt.text,
        answer=prompt.answer,
        meta=copy.deepcopy(prompt.meta),
        seed=seed_of(slot.sampling.seed, slot.number, 0),
        base_url=f"{url}/sessions/{session.id}/v1",  # whose calls are recorded
        api_key=session.key,
        model=session.model,
    )


def _unanswered(record: AgentRecord) -> str:
    """Say why an agent has no answer of the model, and what to do."""
    if record.cut_off:
        advice = "have it say less, or raise that"
        return f"as its prompt leaves no room for one in model.max_length: {advice}"
    if record.calls:
        return f"as none of its {len(record.calls)} calls was answered: have it wait for the answer"
    advice = "have it raise what its client raises, and ask task.base_url"
    return f"as no call of its reached the server: {advice}"


async def _contained(agent: Playable, task: Task) -> tuple[float | str | None, str | None]:
    try:
        return await agent.run(task), None
    # Whatever the user's code raises ends this episode alone. A SystemExit would end the event loop.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return None, f"it raised {type(error).__name__}: {error}"


async def _cancel(running: "asyncio.Task[Any]") -> bool:
    """Cancel a task and return whether it has ended; else abandon it until the end of the event
    loop."""
    running.add_done_callback(retrieve)
    running.cancel()
    await asyncio.wait([running], timeout=CANCEL_S)
    if not running.done():
        _ABANDONED.add(running)
        running.add_done_callback(_ABANDONED.discard)
    return running.done()


def join(
    calls: Iterable[AgentCall],
    decode: Callable[[Sequence[int]], str],
    rewards: Mapping[str, float] = {},
) -> list[Transcript]:
    """Join an agent's calls, in the order in which they began, to sequences; that of the last call
    comes last.

    A call whose prompt's tokens go on from a sequence extends it; another begins one. Calls that
    were broken off are left out; every other sampled token is in one sequence, once.
    """
    transcripts: list[Transcript] = []
    for number, call in enumerate(calls):
        if call.completion is None:
            continue
        prompt_ids = array("I", call.prompt_token_ids)
        prefixes = [each for each in transcripts if _is_prefix(each, prompt_ids, call.images)]
        if prefixes:
            # The longest prefix goes on: what the prompt has behind it is an observation.
            transcript = max(prefixes, key=lambda each: len(each.token_ids))
            transcripts.remove(transcript)
            start = len(transcript.token_ids)
            observed_ids = prompt_ids[start:].tolist()
            new = call.images[len(transcript.images) :]
            images = tuple(dataclasses.replace(image, start=image.start - start) for image in new)
            observation = Observation(text=decode(observed_ids))
            transcript.add_observation(observed_ids, observation, images)
        else:
            transcript = Transcript(prompt_ids, images=call.images)
        transcript.opening = _opening(call, decode)
        transcript.add_completion(call.completion)
        length = len(call.completion.token_ids)
        reward = rewards.get(call.id, 0.0)
        state = state_of(prompt_ids, call.images)
        transcript.turn_rewards[-1] = TurnReward(number, length, reward, state)
        transcripts.append(transcript)
    return transcripts


def _is_prefix(transcript: Transcript, prompt_ids: "array[int]", images: Sequence[Image]) -> bool:
    """Check whether a call's prompt goes on from a sequence.

    Images are compared too, as different images have the same placeholder tokens.
    """
    if prompt_ids[: len(transcript.token_ids)] != transcript.token_ids:
        return False
    return list(images[: len(transcript.images)]) == transcript.images


def _opening(call: AgentCall, decode: Callable[[Sequence[int]], str]) -> str:
    return opening_of(decode(call.prompt_token_ids[-OPENING_TOKENS:]))
