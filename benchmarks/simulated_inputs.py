"""Inputs of a SIMULATED run, for simulate.py: settings, seconds of every part, and public figures of GPUs and a model.

Each has its meaning, unit and source; `.venv/bin/python benchmarks/simulate.py inputs` prints them.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Container, Sequence
from typing import Any

ASSUMED, HERE, RUN = "assumption", "measured here, benchmarks/rank0.py", "calibration, or Hardware"
COLD_STEPS = 4
"""First steps that are not counted: caches and the pipeline fill."""
Lengths = Sequence[Sequence[int]]  # tokens of each completion, group by group


def given(default: Any, meaning: str, source: str = "choice") -> Any:
    """Declare an input: its meaning with the unit, and where the default comes from."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, "source": source})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What is simulated: a run's settings. Calibration takes them from the run's config.yaml."""

    servers: int = given(1, "generation servers")
    ranks: int = given(1, "trainer processes")
    gpus_per_server: int = given(1, "server.tensor_parallel_size")
    prompts: int = given(64, "rollout.prompts_per_step")
    group_size: int = given(16, "rollout.group_size")
    max_tokens: int = given(16_384, "rollout.max_tokens")
    max_staleness: int = given(1, "pipeline.max_staleness")
    max_concurrent: int = given(256, "server.engine.max_num_seqs", "default of hocket")
    micro_batch_tokens: int = given(32_768, "trainer.micro_batch_tokens")
    steps: int = given(12, "steps that count, rounded up to a multiple of max_staleness + 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speeds:
    """Seconds of every part. Calibration replaces what a run's metrics measure; the rest are these defaults."""

    decode_fixed_s: float = given(0.0, "decode iteration, whatever runs", RUN)
    decode_token_s: float = given(0.0, "decode iteration, per running sequence", RUN)
    admit_s: float = given(0.0, "per sequence that a server begins: request, prefill", "calibration")
    batch_s: float = given(0.01, "from a batch's start to its first iteration", "calibration")
    prompt_tokens: float = given(500.0, "tokens of a prompt", "calibration")
    trained_share: float = given(1.0, "share of the rollouts whose group has a signal", "calibration")
    reward_s: float = given(0.01, "latency of a score", "calibration (upper bound), or choice")
    reward_workers: int = given(4, "scores at a time; 0: any number (async)", "rewards/workers.py, NUM_WORKERS")
    rollout_s: float = given(7.5e-5, "rank 0's event loop, per rollout", HERE)
    rollout_token_s: float = given(8e-8, "rank 0's event loop, per sampled token", HERE)
    step_s: float = given(0.0, "rank 0 between rollouts and update, per step", "calibration")
    step_token_s: float = given(2e-7, "the same per token: rows, dividing, sending, building", HERE)
    train_fixed_s: float = given(0.5, "update: the optimizer's part", ASSUMED)
    micro_batch_s: float = given(0.0, "update, per micro-batch of a rank", RUN)
    position_s: float = given(0.0, "update, per token and rank", RUN)
    prepare_s: float = given(0.1, "weight sync before servers pause", "calibration")
    transfer_s: float = given(0.3, "weight sync while servers pause", RUN)
    per_server_s: float = given(0.0, "the same, added by each server: rank 0 sends to one group each", "Hardware")
    check_s: float = given(0.5, "log-prob check of a server that comes (back)", ASSUMED)
    mtbf_s: float = given(0.0, "between failures of one server; 0: none", "Hardware")
    return_s: float = given(300.0, "until a lost server answers again", ASSUMED)
    silence_s: float = given(60.0, "until a loss is noticed", "server.silence_s: a host that vanishes")
    cores: float = given(0.0, "cores that servers and trainer share; 0: each has a device of its own", "--cores")
    server_cores: float = given(1.0, "cores that one busy server keeps busy", "--cores")
    trainer_cores: float = given(1.0, "cores that the training trainer keeps busy", "--cores")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """Public figures of GPUs and a model, from which the speeds come where no run was measured: 7B on H100."""

    parameters: float = given(7.6e9, "parameters", "config of Qwen2.5-7B")
    bytes_per_parameter: float = given(2.0, "bytes of a weight", "bfloat16")
    kv_bytes: float = given(57_344.0, "bytes of KV cache per token", "Qwen2.5-7B: 2·28 layers·4 heads·128·2 B")
    flops: float = given(989e12, "peak operations/s, dense bfloat16", "NVIDIA data sheet, H100 SXM")
    memory_bytes_s: float = given(3.35e12, "memory bandwidth, B/s", "NVIDIA data sheet, H100 SXM")
    memory_share: float = given(0.7, "share of the memory bandwidth that decoding reaches", ASSUMED)
    iteration_s: float = given(0.004, "scheduling and sampling per decode iteration", ASSUMED)
    decode_share: float = given(0.5, "share of the peak that decode's matrix products reach", ASSUMED)
    mfu: float = given(0.35, "share of the peak in training", "below Llama 3's .38 to .43, arXiv 2407.21783, table 4")
    reduce_bytes_s: float = given(200e9, "gradient reduction, B/s", ASSUMED + ": 8 NICs, or NVLink, per node")
    nvlink_bytes_s: float = given(150e9, "weights to servers of one node, B/s", ASSUMED + ": 1/3 of 450 GB/s")
    nic_bytes_s: float = given(50e9, "weights from rank 0 to other nodes, B/s", "ConnectX-7 data sheet: 400 Gb/s")
    load_bytes_s: float = given(15e9, "loading weights in the engine, B/s", ASSUMED)
    gpus_per_node: int = given(8, "GPUs of one node", "DGX H100")
    gpu_mtbf_h: float = given(
        50_700.0, "GPU hours per failure", "419 in 54 days of 16,384 GPUs, arXiv 2407.21783, 3.3.4"
    )
    length_mean: float = given(4000.0, "tokens of a completion, mean before the cut", "choice")
    length_sigma: float = given(0.8, "spread: sigma of the logarithm of the length", ASSUMED + ": log-normal")


def public_speeds(hardware: Hardware, setup: Setup, lengths: Lengths, speeds: Speeds, chosen: Container[str]) -> Speeds:
    """Return speeds of GPUs: decoding by the roofline (arXiv 2211.05102), training by its share of the peak.

    Inputs that are named in `chosen` stay as they are.
    """
    gpus, weight_bytes = setup.gpus_per_server, hardware.parameters * hardware.bytes_per_parameter
    ends = [length for group in lengths for length in group]
    context = speeds.prompt_tokens + sum(n * n for n in ends) / sum(ends) / 2  # mean over all decoded tokens
    memory = hardware.memory_bytes_s * hardware.memory_share * gpus
    matrices, trained = hardware.flops * hardware.decode_share * gpus, hardware.flops * hardware.mfu
    one_node = gpus * setup.servers + setup.ranks <= hardware.gpus_per_node
    derived: dict[str, Any] = {
        "decode_fixed_s": hardware.iteration_s + weight_bytes / memory,
        "decode_token_s": 2 * hardware.parameters / matrices + hardware.kv_bytes * context / memory,
        "admit_s": 2 * hardware.parameters * speeds.prompt_tokens / setup.group_size / matrices,  # once per group
        "micro_batch_s": weight_bytes / hardware.reduce_bytes_s if setup.ranks > 1 else 0.0,
        "position_s": 6 * hardware.parameters / trained,
        "transfer_s": speeds.transfer_s + weight_bytes / hardware.load_bytes_s,
        "per_server_s": weight_bytes / (hardware.nvlink_bytes_s if one_node else hardware.nic_bytes_s),
        "mtbf_s": hardware.gpu_mtbf_h * 3600 / gpus,
    }
    return dataclasses.replace(speeds, **{name: value for name, value in derived.items() if name not in chosen})


def log_normal(hardware: Hardware, setup: Setup, count: int = 256) -> Lengths:
    """Return groups of lengths with the hardware section's mean and spread, cut at max_tokens."""
    draw, sigma = random.Random(0), hardware.length_sigma
    mu = math.log(hardware.length_mean) - sigma**2 / 2
    drawn = (max(1, min(setup.max_tokens, round(draw.lognormvariate(mu, sigma)))) for _ in itertools.count())
    return [list(itertools.islice(drawn, setup.group_size)) for _ in range(count)]
