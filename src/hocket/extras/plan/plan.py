"""Say what a run needs and takes on given GPUs, before anything is rented or loaded: `run.py plan`.

Seconds are good for a choice between settings, not for a promise.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from hocket.algorithm import choices
from hocket.common import environment, machine
from hocket.common.registry import load_plugins
from hocket.config import Config, read_settings
from hocket.data import model_folder
from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError
from hocket.launch import Placement, place, visible_gpus
from hocket.protocol import model_files
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
    gib: float  # that a process can use
    bandwidth: float  # bytes of its memory per second


GPUS = {
    "24GB": Gpu("4090", 23.5, 1.01e12),
    "48GB": Gpu("L40S", 44.5, 0.86e12),
    "80GB": Gpu("H100", 79.0, 3.35e12),
    "141GB": Gpu("H200", 139.5, 4.8e12),
}
"""By size; figures of the data sheets, less half a GiB for CUDA itself."""
MFU = 0.4  # share of the peak that training reaches: Llama 3's is .38 to .43 (arXiv 2407.21783, table 4)
DECODE_MEMORY, DECODE_FLOPS = 0.7, 0.5  # shares that decoding reaches: assumed
ITERATION_S = 0.004  # of scheduling and sampling, per decoded token: assumed
ENGINE_GIB = 2.5  # of vLLM besides weights and KV cache: activations, CUDA graphs
MAX_SEQUENCES = 1024  # vLLM's own limit on such cards
DISK_S, NCCL_S, CHECKPOINT_S = (
    1.6e-9,
    0.083e-9,
    1e-9,
)  # per byte: copy, write, sync, verify and load; broadcast; write
PINNED = (
    2  # weights of a server asleep: torch rounds pinned blocks up to a power of two, and keeps them
)
HOST_S = 0.46e-6  # of rank 0 per token (benchmarks/host.py)
CPU_PROCESS_GIB = 1.0  # of a process on a CPU: libraries: assumed
GPUS_PER_NODE = 8  # where none is here and only their size is asked for
HOST_GIB = 3.0  # of a process: libraries, CUDA's context, tokenizer: assumed
# Bytes per trained parameter that DeepSpeed 0.19.8 keeps off the GPU, by ZeRO stage: master weights, moments, the
# update's gradients, and weights in 16 bits (1, 2) or sums of gradients (3).
OFFLOADED = {1: 18, 2: 18, 3: 20}
UPDATE_BYTES, HOST_BANDWIDTH = (
    28,
    100e9,
)  # AdamW's reads and writes per parameter; a third of eight channels: assumed
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
"""Settings that save the trainer memory, those that cost least speed first."""
NUM_WAYS = 3


class Needs:
    """What a run needs on one machine; sizes in bytes. Raise ConfigError where its GPUs can't be
    divided."""

    def __init__(
        self, config: Config, num_gpus: int, gpu: Gpu, stage: Objective | None = None
    ) -> None:
        self._config = config
        self._gpu = gpu
        server = config.server
        size = server.tensor_parallel_size
        gpus = [str(number) for number in range(num_gpus)]
        if stage is None:
            objective = configured(config)
            where = place(config.launch, size, gpus)
        else:
            objective = stage
            where = Placement([], ",".join(gpus), num_gpus, apart=True)
        self.where = where
        dtype = compute_dtype(config.model, torch.device("cuda"))
        trainer = config.trainer.unmeasured()
        models = objective.models(config.model)
        self._model = models[0][1]
        self.parameters = sum(p.numel() for p in self._model.parameters())
        self.trained = sum(
            p.numel() for _, whole in models for p in whole.parameters() if p.requires_grad
        )
        self.published = 2 * sum(p.numel() for p in self._model.parameters() if p.requires_grad)
        self.weights = self.parameters * dtype.itemsize / size  # on each GPU of a server
        shape = Shape.of(self._model)
        self._kv_token = 2 * shape.layers * shape.key * dtype.itemsize
        left = GIB * (gpu.gib * server.gpu_memory_utilization - ENGINE_GIB) - self.weights
        self.kv_cache = size * (
            server.kv_cache_mib << 20 if server.kv_cache_mib else left
        )  # of all GPUs of a server
        self.kv_tokens = max(0, int(self.kv_cache / self._kv_token))
        self.sequences = self.kv_tokens // tokenizers.context_length(
            config.model
        )  # of the full context
        beside = 0.0  # of a server, on a rank's GPU
        if not where.apart:
            asleep = config.launch.share_gpu
            beside = ENGINE_GIB * GIB + (0.0 if asleep else self.weights + self.kv_cache / size)
        self.room = (1 - memory.MARGIN) * (
            gpu.gib * GIB - beside
        )  # but for what the trainer leaves, too
        rank = memory.needed(models, trainer, dtype, num_ranks=where.num_ranks, on_gpu=True)
        self.stage = default_zero_stage(trainer, dtype, num_ranks=where.num_ranks, on_gpu=True)
        per_token = rank.activations / int(trainer.micro_batch_tokens)
        free = self.room - (rank.total - rank.activations)
        self.largest_micro_batch = min(
            memory.LARGEST_MICRO_BATCH, int(max(0.0, free) / per_token)
        )  # tokens that fit
        self._prompt = config.data.max_prompt_tokens or PROMPT_TOKENS
        limits = [source.max_tokens for source in config.sources.values()]
        weights = [source.weight for source in config.sources.values()]
        self._longest = max(limits)
        self._length = LENGTH * statistics.fmean(limits, weights)
        if config.trainer.micro_batch_tokens == "auto":  # at least one sequence
            tokens = min(
                8192, max(self.largest_micro_batch, objective.unit * (self._prompt + self._longest))
            )
            rank = rank._replace(activations=per_token * tokens)
        self.rank = rank
        backend = config.sync.transport
        self.broadcasts = backend == "nccl" or (backend == "auto" and where.apart)

    @property
    def fits(self) -> bool:
        """Whether both sides have room; vLLM's is for one sequence of the full context."""
        return self.rank.total <= self.room and self.has_servers_room

    @property
    def has_servers_room(self) -> bool:
        return self.sequences > 0 or not self.where.servers

    @property
    def host(self) -> dict[str, float]:
        """What is needed of the machine's memory, but for files in its cache; not all at once."""
        config = self._config
        rank = self.rank
        num_ranks = self.where.num_ranks
        checkpoint = 12 * self.trained
        found: dict[str, float] = {
            "processes": HOST_GIB * GIB * (len(self.where.servers) + num_ranks)
        }
        if config.trainer.offload_optimizer:
            found["offloaded"] = OFFLOADED[self.stage] * self.trained
        if config.launch.share_gpu:
            if config.model.lora:
                found["while the trainer trains"] = PINNED * self.weights
            found["while the server generates"] = num_ranks * (
                rank.weights + rank.gradients + rank.optimizer
            )
        if not self.broadcasts:
            found["version"] = self.published * (1 + (config.sync.transport == "delta"))
        found["checkpoint"] = (
            checkpoint if config.checkpoint.in_background else min(checkpoint, BUCKET_BYTES)
        )
        return found

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of a step by phase, where both sides fit."""
        config = self._config
        rollout = config.rollout
        peak = flops.PEAKS[self._gpu.name]
        length = self._length
        prompt = self._prompt
        count = rollout.prompts_per_step * rollout.group_size
        num_ranks = self.where.num_ranks
        size = config.server.tensor_parallel_size
        mine = count / len(self.where.servers)
        limit = config.server.engine.get("max_num_seqs")
        most = limit if isinstance(limit, int) else MAX_SEQUENCES
        running = max(1.0, min(mine, most, self.kv_tokens / (prompt + length)))
        read = self.weights + running * (prompt + length / 2) * self._kv_token / size
        product = 2 * self.parameters * running / size / (DECODE_FLOPS * peak)
        iteration = ITERATION_S + max(read / (DECODE_MEMORY * self._gpu.bandwidth), product)
        prefill = (
            2 * self.parameters * prompt * mine / rollout.group_size / size / (DECODE_FLOPS * peak)
        )
        model = flops.model_flops(self._model)
        of_step = flops.step_flops(model, [int(prompt + length)] * count, int(length * count))
        again = (
            count - rollout.prompts_per_step if config.trainer.share_prefixes else 0
        )  # prompts of others
        of_step -= flops.step_flops(model, [prompt] * again, 0)
        update = (
            of_step
            / (num_ranks * MFU * peak)
            * (4 / 3 if config.trainer.gradient_checkpointing else 1)
        )
        epochs = config.algorithm.epochs
        updates = config.algorithm.updates
        passes = (config.algorithm.kl != "off") + (updates > 1)  # of log-probs alone
        seconds = {
            "generate": prefill + iteration * max(self._longest, mine * length / running),
            "train": update * epochs + passes * update / 3,
            "rank 0": HOST_S * count * (prompt + length),
            "weights": self.published * (NCCL_S if self.broadcasts else DISK_S),
            "checkpoint": 12 * self.trained * CHECKPOINT_S,
        }
        if config.trainer.offload_optimizer:  # the GPUs wait
            tokens = config.trainer.micro_batch_tokens
            rows = num_ranks / config.trainer.sequence_parallel  # that are computed at a time
            share = (count * (prompt + length) - again * prompt) * epochs / updates / rows
            micro_batches = math.ceil(
                share / (self.largest_micro_batch if tokens == "auto" else tokens)
            )
            # At stage 3 the sums go to the GPU and back with every micro-batch.
            travels = (8 * micro_batches if self.stage == 3 else 4) + 2
            per_parameter = UPDATE_BYTES / HOST_BANDWIDTH + travels / num_ranks / PCIE_BANDWIDTH
            seconds["offload"] = updates * self.trained * per_parameter
        return seconds


def size_here() -> str:
    """Return the size in GPUS that is nearest to this machine's GPU; without a GPU 80GB."""
    shown = environment.nvidia_smi("memory.total") if visible_gpus() else []
    if not shown:
        return "80GB"
    gib = float(shown[0].split()[0]) / 1024
    fitting = [size for size, gpu in GPUS.items() if gpu.gib <= gib]
    return fitting[-1] if fitting else "24GB"


