"""The messages between trainer and server: JSON, validated on both sides."""

import base64
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Generic, Literal, NotRequired, Self, TypeVar

import pydantic
from pydantic import Field
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from hocket.types import FinishReason, Image, InFlight

_A = TypeVar("_A", bound=pydantic.BaseModel)
# Stop at a list's first wrong item. Otherwise pydantic explains each item, and a wrong list costs a
# thousand times its size.
FAIL_FAST = Field(fail_fast=True)
TokenId = Annotated[int, Field(ge=0)]
Dtype = Annotated[str, Field(pattern="^(float32|bfloat16|float16)$")]  # of weights, torch's name
VersionSpan = tuple[int, int, int]  # (weight version, start, end) of the tokens that it sampled


# Prompts


@pydantic.with_config(extra="forbid", strict=True)
class TextPart(TypedDict):
    """A part of a message's content that is text."""

    type: Literal["text"]
    text: str


@pydantic.with_config(extra="forbid", strict=True)
class ImageUrl(TypedDict):
    """An image as a data URL."""

    url: str  # "data:image/png;base64,..."
    detail: NotRequired[Any]  # a field of OpenAI's API, without effect


@pydantic.with_config(extra="forbid", strict=True)
class ImagePart(TypedDict):
    """A part of a message's content that is an image."""

    type: Literal["image_url"]
    image_url: ImageUrl


_ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]
ContentParts = Annotated[list[_ContentPart], FAIL_FAST]


@pydantic.with_config(extra="forbid", strict=True)
class ChatMessage(TypedDict):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | ContentParts
    name: NotRequired[Any]
    tool_calls: NotRequired[Any]
    tool_call_id: NotRequired[Any]


TokenIdList = Annotated[list[TokenId], FAIL_FAST]


@pydantic.with_config(extra="forbid", strict=True)
class ImagePrompt(TypedDict):
    """Token ids with images. The ids have one placeholder per image, which the engine expands."""

    token_ids: TokenIdList
    # A file for each placeholder: base64, or a data URL.
    images: Annotated[list[str], FAIL_FAST]


PromptInput = str | TokenIdList | Annotated[list[ChatMessage], FAIL_FAST] | ImagePrompt
"""A prompt: text, token ids, a chat, or token ids with images."""
MAX_PROMPTS = 1024  # prompts of one request
MAX_SAMPLES = 128  # completions of one prompt
MAX_COMPLETIONS = 1 << 14  # completions of one request
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Seeds = Annotated[list[Seed], Field(min_length=1, max_length=MAX_SAMPLES, fail_fast=True)]
Status = Literal["ready", "updating", "asleep", "failed"]


# The server's state


class Strict(pydantic.BaseModel):
    """A message: no unknown fields, no conversions, no NaN."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False
    )


class ErrorBody(Strict):
    """An error with its code, and a hint that says what to do."""

    code: str
    message: str
    hint: str


class ErrorResponse(Strict):
    """The body of every answer from status 400."""

    error: ErrorBody


CURABLE = ("asleep", "reload_failed", "not_resumed")
"""Codes of `Health.error` that a reload may mend. With any other one, restart the server."""


class Health(Strict):
    """Answer to GET /health, which needs no token."""

    status: Status
    version: int
    model: str
    dtype: str
    architecture: str  # ModelShapes.architecture
    vocab_size: int
    max_length: int
    max_adapter_rank: int  # 0: the server takes no adapters
    tokenizer_sha256: str
    session: str  # new after every start of the server
    in_flight: int  # number of unfinished completions
    root: str  # folder of the published versions
    device: str  # "cpu" or "cuda"
    workers: int  # number of processes that hold weights
    kv_tokens: int  # number of tokens that fit into the KV cache
    waiting: int | None = None  # number of completions that the engine has not begun
    kv_use: float | None = None  # share of the KV cache in use
    error: ErrorBody | None = None


# Generation


class Request(Strict, Generic[_A]):
    """A message that a client sends to a route; `answer` is the type of the answer."""

    route: ClassVar[str]
    answer: ClassVar[Any]
    # The trainer's id. None: curl, eval or the like.
    trainer: str | None = Field(None, min_length=1, max_length=128)


class SamplingParams(Strict):
    """The parameters of sampling; temperature 0 is greedy."""

    temperature: float = Field(1.0, ge=0.0, le=2.0)  # vLLM takes no higher one
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(-1, ge=-1)
    max_tokens: int = Field(16, ge=1)
    # Not strict: FastAPI parses JSON to lists, which a strict tuple would refuse.
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), max_length=16, strict=False, fail_fast=True
    )
    stop_token_ids: tuple[TokenId, ...] = Field((), max_length=16, strict=False, fail_fast=True)
    seed: Seed | None = None


class Toolbox(Strict):
    """Functions that a model may call, as OpenAI's API describes them. Prompts stay as they are."""

    parser: str = Field(min_length=1)  # vLLM's name for the format of calls: "hermes"
    tools: tuple[dict[str, Any], ...] = Field(min_length=1, max_length=1024, fail_fast=True)


