"""What flows between the stages: frozen values, standard library only, lengths checked on construction.

Each stage returns a new type and no field ever changes meaning. Token ids are the truth; text is for rewards and
people and is never encoded again.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]
InFlight = Literal["keep", "drain", "abort"]
"""What becomes of requests that are running when new weights come: they go on with these, end first, or are ended."""
Message = Mapping[str, Any]
"""One chat message, {"role": ..., "content": ...}."""
VersionSpan = tuple[int, int, int]
"""(weight version, start, end): the version that sampled tokens start..end of a completion."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of the data, rendered once.

    Attributes:
        id: stable name of the row within its source, "source:row".
        token_ids: the rendered prompt, ready for the engine.
        messages: the chat it was rendered from; None where the source gave plain text.
        text: what was asked, for rewards and people: the last user message, or the plain text.
        answer: the reference that rewards compare with, None where there is none.
        difficulty: of data.difficulty_column, None without one; the higher, the harder.
        meta: the row's other columns.
    """

    id: str
    token_ids: tuple[int, ...]
    messages: tuple[Message, ...] | None = None
    text: str = ""
    answer: str | None = None
    difficulty: float | None = None
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError(f"prompt {self.id} has no tokens")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One episode as ONE flat sequence, prompt first; where an agent did not go on from what was said, as several.

    Attributes:
        token_ids: every token of the episode.
        mask: true where the policy sampled the token; false for prompt and environment tokens.
        logprobs: the engine's log-probability of each sampled token; 0.0 where the mask is false.
        finish_reason: "stop" where the episode was done, "length" where a limit cut it off.
        version_min, version_max: the oldest and newest weight version that sampled one of its tokens; 0 where none did.
        text: what the policy wrote, in its last turn where it had several.
        turns: how many times the policy was asked.
        reward: sum of what the environment gave; None where it plays no part in the reward.
        dialogue: what policy and environment said after the prompt, for people; () for a single turn.
        others: further sequences of the same episode, without a reward or others of their own: this one's score is
            theirs, too.
    """

    id: str
    group_id: str
    prompt: Prompt
    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    version_min: int
    version_max: int
    text: str
    turns: int = 1
    reward: float | None = None
    dialogue: tuple[Message, ...] = ()
    others: "tuple[Rollout, ...]" = ()

    def __post_init__(self) -> None:
        _same_length(token_ids=self.token_ids, mask=self.mask, logprobs=self.logprobs)

    @property
    def sequences(self) -> "tuple[Rollout, ...]":
        """Every sequence of the episode, each alone."""
        return (*self.others, dataclasses.replace(self, others=())) if self.others else (self,)

    @property
    def num_sampled(self) -> int:
        """Tokens the policy sampled in the whole episode: the completion's length."""
        return sum(sum(sequence.mask) for sequence in self.sequences)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The reward of one rollout. `error` says why there is none; an error is never a 0."""

    total: float
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    error: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one prompt with their scores, index by index."""

    id: str
    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]

    def __post_init__(self) -> None:
        _same_length(rollouts=self.rollouts, scores=self.scores)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One sequence to train on. Every number is per token, 0.0 where the mask is false.

    Attributes:
        rollout_logprobs: the engine's, of each sampled token.
        ref_logprobs: the reference policy's; () where there is none.
        values: the critic's estimate before the step; () without a critic.
        returns: what the critic should have estimated, likewise.
        id: names its rollout.
    """

    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    rollout_logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    ref_logprobs: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    returns: tuple[float, ...] = ()
    version_min: int = 0
    id: str = ""

    def __post_init__(self) -> None:
        optional = {name: getattr(self, name) for name in ("ref_logprobs", "values", "returns") if getattr(self, name)}
        _same_length(
            token_ids=self.token_ids,
            mask=self.mask,
            rollout_logprobs=self.rollout_logprobs,
            advantages=self.advantages,
            **optional,
        )
        if len(self.token_ids) < 2:
            raise ValueError("a sample needs at least two tokens: the first one predicts the second")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the trainer says of one rollout before the step; each () or one number per token, 0.0 where not sampled."""

    ref_logprobs: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one optimiser step did, the same on every rank.

    Attributes:
        loss: the global loss that was minimised.
        grad_norm: norm of the global gradient before clipping; nan where the step was skipped.
        skipped: true where loss or gradient was not finite and the weights were left as they were.
        metrics: the loss function's own measurements, token-weighted over the whole batch; the loss scale in float16.
        critic: what the critic measured of itself; empty without one.
        num_tokens: trained (unmasked) tokens.
        num_positions: tokens that went through forward and backward, prompts included, padding not.
        mfu: share of the devices' peak operations per second that the model's own operations took.
        seconds: wall time of forward, backward and update.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    skipped: bool
    metrics: Mapping[str, float]
    critic: Mapping[str, float] = dataclasses.field(default_factory=dict)
    num_tokens: int
    num_positions: int
    num_sequences: int
    num_micro_batches: int
    mfu: float
    seconds: float


def _same_length(**fields: Sequence[Any]) -> None:
    lengths = {name: len(value) for name, value in fields.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"fields must have equal lengths, got {lengths}")
