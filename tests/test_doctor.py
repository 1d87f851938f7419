"""The doctor: what it says of this machine, of a broken one, and which processes it takes for hocket's."""

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hocket import bootstrap, doctor
from hocket.doctor import Report, is_ours

SLEEPER = "import time; time.sleep(600)"


@pytest.fixture(autouse=True)
def quick_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test but one needs torch itself."""
    monkeypatch.setattr(doctor, "PROBE", 'print(\'{"torch": "2", "built_for": null, "usable": false, "gpus": []}\')')


def test_a_machine_with_everything_is_ready(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bootstrap, "missing", lambda build, command: [])
    monkeypatch.setattr(doctor, "_libraries", lambda report: None)
    assert doctor.run() == 0
    out = capsys.readouterr().out
    for label in ("python", "build", "device", "cores", "memory", "disk", "port", "runs", "verdict"):
        assert f"\n{label}" in f"\n{out}"
    assert f"{sys.version_info.major}.{sys.version_info.minor}." in out
    assert out.splitlines()[-1] == "verdict    ready: python3 run.py quickstart"


def test_a_missing_package_is_an_error_with_a_fix(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = bootstrap.found_version
    monkeypatch.setattr(
        bootstrap, "found_version", lambda name, path=None: None if name == "httpx" else found(name, path)
    )
    assert doctor.run() == 1
    out = capsys.readouterr().out
    assert "httpx" in next(line for line in out.splitlines() if "missing:" in line)
    assert "fix:  packages are missing" in out
    assert "to fix" in out.splitlines()[-1]


def test_torch_is_really_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.undo()
    report = Report()
    doctor._devices(report)
    assert report.errors == []
    assert capsys.readouterr().out.startswith("device")


@pytest.mark.parametrize(
    ("probe", "error"),
    [
        ("import os; os.abort()", "torch is broken"),
        ("raise ImportError('libcudart.so.13: cannot open')", "torch is broken"),
        ("import time; time.sleep(600)", "torch hangs"),
    ],
)
def test_a_broken_torch_does_not_break_the_doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], probe: str, error: str
) -> None:
    monkeypatch.setattr(doctor, "PROBE", probe)
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 0.5 if "sleep" in probe else 60.0)
    report = Report()
    doctor._devices(report)
    assert error in report.errors[0]
    assert "libcudart" not in probe or "libcudart.so.13: cannot open" in capsys.readouterr().out


def test_gpus_are_listed_and_a_full_one_is_noted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = '[["NVIDIA H200", 140.0, 150.0], ["NVIDIA H200", 20.0, 150.0]]'
    monkeypatch.setattr(
        doctor, "PROBE", f'print(\'{{"torch": "2", "built_for": "13.0", "usable": true, "gpus": {gpus}}}\')'
    )
    report = Report()
    doctor._devices(report)
    assert "cuda:0 NVIDIA H200, 140 of 150 GB free" in capsys.readouterr().out
    assert [note[:35] for note in report.warnings] == ["more than half of cuda:1 is taken: "]


def test_a_driver_that_torch_cannot_use_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "has_cuda", lambda: True)
    report = Report()
    doctor._devices(report)
    assert "there is an NVIDIA driver, but torch (for CPUs) can't use it" in report.errors[0]


def test_a_taken_port_names_its_holder(capsys: pytest.CaptureFixture[str]) -> None:
    listen = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", listen], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            port = int(holder.stdout.readline())
            report = Report()
            doctor._port(report, port)
        finally:
            holder.kill()
    assert f"port       {port} is taken by process {holder.pid}" in capsys.readouterr().out
    assert f"kill {holder.pid}" in report.warnings[0]


def test_a_free_port_is_free(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, not listening: nobody else can take it meanwhile
        port = held.getsockname()[1]
        report = Report()
        doctor._port(report, port)
    assert f"{port} is free" in capsys.readouterr().out
    assert report.warnings == []


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (["python3", "run.py", "serve"], True),
        (["/x/.venv/bin/python", "-u", "/x/run.py", "--local_rank=0", "train", "a.yaml"], True),
        (["/x/.venv/bin/python", "-m", "hocket", "serve", "config/quickstart.yaml"], True),
        (["python3.12", "-u", "-m", "hocket", "--local_rank=1", "train"], True),
        (["python3", "/x/bin/torchrun", "--nproc-per-node", "4", "run.py", "train", "a.yaml"], True),
        (["VLLM::EngineCore"], True),
        (["python3", "run.py", "doctor"], False),
        (["python3", "-m", "hocket", "doctor"], False),
        (["python3", "-m", "pytest", "hocket", "train"], False),
        (["python3", "hocket", "train"], False),
        (["vim", "notes about run.py"], False),
        (["tmux", "new", "python3", "run.py", "serve"], False),
        (["grep", "serve", "run.py"], False),
        ([], False),
    ],
)
def test_hockets_processes_are_told_from_others(words: list[str], ours: bool) -> None:
    assert is_ours(words) is ours


def test_running_processes_are_listed_by_pid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.py"
    script.write_text(SLEEPER)
    with subprocess.Popen([sys.executable, str(script), "serve"]) as process:
        try:
            doctor._processes(Report())
            assert psutil.pid_exists(process.pid)
        finally:
            process.kill()
    assert f"process    {process.pid} running" in capsys.readouterr().out


def test_a_process_without_a_parent_is_a_leftover(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.py"
    script.write_text(SLEEPER)
    start = "import subprocess as s, sys; print(s.Popen(sys.argv[1:], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
    words = [sys.executable, "-c", start, sys.executable, str(script), "train"]
    pid = int(subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout)
    try:
        report = Report()
        doctor._processes(report)
        assert f"{pid} leftover" in capsys.readouterr().out
        assert any(f"kill {pid}" in note or f" {pid}" in note for note in report.warnings)
    finally:
        psutil.Process(pid).kill()


def test_a_folder_that_cannot_be_written_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    report = Report()
    doctor._run_folder(report)
    assert "can't be written" in report.errors[0]


def test_without_psutil_the_rest_is_still_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_psutil", lambda: None)
    doctor.run()
    out = capsys.readouterr().out
    assert "\ndisk" in out
    assert "\nport" not in out
