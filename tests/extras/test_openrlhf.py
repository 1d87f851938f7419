"""Files written for OpenRLHF, unchanged, with a fake engine: state, texts, rewards, numbers; and examples/agents."""

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from hocket.client.batcher import Turn
from hocket.client.pool import ServerPool
from hocket.common.registry import load_plugins
from hocket.envs.base import bind
from hocket.errors import ConfigError
from hocket.extras import openrlhf
from hocket.observe.metrics import rollout_metrics
from hocket.observe.rows import rollout_of, row_of
from hocket.protocol import Completion, ToolCall
from hocket.rollout.players import player
from hocket.types import Group, Prompt, Rollout, Score
from support import fakes
from support.batches import SAMPLING
from support.episodes import END, FakeEngine, limits, renderer, slot, user
from support.processes import ROOT

BASES = "AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor"
EXAMPLES = ROOT / "examples" / "agents"
NUMBERED = """
import numpy
turns = 0
async def step(observation, action, label, sampling_params=None, **kwargs):
    global turns
    turns += 1
    logs = {"turns": turns, "label": label, "array": numpy.array([turns / 2])}
    text = observation + action + f"[{turns}]"
    stop = ["x", "y"] if turns == 1 else "z"
    return {"rewards": numpy.array([turns]), "next_observation": text, "done": turns == 3, "extra_logs": logs,
            "sampling_params": type("Params", (), {"stop": stop})}
"""
WHOLE = """
class AgentInstance:
    async def reset(self, states):
        return {"observation": START}
    def step(self, states, **kwargs):
        return {"rewards": 0.5, "done": False, **TOLD}
"""


def saying(*texts: str, calls: tuple[ToolCall, ...] = ()) -> FakeEngine:
    """Says these texts turn by turn, over again; `calls`: of the first turn."""

    def says(turn: Turn) -> Completion:
        number = len(engine.turns)
        text = texts[number % len(texts)]
        token_ids = (*renderer().encode([text])[0], END)
        said = fakes.completion(*token_ids, logprobs=(-1.0,) * len(token_ids), text=text)
        return said.model_copy(update={"tool_calls": () if number else calls})

    engine = FakeEngine(says)
    return engine


async def played(engine: FakeEngine, name: str, answer: str = "12", **options: Any) -> Rollout:
    chat = (*user("3*4"),)
    (token_ids,) = renderer().encode([renderer().render(chat)])
    prompt = Prompt(id="p", token_ids=tuple(token_ids), messages=chat, answer=answer)
    bounds = limits(max_turns=8, max_length=400, timeout_s=20.0)
    place = dataclasses.replace(slot(), sampling=SAMPLING.model_copy(update={"max_tokens": 20}))
    return await player(bind(name, options), ServerPool([]), engine.ask, renderer(), bounds)(prompt, place)


@pytest.mark.parametrize("bases", BASES.split(", "))
def test_each_class_that_such_files_inherit_from_is_there(
    bases: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, openrlhf.BASES, raising=False)
    (tmp_path / "own.py").write_text(f"from openrlhf.utils.agent import {bases}\nclass Own({bases}): ...\n")
    assert load_plugins([str(tmp_path / "own.py")])


def test_other_modules_of_the_package_are_missing_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, openrlhf.BASES, raising=False)
    (tmp_path / "other.py").write_text("from openrlhf.models import Actor\n")
    with pytest.raises(ConfigError, match="No module named 'openrlhf'"):
        load_plugins([str(tmp_path / "other.py")])


def test_nothing_stands_in_where_the_package_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, openrlhf.BASES, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    openrlhf.provide_bases()
    assert openrlhf.BASES not in sys.modules


def test_the_example_of_a_file_for_openrlhf_can_be_a_plugin_before_an_environment_is_made_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, openrlhf.BASES, raising=False)
    file = tmp_path / "turns.py"
    file.write_bytes((ROOT / "examples" / "agents" / "turns.py").read_bytes())
    load_plugins([str(file)])
    assert bind("step", {"path": str(file)})


