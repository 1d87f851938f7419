"""Play an episode of one turn: a prompt, and the model's answer."""

from hocket.client.batcher import Turn
from hocket.common.tasks import seed_of
from hocket.errors import ServerError
from hocket.rollout.collect import Seat
from hocket.rollout.episode import Ask, Limits, late
from hocket.rollout.transcript import Transcript
from hocket.types import Prompt, Rollout


async def play_single_turn(prompt: Prompt, seat: Seat, *, ask: Ask, limits: Limits, placeholder: int | None) -> Rollout:
    """Ask for one completion of the prompt. A late one is a rollout with an error; raises ServerError otherwise.

    `placeholder`: the token that stands for an image; an answer that has it counts as cut off.
    """
    transcript = Transcript(prompt.token_ids, prompt.opening, prompt.images)
    sampling = seat.sampling
    room = limits.max_length - len(prompt.token_ids)
    error = None
    if room < 1:
        error = f"the prompt leaves no room for an answer in {limits.max_length} tokens"
    else:
        turn = Turn(
            token_ids=prompt.token_ids,
            images=prompt.images,
            sampling=sampling.model_copy(update={"max_tokens": min(sampling.max_tokens, room)}),
            seed=seed_of(sampling.seed, seat.number, 1),
            deadline=seat.deadline,
            group=seat.group,
            place=f"{seat.id} (prompt {prompt.id})",
        )
        try:
            completion = await ask(turn)
        except ServerError as failed:
            error = late(seat, failed)
        else:
            transcript.add_completion(completion)
            if placeholder in completion.token_ids:
                transcript.finish_reason = "length"
    return Rollout(id=seat.id, prompt=prompt, sequences=(transcript.sequence(),), error=error)
