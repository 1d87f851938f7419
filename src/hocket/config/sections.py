"""The sections of a config, but `algorithm` and `critic` (algorithm.py). A field's description is its documentation."""

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
    model_config = pydantic.ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,  # an answer column named 2024
    )

    def _contradictions(self) -> Iterable[tuple[bool, str]]:
        """Yield (condition, message) of what is refused."""
        return ()

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        for contradiction, message in self._contradictions():
            if contradiction:
                raise ValueError(message)
        return self


class RunConfig(Section):
    dir: UserPath = "runs/default"
    """Folder of metrics, rollouts, checkpoints and weights."""


class LoraConfig(Section):
    rank: int = Field(16, ge=1, le=MAX_LORA_RANK)
    """Rank of each layer's update."""
    alpha: float = Field(32.0, gt=0)
    """The update is scaled by alpha / rank."""
    quantize: Literal["nf4"] | None = None
    """QLoRA: frozen 4-bit weights; needs GPU, bitsandbytes."""
    targets: Literal["all-linear"] | Annotated[Names, Field(min_length=1)] = "all-linear"
    """Layers: `all-linear` (all but the output head), or names: [q_proj]."""


class ModelConfig(Section):
    path: Annotated[UserPath, pydantic.AfterValidator(newest_version)] = "checkpoints/tiny-sort"
    """Folder or hub name of a model; of a run: its newest version."""
    dtype: Dtype = "auto"
    """Precision. `auto`: bfloat16 on a GPU, float32 on a CPU."""
    max_length: int | None = Field(None, ge=2)
    """Maximum tokens, with the prompt. Default: the model's."""
    random_init: bool = False
    """Random weights; path needs only a config and a tokenizer."""
    float32_head: bool = False
    """Logits in float32 on both sides, whatever the dtype."""
    lora: LoraConfig | None = None
    """LoRA ({} for defaults); needs 10x the learning rate."""

    def _contradictions(self) -> Iterable[tuple[bool, str]]:
        yield self.lora is not None and self.random_init, "lora adapts loaded weights; with random_init there are none"

    @property
    def weights(self) -> Literal["model", "adapter"]:
        return "model" if self.lora is None else "adapter"

    @property
    def quantizes(self) -> bool:
        return self.lora is not None and self.lora.quantize is not None

    def beside(self, path: str | None) -> "ModelConfig":
        """Return the config of another whole model: at `path`, or the one that the run starts from."""
        other = {} if path is None else {"path": path, "random_init": False}
        return self.model_copy(update={"lora": None, **other})


class DataConfig(Section):
    section: ClassVar[str] = "data"
    source: str = "task:sort"
    """Rows: file.jsonl, file.parquet, hf:NAME[:SUBSET] (hub), task:NAME."""
    split: str = "train"
    """Split of a Hugging Face dataset or of a built-in task."""
    prompt_column: str = "prompt"
    """Column of the prompt: text, or a list of chat messages."""
    answer_column: str | None = "answer"
    """Column of the answer; null without one."""
    answer_pattern: re.Pattern[str] | None = None
    """Regular expression; its group 1 is the answer."""
    response_column: str = "response"
    """Column of the demonstration, for sft."""
    system_prompt: str | None = None
    """System message before every text prompt."""
    chat_template: bool = True
    """Text prompts become a user message in the chat template."""
    chat_template_kwargs: Annotated[dict[str, Any], pydantic.AfterValidator(_not_own)] = Field({})
    """Options of the chat template: {enable_thinking: false}."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longer prompts are dropped. Default: what fits."""
    limit: int | None = Field(None, ge=1)
    """Number of rows used, from the first. Default: all."""

    def _contradictions(self) -> Iterable[tuple[bool, str]]:
        yield self.system_prompt is not None and not self.chat_template, "system_prompt needs chat_template: true"
        yield self.answer_pattern is not None and self.answer_column is None, "answer_pattern needs answer_column"
        groups = 1 if self.answer_pattern is None else self.answer_pattern.groups
        yield groups < 1, "answer_pattern needs a group (...) around the answer"


class CurriculumConfig(Section, extra="allow"):
    name: str = "shuffle"
    """Order of prompts: `shuffle`, `sorted` or a plugin's; its options."""
    retire_after: int = Field(0, ge=0)  # an option of each (curriculum.md)


class RolloutConfig(Section):
    prompts_per_step: int = Field(16, ge=1)
    """Prompts per step."""
    group_size: int = Field(8, ge=1)
    """Rollouts per prompt, whose rewards are compared."""
    max_tokens: int = Field(256, ge=1)
    """Maximum tokens of a completion, or of a turn."""
    temperature: float = Field(1.0, ge=0, le=2)
    """Temperature; divides the trainer's logits, too."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds for the generation of one batch."""

    def _contradictions(self) -> Iterable[tuple[bool, str]]:
        yield (
            self.temperature < 0.01,
            f"temperature={self.temperature:g} would make all rollouts of a group alike: set 0.01 or more, such as 1; "
            "eval.temperature=0 evaluates greedily",
        )