class ToolCall(Strict):
    """A call of a function, as the model wrote it."""

    name: str
    arguments: str  # JSON
    id: str = ""


class Column:
    """Annotation of a field with a number per token: it tells pydantic how to read and write it.

    In JSON it is a list. In a `packed` stream it is the memory of an array, in base64.
    """

    def __init__(self, list_type: Any, code: str) -> None:
        self._list_type = list_type
        self._code = code  # type code of the array: "I" or "f", 4 bytes each

    def __get_pydantic_core_schema__(
        self, source: Any, handler: pydantic.GetCoreSchemaHandler
    ) -> CoreSchema:
        """Make the schema by which pydantic handles the field: it calls this by its name."""
        as_list = handler(self._list_type)
        as_base64 = core_schema.no_info_plain_validator_function(self._read)
        write = core_schema.plain_serializer_function_ser_schema(
            self._write, info_arg=True, when_used="json"
        )
        return core_schema.union_schema(
            [as_list, as_base64], mode="left_to_right", serialization=write
        )

    def _read(self, value: Any) -> Any:
        if isinstance(value, array):
            return value
        if not isinstance(value, str):
            raise ValueError("must be a list, or base64")
        import numpy as np  # not at the top, as a launcher needs none

        numbers = _in_wire_order(array(self._code, base64.b64decode(value, validate=True)))
        if not np.isfinite(numbers).all():
            raise ValueError("must be finite")
        return numbers

    def _write(self, values: Sequence[float], info: pydantic.SerializationInfo) -> Any:
        if not info.context:  # the server sets a context for a packed stream
            return tuple(values)
        return base64.b64encode(_in_wire_order(array(self._code, values))).decode()


