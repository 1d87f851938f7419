"""What a command leaves behind: nothing, however it ends; also the whole test-suite, interrupted."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hocket.common.processes import contained, without_secrets
from support.processes import wait_for
from support.programs import run_code

ROOT = Path(__file__).resolve().parents[2]
DETACHES = """
import os, subprocess, sys, time
def test_it():
    sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    pids = [os.getpid(), *(subprocess.Popen(sleeps, start_new_session=away).pid for away in (False, True))]
    with open({pids!r}, "a") as file:
        file.write("".join(f"{{pid}}\\n" for pid in pids))
    time.sleep(600)
"""


def test_a_process_whose_parent_is_gone_already_ends_with_the_reason() -> None:
    for parent, status, said in ((os.getpid(), 0, ""), (2**22 + 1, 1, "is gone")):
        code = f"from hocket.common.processes import die_with_parent; die_with_parent({parent}, 9)"
        ended = run_code(code)
        assert (ended.returncode, said in ended.stderr) == (status, True)


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_interrupting_the_tests_leaves_nothing_running(tmp_path: Path, signum: signal.Signals) -> None:
    pids = tmp_path / "pids"
    for name in ("test_a.py", "test_b.py"):  # one for each of two workers
        (tmp_path / name).write_text(DETACHES.format(pids=str(pids)))
    tests = [f"--rootdir={tmp_path}", "-p", "no:cacheprovider", str(tmp_path)]
    run = subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), "test", *tests],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for(lambda: pids.exists() and pids.read_text().count("\n") == 6, "both tests and what they start run")
    processes = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
    if signum == signal.SIGINT:
        os.killpg(run.pid, signum)  # as a terminal does
    else:
        run.send_signal(signum)
    assert run.wait(60) in (2, 143)  # 2 is pytest's own word for interrupted
    assert not any(process.is_running() for process in processes)


@pytest.mark.parametrize(
    ("code", "status"),
    [("", 0), ("import sys; sys.exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_the_exit_status_is_the_commands_own(code: str, status: int) -> None:
    assert subprocess.run(contained([sys.executable, "-S", "-c", code]), check=False).returncode == status


def test_a_command_ends_with_its_status_though_a_thread_hangs() -> None:
    code = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
from hocket.common import processes
processes.EXIT_S = 0.2
processes.exit_with(lambda argv: ThreadPoolExecutor().submit(time.sleep, 600) and print("done") or 3)
"""
    ended = run_code(code)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "done\n", "")


def test_a_destructor_that_fails_while_python_takes_modules_apart_says_nothing() -> None:
    code = """
from hocket.common import processes
class Client:
    def __init__(self, when): self.when = when
    def __del__(self): raise ValueError(self.when)
Client("while it runs")
processes.kept = Client("at the end")
processes.exit_with(lambda argv: Client("before the end") and 0)
"""
    ended = run_code(code)
    assert ended.returncode == 0
    assert "ValueError: while it runs" in ended.stderr
    assert "ValueError: before the end" in ended.stderr
    assert "at the end" not in ended.stderr


def test_what_looks_like_a_secret_is_kept_from_the_code_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = (
        "HOCKET_TOKEN", "HF_TOKEN", "OPENAI_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD",
        "GOOGLE_APPLICATION_CREDENTIALS", "api_tokens",
    )  # fmt: skip
    others = ("PATH", "TOKENIZERS_PARALLELISM", "KEYBOARD", "NCCL_DEBUG", "SECRETARY")
    for name in (*secrets, *others):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:word@proxy:80/")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:80/")
    given = without_secrets()
    assert given.keys() >= {*others, "HTTP_PROXY"}
    assert not given.keys() & {*secrets, "HTTPS_PROXY"}
    monkeypatch.setenv("HOCKET_PASS_ENV", "HF_TOKEN,HTTPS_PROXY")
    assert given.keys() ^ without_secrets().keys() == {"HF_TOKEN", "HTTPS_PROXY", "HOCKET_PASS_ENV"}
