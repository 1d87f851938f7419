"""The whole configuration: one YAML file, overridden by `section.key=value`, validated once, frozen, global nowhere.

Each class is a section and each attribute's description is its documentation; `python run.py config --reference`
prints them all. This module imports no engine and no torch, so that a mistake is answered within a second.
"""

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pydantic
import yaml
from pydantic import Field

from hocket.errors import ConfigError
from hocket.types import InFlight

UserPath = Annotated[str, pydantic.AfterValidator(os.path.expanduser)]
MIN_TOKEN_LENGTH = 8
MAX_LORA_RANK = 512
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class Section(pydantic.BaseModel):
    """Base of every section: unknown keys are errors, values don't change, no silent conversion of types."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        coerce_numbers_to_str=True,  # YAML takes an answer column called 2024, or a token of digits, for a number
    )


class RunConfig(Section):
    dir: UserPath = Field("runs/default", description="Folder for everything this run makes.")


class LoraConfig(Section):
    rank: int = Field(16, ge=1, le=MAX_LORA_RANK, description="Rank of each adapted layer's update.")
    alpha: float = Field(32.0, gt=0, description="The update is scaled by alpha / rank.")
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        "all-linear", description="Adapted layers: all-linear (all but the output head), or names such as [q_proj]."
    )

    @pydantic.field_validator("targets", mode="before")
    @classmethod
    def _one_alone(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) and value != "all-linear" else value


class ModelConfig(Section):
    path: UserPath = Field(
        "checkpoints/tiny-sort", description="Folder or hub name of a Hugging Face causal language model."
    )
    dtype: Dtype = Field(
        "auto", description="Precision of server and trainer; auto: bfloat16 on a GPU, float32 on a CPU."
    )
    max_length: int | None = Field(
        None, ge=2, description="Longest prompt + completion, in tokens; default: what the model's own config allows."
    )
    random_init: bool = Field(
        False, description="Start from random weights; path then needs only a config and a tokenizer."
    )
    lora: LoraConfig | None = Field(
        None,
        description="Train and publish an adapter alone, beside frozen weights; {}: as below. Its learning rate is "
        "about ten times that of all weights.",
    )

    @pydantic.model_validator(mode="after")
    def _adapted_weights_are_on_both_sides(self) -> "ModelConfig":
        if self.lora is not None and self.random_init:
            raise ValueError("lora adapts weights that the server has too; with random_init there are none")
        return self


class DataConfig(Section):
    source: str = Field(
        "task:sort", description="file.jsonl, file.parquet, hf:NAME (Hugging Face datasets), or task:NAME (built in)."
    )
    subset: str | None = Field(None, description="Configuration name of a Hugging Face dataset.")
    split: str = Field("train", description="Split of a Hugging Face dataset or of a built-in task.")
    prompt_column: str = Field("prompt", description="Column with the prompt: text, or a list of chat messages.")
    answer_column: str | None = Field(
        "answer", description="Column with the reference answer; null where there is none."
    )
    answer_pattern: str | None = Field(
        None, description="Regular expression whose first group is the answer within the answer column."
    )
    response_column: str = Field("response", description="Column with the demonstration that sft learns from.")
    system_prompt: str | None = Field(None, description="System message put before every text prompt.")
    chat_template: bool = Field(True, description="Render text prompts as a user message through the chat template.")
    max_prompt_tokens: int | None = Field(
        None,
        ge=1,
        description="Longer prompts are counted and dropped; default: what leaves room for rollout.max_tokens.",
    )
    limit: int | None = Field(None, ge=1, description="Use only the first rows of the source.")


class RolloutConfig(Section):
    prompts_per_step: int = Field(16, ge=1, description="Prompts per optimiser step.")
    group_size: int = Field(8, ge=2, description="Completions per prompt; the group's mean is the baseline.")
    max_tokens: int = Field(256, ge=1, description="Longest completion, in tokens.")
    temperature: float = Field(
        1.0, gt=0.0, le=10.0, description="Sampling temperature; the trainer divides logits by it too."
    )
    stop: tuple[str, ...] = Field((), description="Strings that end a completion.")
    stop_token_ids: tuple[int, ...] = Field((), description="Token ids that end a completion, besides the model's own.")
    timeout_s: float = Field(600.0, gt=0, description="Deadline for one step's generation.")
    max_in_flight_tokens: int | None = Field(
        None,
        ge=1,
        description="No other episode of several turns starts while those that have begun hold so many tokens, the "
        "turn to come included; default: all start at once. About what the servers' KV caches hold is a good choice.",
    )
    top_p: float = Field(1.0, description="Must stay 1: the trainer can't reproduce a truncated distribution.")
    top_k: int = Field(-1, description="Must stay -1, for the same reason as top_p.")

    @pydantic.model_validator(mode="after")
    def _sampled_distribution_is_the_policy(self) -> "RolloutConfig":
        if self.top_p != 1.0 or self.top_k != -1:
            raise ValueError(
                "top_p must be 1 and top_k -1 while training: tokens outside the nucleus have no probability under the "
                "sampler but some under the trainer, which biases every importance weight; lower the temperature"
            )
        return self


class EnvConfig(Section):
    model_config = pydantic.ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    name: str = Field(
        "single_turn",
        description="Environment that answers the model's turns: single_turn, guess, tools, or one of your own; every "
        "other key is an option of it.",
    )
    max_turns: int = Field(16, ge=1, description="An episode that is not done after so many turns is cut off.")
    timeout_s: float = Field(
        60.0, gt=0, description="Deadline of the environment's own work in one episode; past it, the episode failed."
    )


class RewardSpec(Section):
    model_config = pydantic.ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    weight: float = Field(
        1.0, description="Factor in the total; every other key is passed to the function as an argument."
    )


class RewardsConfig(Section):
    functions: dict[str, RewardSpec] = Field(
        default_factory=lambda: {"exact_match": RewardSpec(weight=1.0)},
        description="Reward name: weight, or reward name: {weight: ..., argument: ...}.",
    )
    timeout_s: float = Field(30.0, gt=0, description="Deadline of one reward function on one rollout.")
    max_error_rate: float = Field(
        0.5, ge=0, le=1, description="Above this share of failed scores in a step the run stops."
    )

    @pydantic.field_validator("functions", mode="before")
    @classmethod
    def _weight_alone(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {
            k: {"weight": v} if isinstance(v, int | float) and not isinstance(v, bool) else v for k, v in value.items()
        }

    @pydantic.field_validator("functions")
    @classmethod
    def _at_least_one(cls, value: dict[str, RewardSpec]) -> dict[str, RewardSpec]:
        if not value:
            raise ValueError("name at least one reward, e.g. rewards.functions: {exact_match: 1.0}")
        return value


class AlgorithmConfig(Section):
    scale: Literal["group", "none"] = Field(
        "group", description="Divide centred rewards by the group's deviation, or don't."
    )
    clip_low: float = Field(
        0.2, gt=0, lt=1, description="The ratio is clipped below at 1 - clip_low; with a correction it is 1."
    )
    clip_high: float = Field(
        0.28, gt=0, description="The ratio is clipped above at 1 + clip_high; with a correction it is 1."
    )
    correction: Literal["none", "truncate"] = Field(
        "truncate", description="Importance weight between engine and trainer: capped at correction_high, or none."
    )
    correction_high: float = Field(2.0, gt=0, description="Cap of the importance weight.")


class TrainerConfig(Section):
    steps: int = Field(100, ge=1, description="Optimiser steps.")
    seed: int = Field(0, ge=0, description="Seed of data order, sampling and initialisation.")
    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate of AdamW.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Learning rate after warm-up.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay of AdamW.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's moment decay rates.")
    max_grad_norm: float = Field(1.0, gt=0, description="Global gradient norm is clipped to this.")
    micro_batch_tokens: int = Field(
        8192, ge=2, description="Most tokens, padding included, in one forward pass of one rank."
    )
    logprob_chunk_tokens: int = Field(1024, ge=1, description="Tokens whose logits exist at the same time.")
    zero_stage: Literal[0, 1, 2, 3] | None = Field(
        None, description="DeepSpeed ZeRO stage; default: 1 on a CPU, 2 on a GPU."
    )
    gradient_checkpointing: bool = Field(False, description="Recompute activations in the backward pass.")
    max_skipped_steps: int = Field(5, ge=1, description="Non-finite steps in a row after which the run stops.")
    collective_timeout_s: float = Field(1800.0, gt=0, description="Deadline of any wait between trainer ranks.")


class SftConfig(Section):
    output: UserPath | None = Field(None, description="Folder for the trained model; default: <run.dir>/model.")
    batch_size: int = Field(64, ge=1, description="Demonstrations per optimiser step.")


class SyncConfig(Section):
    backend: Literal["disk", "nccl"] = Field(
        "disk", description="How new weights reach the servers: through files, or straight from memory (gloo on a CPU)."
    )
    root: UserPath | None = Field(
        None, description="Folder both sides see; published versions lie under it. Default: the parent of run.dir."
    )
    keep: int = Field(2, ge=1, description="Published versions kept on disk; older ones are removed.")
    timeout_s: float = Field(300.0, gt=0, description="Deadline for one server to load one version.")
    in_flight: InFlight = Field(
        "keep", description="Requests running when weights change: keep (go on with them), drain (end first), or abort."
    )
    delta: bool = Field(
        False,
        description="Publish only the weights whose bits changed: a few per cent of them at the learning rates of "
        "reinforcement learning in bfloat16. Needs backend disk, and room for another copy of the model: in the "
        "trainer's memory, and in each server's folder for temporary files ($TMPDIR).",
    )
    full_every: int = Field(50, ge=1, description="With delta, every so many versions are published in full.")
    upload: bool = Field(
        False, description="Send published files to the servers over HTTP: they need not see the trainer's disk."
    )
    bucket_mib: int = Field(
        256, ge=1, description="Tensors travel in buckets of about this size (backend nccl, or delta)."
    )
    canary_every: int = Field(
        20, ge=0, description="Compare log-probs of both sides every so many versions, besides the first; 0: don't."
    )
    max_logprob_gap: float = Field(
        0.1, gt=0, description="The run stops where this comparison's mean absolute difference is larger."
    )


class ServerConfig(Section):
    host: str = Field("127.0.0.1", description="Address to listen on; anything but loopback needs a token.")
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on.")
    urls: tuple[str, ...] = Field(
        (), description="Where the trainer finds the servers; one may be given as it is. Default: http://host:port."
    )
    token: str | None = Field(None, description="Bearer token of every route but /health; default: $HOCKET_TOKEN.")
    start_timeout_s: float = Field(
        600.0, gt=0, description="How long the trainer waits for a server, at the start or when none is left."
    )
    silence_s: float = Field(
        60.0, gt=0, description="A server that does not answer /health for so long has its requests played elsewhere."
    )
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs that share one copy of the model.")
    gpu_memory_utilization: float = Field(
        0.85,
        gt=0,
        le=1,
        description="Share of GPU memory for weights and KV cache. A trainer on the same GPU needs room in the rest; "
        "with launch.share_gpu that is only what its process holds while its states are away, 1 or 2 GiB.",
    )
    kv_cache_mib: int | None = Field(
        None, ge=16, description="KV cache size; default: from the share on a GPU, 256 on a CPU."
    )
    max_concurrent: int = Field(256, ge=1, description="Sequences the engine decodes at the same time.")
    max_lora_rank: int = Field(
        0, ge=0, le=MAX_LORA_RANK, description="Highest rank of adapters to serve, if it is above model.lora.rank."
    )
    max_prompts: int = Field(1024, ge=1, description="Most prompts in one request.")
    max_n: int = Field(128, ge=1, description="Most completions per prompt.")
    max_stop: int = Field(16, ge=0, description="Most stop strings, and most stop token ids, in one request.")
    max_body_mib: int = Field(64, ge=1, description="Largest request body.")

    @pydantic.field_validator("urls", mode="before")
    @classmethod
    def _one_alone(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @pydantic.field_validator("urls")
    @classmethod
    def _are_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} must begin with http:// or https://")
        urls = tuple(url.rstrip("/") for url in value)
        if len(set(urls)) < len(urls):
            raise ValueError("the same server is named twice")
        return urls


class EvalConfig(Section):
    data: DataConfig = Field(
        default_factory=lambda: DataConfig(split="test"), description="Held-out prompts, described as in data."
    )
    num_prompts: int = Field(256, ge=0, description="Prompts per evaluation; 0: no evaluation.")
    every_steps: int = Field(0, ge=0, description="Evaluate every so many steps, besides before and after; 0: don't.")
    temperature: float | None = Field(None, ge=0, description="Default: rollout.temperature; 0: greedy.")
    reward: str | None = Field(
        None, description="Reward whose mean is the accuracy; default: first of rewards.functions."
    )


class ObserveConfig(Section):
    tensorboard: bool = Field(True, description="Write TensorBoard files where the package is installed.")
    console: Literal["auto", "live", "plain"] = Field(
        "auto", description="Live table, plain lines, or as the terminal can."
    )


class LaunchConfig(Section):
    trainers: int = Field(1, ge=1, description="Trainer processes that quickstart starts on this machine.")
    server_gpus: str | None = Field(None, description="CUDA_VISIBLE_DEVICES of the server that quickstart starts.")
    trainer_gpus: str | None = Field(None, description="CUDA_VISIBLE_DEVICES of the trainer that quickstart starts.")
    share_gpu: bool = Field(
        False,
        description="Server and trainer take turns on the same GPU: while one works, the other's memory is off it. "
        "Both must be started with it; the trainer waits for the server before it takes the GPU.",
    )


class Config(Section):
    """Every section of a run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    env: EnvConfig = EnvConfig()
    rewards: RewardsConfig = RewardsConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    sft: SftConfig = SftConfig()
    sync: SyncConfig = SyncConfig()
    server: ServerConfig = ServerConfig()
    eval: EvalConfig = EvalConfig()
    observe: ObserveConfig = ObserveConfig()
    launch: LaunchConfig = LaunchConfig()
    plugins: tuple[str, ...] = Field((), description="Python files with rewards, environments and tools of your own.")

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> "Config":
        if self.model.max_length is not None and self.rollout.max_tokens >= self.model.max_length:
            raise ValueError(
                f"rollout.max_tokens={self.rollout.max_tokens} leaves no room for a prompt in "
                f"model.max_length={self.model.max_length}"
            )
        run_dir, root = self.run_dir.resolve(), self.sync_root.resolve()
        if not run_dir.is_relative_to(root) or run_dir == root:
            raise ValueError(f"run.dir={run_dir} must lie under sync.root={root}, where the server looks")
        if any(part.startswith(".") for part in run_dir.relative_to(root).parts):
            raise ValueError(f"run.dir={self.run.dir}: no folder name below sync.root may begin with a dot")
        if self.sync.delta and self.sync.backend != "disk":
            raise ValueError("sync.delta=true needs sync.backend=disk: from memory, all weights are sent")
        if self.sync.delta and self.model.lora is not None:
            raise ValueError("sync.delta=true has nothing to save with model.lora: an adapter is small already")
        waits = self.server.start_timeout_s + self.rollout.timeout_s + self.sync.timeout_s
        if waits >= self.trainer.collective_timeout_s:
            raise ValueError(
                f"trainer.collective_timeout_s must exceed server.start_timeout_s + rollout.timeout_s + sync.timeout_s "
                f"= {waits:g}: the other ranks wait that long"
            )
        if self.launch.share_gpu:
            self._can_share_gpu()
        _ = self.token  # a weak one is refused now
        return self

    def _can_share_gpu(self) -> None:
        if self.sync.backend != "disk":
            raise ValueError(
                "launch.share_gpu needs sync.backend=disk: NCCL can't connect two processes on one GPU, and the "
                "trainer is off it while the server loads"
            )
        if self.sync.delta:
            raise ValueError("launch.share_gpu does not go with sync.delta: whole versions are written")
        if len(self.server_urls) > 1:
            raise ValueError("launch.share_gpu is for one server; give several servers GPUs of their own")
        if self.launch.server_gpus != self.launch.trainer_gpus:
            raise ValueError("with launch.share_gpu, launch.server_gpus and launch.trainer_gpus must be the same")

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return Path(self.run.dir)

    @property
    def sync_root(self) -> Path:
        """Folder under which the server accepts published versions."""
        return Path(self.sync.root) if self.sync.root is not None else self.run_dir.resolve().parent

    @property
    def own_url(self) -> str:
        """Base URL of the server that this config starts, without a slash at the end."""
        host = f"[{self.server.host}]" if ":" in self.server.host else self.server.host
        return f"http://{host}:{self.server.port}"

    @property
    def server_urls(self) -> tuple[str, ...]:
        """Base URLs of the generation servers that the trainer uses."""
        return self.server.urls or (self.own_url,)

    @property
    def token(self) -> str | None:
        """Bearer token of the server, from the config or the environment. Raises ConfigError where it is too weak."""
        token = self.server.token or os.environ.get("HOCKET_TOKEN") or None
        if token is not None and (len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable()):
            raise ConfigError(
                f"server.token, or $HOCKET_TOKEN, needs at least {MIN_TOKEN_LENGTH} plain ASCII characters"
            )
        return token


