"""A few completions, scored by both sides: the end-to-end proof that the engine computes with the trainer's weights.

Checksums prove what went into the model; this proves what comes out. A stale copy of a tied output head, a wrong
precision or a cached prefix of old weights all show here.
"""

from collections.abc import Awaitable, Callable, Sequence

from hocket.config import RolloutConfig
from hocket.members import Member
from hocket.protocol import SamplingParams
from hocket.types import Prompt, TokenSequence, TrainSample

MAX_TOKENS = 16
SEED = 20


Score = Callable[[Sequence[TrainSample]], Awaitable[float]]
"""The trainer's mean |Δ log-prob| to what these samples say."""


async def logprob_gap(
    member: Member, score: Score, prompts: Sequence[Prompt], rollout: RolloutConfig, timeout_s: float
) -> float:
    """Returns the mean |Δ log-prob| of the engine's own completions of these prompts; 0 without prompts.

    Raises:
        ServerError: the server could not complete them.
    """
    sampling = SamplingParams(
        temperature=rollout.temperature, max_tokens=min(MAX_TOKENS, rollout.max_tokens), seed=SEED
    )
    answers = member.server.generate(
        [prompt.token_ids for prompt in prompts], sampling, timeout_s=timeout_s, session=member.session
    )
    samples = [
        TrainSample(
            sequence=TokenSequence(
                token_ids=prompts[i].token_ids + completion.token_ids,
                mask=(False,) * len(prompts[i].token_ids) + (True,) * len(completion.token_ids),
                logprobs=(0.0,) * len(prompts[i].token_ids) + completion.logprobs,
            ),
            advantages=(0.0,) * (len(prompts[i].token_ids) + len(completion.token_ids)),
        )
        async for i, _, completion in answers
    ]
    return await score(samples) if samples else 0.0
