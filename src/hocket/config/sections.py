"""The sections of the run itself, and the types and helpers of all sections.

A section is a frozen pydantic model. The text under a field is its documentation: `run.py config
--reference` prints it, and docs/reference/settings.md is that table.
"""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field

from hocket.common.files import newest_version, shipped, unshipped
from hocket.errors import ConfigError


def _path(text: str) -> str:
    """Expand ~ in a path, and refuse a variable, which no shell would replace in a file."""
    if not text:
        raise ValueError("the path is empty: is a shell variable not set?")
    if re.search(r"\$\{?[A-Za-z_]", text):
        raise ValueError(f"{text} names a variable: only a shell replaces it, on its command line")
    return os.path.expanduser(text)


def ascending(bounds: tuple[float, float]) -> tuple[float, float]:
    """Check that the first bound lies below the second. Raises ValueError."""
    if bounds[0] >= bounds[1]:
        raise ValueError("must be [lowest, highest], the first below the second")
    return bounds


UserPath = Annotated[str, pydantic.AfterValidator(_path)]
ModelPath = Annotated[
    UserPath,
    pydantic.AfterValidator(shipped),
    pydantic.AfterValidator(newest_version),  # of a run
    pydantic.PlainSerializer(unshipped),
]


def _or_key(key: str) -> pydantic.BeforeValidator:
    """Let a user write TEXT for {key: TEXT}."""
    return pydantic.BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


or_name = _or_key("name")
or_source = _or_key("source")
or_one = pydantic.BeforeValidator(
    lambda value: (value,) if isinstance(value, str | dict) else value
)
"""Lets a user write X for [X]."""
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], or_one]
Range = Annotated[tuple[float, float], pydantic.AfterValidator(ascending)]
RATE_OF_8B = 1e-6  # learning rate of learning_rate=auto for a model of 8 billion parameters
ADAPTER_RATE = 10.0  # an adapter's rate, as a multiple of that of all weights
ChosenDtype = Literal["auto", "float32", "bfloat16", "float16"]


def _chosen(chosen: Any) -> str | dict[str, Any]:
    options = {"name": chosen} if isinstance(chosen, str) else chosen
    if not isinstance(options, dict) or not isinstance(options.get("name"), str):
        raise ValueError("must be a name, or {name: NAME, option: value}")
    # A choice without options has one form, so that equal settings compare equal.
    return options if len(options) > 1 else str(options["name"])


Chosen = Annotated[str | dict[str, Any], pydantic.PlainValidator(_chosen)]
"""A choice from a registry, which plugins may add to: NAME, or {name: NAME, option: value}."""


class Section(pydantic.BaseModel):
    """A group of settings: frozen, without unknown keys, and checked by `refuse`."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,  # a column may be named 2024
    )

    def refuse(self) -> None:
        """Raise ValueError where settings contradict each other."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        self.refuse()
        return self


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested mappings.

    The inner mappings are copied first, as aliases of YAML share them. Raises ConfigError where a
    parent is no mapping.
    """
    *parents, leaf = key.split(".")
    for parent in parents:
        child = values.get(parent)
        if not isinstance(child, dict | None):
            raise ConfigError(f"can't set {key!r}: {parent!r} is not a section")
        values[parent] = dict(child or {})
        values = values[parent]
    values[leaf] = value


def leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings: dotted key -> value.

    >>> leaves({"trainer": {"steps": 10, "betas": [0.9, 0.95]}})
    {'trainer.steps': 10, 'trainer.betas': [0.9, 0.95]}
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= leaves(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def markdown_table(header: tuple[str, ...], rows: Iterable[Iterable[object]]) -> str:
    """Return a table as Markdown, without a newline at its end."""
    lines = [_markdown_row(header), "|---" * len(header) + "|"]
    lines += [_markdown_row(row) for row in rows]
    return "\n".join(lines)


def _markdown_row(cells: Iterable[object]) -> str:
    texts = [str(cell).replace("|", r"\|") for cell in cells]  # a bare | ends a cell
    return f"| {' | '.join(texts)} |"


class RunConfig(Section):
    dir: UserPath = "runs/default"
    """Folder of metrics, rollouts, checkpoints and weights."""


class LoraConfig(Section):
    rank: int = Field(16, ge=1, le=512)  # vLLM serves no higher one
    """Rank of each layer's update."""
    alpha: float = Field(32.0, gt=0)
    """The update is scaled by alpha / rank."""
    quantize: Literal["nf4"] | None = None
    """QLoRA: frozen 4-bit weights; needs GPU, bitsandbytes."""
    targets: Literal["all-linear"] | Annotated[Names, Field(min_length=1)] = "all-linear"
    """Layers: `all-linear` (all but the output head), or names: [q_proj]."""


