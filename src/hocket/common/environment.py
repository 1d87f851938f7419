"""Find, make or repair the environment of run.py: `.venv`, filled by uv from its build's lock. Standard library only.

`.venv/hocket.json` says "installing" until all packages are there, then from which lock they are. After an
interruption all begins anew, from uv's cache.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

from hocket.common import shell
from hocket.common.files import atomic_folder, write_atomically
from hocket.common.processes import die_with_parent
from hocket.errors import SetupError

ROOT = Path(__file__).resolve().parents[3]
VENV = ROOT / ".venv"
FOLDER = ROOT / "requirements"
LISTS = {
    "cpu": FOLDER / "cpu.txt",
    "cuda": ROOT / "requirements.txt",
}  # the locks hold these and what these need
SERVER_ALONE = "# The server alone"  # begins the last section of a list
LAUNCHED = ("train", "sft", "rm", "dpo")  # by torchrun and the like; these need no engine
INSTALLING = {"state": "installing"}
NEEDED_CUDA, NEEDED_DRIVER = 13, 580  # of torch 2.13


def prepare(notes: Iterable[str] = ()) -> None:
    """Set what children and libraries need, where a user's own values win; mend what the shell has set wrongly.

    Print notes, and what was mended. Raises SetupError.
    """
    for note in [*notes, *shell.mend()]:
        print(f"hocket: {note}", file=sys.stderr)
    os.environ.setdefault(
        "TOKENIZERS_PARALLELISM", "false"
    )  # its threads don't survive the forks of data loading
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "PASSIVE"
    )  # a waiting thread leaves its core to others
    programs = os.path.join(sys.prefix, "bin")  # ninja, for one
    searched = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if sys.prefix != sys.base_prefix and searched[0] != programs:
        os.environ["PATH"] = os.pathsep.join([programs, *searched])


def ensure(command: str, *, install: bool = True, update: bool = True) -> None:
    """Return if this interpreter has the command's packages; else go on in .venv.

    It is made where `install`, if there is none that was completed, and changed where `update`, if it is another build
    or lock's and no process uses it. Raises SetupError where the packages can't be had.
    """
    inside = os.path.realpath(sys.prefix) == os.path.realpath(VENV)
    if not _state():
        if any(not missing(build, command) for build in builds()):
            return
        if not inside and _python().exists():  # somebody else's, which may have them
            _enter()
    state = _state()
    if not _is_complete():
        users = _users()
        if "lock" in state and _python().exists() and (users or not update):
            if inside:
                _stay(command, users if update else [])
            else:
                _enter()
            return
        if not install:
            return
        _install(command)
    if not inside:
        _enter()


def builds() -> list[str]:
    """Return the builds ("cpu", "cuda") that suit this machine, the one to install first."""
    chosen = os.environ.get("HOCKET_DEVICE", "").lower()
    suited = {"": ["cuda"] if has_cuda() else ["cpu", "cuda"], "cpu": ["cpu"], "cuda": ["cuda"]}
    if chosen not in suited:
        raise SetupError(f"HOCKET_DEVICE={chosen!r} is neither cpu nor cuda")
    return suited[chosen]


def has_cuda() -> bool:
    """Check whether an NVIDIA driver is loaded: Linux's, or Windows' in WSL."""
    return any(
        Path(path).exists()
        for path in ("/dev/nvidia0", "/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")
    )


def driver() -> int | None:
    with contextlib.suppress(LookupError, ValueError):
        return int(nvidia_smi("driver_version")[0].partition(".")[0])
    return None


def nvidia_smi(column: str) -> list[str]:
    """Return one word of nvidia-smi on each GPU; nothing without a driver."""
    query = ["nvidia-smi", f"--query-gpu={column}", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, check=True, text=True, timeout=60.0)
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.split()


def version_of(package: str) -> str | None:
    return next((found.version for found in importlib.metadata.distributions(name=package)), None)


def missing(build: str, command: str) -> list[str]:
    """Return the requirements that this interpreter does not meet: "name>=1", or "name>=1 (has 0.9)"."""
    text = ""
    with contextlib.suppress(FileNotFoundError):  # `pip install .` sees to its own
        text = LISTS[build].read_text("utf-8")
        if command == "test":
            text += (FOLDER / "dev.txt").read_text("utf-8")
    if command in LAUNCHED:
        text = text.partition(SERVER_ALONE)[0]
    lines = re.findall(r"(?m)^\w[^ #\n]*", text)
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:  # transformers brings it
        return lines
    lacks = []
    for requirement in map(Requirement, lines):
        has = version_of(requirement.name)
        if not has or not requirement.specifier.contains(has, prereleases=True):
            lacks.append(f"{requirement} (has {has})" if has else str(requirement))
    return lacks


def _stay(command: str, users: Sequence[str]) -> None:
    """Say that .venv stays as it is. Raises SetupError where processes use it and the command lacks packages."""
    build = _state()["build"]
    if build not in builds():
        build = builds()[0]
    wanted = _lock(build).name
    others = f" and {len(users) - 1} others" if len(users) > 1 else ""
    lacks = missing(build, command)
    if users and (lacks or command == "install"):
        cause = f"lacks {', '.join(lacks[:5])}" if lacks else f"was made by an earlier {wanted}"
        raise SetupError(
            f"{VENV} {cause}, and is in use by {users[0]}{others}: end these first, then run this again"
        )
    reason = "as this command changes nothing: `python3 run.py install` does"
    if users:
        reason = f"as it is in use by {users[0]}{others}"
    print(
        f"run.py: {VENV} is not what requirements/{wanted} lists, and stays so, {reason}",
        file=sys.stderr,
    )


def _users() -> list[str]:
    """Return the other processes of this machine that run in .venv, as "process 7 (python run.py serve)"."""
    folders = {f"{path}{os.sep}".encode() for path in (VENV, os.path.realpath(VENV))}
    users = []
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            command = (process / "cmdline").read_bytes()
            is_user = any(map(command.startswith, folders))
            if is_user or any(folder in (process / "maps").read_bytes() for folder in folders):
                words = command.replace(b"\0", b" ").decode(errors="replace").strip()
                users.append(f"process {process.name} ({words[:90]})")
    return users


def _added(build: str) -> list[str]:
    """Return the packages that .venv has besides its lock's, as "name==version"."""
    listed = {
        "pip",
        "setuptools",
        "uv",
        *re.findall(r"(?m)^([\w.-]+?)={2,3}", _lock(build).read_text("utf-8")),
    }
    folders = map(str, VENV.glob("lib/python*/site-packages"))
    packages = {
        re.sub(r"[-_.]+", "-", package.name).lower(): package.version
        for package in importlib.metadata.distributions(path=[*folders])
    }
    return [
        f"{name}=={version}" for name, version in sorted(packages.items()) if name not in listed
    ]


