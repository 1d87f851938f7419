"""The sections of a config, but those of algorithm.py and deployment.py."""

import math
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic
from pydantic import Field

from hocket.common.files import newest_version
from hocket.common.registry import refuse_owned
from hocket.errors import ConfigError


def _path(text: str) -> str:
    if not text:
        raise ValueError("the path is empty: is a shell variable not set?")
    if re.search(r"\$\{?[A-Za-z_]", text):
        raise ValueError(f"{text} names a variable: only a shell replaces it, on its command line")
    return os.path.expanduser(text)


def _not_own(template: bool | dict[str, Any]) -> bool | dict[str, Any]:
    own = ("messages", "conversation", "tools", "add_generation_prompt", "tokenize", "chat_template")
    options = template if isinstance(template, dict) else {}
    refuse_owned("", options, dict.fromkeys(own, ""), options, "")
    return template if template != {} else True


def ascending(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] >= bounds[1]:
        raise ValueError("must be [lowest, highest], the first below the second")
    return bounds


UserPath = Annotated[str, pydantic.AfterValidator(_path)]
_or_name = pydantic.BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)
_or_source = pydantic.BeforeValidator(lambda value: {"source": value} if isinstance(value, str) else value)
or_one = pydantic.BeforeValidator(lambda value: (value,) if isinstance(value, str | dict) else value)
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], or_one]
Range = Annotated[tuple[float, float], pydantic.AfterValidator(ascending)]
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

    def refuse(self) -> None:
        """Raise ValueError where settings contradict each other."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        self.refuse()
        return self


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested mappings, which are copied: YAML's aliases share them."""
    *parents, leaf = key.split(".")
    for parent in parents:
        child = values.get(parent)
        if not isinstance(child, dict | None):
            raise ConfigError(f"can't set {key!r}: {parent!r} is not a section")
        values[parent] = dict(child or {})
        values = values[parent]
    values[leaf] = value


def leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key → value of nested mappings."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= leaves(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


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
    """Random weights, for sft; servers need saved ones. path needs only a config and a tokenizer."""
    float32_head: bool = False
    """Logits in float32 on both sides, whatever the dtype."""
    lora: LoraConfig | None = None
    """LoRA ({} for defaults); needs 10x the learning rate."""
    freeze: Names = ()
    """Parts of a model with eyes that are not trained: vision, projector, language."""

    def refuse(self) -> None:
        if (self.lora is not None or self.freeze) and self.random_init:
            raise ValueError("lora and freeze are for loaded weights; with random_init there are none")
        if self.lora is not None and self.freeze:
            raise ValueError("lora freezes the whole model, and adapts its language part alone: leave out freeze")

    @property
    def weights(self) -> Literal["model", "adapter"]:
        return "model" if self.lora is None else "adapter"

    @property
    def quantizes(self) -> bool:
        return self.lora is not None and self.lora.quantize is not None

    def beside(self, path: str | None) -> "ModelConfig":
        """Return the config of the whole model at `path`, or that the run starts from."""
        other = {} if path is None else {"path": path, "random_init": False}
        return self.model_copy(update={"lora": None, **other})


class DataConfig(Section):
    section: ClassVar[str] = "data"
    otherwise: ClassVar[str] = ""  # other advice, where its rows are of no use
    source: str = "task:sort"
    """Rows: file.jsonl, file.parquet, hf:NAME[:SUBSET] (hub), task:NAME, gym:NAME (hubs.md)."""
    options: dict[str, Any] = Field({})
    """Options of gym:NAME, such as its difficulty: {min_digits: 2}."""
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
    chat_template: Annotated[bool | dict[str, Any], pydantic.AfterValidator(_not_own)] = True
    """Text prompts become a user message in the chat template, of options such as {enable_thinking: false}."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longer prompts are dropped. Default: what fits."""
    limit: int | None = Field(None, ge=1)
    """Number of rows used, from the first. Default: all."""
    image_hosts: Names = ()
    """Hosts from which URLs of images are fetched, in rows and by servers (vision.md)."""

    def refuse(self) -> None:
        is_file = self.source.partition(":")[0] not in ("hf", "task", "gym")
        if is_file and self.split != type(self).model_fields["split"].default:
            raise ValueError(
                f"split={self.split}: leave it out of a file, which has none; eval.data names held-out rows"
            )
        if self.system_prompt is not None and not self.chat_template:
            raise ValueError("system_prompt needs chat_template: true")
        if self.answer_pattern is None:
            return
        if self.answer_column is None:
            raise ValueError("answer_pattern needs answer_column")
        if self.answer_pattern.groups < 1:
            raise ValueError("answer_pattern needs a group (...) around the answer")

    @property
    def template_options(self) -> dict[str, Any]:
        return self.chat_template if isinstance(self.chat_template, dict) else {}


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
    stop: Names = Field((), max_length=16)
    """Strings that end a completion."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds for the generation of one batch."""

    def refuse(self) -> None:
        if self.temperature < 0.01:
            raise ValueError(
                f"temperature={self.temperature:g} would make all rollouts of a group alike: set 0.01 or more, such as "
                "1; eval.temperature=0 evaluates greedily"
            )


