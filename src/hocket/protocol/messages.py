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
FAIL_FAST = Field(
    fail_fast=True
)  # or a wrong list costs a thousand times its size: pydantic explains each item
TokenId = Annotated[int, Field(ge=0)]
Dtype = Annotated[
    str, Field(pattern="^(float32|bfloat16|float16)$")
]  # of weights, as torch names it
VersionSpan = tuple[int, int, int]  # (weight version, start, end) of the tokens that it sampled


@pydantic.with_config(extra="forbid", strict=True)
class TextPart(TypedDict):
    type: Literal["text"]
    text: str


@pydantic.with_config(extra="forbid", strict=True)
class ImageUrl(TypedDict):
    url: str  # "data:image/png;base64,..."
    detail: NotRequired[Any]  # of OpenAI's API; has no effect


@pydantic.with_config(extra="forbid", strict=True)
class ImagePart(TypedDict):
    type: Literal["image_url"]
    image_url: ImageUrl


ContentParts = Annotated[
    list[Annotated[TextPart | ImagePart, Field(discriminator="type")]], FAIL_FAST
]


@pydantic.with_config(extra="forbid", strict=True)
class ChatMessage(TypedDict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | ContentParts
    name: NotRequired[Any]
    tool_calls: NotRequired[Any]
    tool_call_id: NotRequired[Any]


@pydantic.with_config(extra="forbid", strict=True)
class ImagePrompt(TypedDict):
    """Token ids with images, of each of which they have but its placeholder: the engine puts in the rest."""

    token_ids: Annotated[list[TokenId], FAIL_FAST]
    images: Annotated[
        list[str], FAIL_FAST
    ]  # of each placeholder: a file in base64, or as a data URL


PromptInput = (
    str
    | Annotated[list[TokenId], FAIL_FAST]
    | Annotated[list[ChatMessage], FAIL_FAST]
    | ImagePrompt
)
"""Text, token ids, a chat, or token ids with images."""
MAX_PROMPTS = 1024
MAX_SAMPLES = 128
MAX_COMPLETIONS = 1 << 14
"""Prompts of one request, completions of one of them, and of all together."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Seeds = Annotated[list[Seed], Field(min_length=1, max_length=MAX_SAMPLES, fail_fast=True)]
Status = Literal["ready", "updating", "asleep", "failed"]


class Strict(pydantic.BaseModel):
    """A message: no unknown fields, no conversions, no NaN."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False
    )


class ErrorBody(Strict):
    code: str
    message: str
    hint: str


class ErrorResponse(Strict):
    """The body of every answer from status 400."""

    error: ErrorBody


CURABLE = ("asleep", "reload_failed", "not_resumed")
"""Codes of `Health.error` that a reload may mend: a server with any other one must be started again."""


class Health(Strict):
    """GET /health, which needs no token."""

    status: Status
    version: int
    model: str
    dtype: str
    architecture: str  # ModelShapes.architecture
    vocab_size: int
    max_length: int
    max_adapter_rank: int  # 0: it takes no adapters
    tokenizer_sha256: str
    session: str  # new after every start of the server
    in_flight: int  # completions
    root: str  # folder of the versions
    device: str  # "cpu" or "cuda"
    workers: int  # processes that hold weights
    kv_tokens: int  # that fit into the KV cache
    waiting: int | None = None  # completions that the engine has not begun
    kv_use: float | None = None  # share of the KV cache
    error: ErrorBody | None = None


class Request(Strict, Generic[_A]):
    """What a client sends."""

    route: ClassVar[str]
    answer: ClassVar[Any]
    trainer: str | None = Field(None, min_length=1, max_length=128)  # None: curl, eval or the like


class SamplingParams(Strict):
    """How to sample; temperature 0 is greedy."""

    temperature: float = Field(1.0, ge=0.0, le=2.0)  # vLLM takes no higher one
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(-1, ge=-1)
    max_tokens: int = Field(16, ge=1)
    # Strict would take no list from FastAPI.
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), max_length=16, strict=False, fail_fast=True
    )
    stop_token_ids: tuple[TokenId, ...] = Field((), max_length=16, strict=False, fail_fast=True)
    seed: Seed | None = None


class Toolbox(Strict):
    """Functions that a model may call, as OpenAI's API describes them. Prompts stay as they are."""

    parser: str = Field(min_length=1)  # vLLM's name for how calls are written, "hermes"
    tools: tuple[dict[str, Any], ...] = Field(min_length=1, max_length=1024, fail_fast=True)


class ToolCall(Strict):
    name: str
    arguments: str  # JSON of the model
    id: str = ""


