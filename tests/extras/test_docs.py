"""The documentation of extras is what the program itself does."""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests import reference
from tests.test_docs import named_files, shown

from hocket import config
from hocket.envs import Action, Task
from hocket.extras.checks import verify
from hocket.observe import metrics
from hocket.protocol import ToolCall
from hocket.rewards import base
from hocket.types import Prompt, Rollout, TokenSequence
from support.batches import played, scorer_of_all
from support.processes import ROOT
from support.service import Answer, Headers, Service


def test_the_missing_share_is_said_up_to_the_error_that_the_pages_name() -> None:
    assert f"; not told above {verify.MAX_ERROR:g}:" in metrics.reference()
    page = (ROOT / "docs" / "explanation" / "weight_updates.md").read_text("utf-8")
    assert f"`sync/missing_error` is above {verify.MAX_ERROR:g} " in page


async def test_the_service_of_the_documentation_gets_and_answers_what_the_page_shows() -> None:
    page = (ROOT / "docs" / "how-to" / "reward_service.md").read_text(encoding="utf-8")
    sample, scores = (json.loads(text) for text in re.findall(r"```json\n(.*?)```", page, re.DOTALL))
    asked: list[object] = []

    async def answer(headers: Headers, body: object) -> Answer:
        asked.append(body)
        return 200, {}, scores

    chat = ({"role": "user", "content": "Sort: dbca"},)
    prompt = Prompt(id="p", token_ids=(1,), messages=chat, text="Sort: dbca", answer="abcd")
    ids, mask = (9, 3, 4, 5, 1), (False, True, True, True, True)
    sequence = TokenSequence(token_ids=ids, mask=mask, logprobs=(0.0,) * 5, text="abcd")
    shown = yaml.safe_load(page.split("```yaml\n# my.yaml\n")[1].split("```")[0])["rewards"]
    del shown["functions"]["http"]["key_env"]  # of serve-reward
    async with Service(answer).open() as service:
        shown["functions"]["http"]["url"] = service.url
        with scorer_of_all(config.RewardsConfig.model_validate(shown)) as scorer:
            (score,) = await scorer.score_group([Rollout(id="step 3/7/0", prompt=prompt, sequences=(sequence,))])
    assert (score.total, asked) == (1.0, [sample])


async def test_the_judge_of_the_documentation_scores_as_it_stands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "how-to" / "judge.md").read_text(encoding="utf-8").split("## Limit the cost")[1]
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


async def test_the_tool_and_the_agent_of_the_documentation_work_as_they_stand(tmp_path: Path) -> None:
    tools = shown("how-to/tools.md", "my_tools.py", "population.yaml", tmp_path)
    second_look = shown("how-to/agents.md", "my_agents.py", "second_look.yaml", tmp_path)
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


def test_the_agent_of_the_first_environment_is_that_of_its_plugin() -> None:
    page = (ROOT / "docs" / "tutorials" / "first_environment.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(@agent.*?)```", page, re.DOTALL)
    assert code in (ROOT / "config" / "guess_agent.py").read_text(encoding="utf-8")


def test_readme_and_architecture_name_no_file_of_extras_that_is_not_there() -> None:
    named, found = named_files()
    assert {name for name in named if "extras/" in name} <= found


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_page_that_hocket_writes_is_up_to_date(name: str) -> None:
    written = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert written == reference.page(name), "PYTHONPATH=src:tests .venv/bin/python tests/reference.py --write"


def test_the_page_of_rewards_has_every_built_in_reward_and_its_options() -> None:
    page = (ROOT / "docs" / "reference" / "rewards.md").read_text(encoding="utf-8")
    provided = set(base._SINGLE_ARGUMENTS) | set(base._GROUP_ARGUMENTS)
    keys = set(config.RewardSpec.model_fields)
    for name in builtin_rewards():
        assert f"`{name}`" in page, name
        parameters = inspect.signature(base.REWARDS.get(name).function).parameters.keys()
        for option in parameters - provided - keys - {"requests_per_minute", "tokens_per_minute"}:
            assert re.search(rf"^\| `{option}`( of `{name}`)? \|", page, re.M), (name, option)
    for key in keys:
        assert f"| `{key}` |" in page, key


def builtin_rewards() -> list[str]:
    """Returns the names of the rewards that ship with hocket, without those of tests and plugins."""
    return [name for name in base.REWARDS.names if base.REWARDS.get(name).function.__module__.startswith("hocket.")]
