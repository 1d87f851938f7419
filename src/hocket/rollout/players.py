"""Choose how episodes are played: one turn, turns with an environment, or whole by an agent."""

from collections.abc import Awaitable, Callable
from functools import partial

from hocket.client.batcher import Turn
from hocket.client.pool import ServerPool
from hocket.common.tasks import seed_of
from hocket.data.renderer import Renderer
from hocket.envs import Environment
from hocket.envs.base import SingleTurn
from hocket.errors import ServerError
from hocket.rollout.collect import Play, Slot
from hocket.rollout.episode import Episode, Limits, RequestTurn, TokenBudget, too_late
from hocket.rollout.transcript import Transcript
from hocket.types import Prompt, Rollout


def player(
    make: Callable[[], Environment],
    pool: ServerPool,
    ask: RequestTurn,
    renderer: Renderer,
    limits: Limits,
) -> Play:
    """Choose the player of an environment's episodes.

    make: makes an environment for one episode. pool: the servers, whose KV caches bound how many
    episodes start.
    """
    example = make()
    # Without an environment there is no need for an Episode. A subclass has a step of its own.
    if type(example) is SingleTurn and not example.thinking_tokens:
        return partial(play_single_turn, ask=ask, limits=limits, placeholder=renderer.placeholder)

    budget = TokenBudget(lambda: sum(member.kv_tokens for member in pool.members))
    whole = example.player(pool=pool, limits=limits, decode=renderer.decode, budget=budget)
    if whole is not None:
        return whole

    def play(prompt: Prompt, slot: Slot) -> Awaitable[Rollout]:
        return Episode(prompt, slot, make, ask, renderer, limits, budget).play()

    return play


async def play_single_turn(
    prompt: Prompt, slot: Slot, *, ask: RequestTurn, limits: Limits, placeholder: int | None
) -> Rollout:
    """Request one completion of a prompt. A late one becomes a rollout with an error.

    placeholder: the token that stands for an image. A completion that has it counts as cut off.
    Raise ServerError if the servers failed before the deadline.
    """
    transcript = Transcript(prompt.token_ids, prompt.opening, prompt.images)
    sampling = slot.sampling
    room = limits.max_length - len(prompt.token_ids)
    error = None
    if room < 1:
        error = f"the prompt leaves no room for an answer in {limits.max_length} tokens"
    else:
        turn = Turn(
            token_ids=prompt.token_ids,
            images=prompt.images,
            sampling=sampling.model_copy(update={"max_tokens": min(sampling.max_tokens, room)}),
            seed=seed_of(sampling.seed, slot.number, 1),  # as an Episode's first turn
            deadline=slot.deadline,
            group=slot.group,
            place=f"{slot.id} (prompt {prompt.id})",
        )
        try:
            completion = await ask(turn)
        except ServerError as failed:
            if not slot.deadline.over:
                raise
            error = too_late(slot, failed)
        else:
            transcript.add_completion(completion)
            if placeholder in completion.token_ids:
                transcript.cut_off()
    return Rollout(id=slot.id, prompt=prompt, sequences=(transcript.sequence(),), error=error)
