"""From an agent's calls to the sequences that are trained.

A call that goes on from all that was said before makes the sequence longer: what came in between was told, and what
follows was sampled. A call that does not, as the agent has shortened or rewritten what was said, begins a sequence of
its own. Tokens are compared, never text, and none is encoded again.
"""

from collections.abc import Callable, Iterable, Sequence

from hocket.envs import Observation
from hocket.protocol import AgentCall
from hocket.rollout.episode import Transcript
from hocket.types import Prompt


def join(
    prompt: Prompt, calls: Iterable[AgentCall], decode: Callable[[Sequence[int]], str] = lambda token_ids: ""
) -> list[Transcript]:
    """Returns the sequences of one episode, that of the last call last; every sampled token is in one of them, once.

    Args:
        prompt: what the agent was given.
        calls: in the order in which they began; those that were broken off have no part in it.
        decode: writes what was told, for people.
    """
    sequences: list[Transcript] = []
    for call in calls:
        if call.completion is None:
            continue
        asked = list(call.prompt_token_ids)
        begun = [sequence for sequence in sequences if asked[: len(sequence.token_ids)] == sequence.token_ids]
        if begun:
            sequence = max(begun, key=lambda sequence: len(sequence.token_ids))
            sequences.remove(sequence)
            told = asked[len(sequence.token_ids) :]
            sequence.told(told, Observation(text=decode(told)))
        else:
            sequence = Transcript(prompt)
            sequence.begins_with(asked)
        sequence.sampled(call.completion)
        sequences.append(sequence)
    return sequences
