"""Agents as functions and as programs: what they are given, what they return, and how they end."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from hocket.common.shell import proxy_of
from hocket.envs import Agent, Task, agent
from hocket.envs.base import bind
from hocket.errors import ConfigError
from support.processes import is_gone, wait_for

SOURCE = Path(__file__).resolve().parents[3] / "src"
TASK = Task(
    messages=({"role": "user", "content": "Sort: ba"},),
    text="Sort: ba",
    answer="ab",
    meta={"level": 3},
    seed=9,
    base_url="http://10.0.0.7:8000/sessions/x/v1",
    api_key="secret",
    model="m",
)


@agent("number_of_tests")
async def number(task: Task) -> float:
    return task.meta["level"] == 3


@agent("proxy_of_tests")
def proxy(task: Task) -> str | None:
    return proxy_of(task.base_url) or None  # as any client reads it


@agent("text_of_tests")
def text(task: Task) -> str:
    assert threading.current_thread() is not threading.main_thread()
    return f"{task.answer} {task.seed}"


agent("nothing_of_tests")(lambda task: None)
agent("list_of_tests")(lambda task: [1.0])
agent("exit_of_tests")(lambda task: sys.exit(2))
agent("stop_of_tests")(lambda task: next(iter(())))


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("number", 1.0),
        ("text", "ab 9"),
        ("nothing", None),
        ("exit", RuntimeError("SystemExit: 2")),
        ("stop", RuntimeError("StopIteration: ")),
        ("list", TypeError("an agent returns a number, text or None, not list")),
    ],
)
async def test_a_function_returns_a_number_text_or_nothing_or_has_raised(name: str, result: Any) -> None:
    (done,) = await asyncio.gather(Agent(function=f"{name}_of_tests").run(TASK), return_exceptions=True)
    assert (type(done), str(done)) == (type(result), str(result))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "set either function or command"),
        ({"function": "text_of_tests", "command": "true"}, "set either function or command"),
        ({"function": "text_of_test"}, "no agent 'text_of_test' .did you mean 'text_of_tests'"),
        ({"command": "no-such-program --fast"}, "there is no program 'no-such-program --fast'"),
        ({"command": " "}, "there is no program ' '"),
        ({"function": "text_of_tests", "concurrency": 0}, "env.concurrency: .* greater than or equal to 1"),
    ],
)
def test_options_that_can_not_be_are_refused_with_the_fix(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        bind("agent", options)


async def test_the_client_of_a_function_asks_the_model_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert await Agent(function="proxy_of_tests").run(TASK) is None


def program(tmp_path: Path, code: str) -> Agent:
    file = tmp_path / "my agent.py"
    file.write_text(code)
    return Agent(command=f"{sys.executable} -S '{file}' --fast")


async def test_a_program_has_the_task_on_its_stdin_and_the_model_in_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("HOCKET_TOKEN", "the servers' own")
    code = """
import json, os, sys
assert "HOCKET_TOKEN" not in os.environ
names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL", "NO_PROXY", "no_proxy")
print("thinking", file=sys.stderr)
print("thinking")
print(json.dumps([json.load(sys.stdin), [os.environ[name] for name in names], sys.argv[1:]]))
print()
"""
    answer = await program(tmp_path, code).run(TASK)
    assert isinstance(answer, str)
    task, environment, arguments = json.loads(answer)
    chat = [{"role": "user", "content": "Sort: ba"}]
    assert task == {"messages": chat, "text": "Sort: ba", "answer": "ab", "meta": {"level": 3}, "seed": 9}
    assert environment == [TASK.base_url, "secret", "m", *["example.org,10.0.0.7"] * 2]
    assert arguments == ["--fast"]


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ('print("reward: 0.25")', 0.25),
        ('print("so be it\\nreward: -1e2")', -100.0),
        ('print("0.25")', "0.25"),  # an answer, which rewards score
        ('print("the reward: 1\\n")', "the reward: 1"),
        ("", None),
        ("{}['gone']", RuntimeError("my agent.py' --fast ended with status 1: KeyError: 'gone'")),
    ],
)
async def test_the_last_line_of_a_program_is_its_reward_its_answer_or_why_it_fails(
    tmp_path: Path, code: str, result: float | str | RuntimeError | None
) -> None:
    if isinstance(result, RuntimeError):
        with pytest.raises(RuntimeError, match=str(result)):
            await program(tmp_path, code).run(TASK)
    else:
        assert await program(tmp_path, code).run(TASK) == result


CHILDREN = """
import os, subprocess, sys, time
sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
children = [subprocess.Popen(sleeps, start_new_session=away).pid for away in (False, True)]
"""
SAYS = """
open("{0}.partial", "w").write(" ".join(map(str, [os.getpid(), *children])))
os.rename("{0}.partial", "{0}")
"""
STAYS = SAYS + "time.sleep(600)"


async def test_a_program_that_is_given_up_is_killed_with_all_it_has_started(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    running = asyncio.create_task(program(tmp_path, CHILDREN + STAYS.format(file)).run(TASK))
    await asyncio.to_thread(wait_for, file.exists, "the program and its children run")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    gone(file)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (CHILDREN + SAYS, ""),  # which does not wait for them
        (CHILDREN.replace("(False, True)", "(False,)") + SAYS + "os.kill(os.getppid(), 9)\ntime.sleep(600)", "-9"),
    ],
)
async def test_what_a_program_leaves_running_does_not_outlive_it_even_if_it_kills_what_watches_it(
    tmp_path: Path, code: str, status: str
) -> None:
    with contextlib.nullcontext() if not status else pytest.raises(RuntimeError, match=f"ended with status {status}"):
        await asyncio.wait_for(program(tmp_path, code.replace("{0}", str(tmp_path / "pids"))).run(TASK), 60)
    gone(tmp_path / "pids")


def test_a_program_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    command = [sys.executable, "-c", CHILDREN + STAYS.format(file)]
    outer = "import subprocess; from hocket.common.processes import contained; "
    outer += f"subprocess.run(contained({command!r}))"
    parent = subprocess.Popen([sys.executable, "-c", outer], env={**os.environ, "PYTHONPATH": str(SOURCE)})
    wait_for(file.exists, "the program and its children run")
    parent.kill()
    parent.wait()
    gone(file)


async def test_a_program_that_writes_without_end_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.extras.agents.agent.MAX_OUTPUT_MIB", 1)
    monkeypatch.setattr("hocket.extras.agents.agent.LOOK_S", 0.05)
    code = "import time; print('x' * (1 << 20), flush=True); time.sleep(600)"
    with pytest.raises(RuntimeError, match="wrote more than 1 MiB"):
        await asyncio.wait_for(program(tmp_path, code).run(TASK), 20)


def gone(file: Path) -> None:
    wait_for(lambda: all(map(is_gone, file.read_text().split())), "all processes have ended")