class EnvConfig(Section, extra="allow"):
    name: str = "single_turn"
    """`single_turn`, `tools`, `agent`, `step` or a plugin's; its options."""
    max_turns: int = Field(16, ge=1)  # or model calls of an agent: an option of each (environments.md)
    timeout_s: float = Field(60.0, gt=0, le=86_400)  # of the environment or agent in an episode: likewise
    history: str = "keep"
    """Way with history that outgrows model.max_length: `keep` ends the episode, `drop_oldest`, or a plugin's."""


class RewardSpec(Section, extra="allow"):
    """Keys of every reward; others are its arguments."""

    gate: bool = False  # at 0 or less the others can only cost
    weight: float = Field(default_factory=lambda known: 0.0 if known.get("gate") else 1.0)
    clip: Range | None = None  # lowest and highest value
    normalize: bool = False  # by mean and deviation in the group
    max_concurrent: int | None = Field(None, ge=1)  # calls of an async reward
    retries: int = Field(5, ge=0)  # of such a call that raises RetryError

    @pydantic.model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        return {"weight": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


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
    """Maximum tokens per forward pass; rows on a CPU may end earlier. `auto`: 8192 there; what fits on a GPU."""
    share_prefixes: bool = True
    """What sequences of a micro-batch begin with alike, such as a prompt, is computed once."""
    sequence_parallel: int = Field(1, ge=1)
    """Ranks that compute a row together, each a part of its positions."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """ZeRO stage. Default: 1 on a CPU, 2 on a GPU, 3 to offload there, 0 alone in float32."""
    gradient_checkpointing: bool | Literal["long"] = False
    """Recomputed activations: less memory, more time. `long`: for very long rows, with what is kept on the CPU."""
    kernels: Literal["eager", "compile", "liger"] = "eager"
    """Kernels of PyTorch, of torch.compile, or Liger's (a package)."""
    offload_optimizer: bool = False
    """Optimizer and (ZeRO-3) gradients on the CPU."""
    deepspeed: dict[str, Any] = Field({})
    """Others of DeepSpeed: {zero_optimization: {overlap_comm: true}}, or a ds_config.json."""

    def refuse(self) -> None:
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3")

    def unmeasured(self) -> "TrainerConfig":
        """Return the settings with micro_batch_tokens=auto as on CPUs, and in plans."""
        return self.model_copy(update={"micro_batch_tokens": 8192}) if self.micro_batch_tokens == "auto" else self


class StageConfig(Section):
    batch_size: int = Field(64, ge=1)
    """Demonstrations, or pairs, per optimiser step."""
    epochs: int | None = Field(None, ge=1)
    """Passes over them. Default: trainer.steps steps."""


class PairsConfig(StageConfig, extra="allow"):
    """Keys of both stages on pairs; others are options of each (stages.md)."""


class HeldOutConfig(DataConfig):
    section: ClassVar[str] = "eval.data"
    otherwise: ClassVar[str] = ", or eval.num_prompts=0"
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

    def refuse(self) -> None:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError("temperature=0 samples the same every time: set samples to 1")


class SourceConfig(DataConfig):
    """A source of a mixture: what it does not say it has from the run's sections."""

    name: str = Field("", pattern=r"^[^/\s]*$")  # default: of its file, data set or task
    weight: float = Field(1.0, ge=0)  # share of the draws, in relation to the others'
    held_out: Annotated[HeldOutConfig, _or_source] = HeldOutConfig()  # as eval.data
    env: Annotated[EnvConfig | None, _or_name] = None
    curriculum: Annotated[CurriculumConfig | None, _or_name] = None
    rewards: dict[str, RewardSpec] | None = Field(None, min_length=1)  # as rewards.functions
    max_tokens: int | None = Field(None, ge=1)  # as rollout.max_tokens

    @property
    def called(self) -> str:
        rows = self.source if "source" in self.model_fields_set else self.held_out.source
        return self.name or re.split("[:/]", rows)[-1].partition(".")[0]


class TrainingDataConfig(DataConfig):
    sources: tuple[Annotated[SourceConfig, _or_source], ...] = ()
    """Several sources, drawn by weight, in place of `source`: [{source, weight, rewards, env, ...}] (mixtures.md)."""
    exclude_overlap: bool = False
    """Training prompts that are held-out ones, too, are left out."""

    def refuse(self) -> None:
        super().refuse()
        if not self.sources:
            return
        if self.source != type(self).model_fields["source"].default:
            raise ValueError(f"source={self.source} beside sources: name it in that list")
        names = [one.called for one in self.sources]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two sources are called {min(twice)}: give each a name")
        if not any(one.weight for one in self.sources):
            raise ValueError("no source has a weight above 0: give one to train on")

    def of(self, source: SourceConfig) -> "TrainingDataConfig":
        """Return the section as a source has it."""
        given = DataConfig.model_fields.keys() & source.model_fields_set
        own = {name: getattr(source, name) for name in given}
        return self.model_copy(update={"sources": (), **own})


class BestConfig(Section):
    name: str = Field(
        pattern=r"^eval/(greedy|sampled|(greedy|sampled)_stderr|pass@\d+|zero_or_one|reward_errors|length_mean|truncated"
        r"|[^/]+/(greedy|sampled))$"
    )
    patience: int | None = Field(None, ge=1)  # evaluations without a better one that end the run


class CheckpointConfig(Section):
    every_steps: int = Field(50, ge=0)
    """Steps between checkpoints (12 B/trained parameter), and one at the end. 0 disables them."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints that are kept."""
    best: Annotated[BestConfig | None, _or_name] = None
    """Metric of the evaluation whose best weights and checkpoint are kept: eval/greedy; {name: eval/greedy, patience:
    3} ends the run after three evaluations without a better one."""
    copy_to: UserPath | None = None
    """Another folder or mount for each complete checkpoint, in the background."""
    in_background: bool = Field(False, alias="async")
    """Written while training goes on."""
    resume: bool = False
    """Continue from the newest checkpoint, if there is one."""

    def refuse(self) -> None:
        if self.copy_to is not None and os.path.isfile(self.copy_to):
            raise ValueError(f"copy_to={self.copy_to} is a file: name a folder, which need not be there")

    @property
    def patience(self) -> float:
        return math.inf if self.best is None else self.best.patience or math.inf


class LoggerSpec(Section, extra="allow"):
    """Keys of every logger; others are its options."""

    name: str
    rollouts: int = Field(32, ge=0)  # in a table
    rollouts_every: int = Field(10, ge=1)  # steps between tables


class ObserveConfig(Section):
    page: bool | None = None
    """Live page of the run. Default: of `launch` and `quickstart`."""
    host: str = "127.0.0.1"
    """Address of the page; any but loopback needs server.token."""
    port: int = Field(8090, ge=1, le=65535)
    """Port of the page, or the next free one."""
    tokens: bool = False
    """Log-prob and entropy of each trained token, for the page; one forward pass more."""
    trace: str | None = Field(None, pattern=r"^\d+(\.\.\d+)?$")
    """Steps of trace.json, first..last: what each process did when, for ui.perfetto.dev."""
    loggers: Annotated[tuple[Annotated[LoggerSpec, _or_name], ...], or_one] = ()
    """tensorboard, wandb, trackio, mlflow, or a plugin's; {name: wandb, mode: offline} with options (observe.md)."""

    def refuse(self) -> None:
        if self.trace and not self.traced:
            raise ValueError(f"trace={self.trace} has no steps: write first..last, such as 3..5")

    @property
    def traced(self) -> range:
        first, _, last = (self.trace or "1..0").partition("..")
        return range(int(first), int(last or first) + 1)