class Column:
    """A field with a number per token: a list in JSON or, in a `packed` stream, base64 of an array."""

    def __init__(self, listed: Any, code: str) -> None:
        self._listed = listed
        self._code = code  # of the array: "I" or "f", 4 bytes each

    def __get_pydantic_core_schema__(
        self, source: Any, handler: pydantic.GetCoreSchemaHandler
    ) -> CoreSchema:
        packed = core_schema.no_info_plain_validator_function(self._read)
        write = core_schema.plain_serializer_function_ser_schema(
            self._write, info_arg=True, when_used="json"
        )
        return core_schema.union_schema(
            [handler(self._listed), packed], mode="left_to_right", serialization=write
        )

    def _read(self, value: Any) -> Any:
        if isinstance(value, array):
            return value
        if not isinstance(value, str):
            raise ValueError("must be a list, or base64")
        import numpy as np  # here, as a launcher needs none

        numbers = _in_wire_order(array(self._code, base64.b64decode(value, validate=True)))
        if not np.isfinite(numbers).all():
            raise ValueError("must be finite")
        return numbers

    def _write(self, values: Sequence[float], info: pydantic.SerializationInfo) -> Any:
        if not info.context:
            return tuple(values)
        return base64.b64encode(_in_wire_order(array(self._code, values))).decode()


def _in_wire_order(numbers: "array[Any]") -> "array[Any]":
    """Swap the bytes of numbers where this machine is not little-endian, as messages are."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


class Completion(Strict):
    """One sampled completion of at least one token."""

    token_ids: Annotated[Sequence[int], Column(tuple[TokenId, ...], "I")]
    logprobs: Annotated[
        Sequence[float], Column(tuple[float, ...], "f")
    ]  # under the distribution sampled from
    text: str  # of the turn, with its tokens in the prompt (`begun`); without the stop token, or stop string
    after_text: str = Field(
        default="", exclude_if=lambda text: not text
    )  # the stop string, and the rest of its token
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...] = Field(min_length=1)
    tool_calls: tuple[ToolCall, ...] = Field(default=(), exclude_if=lambda calls: not calls)
    # What the engine read of a prompt with images, whole; else ().
    prompt_token_ids: tuple[TokenId, ...] = Field(default=(), exclude_if=lambda ids: not ids)

    @pydantic.model_validator(mode="after")
    def _one_logprob_per_token(self) -> Self:
        count = len(self.token_ids)
        if count != len(self.logprobs) or not count:
            raise ValueError(
                f"{count} token_ids with {len(self.logprobs)} logprobs: as many are needed, at least one"
            )
        return self


class GenerateResponse(Strict):
    """Answer to /generate: completions[i][j] is the j-th of prompt i."""

    version: int  # at the end
    model: str
    completions: list[list[Completion]]


class GenerateRequest(Request[GenerateResponse]):
    """POST /generate. With `stream` the answer is NDJSON in ASCII: StreamLines, then a StreamEnd.

    Prompt i has one completion per seed in seeds[i], or `n`, the j-th with seed sampling.seed + i·n + j.
    """

    route = "/generate"
    answer = GenerateResponse
    prompts: list[PromptInput] = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
    sampling: SamplingParams = SamplingParams()
    n: int = Field(1, ge=1, le=MAX_SAMPLES)
    fit: bool = False  # lower max_tokens to what the context leaves
    stream: bool = False
    packed: bool = False  # little-endian uint32 and float32 in base64
    seeds: Annotated[list[Seeds], FAIL_FAST] | None = Field(None, max_length=MAX_PROMPTS)
    session: str | None = None  # of the server: refused after a restart
    tools: Toolbox | None = None
    # Of each prompt, how many of its last tokens the model wrote in the same turn: text and calls are the whole turn's.
    begun: Annotated[list[Annotated[int, Field(ge=0)]], FAIL_FAST] | None = Field(
        None, max_length=MAX_PROMPTS
    )


class StreamLine(Strict):
    prompt: int
    index: int
    completion: Completion


class StreamEnd(Strict):
    """The last line; without it the answer was cut."""

    done: Literal[True] = True
    version: int
    model: str
    error: ErrorBody | None = None  # why generation broke off


class SessionResponse(Strict):
    id: str
    key: str  # in place of the server's token
    model: str  # the agent may name any other


class SessionRequest(Request[SessionResponse]):
    """POST /sessions: calls to /sessions/ID/v1 are recorded, and sampled in this way whatever they ask."""

    route = "/sessions"
    answer = SessionResponse
    sampling: SamplingParams
    max_length: int = Field(ge=2)  # tokens of prompt and completion
    max_calls: int = Field(ge=1)
    idle_timeout_s: float = Field(gt=0, le=100_000)  # without a call, then it is forgotten
    session: str | None = None  # as in a GenerateRequest


class AgentCall(Strict):
    model_config = pydantic.ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
    id: str = ""  # of vLLM's answer
    prompt_token_ids: tuple[int, ...]
    images: tuple[Image, ...] = Field(default=(), exclude_if=lambda images: not images)
    seed: Seed | None = None
    completion: Completion | None  # None: failed, or has not ended


class AgentRecord(Strict):
    """Answer to GET and DELETE /sessions/ID: calls as they began."""

    calls: tuple[AgentCall, ...]
    cut_off: bool  # a call was over max_calls or max_length


class DiskSource(Strict):
    """A folder under the server's root, with a whole version or an adapter; the answer to PUT /upload, too."""

    kind: Literal["disk"] = "disk"
    name: str = Field(min_length=1, max_length=512)