class ModelConfig(Section):
    path: ModelPath = Field("checkpoints/tiny-sort", validate_default=True)
    """Folder or hub name of a model; of a run: its newest version."""
    dtype: ChosenDtype = "auto"
    """Precision. `auto`: bfloat16 on a GPU, float32 on a CPU."""
    max_length: int | None = Field(None, ge=2)
    """Maximum tokens, with the prompt. Default: the model's."""
    random_init: bool = False
    """Random weights, for sft; servers need saved ones. path needs only a config and a
    tokenizer."""
    float32_head: bool = False
    """Logits in float32 on both sides, whatever the dtype."""
    lora: LoraConfig | None = None
    """LoRA ({} for defaults); needs 10x the learning rate."""
    freeze: Names = ()
    """Parts of a vision-language model that are not trained: vision, projector, language."""

    def refuse(self) -> None:
        if (self.lora is not None or self.freeze) and self.random_init:
            raise ValueError(
                "lora and freeze are for loaded weights; with random_init there are none"
            )
        if self.lora is not None and self.freeze:
            raise ValueError(
                "lora freezes the whole model, and adapts its language part alone: leave out freeze"
            )

    @property
    def weights(self) -> Literal["model", "adapter"]:
        return "model" if self.lora is None else "adapter"

    @property
    def quantizes(self) -> bool:
        return self.lora is not None and self.lora.quantize is not None

    def beside(self, path: str | None) -> "ModelConfig":
        """Make the section of an auxiliary model, such as the reference or the critic's layers.

        It is the whole model at `path` or, without one, that from which the run starts.
        """
        changes: dict[str, Any] = {"lora": None}
        if path is not None:
            changes |= {"path": path, "random_init": False}
        return self.model_copy(update=changes)


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
    """Strings that end a completion, and are no part of its text; they may have special tokens."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds for the generation of one batch."""

    def refuse(self) -> None:
        if self.temperature < 0.01:
            raise ValueError(
                f"temperature={self.temperature:g} would make all rollouts of a group alike: set "
                "0.01 or more, such as 1; eval.temperature=0 evaluates greedily"
            )


class TrainerConfig(Section):
    steps: int = Field(100, ge=1)
    """Steps, each with one batch of rollouts and one version."""
    seed: int = Field(0, ge=0)
    """Seed of data order, sampling and initial weights."""
    learning_rate: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Peak learning rate of AdamW. `auto`: by the model's size, ten times that for an adapter."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear learning-rate warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: `constant`, or `linear` or `cosine` to 0 at the last step."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Maximum global gradient norm."""
    micro_batch_tokens: Annotated[int, Field(ge=2)] | Literal["auto"] = "auto"
    """Maximum tokens per forward pass. `auto`: what fits on a GPU; 8192 on a CPU, where most rows
    end earlier."""
    share_prefixes: Annotated[bool | Chosen, Field(union_mode="left_to_right")] = True
    """Equal beginnings of sequences in a micro-batch, such as a prompt, are computed once; or your
    own packer."""
    sequence_parallel: int = Field(1, ge=1)
    """Ranks that compute a row together, each a part of its positions."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """ZeRO stage. Default: 1 on a CPU, 2 on a GPU, 3 there with offload_optimizer; 0 for a single
    rank in float32 without it."""
    gradient_checkpointing: Annotated[bool | Chosen, Field(union_mode="left_to_right")] = False
    """Activations are computed again: less memory, more time. `long`, for very long rows, keeps on
    the CPU what a layer needs for that; or your own."""
    kernels: Chosen = "eager"
    """Kernels: `eager`, PyTorch's own; `compile`, of torch.compile; `liger`, a package's; or your
    own."""
    offload_optimizer: bool = False
    """Optimizer and (ZeRO-3) gradients on the CPU."""
    deepspeed: dict[str, Any] = Field({})
    """DeepSpeed's own settings: {zero_optimization: {overlap_comm: true}}, or a ds_config.json."""

    def refuse(self) -> None:
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3")

    @property
    def spreads_weights(self) -> bool:
        """Whether each rank holds a part of the weights: ZeRO-3."""
        return self.zero_stage == 3 or (self.zero_stage is None and self.offload_optimizer)

    def below_peak(self, steps: int) -> str:
        """Say that `steps` steps end within the warm-up; "" if they do not."""
        if self.warmup_steps <= steps:
            return ""
        fact = f"trainer.warmup_steps={self.warmup_steps} outlasts the {steps} steps"
        return f"{fact}: the learning rate ends at {steps / self.warmup_steps:.0%} of its peak; lower it"

    def with_rate(self, parameters: int, *, has_adapter: bool) -> "TrainerConfig":
        """Replace learning_rate=auto by a rate for a model with so many parameters.

        It is 1e-6 · (8e9 / parameters)^(2/3). That fits 1e-6 for 7 to 8 billion (arXiv 2402.03300),
        and what small models take (docs/tutorials/first_model.md). An adapter takes ten times it.

        Example: the rate for a model of a billion parameters.

            TrainerConfig().with_rate(1_000_000_000, has_adapter=False).learning_rate  # 4e-06
        """
        if self.learning_rate != "auto":
            return self
        rate = RATE_OF_8B * (8e9 / parameters) ** (2 / 3)
        if has_adapter:
            rate *= ADAPTER_RATE
        return self.model_copy(update={"learning_rate": float(f"{rate:.1e}")})

    def unmeasured(self) -> "TrainerConfig":
        """Replace micro_batch_tokens=auto by 8192: on a CPU and in a plan nothing is measured."""
        if self.micro_batch_tokens != "auto":
            return self
        return self.model_copy(update={"micro_batch_tokens": 8192})


