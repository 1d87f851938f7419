"""Whole runs, the weight group and the checksum on real GPUs: `python3 run.py test -m gpu`. Skipped without one."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml

from hocket.launch import visible_gpus
from hocket.protocol.manifest import tensor_checksum
from hocket.server import worker
from support.processes import ROOT, START_S, Process, free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
SMALL = ("eval.num_prompts=0", "sync.check_every=1", "checkpoint.every_steps=0", "trainer.steps=12")
BESIDE = ("server.kv_cache_mib=256",)  # both on one GPU, as `run` shows one


def steps_of(run_dir: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] > 0]


def has_steps(run_dir: Path) -> bool:
    return (run_dir / "metrics.jsonl").exists()


def run(tmp_path: Path, *settings: str, command: str = "quickstart", gpus: int = 1) -> list[dict[str, float]]:
    """Runs the quickstart's policy with these settings to its end; returns the rows of its steps."""
    place = (f"run.dir={tmp_path / 'runs' / 'a'}", f"server.port={free_port()}")
    words = [command, "config/quickstart.yaml", *SMALL, *place, *settings]
    with Process(words, tmp_path / "log", CUDA_VISIBLE_DEVICES=",".join(visible_gpus()[:gpus])) as process:
        assert process.wait_end(START_S + 300) == 0, process.output()
        process.assert_gone()
    return steps_of(tmp_path / "runs" / "a")


@pytest.mark.parametrize(
    ("settings", "gap"),
    [
        (BESIDE, 0.02),  # versions loaded in place, below CUDA graphs
        ((*BESIDE, "model.dtype=float16"), 0.02),
        ((*BESIDE, "model.lora={rank: 8}", "trainer.learning_rate=2e-3"), 0.02),
        ((*BESIDE, "trainer.zero_stage=3"), 0.02),
        ((*BESIDE, "trainer.offload_optimizer=true"), 0.02),
        ((*BESIDE, "trainer.gradient_checkpointing=true", "model.float32_head=true"), 0.02),
        ((*BESIDE, "trainer.kernels=compile", "trainer.gradient_checkpointing=true"), 0.02),
        (("launch.share_gpu=true", "server.gpu_memory_utilization=0.9"), 0.02),
    ],
    ids=["plain", "float16", "lora", "zero3", "offload", "float32 head", "compile", "shared"],
)
def test_every_version_of_a_run_is_proven_and_the_policy_improves(
    settings: tuple[str, ...], gap: float, tmp_path: Path
) -> None:
    steps = run(tmp_path, *settings)
    assert len(steps) == 12
    assert max(step["train/logprob_gap"] for step in steps) < gap
    assert all(step.get("sync/mismatches", 0) == 0 for step in steps)
    thirds = [sum(step["rollout/reward_mean"] for step in steps[start : start + 4]) / 4 for start in (0, 8)]
    assert thirds[1] > thirds[0]


def test_a_trainer_that_starts_with_a_server_leaves_it_its_kv_cache(tmp_path: Path) -> None:
    found = []
    for command in ("serve", "launch"):
        port, run_dir = free_port(), tmp_path / command
        settings = (f"run.dir={run_dir}", f"server.port={port}", "server.gpu_memory_utilization=0.3")
        with Process([command, "config/quickstart.yaml", *settings], tmp_path / f"{command}.log") as process:
            process.wait_for(lambda at=run_dir, it=process: "ready on" in it.output() or has_steps(at), "it serves")
            found.append(httpx.get(f"http://127.0.0.1:{port}/health").json()["kv_tokens"])
    assert found[1] == pytest.approx(found[0], rel=0.02)


def test_a_server_that_sleeps_holds_little_of_a_shared_gpu(tmp_path: Path) -> None:
    lowest: dict[int, int] = {}  # MiB of each process on the GPU
    settings = ("launch.share_gpu=true", "server.gpu_memory_utilization=0.9", f"run.dir={tmp_path / 'runs' / 'a'}")
    with Process(["quickstart", "config/quickstart.yaml", *SMALL, *settings], tmp_path / "log") as process:
        process.wait_for(lambda: has_steps(tmp_path / "runs" / "a"), "the first steps")
        while process.popen.poll() is None:
            ours = {member.pid for member in process.members()}
            for line in smi("--query-compute-apps=pid,used_memory").splitlines():
                pid, mib = line.split(", ")
                if int(pid) in ours and mib.isdigit():
                    lowest[int(pid)] = min(int(mib), lowest.get(int(pid), int(mib)))
            time.sleep(0.2)
        assert process.popen.returncode == 0, process.output()
    if not lowest:
        pytest.skip("nvidia-smi does not show this container's processes")
    assert all(mib < 3072 for mib in lowest.values()), lowest


def smi(query: str) -> str:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout


