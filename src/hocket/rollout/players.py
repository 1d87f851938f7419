"""Play episodes: one turn without an environment, turns with one, or an agent that asks by itself."""

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
from hocket.rollout.episode import Episode, Limits, RequestTurn, TokenBudget, late
from hocket.rollout.transcript import Transcript
from hocket.types import Prompt, Rollout


def player(
    make: Callable[[], Environment],
    pool: ServerPool,
    ask: RequestTurn,
    renderer: Renderer,
    limits: Limits,
) -> Play:
    """Choose the player of an environment's episodes; `renderer` is that of the prompts' data."""
    example = make()
    if (
        type(example) is SingleTurn and not example.thinking_tokens
    ):  # a subclass has a step of its own
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
    """Ask for one completion of the prompt. A late one is a rollout with an error; raises ServerError otherwise.

    `placeholder`: the token that stands for an image; an answer that has it counts as cut off.
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
            seed=seed_of(sampling.seed, slot.number, 1),
            deadline=slot.deadline,
            group=slot.group,
            place=f"{slot.id} (prompt {prompt.id})",
        )
        try:
            completion = await ask(turn)
        except ServerError as failed:
            error = late(slot, failed)
        else:
            transcript.add_completion(completion)
            if placeholder in completion.token_ids:
                transcript.cut_off()
    return Rollout(id=slot.id, prompt=prompt, sequences=(transcript.sequence(),), error=error)
