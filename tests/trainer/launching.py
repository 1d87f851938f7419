"""Starts worker.py: one rank alone, two under torchrun, or two without a launcher."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

WORKER = str(Path(__file__).with_name("worker.py"))
SOURCE = str(Path(__file__).parents[2] / "src")
DEADLINE_S = 600
"""For all scenarios together; each wait of the ranks for each other has a deadline of its own."""


def environment(**variables: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return inherited | {"PYTHONPATH": SOURCE} | variables


def run_together(size: int, output: Path, scenarios: Sequence[tuple[str, str]]) -> None:
    """Runs scenarios, each with its model, one after the other among the same ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    launcher = [sys.executable] if size == 1 else torchrun
    done = subprocess.run(
        [*launcher, WORKER, str(output), *(word for pair in scenarios for word in pair)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def start_two(scenario: str, model: str, output: Path) -> list[subprocess.Popen[str]]:
    """Starts two ranks without a launcher, which would end them itself when one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return [
        subprocess.Popen(
            [sys.executable, WORKER, str(output), scenario, model],
            env=environment(RANK=r, LOCAL_RANK=r, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in ("0", "1")
    ]


def outputs_of(processes: list[subprocess.Popen[str]]) -> list[str]:
    try:
        return [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
