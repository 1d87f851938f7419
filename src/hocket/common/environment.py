"""Find, make or repair the environment of run.py: the folder .venv, which uv fills from a lock.

Standard library only. There is a lock for each build, "cpu" and "cuda". `.venv/hocket.json` says
"installing" until all packages are installed, and from then on the hash of the lock that lists
them. An installation that was interrupted begins anew, from uv's cache.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
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
# The direct requirements of each build. The locks list these and all that they need.
LISTS = {
    "cpu": FOLDER / "cpu.txt",
    "cuda": ROOT / "requirements.txt",
}
SERVER_ALONE = "# The server alone"  # begins the last section of a list
LAUNCHED = ("train", "sft", "rm", "dpo")  # commands of torchrun's ranks; they need no engine
SERVER_ENGINES = ("torch", "vllm")
ENGINES = (*SERVER_ENGINES, "deepspeed")  # modules that hocket without an extra lacks
CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"  # of torch without CUDA
EXTRAS = (
    f'pip install "hocket[cpu]" {CPU_INDEX}, or on a machine with an NVIDIA GPU: '
    'pip install "hocket[cuda]"'
)
INSTALLING = {"state": "installing"}
# CUDA version of torch 2.13, and the oldest driver that runs it.
NEEDED_CUDA, NEEDED_DRIVER = 13, 580


def prepare(notes: Iterable[str] = ()) -> None:
    """Set the variables that libraries and child processes need, unless the user has set them.

    Repairs what the shell has set wrongly. Prints the notes, and what was repaired. Raises
    SetupError for what can't be repaired.
    """
    for note in [*notes, *shell.mend()]:
        print(f"hocket: {note}", file=sys.stderr)
    _hide_other_builds()
    # The threads of tokenizers don't survive the forks of data loading.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # A thread of OpenMP that waits leaves its core to others.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Libraries look for programs of the environment, such as ninja, in PATH.
    programs = os.path.join(sys.prefix, "bin")
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if sys.prefix != sys.base_prefix and folders[0] != programs:
        os.environ["PATH"] = os.pathsep.join([programs, *folders])


def other_builds() -> list[str]:
    """List packages that were built for another torch than the installed one, as "name version".

    pip takes their CUDA builds where PyTorch's index of CPU builds was not named.
    """
    if not (version_of("torch") or "").endswith("+cpu"):
        return []
    packages = []
    for name in ("torchvision", "torchaudio", "torchcodec"):
        version = version_of(name)
        if version and not version.endswith("+cpu"):
            packages.append(f"{name} {version}")
    return packages


def _hide_other_builds() -> None:
    """Have packages count as not installed that can't be used beside torch's CPU build.

    With one of another build, transformers fails to import its models. Only images need them.
    Triton has no use on a CPU, and ends each process with a page of warnings.
    """
    hidden = [package.partition(" ")[0] for package in other_builds()]
    if (version_of("torch") or "").endswith("+cpu"):
        hidden.append("triton")
    for name in hidden:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def ensure(command: str, *, install: bool = True, update: bool = True) -> None:
    """Return if this interpreter has the packages of a command; else run the command in .venv.

    With `install` a .venv that is missing or incomplete is made. With `update` one of another build
    or an older lock is changed, unless a process uses it. Raises SetupError where the packages
    can't be had.
    """
    is_inside = os.path.realpath(sys.prefix) == os.path.realpath(VENV)
    if not _state():
        # There is no .venv that run.py has made: this interpreter may do.
        for build in builds():
            if not missing(build, command):
                return
        if not is_inside and _python().exists():  # the user made .venv, and it may have them
            _enter()
    if not _is_complete():
        # It may be whole, but of another lock or build.
        has_older = "lock" in _state() and _python().exists()
        users = _users()
        if has_older and (users or not update):
            # The older one serves. The process that _enter starts below comes here again, inside.
            if is_inside:
                _stay(command, users if update else [])
        elif install:
            _install(command)
        else:
            return  # this interpreter goes on, with the packages that it has
    if not is_inside:
        _enter()


def builds() -> list[str]:
    """List the builds, "cpu" and "cuda", that suit this machine; the first is to be installed."""
    chosen = os.environ.get("HOCKET_DEVICE", "").lower()
    if chosen in ("cpu", "cuda"):
        return [chosen]
    if chosen:
        raise SetupError(f"HOCKET_DEVICE={chosen!r} is neither cpu nor cuda")
    return ["cuda"] if has_cuda() else ["cpu", "cuda"]


def has_cuda() -> bool:
    """Check whether an NVIDIA driver is loaded: Linux's, or Windows' in WSL."""
    paths = ("/dev/nvidia0", "/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")
    return any(Path(path).exists() for path in paths)


def driver() -> int | None:
    """Ask nvidia-smi for the major version of the driver; None where it does not answer."""
    with contextlib.suppress(LookupError, ValueError):
        return int(nvidia_smi("driver_version")[0].partition(".")[0])
    return None


def nvidia_smi(column: str) -> list[str]:
    """Ask nvidia-smi for a column, one word for each GPU; an empty list without a driver."""
    query = ["nvidia-smi", f"--query-gpu={column}", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, check=True, text=True, timeout=60.0)
    except (OSError, subprocess.SubprocessError):
        return []
    return result.stdout.split()


def version_of(package: str) -> str | None:
    """Get the installed version of a package, None without one."""
    for distribution in importlib.metadata.distributions(name=package):
        return distribution.version
    return None


def missing(build: str, command: str) -> list[str]:
    """List the requirements that this interpreter does not meet.

    Each is written as "name>=1", or "name>=1 (has 0.9)".
    """
    if LISTS[build].exists():
        text = LISTS[build].read_text("utf-8")
        if command == "test":
            text += (FOLDER / "dev.txt").read_text("utf-8")
        if command in LAUNCHED:
            text = text.partition(SERVER_ALONE)[0]
    else:  # pip has installed hocket, with or without the extra of this name
        text = "\n".join(_of_extra(build))
    lines = re.findall(r"(?m)^\w[^ #\n]*", text)
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:  # transformers needs it: that is not installed either
        return lines
    lacks = []
    for requirement in map(Requirement, lines):
        has = version_of(requirement.name)
        if not has or not requirement.specifier.contains(has, prereleases=True):
            lacks.append(f"{requirement} (has {has})" if has else str(requirement))
    return lacks


def require(user: str, modules: Sequence[str] = (), advice: str = EXTRAS) -> None:
    """Raise SetupError if modules, by default the engines, are missing that `user` needs."""
    lacks = [name for name in modules or ENGINES if importlib.util.find_spec(name) is None]
    if lacks:
        raise SetupError(f"{user} needs {', '.join(lacks)}: {advice}")


def _of_extra(name: str) -> list[str]:
    """List the requirements of an extra of the installed hocket."""
    listed = importlib.metadata.requires("hocket") if version_of("hocket") else None
    mark = f'extra == "{name}"'
    return [line.partition(";")[0].strip() for line in listed or [] if mark in line]


def _stay(command: str, users: Sequence[str]) -> None:
    """Print that .venv stays as it is, though its lock has changed.

    `users` are the processes that prevent an update; without any, the command does not want one.
    Raises SetupError where they prevent an update that the command needs.
    """
    build = _suitable_build()
    lock = _lock(build).name
    reason = "as this command changes nothing: `python3 run.py install` does"
    if users:
        others = f" and {len(users) - 1} others" if len(users) > 1 else ""
        in_use = f"is in use by {users[0]}{others}"
        lacks = missing(build, command)
        if lacks or command == "install":
            cause = f"lacks {', '.join(lacks[:5])}" if lacks else f"was made by an earlier {lock}"
            raise SetupError(f"{VENV} {cause}, and {in_use}: end these first, then run this again")
        reason = f"as it {in_use}"
    print(
        f"run.py: {VENV} is not what requirements/{lock} lists, and stays so, {reason}",
        file=sys.stderr,
    )


def _users() -> list[str]:
    """List the other processes of this machine that run in .venv.

    Each is written as "process 7 (python run.py serve)".
    """
    folders = tuple(f"{path}{os.sep}".encode() for path in (VENV, os.path.realpath(VENV)))
    users = []
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            command = (process / "cmdline").read_bytes()
            # Either its program is in the folder, or it has loaded a library from there.
            if not command.startswith(folders):
                maps = (process / "maps").read_bytes()
                if not any(folder in maps for folder in folders):
                    continue
            words = command.replace(b"\0", b" ").decode(errors="replace").strip()
            users.append(f"process {process.name} ({words[:90]})")
    return users


def _added(build: str) -> list[str]:
    """List the packages of .venv that its lock does not have, as "name==version"."""
    lock = _lock(build).read_text("utf-8")
    listed = {"pip", "setuptools", "uv"}
    listed.update(re.findall(r"(?m)^([\w.-]+?)={2,3}", lock))
    folders = [str(folder) for folder in VENV.glob("lib/python*/site-packages")]
    packages = {}
    for package in importlib.metadata.distributions(path=folders):
        name = re.sub(r"[-_.]+", "-", package.name).lower()
        packages[name] = package.version
    return [
        f"{name}=={version}" for name, version in sorted(packages.items()) if name not in listed
    ]


def _install(command: str) -> None:
    """Make .venv, or update it to its lock, once no other process does that."""
    if "LOCAL_RANK" in os.environ and command in LAUNCHED:
        raise SetupError(
            "a launcher's ranks don't install: run `python3 run.py install` once, then the "
            "launcher in .venv; or unset LOCAL_RANK, if no launcher starts this"
        )
    if sys.platform != "linux":
        raise SetupError(
            f"vLLM has wheels for Linux only, this is {sys.platform}: use Linux, or WSL 2 on "
            "Windows"
        )
    import fcntl  # not on Windows

    # Whoever locks this file may install; its steps inherit the lock.
    with (ROOT / ".venv.lock").open("w") as turn:
        print(
            "run.py: .venv lacks packages; if another run.py installs them, this one waits",
            file=sys.stderr,
        )
        fcntl.flock(turn, fcntl.LOCK_EX)
        if not _is_complete():  # else another process was faster
            _make_or_update(command, turn)


def _make_or_update(command: str, turn: TextIO) -> None:
    """Make .venv for the first suitable build, or update the one of a suitable build.

    `turn` is the open file whose lock lets this process install.
    """
    state = _state()
    if not state and VENV.exists():
        lacks = ", ".join(missing(builds()[0], command)[:5])
        raise SetupError(
            f"{VENV} was not made by run.py and lacks {lacks}: move it away, or install into it"
        )
    build = _suitable_build()
    if build == "cuda":
        _refuse_old_driver()  # before a long download
    is_update = state.get("build") == build and _python().exists()
    added = []
    if is_update:
        _write_state(VENV, INSTALLING)
    else:
        # Put an empty environment in the place of what is there.
        added = _added(state.get("build", build))
        with atomic_folder(VENV) as folder:
            _write_state(folder, INSTALLING)
        python = getattr(sys, "_base_executable", sys.executable)
        _run("virtual environment", [python, "-m", "venv", VENV], turn)
    try:
        install: list[str | Path] = [_python(), "-I", FOLDER / "lock.py", "install", _lock(build)]
        _run(f"packages for {build}", install, turn)
    except SetupError:
        if is_update:
            # It is still complete: uv downloads all before it changes any package.
            _write_state(VENV, state)
        raise
    finally:
        if added:
            print(
                f"run.py: the new {VENV} lacks what was added to the old one; to have it again: "
                f"{_python()} -m pip install {' '.join(added)}",
                file=sys.stderr,
            )
    _write_state(VENV, _complete_state(build))


def _refuse_old_driver() -> None:
    """Raise SetupError for an NVIDIA driver that is too old for the build "cuda"."""
    version = driver()
    if version is not None and version < NEEDED_DRIVER:
        raise SetupError(
            f"the NVIDIA driver is {version}, and CUDA {NEEDED_CUDA} needs {NEEDED_DRIVER} or "
            "newer: update it, or set HOCKET_DEVICE=cpu"
        )


def _run(label: str, command: list[str | Path], turn: TextIO) -> None:
    """Run a step of the installation. Raises SetupError if it fails."""
    print(f"run.py: {label}", file=sys.stderr, flush=True)
    process = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=2,  # standard output belongs to the command that run.py was called for
        pass_fds=[turn.fileno()],  # the step holds the lock as long as it lives
        preexec_fn=functools.partial(die_with_parent, os.getpid(), signal.SIGKILL),
    )
    if process.returncode:
        raise SetupError(
            f"{label}: failed, for the reason above. If the package index can't be reached, check "
            "the network, HTTPS_PROXY and PIP_CERT, or name a mirror in PIP_INDEX_URL; then run "
            "this again"
        )


def _suitable_build() -> str:
    """Choose the build that .venv has, if it suits this machine, else the first one that does."""
    build = _state().get("build", "")
    return build if build in builds() else builds()[0]


def _is_complete() -> bool:
    return _state() in map(_complete_state, builds()) and _python().exists()


def _complete_state(build: str) -> dict[str, str]:
    """Make the content of hocket.json for a complete .venv: the build, and the hash of its lock."""
    digest = hashlib.sha256(_lock(build).read_bytes()).hexdigest()
    return {"build": build, "lock": digest}


def _lock(build: str) -> Path:
    return FOLDER / f"{build}.lock"


def _python() -> Path:
    return VENV / "bin" / "python"


def _state() -> dict[str, str]:
    """Read .venv/hocket.json; an empty dict where run.py has not made .venv."""
    try:
        return dict(json.loads((VENV / "hocket.json").read_text("utf-8")))
    except (OSError, ValueError):
        return {}


def _write_state(folder: Path, state: dict[str, str]) -> None:
    write_atomically(folder / "hocket.json", json.dumps(state))


def _enter() -> None:
    """Run the same command in .venv, in place of this process and with its id."""
    if os.environ.get("HOCKET_EXEC_PID") == str(os.getpid()):
        raise SetupError(
            f"{_python()} does not run in {VENV}; delete that folder and run this again"
        )
    os.environ["HOCKET_EXEC_PID"] = str(os.getpid())
    # PYTHONHOME would have the interpreter search the packages of another Python.
    os.environ.pop("PYTHONHOME", None)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(_python(), [str(_python()), *sys.orig_argv[1:]])