def _in_wire_order(numbers: "array[Any]") -> "array[Any]":
    """Swap the bytes of numbers if this machine is not little-endian, as messages are."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


class Completion(Strict):
    """One sampled completion of at least one token."""

    token_ids: Annotated[Sequence[int], Column(tuple[TokenId, ...], "I")]
    # Under the distribution that was sampled from: after temperature, top_p and top_k.
    logprobs: Annotated[Sequence[float], Column(tuple[float, ...], "f")]
    # The text of the turn: also of its tokens in the prompt (GenerateRequest.begun), but without
    # the stop token or stop string.
    text: str
    # The stop string, and the rest of the token in which it ends.
    after_text: str = Field(default="", exclude_if=lambda text: not text)
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...] = Field(min_length=1)
    tool_calls: tuple[ToolCall, ...] = Field(default=(), exclude_if=lambda calls: not calls)
    # The whole prompt as the engine read it, if the prompt has images; else ().
    prompt_token_ids: tuple[TokenId, ...] = Field(default=(), exclude_if=lambda ids: not ids)

    @pydantic.model_validator(mode="after")
    def _one_logprob_per_token(self) -> Self:
        count = len(self.token_ids)
        if count != len(self.logprobs) or not count:
            raise ValueError(
                f"{count} token_ids with {len(self.logprobs)} logprobs: as many are needed, "
                "at least one"
            )
        return self


class GenerateResponse(Strict):
    """Answer to /generate: completions[i][j] is the j-th of prompt i."""

    version: int  # weight version at the end
    model: str
    completions: list[list[Completion]]


class GenerateRequest(Request[GenerateResponse]):
    """POST /generate. With `stream` the answer is NDJSON in ASCII: StreamLines, then a StreamEnd.

    Prompt i has one completion per seed in seeds[i]. Without `seeds` it has `n` completions, the
    j-th with seed sampling.seed + i·n + j.
    """

    route = "/generate"
    answer = GenerateResponse
    prompts: list[PromptInput] = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
    sampling: SamplingParams = SamplingParams()
    n: int = Field(1, ge=1, le=MAX_SAMPLES)
    fit: bool = False  # lower max_tokens to what the context leaves
    stream: bool = False
    packed: bool = False  # send numbers as little-endian uint32 and float32 in base64
    seeds: Annotated[list[Seeds], FAIL_FAST] | None = Field(None, max_length=MAX_PROMPTS)
    session: str | None = None  # session of the server: the request is refused after a restart
    tools: Toolbox | None = None
    # For each prompt, the number of tokens at its end that belong to this turn already: the turn
    # goes on. Text and tool calls are those of the whole turn.
    begun: Annotated[list[Annotated[int, Field(ge=0)]], FAIL_FAST] | None = Field(
        None, max_length=MAX_PROMPTS
    )


class StreamLine(Strict):
    """A line of a stream: a completion of prompt number `prompt`, the `index`-th of it."""

    prompt: int
    index: int
    completion: Completion


class StreamEnd(Strict):
    """The last line of a stream. Without it the answer was cut."""

    done: Literal[True] = True
    version: int
    model: str
    error: ErrorBody | None = None  # why generation broke off


# Sessions of agents


class SessionResponse(Strict):
    """Answer to /sessions: how an agent reaches its session."""

    id: str
    key: str  # key that the agent sends in place of the server's token
    model: str  # model name for the agent's calls, which may have any other


class SessionRequest(Request[SessionResponse]):
    """POST /sessions: open a session, whose calls to /sessions/ID/v1 are recorded.

    All calls are sampled in the way set here, whatever they ask for.
    """

    route = "/sessions"
    answer = SessionResponse
    sampling: SamplingParams
    max_length: int = Field(ge=2)  # tokens of prompt and completion
    max_calls: int = Field(ge=1)
    idle_timeout_s: float = Field(ge=1, le=100_000)  # seconds without a call until it is forgotten
    session: str | None = None  # session of the server, as in a GenerateRequest


class AgentCall(Strict):
    """One call of an agent: what the model read and sampled."""

    model_config = pydantic.ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
    id: str = ""  # id of vLLM's answer
    prompt_token_ids: tuple[int, ...]
    images: tuple[Image, ...] = Field(default=(), exclude_if=lambda images: not images)
    seed: Seed | None = None
    completion: Completion | None  # None: the call failed, or has not ended


class AgentRecord(Strict):
    """Answer to GET and DELETE /sessions/ID: the calls, in the order in which they began."""

    calls: tuple[AgentCall, ...]
    cut_off: bool  # a call was over max_calls or max_length


# Weights


class DiskSource(Strict):
    """A folder under the server's root, with a whole version or an adapter.

    PUT /upload answers with one, too.
    """

    kind: Literal["disk"] = "disk"
    name: str = Field(min_length=1, max_length=512)


class AdapterConfig(Strict):
    """PEFT's adapter_config.json; keys of other kinds of adapters are refused."""

    peft_type: Literal["LORA"] = "LORA"
    task_type: Literal["CAUSAL_LM"] = "CAUSAL_LM"
    base_model_name_or_path: str
    r: int = Field(ge=1)
    lora_alpha: float = Field(gt=0)
    # The last parts of layers' names.
    target_modules: list[str] = Field(min_length=1, max_length=1024, fail_fast=True)


