"""Loggers: what they are told, in whose thread, what failing ones cost, and that the tools read what they wrote."""

import asyncio
import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hocket import config as config_module
from hocket.common.registry import load_plugins
from hocket.errors import ConfigError
from hocket.observe import loggers
from hocket.observe.loggers import COLUMNS, LOGGERS, Table
from hocket.observe.run_folder import RunFolder
from hocket.types import Prompt, Score
from support import fakes
from support.records import group, sequence
from support.service import Answer, Headers, Service

PROMPT = Prompt(id="p", token_ids=(1,), text="sort ba", answer="ab")
SCORES = (Score(total=1.0, parts={"m": 1.0}, note="m: so"), Score(total=math.nan, error="m: hung"))
GROUP = group(PROMPT, [sequence(2, text="ab\u2028\r\n")] * 2, SCORES)
HOSTILE = "<script>alert(1)</script> | `x`\n\x1b[31m"


class Fake:
    """Keeps what it is told; `held` keeps it from going on."""

    package = "json"
    where = "here"
    made: "list[Fake]" = []  # noqa: RUF012
    held = threading.Event()

    def __init__(self, *, run_dir: Path, run_id: str, config: Mapping[str, Any], fails: str = "") -> None:
        self.told: list[Any] = [("begin", run_dir.name, run_id, config["run"]["dir"])]
        self.fails = fails
        self.thread = threading.current_thread()
        self.made.append(self)
        if fails == "begin":
            raise SystemExit(3)

    def add(self, *what: Any) -> None:
        self.held.wait()
        self.told.append(what)
        if what[0] == self.fails:
            raise ValueError(f"no {self.fails}")

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.add("metrics", step, dict(metrics))

    def table(self, step: int, name: str, rows: Table) -> None:
        self.add("table", step, name, [dict(zip(COLUMNS, row, strict=True)) for row in rows])

    def summary(self, values: Mapping[str, Any]) -> None:
        self.add("summary", values["steps"])

    def close(self, *, failed: bool) -> None:
        self.add("close", failed)


@pytest.fixture(autouse=True)
def fake() -> Iterator[type[Fake]]:
    LOGGERS.register("fake")(Fake)
    Fake.made.clear()
    Fake.held.set()
    yield Fake
    LOGGERS.forget("fake")


def settings(tmp_path: Path, chosen: str) -> list[str]:
    return [f"run.dir={tmp_path}/runs/mine", f"observe.loggers={chosen}", "data.system_prompt=" + HOSTILE]


def run(tmp_path: Path, chosen: str, *, steps: range = range(3), say: Callable[[str], None] = print) -> None:
    with RunFolder(config_module.load(None, settings(tmp_path, chosen)), say) as folder:
        for step in steps:
            if step == steps[0]:
                folder.rollouts(f"eval_{step:06d}", [GROUP])
            folder.rollouts(f"step_{step:06d}", [GROUP])
            folder.finish(step, {"reward/mean": step / 8, "eval/pass@1": 0.5, "train/loss": math.nan})
        folder.summary(final_version=1)


def test_a_logger_gets_config_steps_tables_and_summary_in_a_thread_of_its_own(tmp_path: Path) -> None:
    said: list[str] = []
    run(tmp_path, "[{name: fake, rollouts: 1, rollouts_every: 2}]", steps=range(3, 6), say=said.append)
    run(tmp_path, "fake", steps=range(6, 7))
    first, again = Fake.made
    assert first.thread not in (threading.main_thread(), again.thread)
    assert [what[:3] for what in first.told[1:]] == [
        ("metrics", 3, {"reward/mean": 0.375, "eval/pass@1": 0.5}),
        ("table", 3, "eval/rollouts"),
        ("metrics", 4, {"reward/mean": 0.5, "eval/pass@1": 0.5}),
        ("table", 4, "rollouts"),
        ("metrics", 5, {"reward/mean": 0.625, "eval/pass@1": 0.5}),
        ("summary", 5),
        ("close", False),
    ]
    (row,) = first.told[4][3]
    assert row["completion"] == "ab\u2028\r\n"
    assert (row["reward"], row["parts"], row["note"]) == (1.0, "m 1", "m: so")
    assert first.told[0] == again.told[0]  # the same run goes on
    assert first.told[0][2].startswith("mine-")
    assert said == ["logger fake: here"]


