"""Find, make or repair the environment of run.py: `.venv`, filled by pip. Standard library only.

`.venv/hocket.json` says "installing" until the last package is there, then "complete". After an interrupted
installation the environment is made anew, from pip's cache.
"""

import functools
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TextIO

from hocket.common.files import atomic_folder, write_atomically
from hocket.common.processes import die_with_parent
from hocket.errors import SetupError

ROOT = Path(__file__).resolve().parents[3]
VENV = ROOT / ".venv"
FILES = {"cpu": ("requirements-cpu.txt", "requirements-cpu-engine.txt"), "cuda": ("requirements.txt",)}
DEV_FILE = "requirements-dev.txt"
SERVER_ALONE = "# The server alone"  # begins the last section of a requirements file
NEEDED_CUDA, NEEDED_DRIVER = 13, 580  # of torch 2.13
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
COMPILE = """import compileall, sysconfig, warnings
warnings.simplefilter("ignore")  # of others' sources
compileall.compile_dir(sysconfig.get_path("purelib"), quiet=2, workers=0)"""


def prepare() -> None:
    """Set the variables that this process's children and libraries need; a user's own values win."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads don't survive the forks of data loading
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a waiting thread leaves its core to others
    programs = os.path.join(sys.prefix, "bin")  # ninja, for one
    searched = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if sys.prefix != sys.base_prefix and searched[0] != programs:
        os.environ["PATH"] = os.pathsep.join([programs, *searched])


def ensure(command: str, *, install: bool = True) -> None:
    """Return if this interpreter has all packages of `command`; else go on in .venv, made or repaired where `install`.

    Raises:
        SetupError: there is no environment, and none can be made.
    """
    inside = os.path.realpath(sys.prefix) == os.path.realpath(VENV)
    interrupted = _state().get("state") == "installing"
    if not (inside and interrupted) and any(not missing(build, command) for build in builds()):
        return
    if not inside and not interrupted and _python().exists():
        _enter()
    if not install:
        return
    if "LOCAL_RANK" in os.environ:
        raise SetupError(
            "a launcher's ranks don't install: run `python3 run.py doctor` once, then the launcher in .venv"
        )
    if sys.platform != "linux":
        raise SetupError(f"vLLM has wheels for Linux only, this is {sys.platform}: use Linux, or WSL 2 on Windows")
    _install(command, inside)
    if not inside:
        _enter()


def builds() -> list[str]:
    """Return the builds ("cpu", "cuda") that suit this machine, the one to install first."""
    chosen = os.environ.get("HOCKET_DEVICE", "").lower()
    if chosen not in ("", "cpu", "cuda"):
        raise SetupError(f"HOCKET_DEVICE={chosen!r} is neither cpu nor cuda")
    return [chosen] if chosen else ["cuda"] if has_cuda() else ["cpu", "cuda"]


def has_cuda() -> bool:
    """Return whether an NVIDIA driver is loaded: a device file (Linux), or Windows' driver in WSL."""
    return any(Path(path).exists() for path in ("/dev/nvidia0", "/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1"))


def driver() -> int | None:
    """Return the major version of the NVIDIA driver, None where nvidia-smi does not say."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=60.0)
        return int(found.stdout.partition(".")[0])
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _refuse_old_driver() -> None:
    """Raise SetupError for a driver that the CUDA build of torch can't use, before gigabytes are downloaded."""
    if (found := driver()) is not None and found < NEEDED_DRIVER:
        advice = "update it, or set HOCKET_DEVICE=cpu"
        raise SetupError(
            f"the NVIDIA driver is {found}, and CUDA {NEEDED_CUDA} needs {NEEDED_DRIVER} or newer: {advice}"
        )


def missing(build: str, command: str) -> list[str]:
    """Return the requirements that this interpreter does not meet: "name>=1", or "name>=1 (has 0.9)"."""
    paths = [ROOT / name for name in _files(build, command)]
    texts = [path.read_text("utf-8") for path in paths if path.exists()]  # `pip install .` sees to its own
    if command in ("train", "sft"):
        texts = [text.partition(SERVER_ALONE)[0] for text in texts]
    lines = [line for text in texts for each in text.splitlines() if (line := each.split("#")[0].strip())]
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:  # transformers brings it
        return lines
    lacks = []
    for requirement in map(Requirement, lines):
        found = next(iter(importlib.metadata.distributions(name=requirement.name)), None)
        if not found or not requirement.specifier.contains(found.version, prereleases=True):
            lacks.append(f"{requirement} (has {found.version})" if found else str(requirement))
    return lacks