class EnvConfig(Section, extra="allow"):
    name: str = "single_turn"
    """`single_turn`, `tools`, `agent`, or a plugin with options."""
    max_turns: int = Field(16, ge=1)
    """Maximum turns, or model calls of an agent."""
    timeout_s: float = Field(60.0, gt=0, le=86_400)
    """Seconds of the environment or agent per episode."""


class RewardSpec(Section, extra="allow"):
    """Keys of every reward; each other is its function's argument."""

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
    functions: dict[str, RewardSpec] = Field({"exact_match": RewardSpec()}, min_length=1)
    """{NAME: weight} or {NAME: {weight: 1, argument: ...}} (rewards.md)."""
    timeout_s: float = Field(30.0, gt=0)
    """Seconds per reward and rollout."""
    max_error_rate: float = Field(0.5, ge=0, le=1)
    """Share of failed scores that stops the run."""

    @property
    def first(self) -> str:
        """Name of the first reward that is no gate."""
        return next((name for name, spec in self.functions.items() if spec.weight), next(iter(self.functions)))

    def spec(self, name: str) -> RewardSpec:
        return self.functions.get(name, RewardSpec())


class TrainerConfig(Section):
    steps: int = Field(100, ge=1)
    """Steps, each with one batch of rollouts and one version."""
    patience: int | None = Field(None, ge=1)
    """Evaluations without a better one (checkpoint.best) that end the run."""
    seed: int = Field(0, ge=0)
    """Seed of data order, sampling and initial weights."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear learning-rate warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Maximum global gradient norm."""
    micro_batch_tokens: Annotated[int, Field(ge=2)] | Literal["auto"] = "auto"
    """Maximum tokens per forward pass. `auto`: 8192 on a CPU; what fits on a GPU."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """ZeRO stage. Default: 1 on a CPU, 2 on a GPU, 3 to offload there, 0 alone in float32."""
    gradient_checkpointing: bool = False
    """Recomputed activations: less memory, more time."""
    kernels: Literal["eager", "compile", "liger"] = "eager"
    """Kernels of PyTorch, of torch.compile, or Liger's (a package)."""
    offload_optimizer: bool = False
    """Optimizer and (ZeRO-3) gradients on the CPU."""
    deepspeed: Annotated[dict[str, Any], pydantic.BeforeValidator(read_deepspeed)] = Field({})
    """Others of DeepSpeed: {zero_optimization: {overlap_comm: true}}, or a ds_config.json."""

    def _contradictions(self) -> Iterable[tuple[bool, str]]:
        yield self.offload_optimizer and self.zero_stage == 0, "offload_optimizer needs zero_stage 1, 2 or 3"

    def unmeasured(self) -> "TrainerConfig":
        """Return the settings with the size of CPUs, and of plans, in place of micro_batch_tokens=auto."""
        return self.model_copy(update={"micro_batch_tokens": 8192}) if self.micro_batch_tokens == "auto" else self


class SftConfig(Section):
    batch_size: int = Field(64, ge=1)
    """Demonstrations per optimiser step."""
    epochs: int | None = Field(None, ge=1)
    """Passes over the demonstrations. Default: trainer.steps steps."""


class PipelineConfig(Section):
    max_staleness: Annotated[int, Field(ge=0, le=64)] | Literal["auto"] = "auto"
    """Batches ahead; 0 is on-policy. `auto`: 1 with GPUs apart, else 0."""
    replay: UserPath | None = None
    """Run folder whose rollouts are trained on, without a server."""


class SyncConfig(Section):
    backend: Literal["auto", "disk", "nccl"] = "auto"
    """How new weights go to the servers. `auto`: nccl with GPUs apart, else disk."""
    root: UserPath | None = None
    """Folder above run.dir, equal on both sides. Default: its parent."""
    timeout_s: float = Field(300.0, gt=0)
    """Seconds for one server to load one version; ranks wait for 6x."""
    in_flight: InFlight = "keep"
    """Requests meanwhile: `keep` continues, `drain` waits, `abort`."""
    take_over: bool = False
    """Take the servers of another trainer, which then stops."""
    delta: bool = False
    """Changed weights alone, by disk; copies in RAM and $TMPDIR."""
    upload: bool = False
    """Files go over HTTP, without a shared disk."""
    check_every: int = Field(20, ge=0)
    """Versions between proofs, besides the first two. 0 disables them."""
    max_logprob_gap: float | None = Field(None, gt=0)
    """Highest mean |Δ log-prob| in them. Default: dtype's."""
    check_share: float = Field(0.0625, ge=0, le=1)
    """Share of rollouts that are checked before they are trained on."""
    on_mismatch: Literal["stop", "warn"] = "stop"
    """What a check that fails does to the run."""

    @property
    def bucket_timeout_s(self) -> float:
        """Seconds for a server to join a group, or to take a bucket."""
        return self.timeout_s / 4

    @property
    def collective_timeout_s(self) -> float:
        """Seconds that a rank waits: longer than a hand-over, its repetition, a comparison and log-probs."""
        return self.timeout_s * 6