def on_cpu(config: Config, stage: Objective | None) -> Iterator[str]:
    """Yield the lines of a plan for this machine without GPUs."""
    from hocket.server.vllm_arguments import cpu_kv_cache

    objective = stage or configured(config)
    models = objective.models(config.model)
    dtype = compute_dtype(config.model, torch.device("cpu"))
    num_ranks = config.launch.trainers or 1
    rank = memory.needed(
        models, config.trainer.unmeasured(), dtype, num_ranks=num_ranks, on_gpu=False
    )
    parameters = sum(parameter.numel() for parameter in models[0][1].parameters())
    free = machine.free_memory()
    yield (
        f"{config.model.path}: {parameters:,} parameters; this machine's CPU, {free / GIB:.1f} GiB of "
        "memory are free; for GPUs: --gpus N --gpu SIZE"
    )
    total = num_ranks * (rank.total + CPU_PROCESS_GIB * GIB)
    if stage is None and not config.names_servers:
        num_servers = config.launch.servers or 1
        weights = parameters * dtype.itemsize
        kv_cache = cpu_kv_cache(config)
        total += num_servers * (weights + kv_cache + CPU_PROCESS_GIB * GIB)
        yield f"servers  {num_servers}: weights {weights / GIB:.2f} GiB, KV cache {kv_cache / GIB:.2f} GiB each"
    yield f"ranks    {num_ranks}: {rank}"
    processes = f"with {CPU_PROCESS_GIB:g} GiB a process for libraries, assumed"
    yield f"in all   {total / GIB:.1f} GiB, {processes}; a step's seconds on a CPU are not planned: try 2 steps"
    if total > free:
        advice = "a smaller model or model.max_length, trainer.gradient_checkpointing=true, model.lora={}, or a GPU"
        yield f"does not fit: {total / GIB:.1f} GiB are needed and {free / GIB:.1f} are free; choose {advice}"


