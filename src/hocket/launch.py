"""Starts hocket's processes on this machine and ends them: quickstart's two, and a server for eval.

A child ends with its parent, whatever ends the parent; what was started here is stopped here. Knows nothing of what
the processes do.
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hocket.config import Config
from hocket.errors import ConfigError, ServerError
from hocket.processes import die_with_parent

PARENT_VARIABLE = "HOCKET_PARENT_PID"
STOP_TIMEOUT_S = 15.0


def die_with_launcher() -> None:
    """Have the kernel send SIGTERM to this process when the hocket process that started it ends (Linux)."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is not None:
        die_with_parent(int(parent), signal.SIGTERM)


class Child:
    """A hocket command in a process of its own.

    Args:
        command: what follows `python` on the command line.
        env: variables added to this process's own.
        log: file for its output; None: this process's own output.
    """

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], log: Path | None = None) -> None:
        self.name = shlex.join(command)
        self.log = log
        output = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            output = log.open("wb")
        try:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                env={**os.environ, **env, PARENT_VARIABLE: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                start_new_session=True,  # a Ctrl-C in the terminal reaches the parent alone, which stops its children
            )
        finally:
            if output is not None:
                output.close()

    def poll(self) -> int | None:
        """Returns the exit status, None while it runs."""
        return self._process.poll()

    def stop(self, first: signal.Signals = signal.SIGTERM) -> int:
        """Ends the process with everything it started, and returns its exit status.

        It gets `first` and STOP_TIMEOUT_S seconds to clean up; then its whole process group is killed.
        """
        if self._process.poll() is None:
            self._process.send_signal(first)
        with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed, too
            self._process.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):  # nobody of the group is left
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait(STOP_TIMEOUT_S)

    def tail(self, num_lines: int = 15) -> str:
        """Returns the last lines of the log."""
        if self.log is None:
            return ""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])


def quickstart(config: Config, arguments: Sequence[str]) -> int:
    """Starts a server and a trainer on this machine, shows the training, and leaves nothing running.

    Args:
        config: the resolved config.
        arguments: the command line that gives a child the same config.
    """
    run_dir = config.run_dir if config.checkpoint.resume else _unused(config.run_dir)
    port = free_port(config.server.host, config.server.port)
    arguments = [*arguments, f"run.dir={run_dir}", f"server.port={port}", "server.urls=[]"]
    print(f"run folder {run_dir}; the server's log is {run_dir}/logs/server.log", flush=True)
    with _terminate_as_interrupt(), server_process(config, arguments, run_dir) as server:
        status = run_ranks(
            ["-m", "hocket", "train", *arguments],
            config.launch.trainers,
            env=_visible(config.launch.trainer_gpus),
            check=lambda: refuse_dead(server),
        )
    if status == 0:
        print(_what_next(run_dir, adapter=config.model.lora is not None))
    return status


def run_ranks(command: Sequence[str], size: int, *, env: Mapping[str, str], check: Callable[[], None]) -> int:
    """Runs one command as `size` ranks, which find each other as under torchrun, and leaves none of them running.

    Not by torchrun itself: its workers outlive it where it is killed.

    Args:
        env: variables added to this process's own.
        check: called again and again; what it raises ends the ranks, too.

    Returns:
        0 once all have ended well, or the exit status of a rank that failed; then the others are stopped.
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
    """Runs `serve` for the time of its body; its output goes to logs/server.log in the run folder.

    Args:
        arguments: the command line that gives the child the same config.
    """
    server = Child(
        ["-m", "hocket", "serve", *arguments],
        env=_visible(config.launch.server_gpus),
        log=run_dir / "logs" / "server.log",
    )
    try:
        yield server
    finally:
        server.stop()


def refuse_dead(server: Child) -> None:
    """Raises ServerError with the end of the server's log where its process is gone."""
    status = server.poll()
    if status is not None:
        raise ServerError(
            f"the server ended with status {status}; the end of {server.log}:\n{server.tail()}", code="unreachable"
        )


def _visible(gpus: str | None) -> dict[str, str]:
    return {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}


def _unused(run_dir: Path) -> Path:
    """Returns the folder, or the first of folder-2, folder-3, ... without a run in it."""
    candidates = (run_dir.with_name(f"{run_dir.name}-{i}") if i > 1 else run_dir for i in range(1, 10_000))
    return next(folder for folder in candidates if not folder.exists())


def free_port(host: str, wanted: int) -> int:
    """Returns the wanted port, or another free one where somebody listens there already."""
    for port in (wanted, 0):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if port == 0:
                    raise ConfigError(f"can't listen on server.host={host}: {error.strerror}") from error
                continue
            return int(probe.getsockname()[1])
    raise AssertionError("the loop returns or raises")


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Has SIGTERM end the body like Ctrl-C, so that the children are stopped on both."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _what_next(run_dir: Path, *, adapter: bool) -> str:
    model = f"{run_dir}/weights/{_newest(run_dir / 'weights')}"
    merge = ""
    if adapter:
        merge = f"Merge adapter and base model:  python3 run.py export {model} {run_dir}/model\n"
        model = f"{run_dir}/model"
    return f"""
The same in two terminals:     python3 run.py serve config/quickstart.yaml
                               python3 run.py train config/quickstart.yaml run.dir=runs/mine
Your own model and data:       edit config/gsm8k_1gpu.yaml (Qwen2.5-0.5B-Instruct on GSM8K, one GPU), then
                               python3 run.py quickstart config/gsm8k_1gpu.yaml
{merge}Use the trained policy:        python3 run.py serve model.path={model}
                               python3 run.py generate -p "Sort: fmkt"
"""


def _newest(weights: Path) -> str:
    return max(path.name for path in weights.iterdir() if path.name.startswith("v"))
