"""Start hocket's processes on this machine and end them: quickstart's server and trainer, and a server for eval."""

import contextlib
import errno
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hocket.config import Config
from hocket.errors import ServerError
from hocket.processes import die_with_parent

PARENT_VARIABLE = "HOCKET_PARENT_PID"
STOP_TIMEOUT_S = 15.0
NUM_LINES = 15  # of a server's log, in an error


def die_with_launcher() -> None:
    """Have the kernel send SIGTERM to this process when the hocket process that started it ends (Linux)."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is not None:
        die_with_parent(int(parent), signal.SIGTERM)


class Child(subprocess.Popen[bytes]):
    """Run a hocket command in a process that ends when this one does; without `log` it shares the output."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], log: Path | None = None) -> None:
        self.log = log
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") if log is not None else contextlib.nullcontext() as output:
            super().__init__(
                [sys.executable, *command],
                env={**os.environ, **env, PARENT_VARIABLE: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                start_new_session=True,  # a Ctrl-C in the terminal reaches the parent alone, which stops its children
            )

    def stop(self, first: signal.Signals = signal.SIGTERM) -> int:
        """End the process and return its exit status; STOP_TIMEOUT_S after `first`, its process group is killed."""
        self.send_signal(first)  # nothing if it has ended
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(self.pid, signal.SIGKILL)
        return self.wait(STOP_TIMEOUT_S)

    def refuse_dead(self) -> None:
        """Raise ServerError with the end of the log if the process, a server, has ended."""
        if (status := self.poll()) is not None:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log else []
            text = "\n".join([f"the server ended with status {status}; the end of {self.log}:", *lines[-NUM_LINES:]])
            raise ServerError(text, code="unreachable")


def quickstart(config: Config, arguments: Sequence[str]) -> int:
    """Train with a server and a trainer on this machine, both stopped at the end; return the trainer's exit status."""
    run_dir = config.run_dir if config.checkpoint.resume else _unused(config.run_dir)
    port = free_port(config.server.host, config.server.port)
    arguments = [*arguments, f"run.dir={run_dir}", f"server.port={port}", "server.urls=[]"]
    print(f"run folder {run_dir}; the server's log is {run_dir}/logs/server.log", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: it stops the children, too
    with server_process(config, arguments, run_dir) as server:
        command, env = ["-m", "hocket", "train", *arguments], _visible(config.launch.trainer_gpus)
        status = run_ranks(command, config.launch.trainers, env=env, check=server.refuse_dead)
    if status == 0:
        print(_what_next(run_dir, adapter=config.model.lora is not None))
    return status


def run_ranks(command: Sequence[str], size: int, *, env: Mapping[str, str], check: Callable[[], None]) -> int:
    """Run a command as `size` ranks, as torchrun would (whose workers outlive it where it is killed).

    Return 0 once all have ended well, or the exit status of the first rank that failed; then the others are stopped.
    `check` is called several times a second; an error from it ends the ranks.
    """
    together = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    together["MASTER_PORT"] = str(free_port("127.0.0.1", 0))
    ranks: list[Child] = []
    try:
        ranks.extend(Child(command, env={**env, **together, "RANK": str(i), "LOCAL_RANK": str(i)}) for i in range(size))
        while True:
            statuses = [rank.poll() for rank in ranks]
            failed = [status for status in statuses if status]
            if failed or None not in statuses:
                return failed[0] if failed else 0
            check()
            time.sleep(0.2)
    finally:
        for rank in ranks:  # rank 0 first: it closes the run, and releases the others, which have nothing to close
            rank.stop(signal.SIGINT if rank is ranks[0] else signal.SIGTERM)


@contextmanager
def server_process(config: Config, arguments: Sequence[str], run_dir: Path) -> Iterator[Child]:
    """Run `serve` with these arguments during the body; its output goes to logs/server.log."""
    command, env = ["-m", "hocket", "serve", *arguments], _visible(config.launch.server_gpus)
    server = Child(command, env=env, log=run_dir / "logs" / "server.log")
    try:
        yield server
    finally:
        server.stop()


def _visible(gpus: str | None) -> dict[str, str]:
    return {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}


def _unused(run_dir: Path) -> Path:
    """Return the folder, or the first of folder-2, folder-3, ... that does not exist."""
    others = (run_dir.with_name(f"{run_dir.name}-{i}") for i in itertools.count(2))
    return next(folder for folder in itertools.chain([run_dir], others) if not folder.exists())


def free_port(host: str, wanted: int) -> int:
    """Return the wanted port, or another free one where it is taken."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted))
        except OSError as error:  # another error the server will explain
            return free_port(host, 0) if error.errno == errno.EADDRINUSE else wanted or 8000
        return int(probe.getsockname()[1])


def _what_next(run_dir: Path, *, adapter: bool) -> str:
    model, merge = str(max(run_dir.glob("weights/v*"))), ""
    if adapter:
        merge = f"Merge adapter and base model:  python3 run.py export {model} {run_dir}/model\n"
        model = f"{run_dir}/model"
    return f"""
The same in two terminals:     python3 run.py serve config/quickstart.yaml
                               python3 run.py train config/quickstart.yaml run.dir=runs/mine
Your own model and data:       edit config/gsm8k_1gpu.yaml, then python3 run.py quickstart config/gsm8k_1gpu.yaml
{merge}Use the trained policy:        python3 run.py serve model.path={model}
                               python3 run.py generate -p "Sort: fmkt"
"""