class TensorLayout(Strict):
    """Name, type and shape of a tensor in a bucket."""

    name: str
    dtype: Dtype
    shape: list[int] = Field(max_length=16, fail_fast=True)


class GroupAddress(Strict):
    """The weight group that the workers are to join."""

    name: str = Field(min_length=1, max_length=128)  # new for every attempt
    host: str = Field(min_length=1, max_length=253)  # host of the trainer's key-value store
    port: int = Field(ge=1, le=65535)
    # The trainer's GPU, as NCCL connects no two processes on one. None: gloo connects CPUs.
    device: str | None
    timeout_s: float = Field(gt=0)


class CollectiveSource(Strict):
    """A version that comes in buckets (nccl.py)."""

    kind: Literal["nccl"] = "nccl"
    group: GroupAddress
    turn: int = Field(ge=1)  # number of the transfer in the group; no turn of a model
    adapter: AdapterConfig | None = None  # None: whole weights
    buckets: list[Annotated[list[TensorLayout], FAIL_FAST]] = Field(min_length=1, fail_fast=True)
    partial: bool = False  # frozen weights stay as they came with the last whole version


class OtherSource(Strict, extra="allow"):
    """A version that comes by the transport of a plugin.

    The part of the server that knows this kind reads the other fields.
    """

    kind: str = Field(min_length=1, max_length=64)


def _tag(source: Any) -> str:
    """Choose the class of a source by its kind."""
    if isinstance(source, Mapping):
        kind = source.get("kind", "disk")
    else:
        kind = getattr(source, "kind", "other")
    return kind if kind in ("disk", "nccl") else "other"


Source = Annotated[
    Annotated[DiskSource, pydantic.Tag("disk")]
    | Annotated[CollectiveSource, pydantic.Tag("nccl")]
    | Annotated[OtherSource, pydantic.Tag("other")],
    pydantic.Discriminator(_tag),
]


class ReloadResponse(Strict):
    """The version that the server holds; the checksum is of the tensors loaded into the model."""

    version: int
    seconds: float
    num_tensors: int
    checksum: str
    session: str


class ReloadRequest(Request[ReloadResponse]):
    """POST /reload_weights. A version that the server holds already is not loaded.

    With `compare` no version is loaded: the server compares its weights with those of `source`.
    """

    route = "/reload_weights"
    answer = ReloadResponse
    version: int = Field(ge=1)
    source: Source
    in_flight: InFlight = "keep"
    compare: bool = False


class SleepRequest(Request[Health]):
    """POST /sleep: the engine leaves the GPU until a reload, even of the version that it holds.

    Then requests that were kept go on.
    """

    route = "/sleep"
    answer = Health
    # 1 keeps the weights on the CPU; after 2 only a reload brings the engine back.
    level: int = Field(1, ge=1, le=2)  # not Literal[1, 2], which would take true for 1
    in_flight: InFlight = "keep"


class HeartbeatRequest(Request[Health]):
    """POST /heartbeat: the trainer has the server, unless another one does."""

    route = "/heartbeat"
    answer = Health
    # Required here: in other requests it may be None.
    trainer: str = Field(min_length=1, max_length=128)
    take_over: bool = False  # take the server from another trainer
    leaving: bool = False  # free the server


class TensorSpec(Strict):
    """Type, shape and checksum of a published tensor."""

    dtype: Dtype
    shape: list[int]
    checksum: str  # manifest.tensor_checksum


class Manifest(Strict):
    """The manifest.json of a published version."""

    version: int
    tensors: dict[str, TensorSpec]  # all tensors of the version, also in a delta
    checksum: str  # checksum of all tensors
