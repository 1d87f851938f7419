"""Messages between trainer and server, validated strictly on both sides; all JSON.

The server answers every error as {"error": {"code", "message", "hint"}}.
"""

from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field

from hocket.types import FinishReason, InFlight, VersionSpan

TokenId = Annotated[int, Field(ge=0)]
PromptInput = str | list[TokenId] | list[dict[str, Any]]
"""Text (tokenized as it stands), token ids (taken as they are), or chat messages (rendered by the chat template)."""

Seed = Annotated[int, Field(ge=0, lt=2**63)]

Content = Literal["weights", "adapter"]
"""What the tensors of a published version are."""

Status = Literal["loading", "ready", "updating", "asleep", "failed"]


class Strict(pydantic.BaseModel):
    """Base of every message: unknown fields are errors, true is not 1, "1" is not 1, NaN is no number."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class SamplingParams(Strict):
    """How to sample; temperature 0 is greedy. The returned log-probs are of this very distribution."""

    temperature: float = Field(1.0, ge=0.0, le=10.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(-1, ge=-1)
    max_tokens: int = Field(16, ge=1)
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    stop_token_ids: tuple[TokenId, ...] = ()
    seed: Seed | None = None


class Toolbox(Strict):
    """The functions that a model may call. The server looks for calls in the text; prompts are taken as they are."""

    parser: str = Field(min_length=1)  # vLLM's name for how calls are written, "hermes"
    tools: tuple[dict[str, Any], ...] = Field(min_length=1)  # each as OpenAI's API describes a function


class GenerateRequest(Strict):
    """POST /generate. With `stream` the answer is NDJSON: a StreamLine per finished completion, a StreamEnd.

    With `seeds`, prompt i has one completion per seed in seeds[i], and a seed alone decides the random numbers of its
    completion. Without them it has `n`, the j-th of which is sampled with sampling.seed + i·n + j. With `session` a
    server that has restarted since, and lost the weights that the caller counts on, refuses.
    """

    prompts: list[PromptInput] = Field(min_length=1)
    sampling: SamplingParams = SamplingParams()
    n: int = Field(1, ge=1)
    stream: bool = False
    seeds: list[Annotated[list[Seed], Field(min_length=1)]] | None = None
    session: str | None = None
    tools: Toolbox | None = None


class ToolCall(Strict):
    """A tool call that the model wrote."""

    name: str
    arguments: str  # JSON as the model wrote it
    id: str = ""  # empty where the model wrote none


class Completion(Strict):
    """One sampled completion. Raises ValueError unless it has one log-prob per token."""

    token_ids: tuple[int, ...]  # the end-of-sequence token included
    logprobs: tuple[float, ...]  # natural, under the distribution that the token was sampled from
    text: str  # decoded without the stop token, for rewards and people
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]  # [weight version, start, end] over the tokens
    tool_calls: tuple[ToolCall, ...] = ()  # found in the text where the request has tools

    @pydantic.model_validator(mode="after")
    def _one_logprob_per_token(self) -> Self:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.token_ids)} token_ids need as many logprobs, got {len(self.logprobs)}")
        return self


class GenerateResponse(Strict):
    """Answer to /generate: completions[i][j] is the j-th completion of prompt i; `version` is held at the end."""

    version: int
    model: str
    completions: list[list[Completion]]


class StreamLine(Strict):
    """One line of the NDJSON answer: the completion with number `index` of prompt `prompt`."""

    prompt: int
    index: int
    completion: Completion


class StreamEnd(Strict):
    """Last line of the NDJSON answer. `error` is set where generation broke off; without this line it was cut."""

    done: Literal[True] = True
    version: int
    model: str
    error: "ErrorBody | None" = None


class SessionRequest(Strict):
    """POST /sessions: what an agent asks of /sessions/ID/v1 is recorded, and sampled in this way whatever it asks for.

    Call number i, from 0, gets its seed from sampling.seed and i. Refused are a call more than `max_calls`, and one
    whose prompt leaves no room in `max_length` tokens. A session without a call for `idle_timeout_s` is forgotten.
    `session` is that of the server, as in a GenerateRequest.
    """

    sampling: SamplingParams
    max_length: int = Field(ge=2)
    max_calls: int = Field(ge=1)
    idle_timeout_s: float = Field(gt=0)
    session: str | None = None


class SessionResponse(Strict):
    """Answer to POST /sessions. An agent may call the model as it likes: `model` is its name.

    `key` is what the agent sends in place of the server's token: it opens this session's /v1/... and nothing else.
    """

    id: str
    key: str
    model: str


class AgentCall(Strict):
    """One call of an agent."""

    prompt_token_ids: tuple[int, ...]
    seed: Seed | None = None
    completion: Completion | None  # None where it was broken off, failed, or has not ended


class AgentRecord(Strict):
    """Answer to GET and DELETE /sessions/ID: the calls in the order in which they began."""

    calls: tuple[AgentCall, ...]
    cut_off: bool  # true if a further call was refused: more than max_calls, or a prompt longer than max_length


class DiskSource(Strict):
    """A published version: a folder name under the server's root, never a path."""

    kind: Literal["disk"] = "disk"
    name: str = Field(min_length=1, max_length=512)


