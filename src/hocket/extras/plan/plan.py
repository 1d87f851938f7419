"""Estimate the memory and the time that a run needs on some GPUs, before anything is rented or
loaded: `run.py plan`.

The seconds serve to choose between settings; they are no promise.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from hocket.algorithm import choices
from hocket.commands import room
from hocket.common import environment, machine
from hocket.common.registry import load_plugins
from hocket.config import Config, read_settings
from hocket.data import model_folder
from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError
from hocket.launch import Placement, place, visible_gpus
from hocket.protocol import model_files
from hocket.sync.memory import LEAST_BYTES
from hocket.trainer import choices as trainer_choices
from hocket.trainer import flops, memory
from hocket.trainer.engine import default_zero_stage
from hocket.trainer.flops import Shape
from hocket.trainer.memory import GIB
from hocket.trainer.objective import Objective, configured
from hocket.trainer.policy import compute_dtype
from hocket.trainer.state import BUCKET_BYTES


class Gpu(NamedTuple):
    name: str  # in flops.PEAKS
    gib: float  # memory that a process can use
    bandwidth: float  # bytes per second of that memory


GPUS = {
    "24GB": Gpu("4090", 23.5, 1.01e12),
    "48GB": Gpu("L40S", 44.5, 0.86e12),
    "80GB": Gpu("H100", 79.0, 3.35e12),
    "141GB": Gpu("H200", 139.5, 4.8e12),
}
"""By size, with the figures of the data sheets, less half a GiB for CUDA itself."""
# The share of the peak that training reaches: Llama 3's is .38 to .43 (arXiv 2407.21783, table 4).
MFU = 0.4
DECODE_MEMORY, DECODE_FLOPS = 0.7, 0.5  # shares of the peaks that decoding reaches: assumed
ITERATION_S = 0.004  # scheduling and sampling per decoded token: assumed
ENGINE_GIB = 2.5  # vLLM's besides weights and KV cache: activations, CUDA graphs
MAX_SEQUENCES = 1024  # vLLM's own limit on such cards
# Seconds per byte: of weights over the disk (copy, write, sync, verify and load), of weights by
# broadcast, and of a checkpoint (write).
DISK_S, NCCL_S, CHECKPOINT_S = 1.6e-9, 0.083e-9, 1e-9
# Host memory of a server asleep, as a multiple of its weights: torch rounds pinned blocks up to a
# power of two, and keeps them.
PINNED = 2
HOST_S = 0.46e-6  # of rank 0 per token (benchmarks/host.py)
GPUS_PER_NODE = 8  # planned where no GPU is present and the user names only a size
HOST_GIB = 3.0  # host memory of a process: libraries, CUDA's context, tokenizer: assumed
# Bytes per trained parameter that DeepSpeed 0.19.8 keeps off the GPU, by ZeRO stage: master
# weights, moments, the update's gradients, and weights in 16 bits (1, 2) or sums of gradients (3).
OFFLOADED = {1: 18, 2: 18, 3: 20}
UPDATE_BYTES = 28  # AdamW's reads and writes per parameter
HOST_BANDWIDTH = 100e9  # bytes per second: a third of eight channels, assumed
PCIE_BANDWIDTH = 25e9  # of each GPU, sixteen lanes of version 4: assumed
PROMPT_TOKENS = 256  # assumed, without data.max_prompt_tokens
LENGTH = 0.5  # mean completion, as a share of rollout.max_tokens: assumed
RECOMPUTED = "trainer.gradient_checkpointing=true"
WAYS = (
    (RECOMPUTED,),
    ("trainer.micro_batch_tokens=4096", RECOMPUTED),
    ("trainer.zero_stage=3",),
    ("trainer.zero_stage=3", RECOMPUTED),
    ("trainer.offload_optimizer=true",),
    ("trainer.offload_optimizer=true", RECOMPUTED),
    ("model.lora={}",),
    ("model.lora={}", RECOMPUTED),
    ("model.lora={quantize: nf4}", RECOMPUTED),
    ("launch.share_gpu=true",),
)
"""Settings that save memory of the trainer, those that cost least speed first."""
NUM_WAYS = 3  # that a plan shows


class Needs:
    """The needs of a run on one machine; sizes in bytes.

    Raise ConfigError where the GPUs can't be divided between servers and ranks.
    """

    def __init__(
        self, config: Config, num_gpus: int, gpu: Gpu, stage: Objective | None = None
    ) -> None:
        self._config = config
        self._gpu = gpu
        gpus = [str(number) for number in range(num_gpus)]
        if stage is None:
            objective = configured(config)
            self.where = place(config.launch, config.server.tensor_parallel_size, gpus)
        else:
            objective = stage
            self.where = Placement([], ",".join(gpus), num_gpus, apart=True)
        models = objective.models(config.model)
        self._model = models[0][1]
        self.parameters = 0
        policy_trained = 0
        for parameter in self._model.parameters():
            self.parameters += parameter.numel()
            policy_trained += parameter.numel() * parameter.requires_grad
        self.trained = 0  # parameters of all models
        for _, model in models:
            self.trained += sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.published = 2 * policy_trained
        limits = [source.max_tokens for source in config.sources.values()]
        weights = [source.weight for source in config.sources.values()]
        self._prompt = config.data.max_prompt_tokens or PROMPT_TOKENS
        self._longest = max(limits)
        self._length = LENGTH * statistics.fmean(limits, weights)
        dtype = compute_dtype(config.model, torch.device("cuda"))
        self._plan_servers(dtype)
        self._plan_ranks(objective, models, dtype)
        transport = config.sync.transport
        self.broadcasts = transport == "nccl" or (transport == "auto" and self.where.apart)

    def _plan_servers(self, dtype: torch.dtype) -> None:
        """Compute the weights and the KV cache of a server."""
        server = self._config.server
        size = server.tensor_parallel_size
        shape = Shape.of(self._model)
        self.weights = self.parameters * dtype.itemsize / size  # on each GPU of a server
        self._kv_token = 2 * shape.layers * shape.key * dtype.itemsize
        usable = self._gpu.gib * server.gpu_memory_utilization - ENGINE_GIB
        kv_cache = GIB * usable - self.weights  # on each GPU of a server
        if server.kv_cache_mib:
            kv_cache = server.kv_cache_mib << 20
        self.kv_cache = size * kv_cache
        self.kv_tokens = max(0, int(self.kv_cache / self._kv_token))
        context = tokenizers.context_length(self._config.model)
        self.sequences = self.kv_tokens // context  # of the full context, at the same time

    def _plan_ranks(self, objective: Objective, models: Sequence[Any], dtype: torch.dtype) -> None:
        """Compute the memory that a rank needs, and the room for it on its GPU."""
        config = self._config
        num_ranks = self.where.num_ranks
        of_server = 0.0  # memory that a server takes on a rank's GPU
        if not self.where.apart:
            of_server = ENGINE_GIB * GIB
            if not config.launch.share_gpu:  # else its weights and KV cache are off while it sleeps
                of_server += self.weights + self.kv_cache / config.server.tensor_parallel_size
        self.room = (1 - memory.MARGIN) * (self._gpu.gib * GIB - of_server)
        trainer = config.trainer.unmeasured()
        rank = memory.needed(models, trainer, dtype, num_ranks=num_ranks, on_gpu=True)
        self.stage = default_zero_stage(trainer, dtype, num_ranks=num_ranks, on_gpu=True)
        per_token = rank.activations / int(trainer.micro_batch_tokens)
        free = self.room - (rank.total - rank.activations)
        fitting = int(max(0.0, free) / per_token)
        self.largest_micro_batch = min(memory.LARGEST_MICRO_BATCH, fitting)  # tokens
        if config.trainer.micro_batch_tokens == "auto":
            shortest = objective.unit * (self._prompt + self._longest)  # at least one sequence
            tokens = min(8192, max(self.largest_micro_batch, shortest))
            rank = rank._replace(activations=per_token * tokens)
        self.rank = rank

    @property
    def fits(self) -> bool:
        """Whether both sides have room; a server's is for a sequence of the full context."""
        return self.rank.total <= self.room and self.has_servers_room

    @property
    def has_servers_room(self) -> bool:
        return self.sequences > 0 or not self.where.servers

    @property
    def host(self) -> dict[str, float]:
        """The needs of the machine's memory, but for files in its cache; not all at once."""
        config = self._config
        rank = self.rank
        num_ranks = self.where.num_ranks
        num_processes = len(self.where.servers) + num_ranks
        needs: dict[str, float] = {"processes": HOST_GIB * GIB * num_processes}
        if config.trainer.offload_optimizer:
            needs["offloaded"] = OFFLOADED[self.stage] * self.trained
        if config.launch.share_gpu:
            if config.model.lora:
                needs["while the trainer trains"] = PINNED * self.weights
            of_rank = rank.weights + rank.gradients + rank.optimizer
            needs["while the server generates"] = num_ranks * of_rank
        if not self.broadcasts:
            needs["version"] = self.published * (1 + (config.sync.transport == "delta"))
        checkpoint = 12 * self.trained
        if not config.checkpoint.in_background:
            checkpoint = min(checkpoint, BUCKET_BYTES)
        needs["checkpoint"] = checkpoint
        return needs

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of a step by phase, where both sides fit."""
        config = self._config
        rollout = config.rollout
        count = rollout.prompts_per_step * rollout.group_size
        tokens = self._prompt + self._length  # of a sequence
        # The prompts of a group are computed once.
        shared = count - rollout.prompts_per_step if config.trainer.share_prefixes else 0
        update = self._update_seconds(count, shared)
        updates = config.algorithm.updates
        passes = (config.algorithm.kl != "off") + (updates > 1)  # that only compute log-probs
        seconds = {
            "generate": self._generation_seconds(count),
            "train": update * config.algorithm.epochs + passes * update / 3,
            "rank 0": HOST_S * count * tokens,
            "weights": self.published * (NCCL_S if self.broadcasts else DISK_S),
            "checkpoint": 12 * self.trained * CHECKPOINT_S,
        }
        if config.trainer.offload_optimizer:  # the GPUs wait for it
            trained_tokens = count * tokens - shared * self._prompt
            seconds["offload"] = self._offload_seconds(trained_tokens)
        return seconds

    def _generation_seconds(self, count: int) -> float:
        """Estimate the seconds in which all servers generate `count` completions."""
        rollout = self._config.rollout
        server = self._config.server
        size = server.tensor_parallel_size
        peak = flops.PEAKS[self._gpu.name]
        of_server = count / len(self.where.servers)
        limit = server.engine.get("max_num_seqs")
        most = limit if isinstance(limit, int) else MAX_SEQUENCES
        fitting = self.kv_tokens / (self._prompt + self._length)
        running = max(1.0, min(of_server, most, fitting))  # sequences at the same time
        kv_bytes = running * (self._prompt + self._length / 2) * self._kv_token / size
        read_s = (self.weights + kv_bytes) / (DECODE_MEMORY * self._gpu.bandwidth)
        flop_s = 2 * self.parameters / size / (DECODE_FLOPS * peak)  # per token
        iteration_s = ITERATION_S + max(read_s, running * flop_s)
        prefill_s = flop_s * self._prompt * of_server / rollout.group_size
        return prefill_s + iteration_s * max(self._longest, of_server * self._length / running)

    def _update_seconds(self, count: int, shared: int) -> float:
        """Estimate the seconds of forward and backward passes over a step's batch.

        `shared`: prompts that are not computed again.
        """
        trainer = self._config.trainer
        model = flops.model_flops(self._model)
        lengths = [int(self._prompt + self._length)] * count
        of_step = flops.step_flops(model, lengths, int(self._length * count))
        of_step -= flops.step_flops(model, [self._prompt] * shared, 0)
        recomputation = 4 / 3 if trainer.gradient_checkpointing else 1
        peak = flops.PEAKS[self._gpu.name]
        return of_step / (self.where.num_ranks * MFU * peak) * recomputation

    def _offload_seconds(self, trained_tokens: float) -> float:
        """Estimate the seconds of a step in which the GPUs wait for an optimizer on the CPU."""
        trainer = self._config.trainer
        num_ranks = self.where.num_ranks
        updates = self._config.algorithm.updates
        micro_batch = trainer.micro_batch_tokens
        if micro_batch == "auto":
            micro_batch = self.largest_micro_batch
        rows = num_ranks / trainer.sequence_parallel  # that are computed at the same time
        tokens = trained_tokens * self._config.algorithm.epochs / updates / rows
        num_micro_batches = math.ceil(tokens / micro_batch)
        # At stage 3 the sums of gradients go to the GPU and back with every micro-batch.
        transfers = (8 * num_micro_batches if self.stage == 3 else 4) + 2  # bytes per parameter
        per_parameter = UPDATE_BYTES / HOST_BANDWIDTH + transfers / num_ranks / PCIE_BANDWIDTH
        return updates * self.trained * per_parameter


def size_here() -> str:
    """Return the size in GPUS that is nearest to this machine's GPU; 80GB if it has none."""
    shown = environment.nvidia_smi("memory.total") if visible_gpus() else []
    if not shown:
        return "80GB"
    gib = float(shown[0].split()[0]) / 1024
    fitting = [size for size, gpu in GPUS.items() if gpu.gib <= gib]
    return fitting[-1] if fitting else "24GB"