def ways_out(
    arguments: Sequence[str], num_gpus: int, gpu: Gpu, stage: Objective | None
) -> Iterator[tuple[str, Needs]]:
    """Yield settings with which a config fits, and its needs then, the least costly first."""
    found: list[set[str]] = []
    for way in WAYS:
        with suppress(ConfigError):  # it contradicts another setting
            if not any(less <= set(way) for less in found):
                needs = Needs(read_settings([*arguments, *way])[0], num_gpus, gpu, stage)
                if needs.fits:
                    found.append(set(way))
                    yield " ".join(way), needs


def report(
    arguments: Sequence[str], num_gpus: int | None, size: str | None, stage: Objective | None = None
) -> Iterator[str]:
    """Yield the lines of a plan, of `train` or a stage; without a number or size, for the GPUs that
    are here.

    Raise ConfigError for an unknown card.
    """
    if num_gpus is None:
        num_gpus = len(visible_gpus())
        if num_gpus == 0 and size is not None:
            num_gpus = GPUS_PER_NODE
    if num_gpus < 0:
        raise ConfigError(f"--gpus {num_gpus}: a plan needs 1 or more, or 0 for this machine's CPU")
    if size is None:
        size = size_here()
    size = next(
        (known for known, gpu in GPUS.items() if size.upper() in (known, gpu.name.upper())), size
    )
    if size not in GPUS:
        raise ConfigError(
            f"--gpu {size} is not known: choose {', '.join(f'{s} ({g.name})' for s, g in GPUS.items())}"
        )
    gpu = GPUS[size]
    config, _ = read_settings(arguments)
    load_plugins(config.plugins)
    choices.check(config.algorithm, config.rollout.group_size)
    trainer_choices.check(config.trainer)
    files, problems = model_files.weight_files(config.model.path)
    if files or problems:  # a plan takes a config.json alone
        uses_logits = stage is None or stage.kind.uses_logits
        model_folder.examine(config.model, head="logits" if uses_logits else None)
    if num_gpus == 0:
        yield from on_cpu(config, stage)
        return
    needs = Needs(config, num_gpus, gpu, stage)
    where = needs.where
    context = tokenizers.context_length(config.model)
    yield f"{config.model.path}: {needs.parameters / 1e9:.2f} billion parameters; {num_gpus} x {size} ({gpu.name})"
    if where.servers:
        yield (
            f"servers  {len(where.servers)}, the first on GPU {where.servers[0]}: "
            f"weights {needs.weights / GIB:.1f} GiB, KV cache {needs.kv_cache / GIB:.1f} GiB "
            f"for {needs.kv_tokens:,} tokens: {needs.sequences} sequences of {context:,}"
        )
    yield f"ranks    {where.num_ranks} on GPU {where.ranks}: {needs.rank}; it may use {needs.room / GIB:.1f}"
    yield f"         largest trainer.micro_batch_tokens that fits: {needs.largest_micro_batch:,}"
    host = ", ".join(f"{name} {size / GIB:.1f}" for name, size in needs.host.items())
    yield f"host     up to {sum(needs.host.values()) / GIB:.0f} GiB of memory beside the GPUs': {host}"
    if needs.fits and where.servers:
        times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in needs.seconds.items())
        yield f"a step   {times}; completions of {LENGTH:.0%} of rollout.max_tokens are assumed"
    if not needs.has_servers_room:
        advice = "a shorter model.max_length, server.tensor_parallel_size=2 or 4, or larger GPUs"
        yield f"does not fit: the server has no room for one sequence of {context:,} tokens; choose {advice}"
    if needs.rank.total > needs.room:
        yield "does not fit: a rank needs more than its GPU has. What would change it:"
        found = [*itertools.islice(ways_out(arguments, num_gpus, gpu, stage), NUM_WAYS)]
        yield from (f"         {way}: {other.rank}" for way, other in found)
        if not found:
            yield f"         no setting does on {num_gpus} x {size}: take more GPUs, larger ones, or a smaller model"