class AdapterConfig(Strict):
    """adapter_config.json of PEFT. What it leaves out is PEFT's default; a key of any other kind of adapter is refused.

    `target_modules` are the last parts of the names of adapted layers.
    """

    peft_type: Literal["LORA"] = "LORA"
    task_type: Literal["CAUSAL_LM"] = "CAUSAL_LM"
    base_model_name_or_path: str
    r: int = Field(ge=1)
    lora_alpha: float = Field(gt=0)
    target_modules: list[str] = Field(min_length=1)


class TensorLayout(Strict):
    """What a tensor must be before anything of it has been read."""

    name: str
    dtype: str
    shape: list[int]


class CollectiveSource(Strict):
    """A version that comes through the weight group `session`, bucket after bucket (hocket.weight_group).

    `turn` counts the transfers of the group, so that both ends know which one they are waiting for. With `adapter` the
    tensors are those of an adapter.
    """

    kind: Literal["nccl"] = "nccl"
    session: str
    turn: int = Field(ge=1)
    adapter: AdapterConfig | None = None
    buckets: list[list[TensorLayout]] = Field(min_length=1)


class ReloadRequest(Strict):
    """POST /reload_weights. Idempotent per version: a version already held is answered without loading."""

    version: int = Field(ge=1)
    source: DiskSource | CollectiveSource = Field(discriminator="kind")
    in_flight: InFlight = "keep"


class ReloadResponse(Strict):
    """What the server holds now. `checksum` is computed from the tensors on their way into the model."""

    version: int
    seconds: float
    num_tensors: int
    checksum: str
    session: str


Memory = Literal["weights", "kv_cache"]
"""The parts of the engine's memory that leave the GPU while it sleeps."""


class SleepRequest(Strict):
    """POST /sleep: the engine leaves the GPU. Idempotent, and `level` only counts where weights are still there.

    Level 1 keeps the weights in the CPU's memory; level 2 drops them, and the engine then needs a reload before its KV
    cache may wake up. `in_flight` is as for a reload: kept requests go on once the engine is awake.
    """

    level: int = Field(1, ge=1, le=2)  # for Literal[1, 2], true would be 1
    in_flight: InFlight = "keep"


class WakeRequest(Strict):
    """POST /wake_up: these parts come back to the GPU; the engine generates again once both are there. Idempotent."""

    tags: list[Memory] = Field(["weights", "kv_cache"], min_length=1)


class SleepResponse(Strict):
    """Answer to /sleep and /wake_up: what is off the GPU now; nothing: the engine is awake."""

    asleep: list[Memory]
    session: str


class GroupRequest(Strict):
    """POST /init_weight_group: the engine's workers join the trainer, which is rank 0, in a group of their own.

    `session` is a new name for every attempt; the group before is left. host and port are the trainer's key-value
    store. `device` tells the trainer's GPU: NCCL can't connect two processes on one.
    """

    session: str
    host: str
    port: int = Field(ge=1, le=65535)
    backend: Literal["nccl", "gloo"]
    device: str | None
    timeout_s: float = Field(gt=0)


class GroupResponse(Strict):
    """The group is there; `workers` have joined it."""

    session: str
    workers: int


class Health(Strict):
    """GET /health, the one route that needs no token. `session` is new after every start of the server.

    `workers` is the number of the engine's processes that hold weights, `device` the kind of device they are on;
    `kv_tokens` is how many tokens of all requests together its KV cache holds.
    """

    status: Status
    version: int
    model: str
    dtype: str
    vocab_size: int
    max_length: int
    tokenizer_sha256: str
    session: str
    in_flight: int
    root: str
    device: str
    workers: int
    kv_tokens: int
    error: "ErrorBody | None" = None


class ErrorBody(Strict):
    """What went wrong (code for machines, message for people) and what to do about it (hint)."""

    code: str
    message: str
    hint: str


class ErrorResponse(Strict):
    """Body of every answer with a status of 400 or more."""

    error: ErrorBody


class UploadResponse(Strict):
    """Answer to PUT /upload: the file is there. `name` is what a DiskSource calls the version once all of it is."""

    name: str


class BaseVersion(Strict):
    """The version that a delta changes; the checksum is that of its manifest."""

    version: int
    checksum: str


class Manifest(Strict):
    """manifest.json of a published version: what each tensor must be; `checksum` sums up the whole version.

    With `base` the folder holds only what changed since that version (hocket.delta); `tensors` are still all of them.
    """

    version: int
    content: Content = "weights"
    tensors: dict[str, "TensorSpec"]
    checksum: str
    base: BaseVersion | None = None


class TensorSpec(Strict):
    """One tensor of a published version; the checksum is of its bytes (hocket.manifest.tensor_checksum)."""

    dtype: str
    shape: list[int]
    checksum: str
