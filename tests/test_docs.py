"""The documentation is what the program itself prints."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hocket import config
from hocket.common.registry import load_plugins
from hocket.config import loading
from hocket.envs import Action, Task
from hocket.envs.base import bind
from hocket.observe import metrics
from hocket.protocol import ToolCall
from hocket.sync import proof
from hocket.types import Prompt, Rollout, TokenSequence
from support.batches import played, scorer_of_all
from support.service import Answer, Headers, Service

ROOT = Path(__file__).parents[1]


def test_the_reference_pages_are_up_to_date() -> None:
    for page, option, content in (
        ("configuration", "--reference", config.reference()),
        ("metrics", "--metrics", metrics.reference()),
        ("algorithms", "--presets", config.preset_table()),
    ):
        written = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        assert written.endswith(content + "\n"), f"refresh docs/{page}.md: python3 run.py config {option}"
    unsaid = {key for key, field in loading._fields() if "." in key and not field.description}
    options = {"curriculum.retire_after", "env.max_turns", "env.timeout_s"}  # of every curriculum and environment
    assert unsaid == options | {"checkpoint.best.name", "checkpoint.best.patience"}  # checkpoint.best tells them
    assert f" is not told above {proof.MAX_ERROR:g}:" in metrics.reference()
    assert f"`sync/missing_error` is above {proof.MAX_ERROR:g} " in (ROOT / "docs" / "hand_over.md").read_text("utf-8")


def test_readme_and_architecture_name_no_file_that_is_not_there() -> None:
    tree = (ROOT / "README.md").read_text(encoding="utf-8").split("## How it works")[1].split("```")[1]
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = {word for word in tree.split() if word.endswith((".py", ".yaml"))}
    named |= set(re.findall(r"[\w/]+\.py", page)) | set(re.findall(r"`([\w/]+/)`", page))
    assert {"loop.py", "sync/publish.py", "data/"} <= named
    folders = [ROOT / folder for folder in ("src", "tests", "config", "benchmarks")]
    found = {name for name in named if (ROOT / name).exists() or any(any(folder.rglob(name)) for folder in folders)}
    assert named - found == set()


async def test_the_readmes_own_model_data_and_reward_are_the_example_and_work_as_they_stand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Your own model, data and reward")[1]
    folder = ROOT / "examples" / "own_everything"
    for language, name in (("yaml", "config.yaml"), ("python", "reward.py"), ("json", "train.jsonl")):
        shown, file = section.split(f"```{language}\n")[1].split("```")[0], folder.joinpath(name).read_text("utf-8")
        assert shown == (file if language != "json" else "".join(file.splitlines(True)[:2]))
    monkeypatch.chdir(ROOT)
    settings = config.load("examples/own_everything/config.yaml")
    load_plugins(settings.plugins)
    rollout = played(Prompt(id="p", token_ids=(1,), answer="dcba"), "r", "dcab")
    with scorer_of_all(settings.rewards) as scorer:
        assert (await scorer.score(rollout)).total == pytest.approx(2 / 3)  # dc and ca fall, ab does not; no bonus


async def test_the_rewards_of_the_documentation_work_as_they_stand(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    name, code = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL)[0]
    (tmp_path / name).write_text(code)
    functions = re.findall(r'"(rewards.functions=.*?)"', page)[0]
    settings = config.load(None, [f"plugins=[{tmp_path / name}]", functions, "rewards.timeout_s=60"])
    load_plugins(settings.plugins)
    rollouts = [played(Prompt(id="p", token_ids=(1,)), "r", text) for text in ("a b a", "be")]
    with scorer_of_all(settings.rewards) as scorer:
        scores = await scorer.score_group(rollouts)
    assert [score.total for score in scores] == [0.5 * 2 + (2 - 1) + 0, 0.5 * 1 + (1 - 0) + 1]


async def test_the_service_of_the_documentation_gets_and_answers_what_the_page_shows() -> None:
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8").split("## `http`")[1]
    sample, scores = (json.loads(text) for text in re.findall(r"```json\n(.*?)```", page, re.DOTALL))
    asked: list[object] = []

    async def answer(headers: Headers, body: object) -> Answer:
        asked.append(body)
        return 200, {}, scores

    chat = ({"role": "user", "content": "Sort: dbca"},)
    prompt = Prompt(id="p", token_ids=(1,), messages=chat, text="Sort: dbca", answer="abcd")
    ids, mask = (9, 3, 4, 5, 1), (False, True, True, True, True)
    sequence = TokenSequence(token_ids=ids, mask=mask, logprobs=(0.0,) * 5, text="abcd")
    shown = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0])["rewards"]
    async with Service(answer).open() as service:
        shown["functions"]["http"]["url"] = service.url
        with scorer_of_all(config.RewardsConfig.model_validate(shown)) as scorer:
            (score,) = await scorer.score_group([Rollout(id="step 3/7/0", prompt=prompt, sequences=(sequence,))])
    assert (score.total, asked) == (1.0, [sample])


async def test_the_judge_of_the_documentation_scores_as_it_stands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8").split("## `judge`")[1]
    shown = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0])["rewards"]

    async def say(headers: Headers, body: Any) -> Answer:
        text = "10" if shown["functions"]["judge"]["rubric"] in body["messages"][0]["content"] else "0"
        return 200, {}, {"choices": [{"message": {"content": '{"reason": "so", "score": ' + text + "}"}}]}

    monkeypatch.setenv("OPENAI_API_KEY", "hush-hush")
    async with Service(say).open() as service:
        shown["functions"]["judge"] |= {
            "base_url": service.url,
            "key_env": "OPENAI_API_KEY",
            "cache": str(tmp_path / "judge.db"),
        }
        with scorer_of_all(config.RewardsConfig.model_validate(shown)) as scorer:
            assert (await scorer.score(played(Prompt(id="p", token_ids=(1,)), "r", "abcd"))).total == 1.0


async def count(headers: Headers, body: Any) -> Answer:
    """Answers a chat with the number of its messages."""
    message = {"role": "assistant", "content": f"{len(body['messages'])} "}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    return 200, {}, {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}


async def test_the_environment_the_tool_and_the_agent_of_the_documentation_work_as_they_stand(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    codes = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL)
    commands = re.findall(r'"plugins=\[(.*?)\]" "(env=.*?)"', page)
    names = ["my_envs.py", "my_tools.py", "my_agents.py"]
    assert [name for name, _ in codes] == [name for name, _ in commands] == names
    made = []
    for (name, code), (_, env) in zip(codes, commands, strict=True):
        (tmp_path / name).write_text(code)
        settings = config.load(None, [f"plugins=[{tmp_path / name}]", env])
        load_plugins(settings.plugins)
        made.append(bind(settings.env.name, settings.env.model_extra or {})())
    spell, tools, second_look = made
    assert spell.words == 50
    started = await spell.reset(Prompt(id="p", token_ids=(1,), answer="ab"), 0)
    assert started.messages[0]["content"] == "First letter?"
    steps = [await spell.step(Action(text=text, token_ids=(1,), finish_reason="stop")) for text in ("a ", "c")]
    assert [(step.reward, step.done) for step in steps] == [(0.5, False), (0.0, True)]
    call = ToolCall(name="population", arguments='{"city": "Cologne"}')
    told = await tools.step(Action(text="", token_ids=(1,), finish_reason="stop", tool_calls=(call,)))
    assert [message["content"] for message in told.messages] == ["1087353"]
    async with Service(count).open() as service:
        task = Task(
            messages=({"role": "user", "content": "?"},),
            text="?",
            answer="3",  # messages, once both turns before it are there
            meta={},
            seed=0,
            base_url=f"{service.url}/v1",
            api_key="none",
            model="m",
        )
        assert await second_look.run(task) == 1.0