class ServerConfig(Section):
    host: str = "127.0.0.1"
    """Address of the server; any but loopback needs a token."""
    port: int = Field(8000, ge=1, le=65535)
    """Port of the server."""
    urls: Urls = ()
    """URLs of the servers. Default: http://host:port."""
    discover: UserPath | None = None
    """Servers that come and go: NAME:PORT, by DNS, or a file of URLs, PATH/FILE."""
    token: str | None = None
    """Bearer token of every route but /health. Default: $HOCKET_TOKEN."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Seconds to wait for a server."""
    silence_s: float = Field(60.0, gt=0)
    """Seconds of silence until a server is lost."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs that share one copy of the model."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of GPU memory; with launch.share_gpu leave 2 GiB."""
    kv_cache_mib: int | None = Field(None, ge=16)
    """KV cache in MiB. Default: what a GPU's share allows, 256 on a CPU."""
    max_concurrent: int | None = Field(None, ge=1)
    """Sequences decoded at once. Default: vLLM's on a GPU, 256 on a CPU."""
    engine: dict[str, Any] = Field({})
    """Other arguments of vLLM: {enforce_eager: true}."""

    def _contradictions(self) -> Iterable[tuple[bool, str]]:
        if self.discover is None:
            return
        yield bool(self.urls), "discover and urls both name the servers: leave one out"
        name = re.fullmatch(r"[^\s:/]+:(\d{1,5})", self.discover)
        is_file = "/" in self.discover and "://" not in self.discover
        yield (
            not is_file and (name is None or int(name[1]) >= 1 << 16),
            f"discover={self.discover} is neither NAME:PORT nor a file with a slash in its path; a URL goes to urls",
        )


class HeldOutConfig(DataConfig):
    section: ClassVar[str] = "eval.data"
    split: str = "test"
    """As in section data."""


class EvalConfig(Section):
    data: HeldOutConfig = HeldOutConfig()
    """Held-out `source`, or a hub dataset's `split`; else as `data`."""
    num_prompts: int = Field(256, ge=0)
    """Prompts per evaluation. 0 disables evaluation."""
    samples: int = Field(1, ge=1)
    """Sampled rollouts per prompt, for pass@k with k = 1, 2, 4, ...; one more is greedy."""
    threshold: float = 1.0
    """Reward from which a sample passes, for pass@k."""
    every_steps: int = Field(0, ge=0)
    """Steps between evaluations, besides start and end. 0 disables them."""
    max_tokens: int | None = Field(None, ge=1)
    """As rollout.max_tokens, the default."""
    temperature: float | None = Field(None, ge=0, le=2)
    """Temperature of samples; 0: greedy ones alone. Default: rollout.temperature."""
    reward: str | None = None
    """Reward that is measured. Default: the first."""

    def _contradictions(self) -> Iterable[tuple[bool, str]]:
        yield self.samples > 1 and self.temperature == 0, "temperature=0 samples the same every time: set samples to 1"


class CheckpointConfig(Section):
    every_steps: int = Field(50, ge=0)
    """Steps between checkpoints (12 B/trained parameter), and one at the end. 0 disables them."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints that are kept."""
    best: str | None = None
    """Metric of the evaluation whose best weights and checkpoint are kept, such as eval/greedy."""
    best_is: Literal["max", "min"] = "max"
    """Whether the best is the largest or the smallest; of equals the first."""
    copy_to: UserPath | None = None
    """Another folder or mount for each complete checkpoint, in the background."""
    in_background: bool = Field(False, alias="async")
    """Written while training goes on."""
    resume: bool = False
    """Continue from the newest checkpoint, if there is one."""


class ObserveConfig(Section):
    tensorboard: bool = False
    """TensorBoard files; needs `pip install tensorboard`."""


def listed(gpus: str | None) -> list[str]:
    return [gpu.strip() for gpu in (gpus or "").split(",") if gpu.strip()]


class LaunchConfig(Section):
    servers: int | None = Field(None, ge=1)
    """Servers. Default: half of the GPUs, or what `trainers` leaves."""
    trainers: int | None = Field(None, ge=1)
    """Trainer ranks. Default: one per GPU left; 1 on a CPU."""
    gpus_apart: bool | None = None
    """Servers have GPUs of their own. Default: as `launch` says, or if no server is here."""
    gpus_per_node: int = Field(8, ge=0)
    """GPUs of a node, for launch --engine. 0: CPUs only."""
    share_gpu: bool = False
    """One GPU, on which both sides take turns."""
