"""The doctor: what it says of this machine, and of a broken one."""

import sys
from pathlib import Path

import pytest
from tests.commands.test_cli import check_quiet

from hocket.common import environment
from hocket.extras import doctor


@pytest.fixture(autouse=True)
def quick_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer instead of torch, in all tests but one."""
    monkeypatch.setattr(doctor, "PROBE", "print('[null, []]')")


def test_a_machine_with_everything_is_ready(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "missing", lambda build, command: [])
    monkeypatch.setattr(doctor, "libraries", lambda: ())
    assert doctor.run() == 0
    out = capsys.readouterr().out
    for label in ("python", "build", "device", "cores", "memory", "disk", "verdict"):
        assert f"\n{label}" in f"\n{out}"
    assert f"{sys.version_info.major}.{sys.version_info.minor}." in out
    assert out.splitlines()[-1] == "verdict    ready: python3 run.py quickstart"


def test_what_is_missing_is_an_error_with_a_fix(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "missing", lambda build, command: ["httpx>=1"])
    assert doctor.run() == 1
    out = capsys.readouterr().out
    assert "missing: httpx>=1\n" in out
    assert "fix:  packages are missing" in out
    assert out.splitlines()[-1].endswith("to fix")


@pytest.mark.long
def test_torch_is_really_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert [(finding.label, finding.ok) for finding in doctor.devices()][:1] == [("device", True)]


@pytest.mark.parametrize(
    "probe", ["import os; os.abort()", "raise ImportError('libcudart.so.13')", "import time; time.sleep(600)"]
)
def test_a_broken_torch_does_not_break_the_doctor(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], probe: str
) -> None:
    monkeypatch.setattr(doctor, "PROBE", probe)
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 0.5 if "sleep" in probe else 60.0)
    (finding,) = doctor.devices()
    assert "torch hangs or is broken" in finding.advice
    assert ("libcudart.so.13" in capfd.readouterr().err) == ("libcudart" in probe)


def test_a_full_gpu_is_noted_and_a_driver_that_torch_cannot_use_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "has_cuda", lambda: True)
    (finding,) = doctor.devices()
    assert "torch (for CPUs) can't use the NVIDIA driver" in finding.advice
    assert finding.blocks
    gpus = '[["NVIDIA H200", 140.0, 150.0], ["NVIDIA H200", 20.0, 150.0]]'
    monkeypatch.setattr(doctor, "PROBE", f"print('[\"13.0\", {gpus}]')")
    first, second = doctor.devices()
    assert (first.text, first.ok) == ("cuda:0 NVIDIA H200, 140 of 150 GB free", True)
    assert "more than half of cuda:1 is taken" in second.advice
    assert not second.blocks


def test_what_triton_and_torch_need_on_a_gpu_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor.environment, "version_of", lambda name: None)  # no CPU build
    monkeypatch.setattr(environment, "driver", lambda: 570)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    found = list(doctor.libraries())
    assert [(one.label, one.text) for one in found] == [
        ("driver", "570"),
        ("libraries", f"a C compiler and Python's headers ({tmp_path}/Python.h) missing"),
    ]
    assert not any(one.ok for one in found)
    monkeypatch.setattr(environment, "driver", lambda: 580)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/clang" if name == "clang" else None)
    (tmp_path / "Python.h").touch()
    assert all(one.ok for one in doctor.libraries())


def test_a_report_that_nobody_reads_ends_quietly(tmp_path: Path) -> None:
    prints = "from hocket.extras import doctor; doctor.run = lambda: print('x' * 1_000_000)"
    check_quiet(["doctor"], prints, "run", tmp_path)