def load(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Reads a YAML file (or only defaults), applies `section.key=value` overrides and validates.

    Args:
        path: YAML file; None for defaults.
        overrides: e.g. "trainer.steps=10", "rewards.functions={math: 1.0}"; the value is read as YAML.

    Raises:
        ConfigError: with the file, the key, and the nearest known key where one is unknown.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"can't read the config {path}: {error.strerror or error}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not valid YAML: {error}") from error
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(f"{path} must be a mapping of sections, got {type(loaded).__name__}")
        values = loaded or {}
    for override in overrides:
        _apply(values, override)
    try:
        return Config.model_validate(values)
    except pydantic.ValidationError as error:
        where = f"{path}: " if path is not None else ""
        raise ConfigError("\n".join(where + line for line in _explain(error))) from error


def dump(config: Config) -> str:
    """Returns the resolved config as YAML that `load` reads back to an equal config; the token is left out."""
    values = config.model_dump(mode="json")
    values["server"]["token"] = None  # a run folder is shared; a secret is not
    return yaml.safe_dump(values, sort_keys=False)


def reference() -> str:
    """Returns every key with its default and description, as a Markdown table."""
    rows = ["| key | default | what it does |", "|---|---|---|"]
    for section, field in Config.model_fields.items():
        model = field.annotation
        if not (isinstance(model, type) and issubclass(model, Section)):
            rows.append(f"| `{section}` | `{_default(field)}` | {field.description} |")
            continue
        for key, item in model.model_fields.items():
            rows.append(f"| `{section}.{key}` | `{_default(item)}` | {item.description} |")
            for name, inner in _optional_section(item).items():
                rows.append(f"| `{section}.{key}.{name}` | `{_default(inner)}` | {inner.description} |")
    return "\n".join(rows)