async def test_a_function_keeps_its_globals_for_one_episode_and_numbers_become_metrics(tmp_path: Path) -> None:
    (tmp_path / "my_agent.py").write_text(NUMBERED)
    for episode in range(2):  # the second one begins anew, with the code that the run began with
        if episode == 1:
            (tmp_path / "my_agent.py").write_text("step = None")
        engine = saying("a", "b", "c")
        rollout = await played(engine, "step", path=str(tmp_path / "my_agent.py"))
        prompt = engine.seen(0)
        assert rollout.error is None
        assert engine.seen(2) == f"{prompt}a<|end|>[1]b<|end|>[2]"
        assert [turn.sampling.stop for turn, _ in engine.turns] == [(), ("x", "y"), ("z",)]
        assert rollout.reward == 1 + 2 + 3
        assert rollout.metrics == {"env/turns": 3.0, "env/array": 1.5}
    group = Group(id="g", rollouts=(rollout, rollout), scores=(Score(total=1.0), Score(total=0.0)))
    assert rollout_metrics([group])["env/array"] == 1.5
    assert rollout_of(row_of(group, rollout, group.scores[0])).metrics == rollout.metrics  # also in a replay


@pytest.mark.parametrize(
    ("start", "told", "says"),
    [
        ("states['observation'] + 'Hint.'", "{'environment_feedback': '?', 'done': True}", ""),
        ("'another prompt'", "{}", "reset raised ValueError: a text must go on from the one before"),
        ("states['observation']", "{'next_state': 'else'}", "step raised ValueError: a text must go on from the one"),
        ("states['observation']", "{'environment_images': [1]}", "environment_images can't be shown"),
        ("states['observation']", "{}", "step raised KeyError: 'environment_feedback'"),
    ],
)
async def test_a_class_may_add_to_the_prompt_and_what_rewrites_it_is_refused(
    start: str, told: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(WHOLE.replace("START", start).replace("TOLD", told))
    engine = saying("a")
    rollout = await played(engine, "step", path=str(tmp_path / "agent.py"))
    assert says in str(rollout.error)
    assert says or (engine.seen(0)[-5:], rollout.error, rollout.reward) == ("Hint.", None, 0.5)


def test_a_file_without_either_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("class AgentExecutor: ...")
    with pytest.raises(ConfigError, match="neither a class AgentInstance nor a function step"):
        bind("step", {"path": str(tmp_path / "empty.py")})


async def test_the_example_turns_asks_again_and_pays_less_for_it() -> None:
    assert importlib.util.find_spec("openrlhf") is None  # what it imports is stood in for
    engine = saying("11", "12")
    rollout = await played(engine, "step", path=str(EXAMPLES / "turns.py"))
    assert (rollout.error, rollout.reward) == (None, 0.5)
    assert engine.seen(1).endswith("and answer again.<|im_end|>\n<|im_start|>assistant\n")
    assert rollout.metrics == {"env/scores": 1.0, "env/tries": 2.0}
    assert (await played(saying("11"), "step", path=str(EXAMPLES / "turns.py"))).metrics["env/tries"] == 3


async def test_the_example_guess_gives_hints_in_the_template_of_the_small_policy() -> None:
    engine = saying("9", "15", "12")
    rollout = await played(engine, "step", path=str(EXAMPLES / "guess.py"))
    assert (rollout.error, rollout.reward) == (None, 1.0)
    assert engine.seen(2).endswith(
        "9<|end|><|user|>higher<|end|><|assistant|>15<|end|><|user|>lower<|end|><|assistant|>"
    )
    assert rollout.metrics == {"env/scores": 1.0, "env/guesses": 3.0}


async def test_the_example_tools_are_called_and_answer() -> None:
    load_plugins([str(EXAMPLES / "tools.py")])
    calls = tuple(ToolCall(name=name, arguments='{"a": 3, "b": 4}') for name in ("multiply", "async_add"))
    engine = saying("calls", "12", calls=calls)
    rollout = await played(engine, "tools", tools=["multiply", "async_add"], parser="hermes")
    assert rollout.error is None
    assert [message["content"] for message in rollout.sequences[0].dialogue] == ["calls", "12", "7", "12"]
    assert rollout.metrics["tool/multiply/calls"] == rollout.metrics["tool/async_add/calls"] == 1