def on_cpu(config: Config, stage: Objective | None) -> Iterator[str]:
    """Yield the lines of a plan for this machine without GPUs."""
    objective = stage or configured(config)
    num_servers = 0
    if stage is None and not config.names_servers:
        num_servers = config.launch.servers or 1
    needed = room.needs(config, objective, num_servers, config.launch.trainers or 1)
    free = machine.free_memory()
    yield (
        f"{config.model.path}: {needed.parameters:,} parameters; this machine's CPU, "
        f"{free / GIB:.1f} GiB of memory are free; for GPUs: --gpus N --gpu SIZE"
    )
    if num_servers:
        yield f"server   {num_servers} of {needed.server}"
    libraries = room.RANK_LIBRARIES / GIB
    yield (
        f"trainer  {needed.num_ranks} of {needed.of_trainer / needed.num_ranks / GIB:.2f} GiB: "
        f"libraries {libraries:.2f}, {needed.rank.parts}"
    )
    yield (
        f"in all   {needed.total / GIB:.1f} GiB at most, as all processes need it at the same time; "
        "a step's seconds on a CPU are not planned: try 2 steps"
    )
    version = needed.parameters * compute_dtype(config.model, torch.device("cpu")).itemsize
    if num_servers and config.model.lora is None and version >= LEAST_BYTES:
        yield (
            f"weights  2 versions of {version / GIB:.2f} GiB besides, in shared memory; through the "
            "disk where that has no room"
        )
    if not needed.fits(free):
        reason = room.shortage(needed, free)
        yield f"does not fit: {reason}; {room.advice(config, needed, free, stage)}"