def _optional_section(field: pydantic.fields.FieldInfo) -> dict[str, pydantic.fields.FieldInfo]:
    """Returns the keys of a section that may be null."""
    sections = (kind for kind in get_args(field.annotation) if isinstance(kind, type) and issubclass(kind, Section))
    return next((section.model_fields for section in sections), {})


def _default(field: pydantic.fields.FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Section):
        value = value.model_dump(exclude_defaults=True)
    if isinstance(value, dict):
        value = {k: v.model_dump() if isinstance(v, Section) else v for k, v in value.items()}
    if isinstance(value, tuple):
        value = list(value)
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def _apply(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"can't read {override!r}: overrides look like section.key=value, e.g. trainer.steps=10")
    try:
        value = text if text != "null" and _is_text(key) else _number(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"the value in {override!r} is not valid YAML: {error}") from error
    *parents, leaf = key.split(".")
    for parent in parents:
        child = values[parent] = {} if values.get(parent) is None else values[parent]  # a file may say null
        if not isinstance(child, dict):
            raise ConfigError(f"can't set {key!r}: {parent!r} is not a section")
        values = child
    values[leaf] = value


def _is_text(key: str) -> bool:
    """Returns whether the key's value is text, which is then taken as it stands: "runs/a #3", "2024_10", "0123"."""
    model: Any = Config
    for part in key.split("."):
        field = model.model_fields.get(part) if isinstance(model, type) and issubclass(model, Section) else None
        if field is None:
            return False
        model = field.annotation
    return all(kind in (str, UserPath, type(None)) for kind in get_args(model) or (model,))


def _number(value: Any) -> Any:
    # YAML 1.1 reads 1e-6 as text
    return float(value) if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value) else value


def _explain(error: pydantic.ValidationError) -> list[str]:
    lines = []
    for item in error.errors():
        where = [str(part) for part in item["loc"]]
        key = ".".join(where)
        if item["type"] == "extra_forbidden":
            close = difflib.get_close_matches(key, _known_keys(), n=1) or difflib.get_close_matches(
                where[-1], [k for k in _known_keys() if "." not in k], n=1
            )
            hint = f"; did you mean {close[0]!r}?" if close else "; `python run.py config --reference` lists every key"
            lines.append(f"unknown key {key!r}{hint}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"{key}: {message}" if key else message)
    return lines


def _known_keys() -> list[str]:
    keys: list[str] = []
    for section, field in Config.model_fields.items():
        keys.append(section)
        model = field.annotation
        if isinstance(model, type) and issubclass(model, Section):
            for key, item in model.model_fields.items():
                keys += [f"{section}.{key}", *(f"{section}.{key}.{name}" for name in _optional_section(item))]
    keys += [f"eval.data.{key}" for key in DataConfig.model_fields]
    return keys