def _install(command: str) -> None:
    """Make .venv, or update it to its lock; one process at a time."""
    if "LOCAL_RANK" in os.environ and command in LAUNCHED:
        raise SetupError(
            "a launcher's ranks don't install: run `python3 run.py install` once, then the launcher in .venv; or unset "
            "LOCAL_RANK, if no launcher starts this"
        )
    if sys.platform != "linux":
        raise SetupError(
            f"vLLM has wheels for Linux only, this is {sys.platform}: use Linux, or WSL 2 on Windows"
        )
    import fcntl  # not on Windows

    with (ROOT / ".venv.lock").open("w") as turn:
        print(
            "run.py: .venv lacks packages; if another run.py installs them, this one waits",
            file=sys.stderr,
        )
        fcntl.flock(turn, fcntl.LOCK_EX)
        if _is_complete():  # another process was faster
            return
        state = _state()
        if not state and VENV.exists():
            lacks = ", ".join(missing(builds()[0], command)[:5])
            raise SetupError(
                f"{VENV} was not made by run.py and lacks {lacks}: move it away, or install into it"
            )
        build = state["build"] if state.get("build") in builds() else builds()[0]
        if (
            build == "cuda" and (found := driver()) is not None and found < NEEDED_DRIVER
        ):  # before a long download
            needs = f"CUDA {NEEDED_CUDA} needs {NEEDED_DRIVER} or newer: update it, or set HOCKET_DEVICE=cpu"
            raise SetupError(f"the NVIDIA driver is {found}, and {needs}")
        update = state.get("build") == build and _python().exists()
        added = []
        if not update:
            added = _added(state.get("build", build)) if VENV.exists() else []
            with atomic_folder(VENV) as folder:  # in place of the old one
                _note(folder, INSTALLING)
            _run(
                "virtual environment",
                [getattr(sys, "_base_executable", sys.executable), "-m", "venv", VENV],
                turn,
            )
        _note(VENV, INSTALLING)
        try:
            _run(
                f"packages for {build}",
                [_python(), "-I", FOLDER / "lock.py", "install", _lock(build)],
                turn,
            )
        except SetupError:
            if update:
                _note(VENV, state)  # uv downloads all before it changes any
            raise
        finally:
            if added:
                print(
                    f"run.py: the new {VENV} lacks what was added to the old one; to have it again: "
                    f"{_python()} -m pip install {' '.join(added)}",
                    file=sys.stderr,
                )
        _note(VENV, _stamp(build))


def _run(label: str, command: list[str | Path], turn: TextIO) -> None:
    print(f"run.py: {label}", file=sys.stderr, flush=True)
    process = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=2,  # standard output is the command's own
        pass_fds=[turn.fileno()],  # held while the step lives; it ends with this process
        preexec_fn=functools.partial(die_with_parent, os.getpid(), signal.SIGKILL),
    )
    if process.returncode:
        raise SetupError(
            f"{label}: failed, for the reason above. If the package index can't be reached, check the network, "
            "HTTPS_PROXY and PIP_CERT, or name a mirror in PIP_INDEX_URL; then run this again"
        )


def _is_complete() -> bool:
    return _state() in map(_stamp, builds()) and _python().exists()


def _stamp(build: str) -> dict[str, str]:
    """Return the build and the lock's hash, which a complete .venv of this build has on record."""
    return {"build": build, "lock": hashlib.sha256(_lock(build).read_bytes()).hexdigest()}


def _lock(build: str) -> Path:
    return FOLDER / f"{build}.lock"


def _python() -> Path:
    return VENV / "bin" / "python"


def _state() -> dict[str, str]:
    try:
        return dict(json.loads((VENV / "hocket.json").read_text("utf-8")))
    except (OSError, ValueError):
        return {}


def _note(folder: Path, state: dict[str, str]) -> None:
    write_atomically(folder / "hocket.json", json.dumps(state))


def _enter() -> None:
    """Run the same command in .venv, in place of this process and with its id."""
    if os.environ.get("HOCKET_EXEC_PID") == str(os.getpid()):
        raise SetupError(
            f"{_python()} does not run in {VENV}; delete that folder and run this again"
        )
    os.environ["HOCKET_EXEC_PID"] = str(os.getpid())
    os.environ.pop("PYTHONHOME", None)  # of another Python: this one's packages would not be seen
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(_python(), [str(_python()), *sys.orig_argv[1:]])