def ways_out(
    arguments: Sequence[str], num_gpus: int, gpu: Gpu, stage: Objective | None
) -> Iterator[tuple[str, Needs]]:
    """Yield settings with which a config fits, and its needs then, the least costly first."""
    fitting: list[set[str]] = []
    for way in WAYS:
        if any(settings <= set(way) for settings in fitting):  # fewer settings are enough
            continue
        with suppress(ConfigError):  # it contradicts another setting
            config, _ = read_settings(list(arguments) + list(way))
            needs = Needs(config, num_gpus, gpu, stage)
            if needs.fits:
                fitting.append(set(way))
                yield " ".join(way), needs


def chosen_gpus(num_gpus: int | None, size: str | None) -> tuple[int, str]:
    """Return the number of GPUs and their size in GPUS, by default those of this machine.

    `size` may be a name as well: H100. Raise ConfigError for an unknown card.
    """
    if num_gpus is None:
        num_gpus = len(visible_gpus())
        if num_gpus == 0 and size is not None:
            num_gpus = GPUS_PER_NODE
    if num_gpus < 0:
        raise ConfigError(f"--gpus {num_gpus}: a plan needs 1 or more, or 0 for this machine's CPU")
    if size is None:
        size = size_here()
    for known, gpu in GPUS.items():
        if size.upper() in (known, gpu.name.upper()):
            return num_gpus, known
    choices_of_size = ", ".join(f"{known} ({gpu.name})" for known, gpu in GPUS.items())
    raise ConfigError(f"--gpu {size} is not known: choose {choices_of_size}")


