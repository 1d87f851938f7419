"""Define what flows between the stages. t: tokens of a sequence, prompt first.

Token ids are the truth; text is for rewards and people and is never encoded again.
"""

import dataclasses
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

FinishReason = Literal["stop", "length", "abort"]
InFlight = Literal[
    "keep", "drain", "abort"
]  # while weights load, requests go on, end before, or are aborted
TokenIds: TypeAlias = "array[int]"  # Python 3.11 can't subscript the class
"""Ids of tokens, in a process always an array("I").

It has four bytes per id, where a list or tuple has about forty; what servers send, what is pickled
for other ranks and what numpy reads is an array's memory as it is. Ids have another type only at the
borders: a tokenizer gives a list, a request is JSON of a list, tensors are made by numpy, and plugins
(`Action`, the argument `token_ids` of a reward) get a tuple, which can be compared and hashed.
"""
Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Metrics = dict[str, float]
Columns = Mapping[str, Sequence[float]]  # by name: a number per token, 0.0 where it was not sampled


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A picture, and where its tokens stand in a sequence."""

    file: bytes | Callable[[], bytes] = dataclasses.field(
        compare=False
    )  # a PNG, JPEG or WebP, or what reads it
    name: str  # SHA-256 of its bytes, and their kind: tells images apart, whose tokens are alike
    start: int  # place of its first token
    length: int  # of its tokens: what the model's processor makes of its placeholder
    placeholder: int  # the token that stands for it in what servers are sent

    @property
    def data(self) -> bytes:
        return self.file() if callable(self.file) else self.file


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of the data, rendered once."""

    id: str  # stable name of the row, "source:row"
    token_ids: TokenIds  # never empty
    messages: tuple[Message, ...] | None = None  # None for plain text
    text: str = ""  # for rewards and people: the last user message, or all
    opening: str = (
        ""  # the thought at its end that the chat template opens, maybe closes: "<think>\n"
    )
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the chat template
    answer: str | None = None  # which rewards compare with
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the row's other columns
    images: tuple[Image, ...] = ()
    source: str = ""  # of data.sources, by name


class TurnReward(NamedTuple):
    """A turn of the model, and what the environment gave for it."""

    number: int  # in its episode, from 0
    tokens: int  # sampled in it
    reward: float = 0.0
    state: str = ""  # alike where the model saw the same before it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """One flat sequence, exactly as the engine read and sampled it."""

    token_ids: TokenIds  # [t]
    mask: tuple[bool, ...]  # [t] True where the policy sampled: only that is trained
    logprobs: Sequence[float]  # [t] the engine's; 0.0 where the mask is False
    finish_reason: FinishReason = "stop"  # of the last turn; "length" where a limit cut it off
    version_min: int = 0  # oldest and newest weight version that sampled tokens; 0 without any
    version_max: int = 0
    turns: int = 1  # model turns
    text: str = ""  # of the policy's last turn
    opening: str = ""  # of a thought, before this text: "<think>\n"
    dialogue: tuple[Message, ...] = ()  # after the prompt; () if only the policy spoke
    images: tuple[Image, ...] = ()  # of the whole sequence, in order
    turn_rewards: tuple[TurnReward, ...] = ()  # of each model turn; (): one turn

    def __post_init__(self) -> None:
        check_lengths(token_ids=self.token_ids, mask=self.mask, logprobs=self.logprobs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One episode of one prompt: one sequence, or several where an agent rewrote its conversation."""

    id: str  # "step 3/7/1": the second of group "step 3/7"
    prompt: Prompt
    sequences: tuple[TokenSequence, ...]  # the one of the last turn comes last
    reward: float | None = None  # of the environment; None where it gives none
    error: str | None = None  # why it failed; then it is not trained
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of the environment

    @property
    def text(self) -> str:
        """Text to score: the last turn's, or an agent's result."""
        return self.sequences[-1].text

    @property
    def finish_reason(self) -> FinishReason:
        return self.sequences[-1].finish_reason

    @property
    def num_sampled(self) -> int:
        """Sampled tokens of the whole episode."""
        return sum(sequence.mask.count(True) for sequence in self.sequences)

    @property
    def sequence_ids(self) -> tuple[str, ...]:
        """Names of the sequences: ID.0, ID.1, ..., and ID of the last one."""
        return (*(f"{self.id}.{index}" for index in range(len(self.sequences) - 1)), self.id)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The reward of one rollout; with an `error`, `total` is NaN: it is not trained."""

    total: float
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    error: str | None = None
    note: str = ""  # for people: what a program wrote, why a judge thinks so


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one prompt with their scores, index by index."""

    id: str
    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]
    draw: int = -1  # of the prompt from the stream, from 0; -1 in a replay

    @property
    def source(self) -> str:
        return self.rollouts[0].prompt.source

    @property
    def scored(self) -> list[tuple[Rollout, Score]]:
        return [
            pair for pair in zip(self.rollouts, self.scores, strict=True) if pair[1].error is None
        ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    sequence: TokenSequence
    advantages: Sequence[float]  # [t] 0.0 where the mask is False
    columns: Columns = dataclasses.field(default_factory=dict)  # what else the losses read
    id: str = ""  # of the sequence, for reports
    group: int = 0  # number of its prompt's group, which no mini-batch divides
    is_unbiased: bool = (
        False  # whether it is trained did not depend on its tokens (algorithm/samples.py)
    )

    def __post_init__(self) -> None:
        check_lengths(token_ids=self.sequence.token_ids, **self.numbers)

    @property
    def numbers(self) -> Columns:
        """All that the losses read, by name."""
        return {
            "rollout_logprobs": self.sequence.logprobs,
            "advantages": self.advantages,
            **self.columns,
        }


def text_of(content: Any) -> str:
    """Return the text of a message's content, which has parts where there are pictures."""
    return (
        content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    )


def check_lengths(**fields: Sequence[Any]) -> None:
    if len(set(map(len, fields.values()))) > 1:
        lengths = {name: len(value) for name, value in fields.items()}
        raise ValueError(f"fields must have equal lengths, got {lengths}")
