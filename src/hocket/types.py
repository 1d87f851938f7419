"""Define what flows between the stages: Prompts, Rollout, Score, Group, TrainSample.

Token ids are the truth. Text is for rewards and people, and is never encoded again. In comments,
[t] means one entry per token of a sequence, prompt first.
"""

import dataclasses
import functools
import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, overload

FinishReason = Literal["stop", "length", "abort"]
# What becomes of requests in flight when weights load: they go on, end first, or are aborted.
InFlight = Literal["keep", "drain", "abort"]
TokenIds: TypeAlias = "array[int]"  # Python 3.11 can't subscript the class
"""Token ids, within a process always an array("I").

An array takes four bytes per id, where a list or tuple takes about forty. Its memory is what
servers send, what is pickled for other ranks and what numpy reads. Ids have another type only at
the borders: a tokenizer gives a list, a request is JSON of a list, tensors are made by numpy, and
plugins (`Action`, the argument `token_ids` of a reward) get a tuple, which can be compared and
hashed.
"""
Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Metrics = dict[str, float]
Columns = Mapping[str, Sequence[float]]  # [t] numbers by name, 0.0 where the token was not sampled


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image, and where its tokens stand in a sequence."""

    # The bytes of a PNG, JPEG or WebP file, or a function that reads them.
    file: bytes | Callable[[], bytes] = dataclasses.field(compare=False)
    # SHA-256 of the bytes, and their kind. It tells images apart, as their tokens are equal.
    name: str
    start: int  # place of the first of its tokens in the sequence
    length: int  # number of its tokens: the model's processor expands its placeholder to these
    placeholder: int  # token that stands for the image in what servers are sent

    @property
    def data(self) -> bytes:
        """The bytes of the file."""
        return self.file() if callable(self.file) else self.file


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of the data, rendered once."""

    id: str  # stable name of the row, "source:row"
    token_ids: TokenIds  # the rendered prompt; never empty
    messages: tuple[Message, ...] | None = None  # the prompt as a chat; None for plain text
    text: str = ""  # text for rewards and people: the last user message, or all
    # The thought at the prompt's end that the chat template opens, and maybe closes: "<think>\n"
    opening: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # chat template's options
    answer: str | None = None  # reference answer that rewards compare with
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the row's other columns
    images: tuple[Image, ...] = ()  # all images of the prompt, in order
    source: str = ""  # name of its source in data.sources


class TurnReward(NamedTuple):
    """A turn of the model, and the reward that the environment gave for it."""

    number: int  # number of the turn in its episode, from 0
    tokens: int  # number of tokens sampled in it
    reward: float = 0.0  # reward of the environment for it
    state: str = ""  # names what the model read before the turn: equal for the same text


class Prompts(Sequence[Prompt]):
    """A list of prompts that knows a fingerprint of itself, and which of them ask the same.

    Example: a list of one prompt.

        Prompts([Prompt(id="a.jsonl:1", text="1 + 1", token_ids=array("I", (5, 6, 5)), answer="2")])
    """

    def __init__(self, prompts: Iterable[Prompt] = ()) -> None:
        self._rows: Any = list(prompts)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of all prompts: a run is resumed only with the same ones."""
        return sha256_of_text("".join(map(digest_of, self._rows)))

    def column(self, name: str) -> list[Any]:
        """Return a further column of the data; None where a row lacks it."""
        return [prompt.meta.get(name) for prompt in self]

    def keys(self) -> list[str]:
        """Return a key of each prompt, equal where two ask the same, but for white space."""
        return [key_of(prompt) for prompt in self]

    def select(self, indices: Iterable[int]) -> "Prompts":
        return Prompts(self[index] for index in indices)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]


def digest_of(prompt: Prompt) -> str:
    """Return a hash of a prompt's place, tokens, answer and pictures."""
    images = (image.name for image in prompt.images)
    return sha256_of_text(repr([prompt.id, tuple(prompt.token_ids), prompt.answer, *images]))[:16]


def key_of(prompt: Prompt) -> str:
    """Return a hash of what is asked, without the system's words, and of the answer."""
    messages = prompt.messages or ()
    texts = [message["content"] for message in messages if message["role"] != "system"]
    words = [str(text).split() for text in texts or [prompt.text]]
    images = [image.name for image in prompt.images]
    return sha256_of_text(repr([words, prompt.answer, images]))[:16]