def test_the_checksum_on_a_gpu_is_that_on_a_cpu_and_fast() -> None:
    tensor = torch.randint(-(2**31), 2**31 - 1, (1 << 28,), dtype=torch.int32)  # 1 GiB
    on_gpu = tensor.cuda()
    tensor_checksum(on_gpu)
    torch.cuda.synchronize()
    start = time.perf_counter()
    found = tensor_checksum(on_gpu)
    rate = tensor.nbytes / (time.perf_counter() - start) / 1e9
    print(f"{rate:.0f} GB/s")
    assert found == tensor_checksum(tensor)


def test_a_bucket_is_not_overwritten_while_the_engine_still_copies_from_it() -> None:
    def buckets() -> Iterator[Any]:
        for number in range(200):
            with torch.cuda.stream(torch.cuda.default_stream()):  # of the thread that receives
                flat = torch.full((1 << 22,), number, dtype=torch.uint8, device="cuda")
                torch.cuda.current_stream().synchronize()
            yield [("a", flat)], {}

    copies = []
    with torch.cuda.stream(torch.cuda.Stream()):  # the engine's, far behind
        for _, tensor in worker._tensors(buckets(), {}):
            torch.cuda._sleep(1_000_000)
            copies.append(tensor.clone())
            del tensor
    torch.cuda.synchronize()
    assert [(int(copy.min()), int(copy.max())) for copy in copies] == [(number, number) for number in range(200)]


MEMBER = """
import os, sys, time
import torch
from hocket.common import machine
from hocket.protocol import nccl
machine.bound_nccl(15)
rank, port, comes = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "comes"
store = nccl.make_store("127.0.0.1", 60) if rank == 0 else nccl.find_store("127.0.0.1", port, 60)
if rank == 0:
    print(store.port, flush=True)
if rank == 1 and not comes:
    nccl.dist.PrefixStore("a", store).set("transfer 0/1", "1")
    time.sleep(600)
device = torch.device("cuda", 0)
torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.distributed.all_reduce(torch.ones(1, device=device))  # as a trainer has before it joins any group
group = nccl.WeightGroup(store, "a", device, "127.0.0.1", rank=rank, size=2, timeout_s=15)
for number in range(20):
    flat = torch.full((1 << 26,), number if rank == 0 else 0, dtype=torch.uint8, device=device)
    group.broadcast(flat)
    assert int(flat.max()) == int(flat.min()) == number
group.close()
"""


@pytest.mark.parametrize("comes", [True, False])
def test_nccl_carries_every_byte_and_does_not_wait_for_ever_for_a_rank_that_does_not_connect(comes: bool) -> None:
    # Two hosts' names let NCCL connect two processes on one GPU, over the loopback device.
    common = {"PYTHONPATH": str(ROOT / "src"), "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank, port in ((0, "0"), (1, "")):
            port = port or ranks[0].stdout.readline().strip()  # type: ignore[union-attr]
            command = [sys.executable, "-c", MEMBER, str(rank), port, "comes" if comes else "does not"]
            env = {**os.environ, **common, "NCCL_HOSTID": f"host{rank}"}
            pipe = subprocess.PIPE
            ranks.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True))
        _, said = ranks[0].communicate(timeout=120)  # without a deadline it would wait for ever
        assert (ranks[0].returncode == 0) is comes, said
        assert not comes or ranks[1].wait(60) == 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(30)


@TWO_GPUS
def test_with_gpus_of_their_own_both_sides_overlap_and_weights_go_from_gpu_to_gpu(tmp_path: Path) -> None:
    steps = run(tmp_path, "launch.servers=1", "launch.trainers=1", command="launch", gpus=2)
    config: dict[str, Any] = yaml.safe_load((tmp_path / "runs" / "a" / "config.yaml").read_text())
    assert (config["sync"]["backend"], config["pipeline"]["max_staleness"]) == ("nccl", 1)
    assert all(step["sync/fallbacks"] == 0 for step in steps)
    assert all(step.get("sync/mismatches", 0) == 0 for step in steps)  # bit for bit, at every version


@TWO_GPUS
def test_two_ranks_train_as_one_does_to_rounding(tmp_path: Path) -> None:
    rewards = []
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
        settings = ("launch.share_gpu=true", f"launch.trainers={ranks}")
        steps = run(tmp_path / str(ranks), *settings, gpus=ranks)
        rewards.append(steps[0]["train/loss"])
    assert rewards[1] == pytest.approx(rewards[0], abs=2e-3)


@pytest.mark.parametrize("kernels", ["eager", "compile", "liger"])
def test_a_step_of_half_a_billion_parameters_is_taken_and_timed(kernels: str) -> None:
    if kernels == "liger":
        pytest.importorskip("liger_kernel")
    sizes = "--hidden 896 --layers 24 --vocabulary 151936 --tokens 16384 --dtype bfloat16 --gradient-checkpointing"
    sizes += f" --only times memory --rounds 1 --ways hocket --set trainer.kernels={kernels}"
    command = [sys.executable, "benchmarks/trainer.py", *sizes.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    print(done.stdout)
    assert (done.returncode, "hocket" in done.stdout) == (0, True), done.stderr
