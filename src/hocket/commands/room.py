"""Estimate what a run needs of this machine's memory, where its models run on the CPU.

A run that clearly does not fit is refused before anything is loaded, with a setting that would.
"""

import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from hocket.config import Config, load
from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError
from hocket.server.kv_cache import CPU_BATCHED_TOKENS, CPU_SEQUENCES, cpu_kv_cache
from hocket.trainer import memory
from hocket.trainer.flops import Shape
from hocket.trainer.memory import GIB
from hocket.trainer.objective import Objective, configured
from hocket.trainer.policy import compute_dtype
from hocket.trainer.weights import head_of

MIB = 1 << 20
# Memory of the processes of a run with a tiny model, without its KV cache. The HTTP process of a
# server and its engine are forks, which share what the first has imported.
SERVER_LIBRARIES = 630 * MIB
WORKER_LIBRARIES = 400 * MIB  # of each further process of an engine (tensor parallelism)
RANK_LIBRARIES = 380 * MIB
OTHERS = 55 * MIB  # the command that starts them, and the page of the run
SAMPLING = 8  # tensors of a decoded token over the vocabulary, in float32
PROMPT_TOKENS = 256  # assumed, without data.max_prompt_tokens


class ServerNeeds(NamedTuple):
    """Bytes that the processes of a server need together at their peak, a load of new weights."""

    libraries: float
    weights: float  # with the packed copy of the output head, by which a CPU computes
    kv_cache: float
    work: float  # activations of prompts, and log-probs of the tokens that are decoded at once
    loading: float  # a version's largest tensors, and holes that packing leaves in the heap

    @property
    def total(self) -> float:
        """The sum of all parts, in bytes."""
        return float(sum(self))

    def __str__(self) -> str:
        parts = (f"{name} {value / GIB:.2f}" for name, value in self._asdict().items())
        return f"{self.total / GIB:.2f} GiB: {', '.join(parts)}".replace("kv_cache", "KV cache")


NO_SERVER = ServerNeeds(0, 0, 0, 0, 0)


class MachineNeeds(NamedTuple):
    """Memory that the processes of a run need of this machine."""

    parameters: int  # of the policy, with an adapter's
    num_servers: int
    server: ServerNeeds
    num_ranks: int
    rank: memory.Estimate

    @property
    def of_servers(self) -> float:
        """Bytes of all servers."""
        return self.num_servers * self.server.total

    @property
    def of_trainer(self) -> float:
        """Bytes of all ranks."""
        return self.num_ranks * (RANK_LIBRARIES + self.rank.total)

    @property
    def total(self) -> float:
        """Bytes of all processes."""
        return OTHERS + self.of_servers + self.of_trainer

    def fits(self, free: float) -> bool:
        """Check whether the estimate is at most so many bytes."""
        return self.total <= free


def needs(
    config: Config, objective: Objective, num_servers: int, num_ranks: int = 1
) -> MachineNeeds:
    """Estimate the memory of a run whose ranks, and so many servers, use this machine's CPU."""
    models = objective.models(config.model)
    dtype = compute_dtype(config.model, torch.device("cpu"))
    trainer = config.trainer.unmeasured()
    rank = memory.needed(models, trainer, dtype, num_ranks=num_ranks, on_gpu=False)
    server = NO_SERVER
    if num_servers:  # its KV cache may have no room here
        server = _of_server(config, models[0][1], dtype.itemsize)
    parameters = sum(parameter.numel() for parameter in models[0][1].parameters())
    return MachineNeeds(parameters, num_servers, server, num_ranks, rank)


