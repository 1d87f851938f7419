"""Declare the sections of a run's configuration; `algorithm` and `critic` are in algorithm.py.

A field's description is its documentation. Checks between sections are in whole.py.
"""

import os
import re
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic
from pydantic import Field

from hocket.common.files import newest_version
from hocket.common.registry import refuse_owned
from hocket.config.deepspeed import read_deepspeed
from hocket.types import InFlight


def _path(text: str) -> str:
    if not text:
        raise ValueError("the path is empty: is a shell variable not set?")
    return os.path.expanduser(text)


def _not_own(kwargs: dict[str, Any]) -> dict[str, Any]:
    own = ("messages", "conversation", "tools", "add_generation_prompt", "tokenize", "chat_template")
    refuse_owned("", kwargs, dict.fromkeys(own, ""), kwargs, "")
    return kwargs


UserPath = Annotated[str, pydantic.AfterValidator(_path)]
_or_one = pydantic.BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
Names = Annotated[tuple[str, ...], _or_one]
Url = Annotated[str, Field(pattern="^https?://"), pydantic.AfterValidator(lambda url: url.rstrip("/"))]
Urls = Annotated[tuple[Url, ...], _or_one, pydantic.AfterValidator(lambda urls: tuple(dict.fromkeys(urls)))]
MAX_LORA_RANK = 512
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class Section(pydantic.BaseModel):
    """Refuse unknown keys, and changes after loading."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        coerce_numbers_to_str=True,  # YAML reads an answer column named 2024 as a number
    )

    def _contradictions(self) -> Iterable[tuple[bool, str]]:
        """Yield (condition, message) for each combination that is refused."""
        return ()

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        for contradiction, message in self._contradictions():
            if contradiction:
                raise ValueError(message)
        return self


class RunConfig(Section):
    dir: UserPath = Field("runs/default", description="Folder of the run: metrics, rollouts, checkpoints, weights.")


class LoraConfig(Section):
    rank: int = Field(16, ge=1, le=MAX_LORA_RANK, description="Rank of each layer's update.")
    alpha: float = Field(32.0, gt=0, description="Factor of the update, times rank: it is scaled by alpha / rank.")
    quantize: Literal["nf4"] | None = Field(None, description="QLoRA: frozen 4-bit weights; needs GPU, bitsandbytes.")
    targets: Literal["all-linear"] | Annotated[Names, Field(min_length=1)] = Field(
        "all-linear", description="Adapted layers: `all-linear` (all but the output head), or names, e.g. [q_proj]."
    )


class ModelConfig(Section):
    path: Annotated[UserPath, pydantic.AfterValidator(newest_version)] = Field(
        "checkpoints/tiny-sort", description="Folder or hub name of a Hugging Face model; of a run: its newest version."
    )
    dtype: Dtype = Field("auto", description="Precision on both sides. `auto`: bfloat16 on a GPU, float32 on a CPU.")
    max_length: int | None = Field(None, ge=2, description="Maximum tokens, prompt included. Default: the model's own.")
    random_init: bool = Field(False, description="Random initial weights; path needs only a config and a tokenizer.")
    float32_head: bool = Field(False, description="Logits in float32 on server and trainer, whatever the dtype.")
    lora: LoraConfig | None = Field(None, description="LoRA adapter ({} for defaults); needs 10x the learning rate.")

    def _contradictions(self) -> Iterable[tuple[bool, str]]:
        yield self.lora is not None and self.random_init, "lora adapts loaded weights; with random_init there are none"

    @property
    def weights(self) -> Literal["model", "adapter"]:
        """What is trained: the whole model, or an adapter beside its frozen weights."""
        return "model" if self.lora is None else "adapter"

    @property
    def quantizes(self) -> bool:
        """Whether frozen weights are held in 4 bits."""
        return self.lora is not None and self.lora.quantize is not None

    def beside(self, path: str | None) -> "ModelConfig":
        """Return the config of another whole model: at `path`, or the one that the run starts from."""
        other = {} if path is None else {"path": path, "random_init": False}
        return self.model_copy(update={"lora": None, **other})


class DataConfig(Section):
    section: ClassVar[str] = "data"
    source: str = Field("task:sort", description="Rows: file.jsonl, file.parquet, hf:NAME[:SUBSET] (hub), task:NAME.")
    split: str = Field("train", description="Split of a Hugging Face dataset or of a built-in task.")
    prompt_column: str = Field("prompt", description="Column of the prompt: text, or a list of chat messages.")
    answer_column: str | None = Field("answer", description="Column of the reference answer; null without one.")
    answer_pattern: re.Pattern[str] | None = Field(None, description="Regular expression; its group 1 is the answer.")
    response_column: str = Field("response", description="Column of the demonstration, for sft; `messages` needs none.")
    system_prompt: str | None = Field(None, description="System message before every text prompt.")
    chat_template: bool = Field(True, description="Rendering of text prompts as a user message in the chat template.")
    chat_template_kwargs: Annotated[dict[str, Any], pydantic.AfterValidator(_not_own)] = Field(
        {}, description="Options of the chat template, on trainer and server: {enable_thinking: false}."
    )
    max_prompt_tokens: int | None = Field(None, ge=1, description="Longer prompts are dropped. Default: what fits.")
    limit: int | None = Field(None, ge=1, description="Number of rows used, from the first. Default: all.")

    def _contradictions(self) -> Iterable[tuple[bool, str]]:
        yield self.system_prompt is not None and not self.chat_template, "system_prompt needs chat_template: true"
        yield self.answer_pattern is not None and self.answer_column is None, "answer_pattern needs answer_column"
        groups = 1 if self.answer_pattern is None else self.answer_pattern.groups
        yield groups < 1, "answer_pattern needs a group (...) around the answer"


class CurriculumConfig(Section, extra="allow"):
    name: str = Field("shuffle", description="Order of prompts: `shuffle`, `sorted` or a plugin's, with its options.")
    retire_after: int = Field(0, ge=0)  # an option of each (curriculum.md)


class RolloutConfig(Section):
    prompts_per_step: int = Field(16, ge=1, description="Prompts per step.")
    group_size: int = Field(8, ge=1, description="Rollouts per prompt; a reward is compared with those of its group.")
    max_tokens: int = Field(256, ge=1, description="Maximum length of a completion, or of a turn, in tokens.")
    temperature: float = Field(1.0, ge=0, le=2, description="Sampling temperature; divides the trainer's logits, too.")
    stop: tuple[str, ...] = Field((), description="Strings that end a completion.")
    stop_token_ids: tuple[int, ...] = Field((), description="Token ids that end a completion, besides the model's.")
    timeout_s: float = Field(600.0, gt=0, description="Seconds for the generation of one batch.")

    def _contradictions(self) -> Iterable[tuple[bool, str]]:
        advice = "set 0.01 or more, such as 1; eval.temperature=0 evaluates greedily"
        yield (
            self.temperature < 0.01,
            f"temperature={self.temperature:g} would make all rollouts of a group alike: {advice}",
        )


class EnvConfig(Section, extra="allow"):
    name: str = Field("single_turn", description="`single_turn`, `tools`, `agent`, or a plugin with options.")
    max_turns: int = Field(16, ge=1, description="Maximum turns of an episode, or model calls of an agent.")
    timeout_s: float = Field(
        60.0, gt=0, le=86_400, description="Seconds of the environment's work, or of an agent, per episode."
    )


class RewardSpec(Section, extra="allow"):
    """Keys of every reward; each other one is an argument of its function."""

    gate: bool = False  # where its value is not above 0, the other rewards can only cost
    weight: float = Field(default_factory=lambda known: 0.0 if known.get("gate") else 1.0)
    clip: tuple[float, float] | None = None  # lowest and highest value
    normalize: bool = False  # by mean and deviation of the value within the group
    max_concurrent: int | None = Field(None, ge=1)  # calls of an async reward at the same time
    retries: int = Field(5, ge=0)  # of a call of an async reward that raises RetryError

    @pydantic.model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        return {"weight": value} if isinstance(value, int | float) and not isinstance(value, bool) else value

    def _contradictions(self) -> Iterable[tuple[bool, str]]:
        yield self.clip is not None and self.clip[0] > self.clip[1], "clip is [lowest, highest]"


class RewardsConfig(Section):
    functions: dict[str, RewardSpec] = Field(
        {"exact_match": RewardSpec()},
        min_length=1,
        description="{NAME: weight} or {NAME: {weight: 1, argument: ...}} (rewards.md).",
    )
    timeout_s: float = Field(30.0, gt=0, description="Seconds for one reward function on one rollout.")
    max_error_rate: float = Field(0.5, ge=0, le=1, description="Share of failed scores in a step that stops the run.")

    @property
    def first(self) -> str:
        """Name of the first reward that has a weight, which a gate has not."""
        return next((name for name, spec in self.functions.items() if spec.weight), next(iter(self.functions)))

    def spec(self, name: str) -> RewardSpec:
        """Return the section of a reward; without options where it has none, as eval.reward may."""
        return self.functions.get(name, RewardSpec())


class TrainerConfig(Section):
    steps: int = Field(100, ge=1, description="Steps of the run: one batch of rollouts, and one weight version, each.")
    seed: int = Field(0, ge=0, description="Seed of data order, sampling and initial weights.")
    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate of AdamW.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear learning-rate warm-up.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Learning rate after warm-up.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay of AdamW.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Decay rates of AdamW's moments.")
    max_grad_norm: float = Field(1.0, gt=0, description="Maximum global gradient norm; larger gradients are scaled.")
    micro_batch_tokens: Annotated[int, Field(ge=2)] | Literal["auto"] = Field(
        "auto", description="Maximum tokens per forward pass of one rank. `auto`: 8192 on a CPU; what fits on a GPU."
    )
    zero_stage: Literal[0, 1, 2, 3] | None = Field(
        None,
        description="DeepSpeed ZeRO stage. Default: 1 on a CPU, 2 on a GPU, 3 to offload there, 0 alone in float32.",
    )
    gradient_checkpointing: bool = Field(False, description="Recomputed activations: less memory, more time.")
    kernels: Literal["eager", "compile", "liger"] = Field(
        "eager", description="Kernels of the layers: PyTorch's one by one, torch.compile's, or Liger's (a package)."
    )
    offload_optimizer: bool = Field(False, description="Optimizer state, update and (ZeRO-3) gradients on the CPU.")
    deepspeed: Annotated[dict[str, Any], pydantic.BeforeValidator(read_deepspeed)] = Field(
        {}, description="Other settings of DeepSpeed, {zero_optimization: {overlap_comm: true}}, or a ds_config.json."
    )
    collective_timeout_s: float = Field(1800.0, gt=0, description="Seconds that a trainer rank waits for the others.")

    def _contradictions(self) -> Iterable[tuple[bool, str]]:
        yield self.offload_optimizer and self.zero_stage == 0, "offload_optimizer needs zero_stage 1, 2 or 3"

    def unmeasured(self) -> "TrainerConfig":
        """Return the settings with a size in place of micro_batch_tokens=auto: that of CPUs, and of plans for GPUs."""
        return self.model_copy(update={"micro_batch_tokens": 8192}) if self.micro_batch_tokens == "auto" else self


class SftConfig(Section):
    batch_size: int = Field(64, ge=1, description="Demonstrations per optimiser step.")
    epochs: int | None = Field(None, ge=1, description="Passes over the demonstrations. Default: trainer.steps steps.")


class PipelineConfig(Section):
    max_staleness: Annotated[int, Field(ge=0, le=64)] | Literal["auto"] = Field(
        "auto",
        description="Maximum age of a rollout: batches ahead; 0 is on-policy. `auto`: 1 with GPUs apart, else 0.",
    )
    replay: UserPath | None = Field(None, description="Run folder whose rollouts are trained on, without a server.")


class SyncConfig(Section):
    backend: Literal["auto", "disk", "nccl"] = Field(
        "auto", description="New weights by files, or by broadcast. `auto`: nccl with GPUs apart, else disk."
    )
    root: UserPath | None = Field(None, description="Folder above run.dir, equal on both sides. Default: its parent.")
    timeout_s: float = Field(300.0, gt=0, description="Seconds for one server to load one version.")
    in_flight: InFlight = Field("keep", description="Requests during a sync: `keep` continues, `drain` waits, `abort`.")
    take_over: bool = Field(False, description="Take the servers of another trainer that runs, which then stops.")
    delta: bool = Field(False, description="Changed weights alone (backend disk); copies in RAM and servers' $TMPDIR.")
    upload: bool = Field(False, description="Upload of published files over HTTP, without a shared disk.")
    check_every: int = Field(20, ge=0, description="Versions between proofs, besides the first two. 0 disables them.")
    max_logprob_gap: float | None = Field(
        None, gt=0, description="Highest mean |Δ log-prob| in them. Default: dtype's."
    )
    on_mismatch: Literal["stop", "warn"] = Field("stop", description="What a proof that fails does to the run.")

    @property
    def bucket_timeout_s(self) -> float:
        """Seconds that a server may take to join a group, or to take a bucket: the others wait for it meanwhile."""
        return self.timeout_s / 4


class ServerConfig(Section):
    host: str = Field("127.0.0.1", description="Address of the server; any but loopback needs a token.")
    port: int = Field(8000, ge=1, le=65535, description="Port of the server.")
    urls: Urls = Field((), description="URLs of the servers, one or a list. Default: http://host:port.")
    discover: UserPath | None = Field(
        None, description="Servers that come and go, instead of urls: NAME:PORT, by DNS, or a file of URLs, PATH/FILE."
    )
    token: str | None = Field(None, description="Bearer token of every route but /health. Default: $HOCKET_TOKEN.")
    start_timeout_s: float = Field(600.0, gt=0, description="Seconds that the trainer waits for a server to be up.")
    silence_s: float = Field(60.0, gt=0, description="Seconds without an answer from /health until a server is lost.")
    served_model_name: str | None = Field(None, description="Name of the model in /v1. Default: model.path alone.")
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs that share one copy of the model.")
    gpu_memory_utilization: float = Field(
        0.85,
        gt=0,
        le=1,
        description="Share of GPU memory. A trainer beside it needs the rest; with launch.share_gpu leave 2 GiB.",
    )
    kv_cache_mib: int | None = Field(
        None, ge=16, description="KV cache in MiB. Default: what requests can fill of a GPU's share, 256 on a CPU."
    )
    max_concurrent: int | None = Field(
        None, ge=1, description="Maximum sequences decoded at the same time. Default: vLLM's on a GPU, 256 on a CPU."
    )
    engine: dict[str, Any] = Field({}, description="Other engine arguments of vLLM: {enforce_eager: true}.")
    tool_parser: str | None = Field(None, description="vLLM's tool-call format (hermes, ...) of /v1, not env `tools`.")

    def _contradictions(self) -> Iterable[tuple[bool, str]]:
        where = self.discover or "servers/"
        yield self.discover is not None and bool(self.urls), "discover and urls both name the servers: leave one out"
        name = re.fullmatch(r"[^\s:/]+:(\d{1,5})", where)
        is_name, is_file = name is not None and int(name[1]) < 1 << 16, "/" in where and "://" not in where
        yield (
            not (is_name or is_file),
            f"discover={where} is neither NAME:PORT nor a file with a slash in its path; a URL goes to urls",
        )


class HeldOutConfig(DataConfig):
    section: ClassVar[str] = "eval.data"
    split: str = Field("test", description="As in section data.")


class EvalConfig(Section):
    data: HeldOutConfig = Field(
        HeldOutConfig(),
        description="Held-out prompts: `source` or, of a hub dataset, `split`; else as `data`.",
    )
    num_prompts: int = Field(256, ge=0, description="Prompts per evaluation. 0 disables evaluation.")
    samples: int = Field(1, ge=1, description="Rollouts per prompt; pass@k is measured for k = 1, 2, 4, ... up to it.")
    every_steps: int = Field(0, ge=0, description="Steps between evaluations, besides start and end. 0 disables them.")
    max_tokens: int | None = Field(None, ge=1, description="Maximum length of a turn. Default: rollout.max_tokens.")
    temperature: float | None = Field(
        None, ge=0, le=2, description="Temperature, 0 is greedy. Default: rollout.temperature."
    )
    reward: str | None = Field(None, description="Reward function whose mean is the accuracy. Default: the first.")

    def _contradictions(self) -> Iterable[tuple[bool, str]]:
        yield self.samples > 1 and self.temperature == 0, "temperature=0 samples the same every time: set samples to 1"


class CheckpointConfig(Section):
    every_steps: int = Field(
        50, ge=0, description="Steps between checkpoints (12 B/trained parameter), one at the end. 0 disables them."
    )
    keep: int = Field(2, ge=1, description="Number of newest checkpoints kept on disk.")
    in_background: bool = Field(False, alias="async", description="Written from a copy while training goes on.")
    resume: bool = Field(False, description="Continue from the newest complete checkpoint in run.dir, if there is one.")


class ObserveConfig(Section):
    tensorboard: bool = Field(False, description="TensorBoard files; needs `pip install tensorboard`.")


def listed(gpus: str | None) -> list[str]:
    return [gpu.strip() for gpu in (gpus or "").split(",") if gpu.strip()]


class LaunchConfig(Section):
    servers: int | None = Field(
        None, ge=1, description="Servers. Default: as many as half of the GPUs hold, or those that `trainers` leaves."
    )
    trainers: int | None = Field(None, ge=1, description="Trainer ranks. Default: one per GPU left; 1 on a CPU.")
    gpus_apart: bool | None = Field(
        None, description="Servers and ranks have GPUs of their own. Default: `launch` says it, or no server is here."
    )
    gpus_per_node: int = Field(8, ge=0, description="GPUs of a cluster's node, for launch --engine. 0: CPUs only.")
    share_gpu: bool = Field(False, description="One GPU for both sides, which take turns on it; start both with it.")