def sha256_of_text(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """One flat sequence, exactly as the engine read and sampled it.

    A list marked [t] has one entry per token, those of the prompt first.

    Example:
        >>> TokenSequence(
        ...     token_ids=array("I", [5, 6, 7]),  # two tokens of the prompt, one sampled
        ...     mask=(False, False, True),
        ...     logprobs=[0.0, 0.0, -0.5],
        ... ).mask.count(True)
        1
    """

    token_ids: TokenIds  # [t] tokens of the prompt and of all turns
    mask: tuple[bool, ...]  # [t] True where the policy sampled: only these tokens are trained
    logprobs: Sequence[float]  # [t] log-probs of the engine, 0.0 where the mask is False
    finish_reason: FinishReason = "stop"  # reason of the last turn; "length" if a limit cut it off
    version_min: int = 0  # oldest weight version that sampled a token; 0 if none was sampled
    version_max: int = 0  # newest weight version that sampled a token
    turns: int = 1  # number of model turns
    text: str = ""  # text of the policy's last turn
    opening: str = ""  # opening of a thought before this text: "<think>\n"
    dialogue: tuple[Message, ...] = ()  # messages after the prompt; () if only the policy spoke
    images: tuple[Image, ...] = ()  # all images of the sequence, in order
    turn_rewards: tuple[TurnReward, ...] = ()  # one for each model turn; () stands for one turn

    def __post_init__(self) -> None:
        check_lengths(token_ids=self.token_ids, mask=self.mask, logprobs=self.logprobs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One episode of one prompt.

    It has one sequence, or several where an agent rewrote its conversation.
    """

    id: str  # "step 3/7/1": the second of group "step 3/7"
    prompt: Prompt  # what it answers
    sequences: tuple[TokenSequence, ...]  # the sequence of the last turn comes last
    reward: float | None = None  # reward of the environment; None if it gives none
    error: str | None = None  # why the episode failed; then it is not trained
    # Measures of the environment.
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def text(self) -> str:
        """The text to score: that of the last turn, or an agent's result."""
        return self.sequences[-1].text

    @property
    def finish_reason(self) -> FinishReason:
        """The finish reason of the last turn."""
        return self.sequences[-1].finish_reason

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens in the whole episode."""
        return sum(sequence.mask.count(True) for sequence in self.sequences)

    @property
    def sequence_ids(self) -> tuple[str, ...]:
        """Names of the sequences: ID.0, ID.1, ..., and ID for the last one."""
        names = [f"{self.id}.{index}" for index in range(len(self.sequences) - 1)]
        names.append(self.id)
        return tuple(names)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The reward of one rollout. With an `error`, `total` is NaN and the rollout is not trained."""

    total: float  # sum of the weighted rewards
    # Each reward by name, before its weight.
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    error: str | None = None  # why there is no score
    note: str = ""  # text for people: the output of a program, the reasons of a judge


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one prompt with their scores, index by index."""

    id: str
    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]
    draw: int = -1  # number of the prompt in the stream, from 0; -1 in a replay

    @property
    def source(self) -> str:
        """The name of the prompt's source."""
        return self.rollouts[0].prompt.source

    @property
    def scored(self) -> list[tuple[Rollout, Score]]:
        """The rollouts that have a score, with it."""
        pairs = zip(self.rollouts, self.scores, strict=True)
        return [(rollout, score) for rollout, score in pairs if score.error is None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One sequence with all numbers per token that the losses read."""

    sequence: TokenSequence
    advantages: Sequence[float]  # [t] 0.0 where the mask is False
    columns: Columns = dataclasses.field(default_factory=dict)  # other numbers that the losses read
    id: str = ""  # name of the sequence, for reports
    group: int = 0  # number of its prompt's group, which no mini-batch divides
    # Whether the sequence would be trained whatever tokens had been sampled: an unbiased sample
    # (algorithm/samples.py).
    is_unbiased: bool = False

    def __post_init__(self) -> None:
        check_lengths(token_ids=self.sequence.token_ids, **self.numbers)

    @property
    def numbers(self) -> Columns:
        """All numbers that the losses read, by name."""
        numbers = {"rollout_logprobs": self.sequence.logprobs, "advantages": self.advantages}
        numbers.update(self.columns)
        return numbers


def text_of(content: Any) -> str:
    """Return the text of a message's content, which is a list of parts if there are images."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def check_lengths(**fields: Sequence[Any]) -> None:
    """Raise ValueError unless all fields have the same length."""
    lengths = {name: len(values) for name, values in fields.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"fields must have equal lengths, got {lengths}")
