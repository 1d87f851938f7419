"""The whole configuration: one YAML file, overridden by `section.key=value`, validated once, frozen, global nowhere.

Each class is a section and each attribute's description is its documentation; `python run.py config --reference`
prints them all. This module imports no engine and no torch, so that a mistake is answered within a second.
"""

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pydantic
import yaml
from pydantic import Field

from hocket import presets
from hocket.errors import ConfigError
from hocket.presets import CORRECTION_RANGES, DEFAULT, PRESETS
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
    quantize: Literal["nf4"] | None = Field(
        None,
        description="The trainer holds the frozen weights in 4 bits (QLoRA); needs a GPU and the package bitsandbytes. "
        "The server keeps them as they are, so log-probs differ by the rounding, which the correction makes up for.",
    )
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
    float32_head: bool = Field(
        False, description="Compute logits in float32 on both sides, server and trainer, whatever the dtype."
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

    def beside(self, path: str | None) -> "ModelConfig":
        """Returns the config of a whole model beside the policy: another one, or what the run starts with."""
        other = {} if path is None else {"path": path, "random_init": False}
        return self.model_copy(update={"lora": None, **other})


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
    difficulty_column: str | None = Field(
        None, description="Column with a number that says how hard a row is, for section curriculum."
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


class CurriculumConfig(Section):
    model_config = pydantic.ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    name: str = Field(
        "shuffle",
        description="What decides which prompts an epoch has, and in which order: shuffle, sorted, window, staged "
        "(docs/curriculum.md), or one of your own; every other key is an option of it.",
    )
    retire_after: int = Field(
        0,
        ge=0,
        description="A prompt that all its rollouts solved so many times in a row is not played again; 0: it is.",
    )


class RolloutConfig(Section):
    prompts_per_step: int = Field(16, ge=1, description="Prompts per optimiser step.")
    group_size: int = Field(8, ge=1, description="Completions per prompt: the group, with which a reward is compared.")
    max_tokens: int = Field(256, ge=1, description="Longest completion, in tokens.")
    temperature: float = Field(
        1.0, gt=0.0, le=10.0, description="Sampling temperature; the trainer divides logits by it too."
    )
    stop: tuple[str, ...] = Field((), description="Strings that end a completion.")
    stop_token_ids: tuple[int, ...] = Field((), description="Token ids that end a completion, besides the model's own.")
    timeout_s: float = Field(600.0, gt=0, description="Deadline for the generation of one batch.")
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
    preset: presets.PresetName | None = Field(
        None, description="A published algorithm (docs/algorithms.md): fills every key below that is not set."
    )
    baseline: presets.Baseline = Field(
        DEFAULT.baseline,
        description="What a reward is compared with: its group's mean, that of the group's others (leave_one_out), "
        "nothing, or a critic's values. The last two give each token an advantage of its own.",
    )
    scale: presets.Scale = Field(
        DEFAULT.scale,
        description="What that is divided by: the deviation of its group, of the whole batch (over rollouts; over "
        "tokens, whose mean is subtracted too, with baseline none or critic), or nothing.",
    )
    advantage_clip: float | None = Field(None, gt=0, description="Advantages are limited to ± this; default: not.")
    discount: float = Field(
        1.0, gt=0, le=1, description="Baseline none or critic: what a reward weighs one token earlier."
    )
    gae_lambda: float = Field(
        1.0, ge=0, le=1, description="Baseline critic: 1 trusts the rewards to come, 0 the critic's next value."
    )
    reward_clip: tuple[float, float] | None = Field(
        None, description="Rewards are limited to [low, high] before anything else; default: not."
    )
    overlong_share: float = Field(
        DEFAULT.overlong_share,
        ge=0,
        le=1,
        description="Over the last so much of rollout.max_tokens, a penalty on the reward grows from 0 to -1; 0: none.",
    )
    oversampling: float = Field(
        DEFAULT.oversampling,
        ge=1,
        description="Dynamic sampling: a prompt whose group teaches nothing, as all its rewards are alike, is replaced "
        "by the next one, until rollout.prompts_per_step teach something, or this many times as many were played; 1: "
        "it is left out.",
    )
    mask_truncated: bool = Field(
        False, description="Rollouts cut off at rollout.max_tokens count in the baseline and are not trained."
    )
    top_entropy: float = Field(
        1.0, gt=0, le=1, description="Only this share of the batch's tokens, of highest entropy, has an advantage."
    )
    ratio: presets.Ratio = Field(
        DEFAULT.ratio, description="Probability ratio of each token, or its geometric mean over the sequence."
    )
    clip: presets.Clip = Field(
        DEFAULT.clip,
        description="ppo: the smaller of clipped and unclipped; cispo: the clipped ratio weighs the gradient of every "
        "token; none.",
    )
    clip_low: float = Field(
        DEFAULT.clip_low,
        gt=0,
        le=1,
        description="The ratio is clipped below at 1 - clip_low; with a correction it is 1.",
    )
    clip_high: float = Field(
        DEFAULT.clip_high, gt=0, description="The ratio is clipped above at 1 + clip_high; with a correction it is 1."
    )
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="With clip ppo, the ratio of a negative advantage counts up to this; default: unbounded.",
    )
    aggregate: presets.Aggregate = Field(
        DEFAULT.aggregate,
        description="From tokens to the loss, over all micro-batches and ranks: their mean; the mean over sequences of "
        "the mean or of the sum of their tokens; constant: the latter, divided by constant_length.",
    )
    constant_length: int | None = Field(None, ge=1, description="Aggregate constant; default: rollout.max_tokens.")
    correction: presets.Correction = Field(
        DEFAULT.correction,
        description="Importance weight between engine and trainer: none; truncate: capped at correction_high; mask: "
        "0 outside of [correction_low, correction_high]; sequence_mask: that of the tokens, capped at 2, and 0 for "
        "sequences whose geometric mean is outside.",
    )
    correction_low: float = Field(
        CORRECTION_RANGES["truncate"][0],
        ge=0,
        description="Lower bound of the importance weight; mask: 0.5, sequence_mask: 0.99.",
    )
    correction_high: float = Field(
        CORRECTION_RANGES["truncate"][1],
        gt=0,
        description="Upper bound of the importance weight; mask: 5, sequence_mask: 1.01.",
    )
    kl: presets.Kl = Field(
        DEFAULT.kl,
        description="Penalty on the distance x = log(policy / reference) of each token: k1: x; k2: x²/2; "
        "k3: exp(-x) - 1 + x.",
    )
    kl_in: presets.KlIn = Field(
        DEFAULT.kl_in, description="The penalty is a term of the loss, or is taken from the rewards."
    )
    kl_coef: float = Field(DEFAULT.kl_coef, ge=0, description="Weight of the penalty; at the start, with kl_target.")
    kl_target: float | None = Field(
        None,
        gt=0,
        description="In the reward: kl_coef adapts until the mean of a token's penalty is this; default: it stays.",
    )
    kl_horizon: int = Field(10_000, ge=1, description="With kl_target, rollouts over which kl_coef adapts.")
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the policy's entropy, which is then rewarded.")
    reference: UserPath | None = Field(
        None,
        description="Model that a KL divergence is measured from, such as an older version; default: the one that the "
        "run starts from, with model.lora the base without the adapter.",
    )
    reference_reset_every: int = Field(
        0, ge=0, description="The policy becomes its own reference after every so many steps; 0: never."
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        """Sets what the preset says, then the correction's own range, where the user set nothing."""
        if not isinstance(values, Mapping):
            return values
        values = dict(values)
        if values.get("kl") is False:
            values["kl"] = "off"  # which YAML 1.1 takes for a truth value
        knobs = next((row.knobs for name, row in PRESETS.items() if name == values.get("preset")), DEFAULT.knobs)
        if values.get("kl") == "off":
            knobs = {name: value for name, value in knobs.items() if not name.startswith("kl_")}
        filled = {**knobs, **values}
        ranges = (span for name, span in CORRECTION_RANGES.items() if name == filled["correction"])
        low, high = next(ranges, CORRECTION_RANGES["none"])
        return {"correction_low": low, "correction_high": high, **filled}

    @pydantic.model_validator(mode="after")
    def _means_something(self) -> "AlgorithmConfig":
        for nonsense, message in self._contradictions():
            if nonsense:
                raise ValueError(message)
        return self

    def _contradictions(self) -> Iterator[tuple[bool, str]]:
        by_token = self.baseline in ("none", "critic")
        corrected = self.correction != "none"
        in_reward = self.kl_in == "reward"
        yield (
            by_token and self.scale == "group",
            f"baseline={self.baseline} gives every token an advantage, which no group has a deviation of: set scale "
            "to batch or none",
        )
        yield self.discount != 1 and not by_token, "discount is for baseline none or critic; leave it at 1"
        yield self.gae_lambda != 1 and self.baseline != "critic", "gae_lambda is for baseline critic; leave it at 1"
        yield (
            self.reward_clip is not None and self.reward_clip[0] >= self.reward_clip[1],
            "reward_clip is [low, high]: the first must be smaller",
        )
        yield (
            self.ratio == "sequence" and corrected,
            f"ratio=sequence has no effect with correction={self.correction}, where every ratio is 1: set "
            "correction=none, which compares with the policy that sampled",
        )
        yield (
            self.dual_clip is not None and (self.clip != "ppo" or corrected),
            "dual_clip bounds the minimum of clip=ppo where ratios differ from 1: set clip=ppo and correction=none, or "
            "leave it out",
        )
        yield (
            self.constant_length is not None and self.aggregate != "constant",
            "constant_length is for aggregate=constant; set that, or leave it out",
        )
        yield (
            self.correction_low >= self.correction_high,
            f"correction_low={self.correction_low:g} must be below correction_high={self.correction_high:g}",
        )
        yield (
            self.kl == "off" and (in_reward or self.kl_coef > 0 or self.kl_target is not None),
            "kl=off leaves kl_in, kl_coef and kl_target without a meaning: set kl, e.g. to k1 in the reward or k2 in "
            "the loss, or leave them out",
        )
        yield self.kl != "off" and self.kl_coef == 0, f"kl={self.kl} needs a weight, e.g. kl_coef=0.001; or set kl=off"
        yield (
            self.kl == "k1" and not in_reward,
            "k1 in the loss has an expected gradient of zero: set kl_in=reward, or kl=k2",
        )
        yield (
            in_reward and self.scale == "group",
            "scale=group would divide the penalty away where the rewards of a group are alike: with kl_in=reward set "
            "scale=batch or none",
        )
        yield self.kl_target is not None and not in_reward, "kl_target adapts the KL of the rewards: set kl_in=reward"


class CriticConfig(Section):
    path: UserPath | None = Field(
        None, description="Model whose layers the critic of ppo starts from, under a new head; default: model.path."
    )
    learning_rate: float = Field(1e-5, gt=0, description="Constant learning rate of the critic's AdamW.")
    warmup_steps: int = Field(0, ge=0, description="Steps at the start in which only the critic learns.")
    value_clip: float = Field(
        0.5,
        gt=0,
        description="A value that has moved by more than this from the one before the step gains nothing by moving on. "
        "As each batch gives one update, from values that have not moved yet, it limits nothing.",
    )


class TrainerConfig(Section):
    steps: int = Field(100, ge=1, description="Optimiser steps.")
    seed: int = Field(0, ge=0, description="Seed of data order, sampling and initialisation.")
    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate of AdamW.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Learning rate after warm-up.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay of AdamW.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's moment decay rates.")
    max_grad_norm: float = Field(1.0, gt=0, description="Global gradient norm is clipped to this.")
    micro_batch_tokens: Annotated[int, Field(ge=2)] | Literal["auto"] = Field(
        8192, description="Most tokens in one forward pass of one rank; auto: as many as fit, measured at the start."
    )
    logprob_chunk_tokens: int = Field(512, ge=1, description="Tokens whose logits exist at the same time.")
    zero_stage: Literal[0, 1, 2, 3] | None = Field(
        None,
        description="DeepSpeed ZeRO stage; default: 1 on a CPU, 2 on a GPU, 0 for one rank that computes in float32.",
    )
    gradient_checkpointing: bool = Field(False, description="Recompute activations in the backward pass.")
    offload_optimizer: bool = Field(
        False,
        description="Keep the optimizer's state in the CPU's memory and update the weights there: slow, but small.",
    )
    max_skipped_steps: int = Field(5, ge=1, description="Non-finite steps in a row after which the run stops.")
    collective_timeout_s: float = Field(1800.0, gt=0, description="Deadline of any wait between trainer ranks.")

    @pydantic.model_validator(mode="after")
    def _offload_needs_zero(self) -> "TrainerConfig":
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3")
        return self


class SftConfig(Section):
    output: UserPath | None = Field(None, description="Folder for the trained model; default: <run.dir>/model.")
    batch_size: int = Field(64, ge=1, description="Demonstrations per optimiser step.")


class PipelineConfig(Section):
    max_staleness: int = Field(
        0,
        ge=0,
        le=64,
        description="Optimiser steps that may be taken between the start of a rollout and the step that trains on it. "
        "0: strictly on-policy, server and trainer take turns. 1 or more: batches of so many steps ahead are played "
        "while the trainer works.",
    )
    replay: UserPath | None = Field(
        None,
        description="Run folder whose rollouts are trained on, step by step, instead of new ones: without a server, to "
        "look for a fault.",
    )


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
    more: dict[str, DataConfig] = Field(
        default_factory=dict,
        description="More held-out prompts, by the name that their metrics get: eval/NAME/accuracy.",
    )
    num_prompts: int = Field(256, ge=0, description="Prompts of each dataset per evaluation; 0: no evaluation.")
    samples: int = Field(
        1, ge=1, description="Completions per prompt; with several, pass@k is measured for k = 1, 2, 4 ... up to this."
    )
    every_steps: int = Field(0, ge=0, description="Evaluate every so many steps, besides before and after; 0: don't.")
    temperature: float | None = Field(None, ge=0, description="Default: rollout.temperature; 0: greedy.")
    reward: str | None = Field(
        None, description="Reward whose mean is the accuracy; default: first of rewards.functions."
    )

    @pydantic.model_validator(mode="after")
    def _can_differ(self) -> "EvalConfig":
        if self.samples > 1 and self.temperature == 0:
            raise ValueError("temperature=0 samples the same again and again: set samples to 1, or a temperature")
        for name in self.more:
            if not name.isidentifier():
                raise ValueError(f"more: {name!r} can't name metrics; use letters, digits and _")
        return self


class CheckpointConfig(Section):
    every_steps: int = Field(
        50,
        ge=0,
        description="Save all that going on needs every so many steps, and after the last: 12 bytes per trained "
        "parameter. 0: don't.",
    )
    keep: int = Field(2, ge=1, description="Newest checkpoints kept on disk; older ones are removed.")
    best: str | None = Field(
        None, description="Metric, such as eval/accuracy: of all checkpoints, the one where it is highest is kept, too."
    )
    in_background: bool = Field(
        False,
        alias="async",
        description="Write while training goes on, from a copy in the memory of rank 0's machine: the 12 bytes again.",
    )
    resume: bool = Field(
        False,
        description="Go on from the newest complete checkpoint in run.dir, or begin where there is none: the same "
        "command may be given again after whatever has ended the run.",
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
    curriculum: CurriculumConfig = CurriculumConfig()
    rollout: RolloutConfig = RolloutConfig()
    env: EnvConfig = EnvConfig()
    rewards: RewardsConfig = RewardsConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    trainer: TrainerConfig = TrainerConfig()
    sft: SftConfig = SftConfig()
    pipeline: PipelineConfig = PipelineConfig()
    sync: SyncConfig = SyncConfig()
    server: ServerConfig = ServerConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()
    launch: LaunchConfig = LaunchConfig()
    plugins: tuple[str, ...] = Field(
        (), description="Python files with rewards, environments, tools and curricula of your own."
    )

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> "Config":
        if self.model.max_length is not None and self.rollout.max_tokens >= self.model.max_length:
            raise ValueError(
                f"rollout.max_tokens={self.rollout.max_tokens} leaves no room for a prompt in "
                f"model.max_length={self.model.max_length}"
            )
        if self.rollout.group_size == 1 and self.algorithm.baseline in ("mean", "leave_one_out"):
            raise ValueError(
                f"rollout.group_size=1 leaves nothing to compare a reward with under "
                f"algorithm.baseline={self.algorithm.baseline}: set it to 2 or more, or the baseline to none or critic"
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
        if self.trainer.zero_stage == 3 and self.model.lora is not None and self.model.lora.quantize is not None:
            raise ValueError("trainer.zero_stage=3 can't spread the 4-bit weights of model.lora.quantize; set stage 2")
        self._has_its_reference()
        waits = self.server.start_timeout_s + self.rollout.timeout_s + self.sync.timeout_s
        if waits >= self.trainer.collective_timeout_s:
            raise ValueError(
                f"trainer.collective_timeout_s must exceed server.start_timeout_s + rollout.timeout_s + sync.timeout_s "
                f"= {waits:g}: the other ranks wait that long"
            )
        if self.algorithm.baseline == "critic" and self.critic.warmup_steps >= self.trainer.steps:
            raise ValueError(
                f"critic.warmup_steps={self.critic.warmup_steps} leaves no step of trainer.steps={self.trainer.steps} "
                "for the policy"
            )
        if self.launch.share_gpu:
            self._can_share_gpu()
        if self.pipeline.replay is not None and (self.pipeline.max_staleness or self.launch.share_gpu):
            raise ValueError("pipeline.replay has no server: leave pipeline.max_staleness and launch.share_gpu out")
        best, every = self.checkpoint.best or "", self.eval.every_steps
        if best.startswith("eval/") and (every == 0 or self.checkpoint.every_steps % every):
            raise ValueError(
                f"checkpoint.best={best} is not measured at every checkpoint; set checkpoint.every_steps to "
                "eval.every_steps, or a multiple of it"
            )
        _ = self.token  # a weak one is refused now
        return self

    def _has_its_reference(self) -> None:
        algorithm = self.algorithm
        if algorithm.kl == "off" and (algorithm.reference is not None or algorithm.reference_reset_every):
            raise ValueError(
                "algorithm.reference and algorithm.reference_reset_every are of no use while algorithm.kl is off; "
                "set algorithm.kl=k2, or leave them out"
            )
        if algorithm.reference_reset_every and self.model.lora is not None:
            raise ValueError(
                "algorithm.reference_reset_every can't copy an adapter into its own base; merge what was trained with "
                "`python3 run.py export` and start the next run from it as model.path"
            )

    def _can_share_gpu(self) -> None:
        if self.pipeline.max_staleness:
            raise ValueError("launch.share_gpu needs pipeline.max_staleness=0: server and trainer take turns")
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
    return yaml.safe_dump(as_dict(config), sort_keys=False)


def as_dict(config: Config) -> dict[str, Any]:
    """Returns the resolved config ready for JSON; the token is left out."""
    values = config.model_dump(mode="json", by_alias=True)
    values["server"]["token"] = None  # a run folder is shared; a secret is not
    return values


def changes(before: Mapping[str, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """Returns key → (then, now) of every setting that differs from an earlier `as_dict`.

    Where a run resumes does not count, and neither do settings that were not there yet.
    """
    after = as_dict(config)
    found: dict[str, tuple[Any, Any]] = {}
    for section in before.keys() & after.keys():
        if not isinstance(after[section], dict):
            pairs = {section: (before[section], after[section])}
        else:
            keys = before[section].keys() & after[section].keys()
            model: Any = Config.model_fields[section].annotation
            if model.model_config["extra"] == "allow":  # an option that is not there has a value, too: its default
                keys |= (before[section].keys() | after[section].keys()) - model.model_fields.keys()
            pairs = {f"{section}.{key}": (before[section].get(key), after[section].get(key)) for key in keys}
        found |= {key: (then, now) for key, (then, now) in pairs.items() if then != now}
    found.pop("checkpoint.resume", None)
    return dict(sorted(found.items()))


def reference() -> str:
    """Returns every key with its default and description, as a Markdown table."""
    rows = ["| key | default | what it does |", "|---|---|---|"]
    for section, field in Config.model_fields.items():
        model = field.annotation
        if not (isinstance(model, type) and issubclass(model, Section)):
            rows.append(f"| `{section}` | `{_default(field)}` | {field.description} |")
            continue
        for name, item in model.model_fields.items():
            key = item.alias or name
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
            for name, item in model.model_fields.items():
                key = item.alias or name
                keys += [f"{section}.{key}", *(f"{section}.{key}.{name}" for name in _optional_section(item))]
    keys += [f"eval.data.{key}" for key in DataConfig.model_fields]
    return keys
