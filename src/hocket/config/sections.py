"""The sections of a run's configuration, each by itself; the algorithm's own are in algorithm.py.

Each attribute's description is its documentation. What holds between sections is checked in whole.py.
"""

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from hocket.types import InFlight

UserPath = Annotated[str, pydantic.AfterValidator(os.path.expanduser)]
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
        "turn to come included (an agent: its prompt and one answer); default: what the servers' KV caches hold.",
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
        description="Environment that answers the model's turns: single_turn, guess, tools, agent (your own code "
        "asks the model), or one of your own; every other key is an option of it.",
    )
    max_turns: int = Field(
        16,
        ge=1,
        description="An episode that is not done after so many turns is cut off; an agent is refused more calls.",
    )
    timeout_s: float = Field(
        60.0,
        gt=0,
        description="Deadline of the environment's own work in one episode (of tools, beyond their call_timeout_s per "
        "turn), or of an agent for all of it; past it, the episode failed.",
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
    tool_parser: str | None = Field(
        None,
        description="How the model writes tool calls, in vLLM's words (hermes, llama3_json, ...), for clients of /v1 "
        "that send tools; the environment tools names its own.",
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


class HeldOutConfig(DataConfig):
    split: str = Field("test", description="As in data.")


class EvalConfig(Section):
    data: HeldOutConfig = Field(HeldOutConfig(), description="Held-out prompts, described as in data.")
    more: dict[str, HeldOutConfig] = Field(
        default_factory=dict,
        description="More held-out prompts, by the name that their metrics get: eval/NAME/accuracy.",
    )
    num_prompts: int = Field(256, ge=0, description="Prompts of each dataset per evaluation; 0: no evaluation.")
    samples: int = Field(
        1, ge=1, description="Completions per prompt: pass@k is measured for k = 1, 2, 4 ... up to this."
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
