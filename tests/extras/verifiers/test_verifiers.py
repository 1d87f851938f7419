"""With the package's own environments of examples/agents/verifiers_tasks.py, where that is installed."""

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from hocket.config import load
from hocket.data.sources import read_rows
from hocket.envs import Task
from hocket.envs.base import bind
from hocket.errors import ConfigError
from support.processes import ROOT, START_S, Process, free_port

TASKS = ROOT / "examples" / "agents"
FAILING = """
import verifiers as vf
import verifiers_tasks

def raises(completion): raise OSError("the judge is away")
async def raises_later(completion): raise OSError("the judge is away")
def none(completion): return None
def half(completion): return 0.5

def load_environment(task, rows, name, weight, grouped):
    environment = verifiers_tasks.load_environment(task, rows)
    rubric = vf.Rubric(funcs=[half, globals()[name]], weights=[1.0, weight])
    environment.rubric = vf.RubricGroup([environment.rubric, rubric]) if grouped else rubric
    return environment
"""


def test_the_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"verifiers:mine needs the package verifiers: \.venv/bin/pip install verif"):
        bind("verifiers", {"env": "mine"})
    with pytest.raises(ConfigError, match="verifiers:mine needs the package verifiers"):
        [*read_rows(load(None, ["data.source=verifiers:mine"]).data)]


class TestWithThePackage:
    @pytest.fixture(autouse=True)
    def needs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("verifiers", reason="verifiers is not installed")
        monkeypatch.syspath_prepend(str(TASKS))

    async def played(
        self, monkeypatch: pytest.MonkeyPatch, task: str, *says: str, env: str = "verifiers_tasks", **more: Any
    ) -> tuple[float, list[Any]]:
        """The reward of a model that says this, and the chats that it was asked to go on."""
        chats: list[Any] = []

        def answer(request: httpx.Request) -> httpx.Response:
            assert request.headers["authorization"] == "Bearer its own"
            asked = json.loads(request.content)
            chats.append(asked["messages"])
            message = {"role": "assistant", "content": says[len(chats) - 1]}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            body = {"id": "c", "object": "chat.completion", "created": 0, "model": asked["model"], "choices": [choice]}
            return httpx.Response(200, json=body)

        http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        shared = openai.AsyncOpenAI(base_url="http://a", api_key="none", http_client=http)  # type: ignore[arg-type]  # alike
        monkeypatch.setattr("hocket.extras.verifiers.env._client", lambda: shared)
        environment = bind("verifiers", {"env": env, "args": {"task": task, "rows": 9, **more}})()
        row = next(read_rows(load(None, self.source(task)).data))[1]
        given = {"messages": tuple(row["prompt"]), "text": "", "answer": row["answer"], "meta": row}
        reward = await environment.run(Task(**given, seed=1, base_url="http://b/v1", api_key="its own", model="m"))
        return reward, chats

    def source(self, task: str, *settings: str) -> list[str]:
        return ["data.source=verifiers:verifiers_tasks", f"data.options={{task: {task}, rows: 9}}", *settings]

    def test_rows_are_those_of_its_data_set_and_of_the_one_for_evaluation(self) -> None:
        config = load(None, self.source("sort"))
        held_out = config.default_source.held_out
        assert held_out is not None
        train, test = ([columns for _, columns in read_rows(data)] for data in (config.data, held_out))
        assert len(train) == len(test) == 9
        assert {row["answer"] for row in train}.isdisjoint(row["answer"] for row in test)
        assert train[0]["prompt"] == [{"role": "user", "content": train[0]["verifiers"]["question"]}]

    async def test_one_turn_is_scored_by_its_rubric(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reward, chats = await self.played(monkeypatch, "sort", "yqnbi")
        assert (reward, len(chats)) == (0.6, 1)

    async def test_several_turns_are_its_own_and_what_it_finds_wrong_is_an_error(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reward, chats = await self.played(monkeypatch, "guess", "10", "15", "12")
        assert reward == pytest.approx(0.9)
        assert [message["content"] for message in chats[2]] == ["Guess: 1 to 20", "10", "higher", "15", "lower"]
        with pytest.raises(RuntimeError, match="EmptyModelResponse"):
            await self.played(monkeypatch, "guess", "")

    @pytest.mark.parametrize("grouped", [False, True])
    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("raises", "raises raised OSError: the judge is away"),
            ("raises_later", "raises_later raised OSError: the judge is away"),
            ("none", "none raised TypeError"),
        ],
    )
    async def test_a_reward_function_that_fails_is_an_error_not_a_zero_unless_it_only_measures(
        self, name: str, why: str, grouped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "failing_rubrics.py").write_text(FAILING)
        monkeypatch.syspath_prepend(str(tmp_path))
        given = {"env": "failing_rubrics", "name": name, "grouped": grouped}
        with pytest.raises(RuntimeError, match=f"its rubric has no score: {why}"):
            await self.played(monkeypatch, "sort", "yqnbi", weight=0.5, **given)
        reward, _ = await self.played(monkeypatch, "sort", "yqnbi", weight=0.0, **given)
        assert reward == pytest.approx(0.5 + 0.6 * grouped)

    def test_what_can_not_be_loaded_is_refused_and_signals_stay_as_they_were(self) -> None:
        import signal

        handler = signal.getsignal(signal.SIGTERM)
        bind("verifiers", {"env": "verifiers_tasks", "args": {"rows": 3}})
        assert signal.getsignal(signal.SIGTERM) is handler
        with pytest.raises(ConfigError, match=r"verifiers:nowhere can't be loaded: .*or on PYTHONPATH"):
            bind("verifiers", {"env": "nowhere"})
        with pytest.raises(ConfigError, match=r"verifiers_tasks can't be loaded: .*'colour'"):
            bind("verifiers", {"env": "verifiers_tasks", "args": {"colour": "red"}})

    @pytest.mark.e2e
    def test_a_run_trains_with_its_episodes_of_several_turns(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTHONPATH", str(TASKS), prepend=":")
        env = "env={name: verifiers, env: verifiers_tasks, args: {task: guess, rows: 64}}"
        more = ["rewards.functions={env: 1}", "trainer.steps=2", "rollout.max_tokens=16", "eval.num_prompts=0"]
        place = [f"run.dir={tmp_path}/run", f"server.port={free_port()}", "model.path=checkpoints/tiny-tools"]
        words = ["quickstart", "config/quickstart.yaml", *self.source("guess"), env, *more, *place]
        with Process(words, tmp_path / "log") as process:
            assert process.wait_end(START_S) == 0, process.output()
        steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][-2:]
        assert [step["step"] for step in steps] == [1, 2]
        assert max(step["train/logprob_gap"] for step in steps) < 1e-3