def report(
    arguments: Sequence[str], num_gpus: int | None, size: str | None, stage: Objective | None = None
) -> Iterator[str]:
    """Yield the lines of a plan, of `train` or of a stage.

    Without a number or size it is for this machine's GPUs. Raise ConfigError for an unknown card.
    """
    num_gpus, size = chosen_gpus(num_gpus, size)
    config, _ = read_settings(arguments)
    load_plugins(config.plugins)
    choices.check(config.algorithm, config.rollout.group_size)
    trainer_choices.check(config.trainer)
    files, problems = model_files.weight_files(config.model.path)
    if files or problems:  # without weights, a config.json is enough for a plan
        uses_logits = stage is None or stage.kind.uses_logits
        model_folder.examine(config.model, head="logits" if uses_logits else None)
    if num_gpus == 0:
        yield from on_cpu(config, stage)
        return
    gpu = GPUS[size]
    needs = Needs(config, num_gpus, gpu, stage)
    yield (
        f"{config.model.path}: {needs.parameters / 1e9:.2f} billion parameters; "
        f"{num_gpus} x {size} ({gpu.name})"
    )
    yield from _lines(config, needs)
    if needs.rank.total > needs.room:
        yield "does not fit: a rank needs more than its GPU has. What would change it:"
        ways = list(itertools.islice(ways_out(arguments, num_gpus, gpu, stage), NUM_WAYS))
        for way, other in ways:
            yield f"         {way}: {other.rank}"
        if not ways:
            yield (
                f"         no setting does on {num_gpus} x {size}: take more GPUs, larger ones, or "
                "a smaller model"
            )