@pytest.mark.parametrize(
    ("fails", "said"),
    [("begin", "can't be used, and the run goes on without it: 3"), ("metrics", "could not take a record: no metrics")],
)
def test_what_a_logger_fails_at_is_said_once_and_the_run_goes_on(fails: str, said: str, tmp_path: Path) -> None:
    lines: list[str] = []
    run(tmp_path, f"[{{name: fake, fails: {fails}}}]", steps=range(10), say=lines.append)
    assert [line for line in lines if line != "logger fake: here"] == [f"logger fake {said}"]
    assert json.loads((tmp_path / "runs/mine/summary.json").read_text())["steps"] == 9
    assert ("close", False) in Fake.made[0].told or fails == "begin"


def test_slow_loggers_hold_up_no_step_and_the_end_of_a_run_together_only_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def join(self: loggers.LoggerThread, timeout_s: float) -> None:
        waits.append(timeout_s)
        clock.now += timeout_s

    clock = fakes.Clock()
    monkeypatch.setattr(loggers, "time", clock)
    monkeypatch.setattr(loggers.LoggerThread, "join", join)
    Fake.held.clear()  # none goes on until the run has ended
    said: list[str] = []
    run(tmp_path, f"[{', '.join(['fake'] * 40)}]", steps=range(50), say=said.append)
    Fake.held.set()
    assert waits == [30.0, *[0.0] * 39]
    late = "logger fake is not done: 50 steps still wait for it after 30 s"
    assert [line for line in said if "here" not in line] == [late] * 40


def test_a_failed_run_is_told_as_failed(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        RunFolder(config_module.load(None, [f"run.dir={tmp_path}/a", "observe.loggers=fake"])),
    ):
        raise KeyboardInterrupt
    assert Fake.made[0].told[-1] == ("close", True)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ("fakes", r"no logger 'fakes' \(did you mean 'fake'\?\); known: .*fake"),
        ("[{name: fake, failing: 1}]", r"fake\(.*\) has no option 'failing' \(did you mean 'fails'\?\)"),
        ("[{name: fake, rollouts: -1}]", r"observe.loggers.0.rollouts: .*greater than or equal to 0"),
        ("[fake, missing]", r"observe.loggers: missing needs the package not_there: .*pip install not_there, or leave"),
    ],
)
def test_a_wrong_choice_is_refused_before_the_run(chosen: str, said: str, tmp_path: Path) -> None:
    missing = type("Missing", (Fake,), {"package": "not_there"})
    LOGGERS.register("missing")(missing)
    try:
        with pytest.raises(ConfigError, match=said):
            run(tmp_path, chosen)
    finally:
        LOGGERS.forget("missing")
    assert not Fake.made


async def test_the_page_s_logger_of_one_s_own_tells_a_chat_of_each_evaluation(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "loggers.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall("```python\n(.*?)```", page, re.DOTALL) if '@logger("chat")' in block]
    (tmp_path / "chat.py").write_text(code)
    load_plugins([str(tmp_path / "chat.py")])
    told: list[Any] = []

    async def answer(headers: Headers, body: Any) -> Answer:
        told.append(body)
        return 200, {}, "ok"

    async with Service(answer).open() as chat:
        folder = await asyncio.to_thread(
            RunFolder, config_module.load(None, settings(tmp_path, f"[{{name: chat, url: '{chat.url}'}}]"))
        )
        folder.finish(3, {"eval/greedy": 0.5})
        folder.finish(4, {"reward/mean": 0.5})
        await asyncio.to_thread(folder.__exit__, None)
    LOGGERS.forget("chat")
    assert told == [{"text": "mine, step 3: 0.500"}]