class AdapterConfig(Strict):
    """PEFT's adapter_config.json; keys of other kinds of adapters are refused."""

    peft_type: Literal["LORA"] = "LORA"
    task_type: Literal["CAUSAL_LM"] = "CAUSAL_LM"
    base_model_name_or_path: str
    r: int = Field(ge=1)
    lora_alpha: float = Field(gt=0)
    target_modules: list[str] = Field(
        min_length=1, max_length=1024, fail_fast=True
    )  # last parts of layers' names


class TensorLayout(Strict):
    name: str
    dtype: Dtype
    shape: list[int] = Field(max_length=16, fail_fast=True)


class GroupAddress(Strict):
    """The weight group that the workers are to be in."""

    name: str = Field(min_length=1, max_length=128)  # new for every attempt
    host: str = Field(min_length=1, max_length=253)  # of the trainer's key-value store
    port: int = Field(ge=1, le=65535)
    device: (
        str | None
    )  # the trainer's GPU, as NCCL connects no two processes on one; None: gloo connects CPUs
    timeout_s: float = Field(gt=0)


class CollectiveSource(Strict):
    """A version that comes in buckets (nccl.py)."""

    kind: Literal["nccl"] = "nccl"
    group: GroupAddress
    turn: int = Field(ge=1)  # number of the transfer in the group
    adapter: AdapterConfig | None = None  # None: whole weights
    buckets: list[Annotated[list[TensorLayout], FAIL_FAST]] = Field(min_length=1, fail_fast=True)
    partial: bool = False  # frozen weights stay as they came with the last whole version


class OtherSource(Strict, extra="allow"):
    """A version that comes in a way of its own: the part of the server that knows this kind reads the other fields."""

    kind: str = Field(min_length=1, max_length=64)


def _tag(source: Any) -> str:
    kind = (
        source.get("kind", "disk")
        if isinstance(source, Mapping)
        else getattr(source, "kind", "other")
    )
    return kind if kind in ("disk", "nccl") else "other"


Source = Annotated[
    Annotated[DiskSource, pydantic.Tag("disk")]
    | Annotated[CollectiveSource, pydantic.Tag("nccl")]
    | Annotated[OtherSource, pydantic.Tag("other")],
    pydantic.Discriminator(_tag),
]


class ReloadResponse(Strict):
    """What the server holds; the checksum is of what went into the model."""

    version: int
    seconds: float
    num_tensors: int
    checksum: str
    session: str


class ReloadRequest(Request[ReloadResponse]):
    """POST /reload_weights. A version already held is not loaded.

    With `compare` it comes once more, and the model is compared with it.
    """

    route = "/reload_weights"
    answer = ReloadResponse
    version: int = Field(ge=1)
    source: Source
    in_flight: InFlight = "keep"
    compare: bool = False


class SleepRequest(Request[Health]):
    """POST /sleep: the engine leaves the GPU until a reload, if only of what it holds; kept requests then go on."""

    route = "/sleep"
    answer = Health
    # 1 keeps the weights on the CPU; after 2 only a reload brings the engine back.
    level: int = Field(1, ge=1, le=2)  # for Literal[1, 2], true would be 1
    in_flight: InFlight = "keep"


class HeartbeatRequest(Request[Health]):
    """POST /heartbeat: the trainer has the server, unless another one does."""

    route = "/heartbeat"
    answer = Health
    trainer: str = Field(min_length=1, max_length=128)
    take_over: bool = False  # from another trainer
    leaving: bool = False


class TensorSpec(Strict):
    dtype: Dtype
    shape: list[int]
    checksum: str  # manifest.tensor_checksum


class Manifest(Strict):
    """manifest.json of a published version."""

    version: int
    tensors: dict[str, TensorSpec]  # all, also of a delta
    checksum: str  # of all tensors