def _lines(config: Config, needs: Needs) -> Iterator[str]:
    """Yield the lines on servers, ranks, the host and a step."""
    where = needs.where
    context = tokenizers.context_length(config.model)
    if where.servers:
        yield (
            f"servers  {len(where.servers)}, the first on GPU {where.servers[0]}: "
            f"weights {needs.weights / GIB:.1f} GiB, KV cache {needs.kv_cache / GIB:.1f} GiB "
            f"for {needs.kv_tokens:,} tokens: {needs.sequences} sequences of {context:,}"
        )
    yield (
        f"ranks    {where.num_ranks} on GPU {where.ranks}: {needs.rank}; "
        f"it may use {needs.room / GIB:.1f}"
    )
    yield f"         largest trainer.micro_batch_tokens that fits: {needs.largest_micro_batch:,}"
    on_host = needs.host
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in on_host.items())
    total = sum(on_host.values())
    yield f"host     up to {total / GIB:.0f} GiB of memory beside the GPUs': {parts}"
    if needs.fits and where.servers:
        times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in needs.seconds.items())
        yield f"a step   {times}; completions of {LENGTH:.0%} of rollout.max_tokens are assumed"
    if not needs.has_servers_room:
        yield (
            f"does not fit: the server has no room for one sequence of {context:,} tokens; choose "
            "a shorter model.max_length, server.tensor_parallel_size=2 or 4, or larger GPUs"
        )