def _files(build: str, command: str) -> list[str]:
    return [*FILES[build], *([DEV_FILE] if command == "test" else [])]


def _install(command: str, inside: bool) -> None:
    """Make .venv, make it anew, or complete it; one process at a time."""
    import fcntl  # not on Windows

    with (ROOT / ".venv.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("run.py: waiting for another run.py, which is installing", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        state = _state()
        complete = state.get("state") == "complete" and _python().exists()
        if complete and not inside:  # another process was faster
            return
        if not state and VENV.exists():
            lacks = ", ".join(missing(builds()[0], command)[:5])
            raise SetupError(f"{VENV} was not made by run.py and lacks {lacks}: move it away, or install into it")
        build = state["build"] if state.get("build") in builds() else builds()[0]
        if build == "cuda":
            _refuse_old_driver()
        if not complete or state["build"] != build:
            with atomic_folder(VENV) as folder:  # in place of the old one
                _note(folder, "installing", build)
            _run("virtual environment", [getattr(sys, "_base_executable", sys.executable), "-m", "venv", VENV], lock)
        _note(VENV, "installing", build)
        names = _files(build, command)
        for number, name in enumerate(names, 1):
            _install_file(f"[{number}/{len(names)}] {name}", name, lock)
        # or every process compiles its imports, where Python may not write what it has compiled
        _run("compiling", [_python(), "-I", "-c", COMPILE], lock)
        _note(VENV, "complete", build)


def _install_file(label: str, name: str, lock: TextIO) -> None:
    pip: list[str | Path] = [_python(), "-I", "-m", "pip", "install", "--no-compile"]
    if name == FILES["cpu"][0]:  # first, or the others bring PyPI's torch with gigabytes of CUDA
        pin = next(line for line in (ROOT / name).read_text("utf-8").splitlines() if line.startswith("torch=="))
        torch = [*pip, "--no-deps", f"{pin}+cpu"]
        try:
            _run(f"{label}: torch", torch, lock)
        except SetupError:
            _run(f"{label}: torch from PyTorch's own index", [*torch, "--extra-index-url", TORCH_CPU_INDEX], lock)
    alone = ["--no-deps"] if name == FILES["cpu"][1] else []
    _run(label, [*pip, *alone, "-r", ROOT / name], lock)


def _run(label: str, command: list[str | Path], lock: TextIO) -> None:
    """Run one step, whose output the user sees. Raise SetupError if it fails."""
    print(f"run.py: {label}", file=sys.stderr, flush=True)
    process = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=2,  # standard output is the command's own
        env=os.environ | {"PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        pass_fds=[lock.fileno()],  # the lock is held as long as pip lives, and pip ends with this process
        preexec_fn=functools.partial(die_with_parent, os.getpid(), signal.SIGKILL),
    )
    if process.returncode:
        raise SetupError(
            f"{label}: failed, for the reason above. If the package index can't be reached, check the network, "
            "HTTPS_PROXY and PIP_CERT, or name a mirror in PIP_INDEX_URL; then run this again"
        )


def _python() -> Path:
    return VENV / "bin" / "python"


def _state() -> dict[str, str]:
    try:
        return dict(json.loads((VENV / "hocket.json").read_text("utf-8")))
    except (OSError, ValueError):
        return {}


def _note(folder: Path, state: str, build: str) -> None:
    write_atomically(folder / "hocket.json", json.dumps({"state": state, "build": build}))


def _enter() -> None:
    """Replace this process by the same command under .venv's interpreter; the process id stays the same."""
    if os.environ.get("HOCKET_EXEC_PID") == str(os.getpid()):
        raise SetupError(f"{_python()} does not run in {VENV}; delete that folder and run this again")
    os.environ["HOCKET_EXEC_PID"] = str(os.getpid())
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(_python(), [str(_python()), *sys.orig_argv[1:]])