class StageConfig(Section):
    batch_size: int = Field(64, ge=1)
    """Demonstrations per optimizer step; rm and dpo: pairs."""
    epochs: int | None = Field(None, ge=1)
    """Passes over the rows. Default: trainer.steps steps."""


class PairsConfig(StageConfig, extra="allow"):
    """Keys of both stages on pairs; others are options of each (docs/how-to/sft_dpo.md)."""


class BestConfig(Section):
    name: str
    patience: int | None = Field(None, ge=1)  # evaluations without a better one that end the run


class CheckpointConfig(Section):
    every_steps: int = Field(50, ge=0)
    """Steps between checkpoints (12 B/trained parameter), and one at the end. 0 disables them."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints that are kept."""
    best: Annotated[BestConfig | None, or_name] = None
    """Metric of the evaluation whose best weights and checkpoint are kept: eval/greedy; {name:
    eval/greedy, patience: 3} ends the run after three evaluations without a better one."""
    copy_to: UserPath | None = None
    """Another folder or mount for each complete checkpoint, in the background."""
    in_background: bool = Field(False, alias="async")
    """Written while training goes on."""
    resume: bool = False
    """Continue from the newest checkpoint, if there is one."""

    def refuse(self) -> None:
        if self.copy_to is not None and os.path.isfile(self.copy_to):
            raise ValueError(
                f"copy_to={self.copy_to} is a file: name a folder, which need not be there"
            )


class LoggerSpec(Section, extra="allow"):
    """Keys of every logger; others are its options."""

    name: str
    rollouts: int = Field(32, ge=0)  # number of rollouts in each table
    rollouts_every: int = Field(10, ge=1)  # steps between tables


class ObserveConfig(Section):
    page: bool | None = None
    """Live page of the run. Default: true for `launch` and `quickstart` alone."""
    host: str = "127.0.0.1"
    """Address of the page; any but loopback needs server.token."""
    port: int = Field(8090, ge=1, le=65535)
    """Port of the page; another one where it is taken."""
    tokens: bool = False
    """Log-prob and entropy of each trained token, for the page; one forward pass more."""
    trace: str | None = Field(None, pattern=r"^\d+(\.\.\d+)?$")
    """Steps of trace.json, first..last: what each process did when, for ui.perfetto.dev."""
    loggers: Annotated[tuple[Annotated[LoggerSpec, or_name], ...], or_one] = ()
    """tensorboard, wandb, trackio, mlflow, or a plugin's; {name: wandb, mode: offline} with options
    (docs/how-to/loggers.md)."""

    def refuse(self) -> None:
        if self.trace and not self.traced:
            raise ValueError(f"trace={self.trace} has no steps: write first..last, such as 3..5")

    @property
    def traced(self) -> range:
        """The steps of `trace`, which is "4" or "3..5"; empty without it."""
        if self.trace is None:
            return range(0)
        first, _, last = self.trace.partition("..")
        return range(int(first), int(last or first) + 1)