def _of_server(config: Config, model: Any, itemsize: int) -> ServerNeeds:
    """Estimate the memory of a server of this model."""
    sizes = [itemsize * parameter.numel() for parameter in model.parameters()]
    vocabulary, hidden = head_of(model).weight.shape
    packed_head = itemsize * vocabulary * hidden
    num_workers = config.server.tensor_parallel_size

    # What the engine computes at once: prompts, and then a token of each sequence.
    rollout = config.rollout
    running = min(CPU_SEQUENCES, rollout.prompts_per_step * rollout.group_size)
    prompt = config.data.max_prompt_tokens or PROMPT_TOKENS
    batched = min(CPU_BATCHED_TOKENS, running * prompt)
    prefill = itemsize * batched * (3 * Shape.of(model).inner + 4 * hidden)
    sampling = SAMPLING * 4 * running * vocabulary

    # A packed matrix is made beside the old one, whose memory the next matrix can't use: about half
    # of it stays unused. Whole versions bring the embedding, and the head is packed anew.
    loading = sum(sizes) / 2
    if config.model.lora is None:
        loading += 2 * max(sizes)
    return ServerNeeds(
        libraries=SERVER_LIBRARIES + (num_workers - 1) * WORKER_LIBRARIES,
        weights=sum(sizes) + packed_head,
        kv_cache=num_workers * cpu_kv_cache(config),
        work=prefill + sampling,
        loading=loading,
    )


def refuse(config: Config, num_servers: int, free: float) -> None:
    """Raise ConfigError where a run clearly does not fit into so many free bytes.

    `num_servers` have not taken their memory yet. The ranks of this machine count together.
    """
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = needs(config, configured(config), num_servers, num_ranks)
    if needed.total * (1 - memory.TOLERANCE) > free:
        raise ConfigError(f"{shortage(needed, free)}: {advice(config, needed, free)}")


def shortage(needed: MachineNeeds, free: float) -> str:
    """Say what the processes of a run need, and what is free."""
    parts = [f"trainer {needed.of_trainer / GIB:.1f}"]
    if needed.num_servers:
        parts.insert(0, f"server {needed.of_servers / GIB:.1f}")
    return (
        f"this run needs {needed.total / GIB:.1f} GiB of this machine's memory "
        f"({', '.join(parts)}), and {free / GIB:.1f} GiB are free"
    )


def advice(
    config: Config, needed: MachineNeeds, free: float, objective: Objective | None = None
) -> str:
    """Name the first settings with which a run fits, or say that none do."""
    least, smallest = "", needed.total
    for way in ways(config):
        words = " ".join(f"{key}={_word(value)}" for key, value in way.items())
        try:
            changed = load(None, config.model_dump(exclude_unset=True) | way)
            chosen = objective or configured(changed)
            less = needs(changed, chosen, needed.num_servers, needed.num_ranks)
        except ConfigError:  # it contradicts another setting
            continue
        if less.fits(free):
            return f"set {words}, which needs {less.total / GIB:.1f} GiB"
        if less.total < smallest:
            least, smallest = f" ({words} needs {less.total / GIB:.1f})", less.total
    return f"no setting makes it fit{least}; free some memory, or choose a smaller model"


def _word(value: Any) -> str:
    """Write a value as one types it in a setting."""
    return value if isinstance(value, str) else json.dumps(value)


def ways(config: Config) -> Iterator[dict[str, Any]]:
    """Yield settings that save memory: each alone, those that cost least first; then together."""
    lengths = _lengths(config)
    tokens = int(config.trainer.unmeasured().micro_batch_tokens)
    context = tokenizers.context_length(config.model)
    choices: dict[str, list[Any]] = {
        "trainer.micro_batch_tokens": [length for length in lengths if length < tokens],
        "trainer.gradient_checkpointing": [True],
        "model.lora": [{}],
        "model.max_length": [length for length in lengths if length < context],
        "server.kv_cache_mib": [None],
        "model.dtype": ["bfloat16"],
    }
    if config.trainer.gradient_checkpointing:
        del choices["trainer.gradient_checkpointing"]
    if config.model.lora is not None:
        del choices["model.lora"]
    if config.server.kv_cache_mib is None:  # then it is as small as it can be
        del choices["server.kv_cache_mib"]
    if config.model.dtype not in ("auto", "float32"):
        del choices["model.dtype"]

    for key, values in choices.items():
        for value in values:
            yield {key: value}
    together: dict[str, Any] = {}
    for key, values in choices.items():
        if values:
            together[key] = values[-1]  # the smallest
        if len(together) > 1:
            yield dict(together)


def _lengths(config: Config) -> list[int]:
    """List powers of two that hold a prompt with its completion, the largest first."""
    longest = max(source.max_tokens for source in config.sources.values())
    longest += config.data.max_prompt_tokens or PROMPT_TOKENS
    powers = [1 << exponent for exponent in range(15, 6, -1)]
    return [power for power in powers if power >= longest]
