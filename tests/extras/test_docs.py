"""The documentation of extras is what the program itself does."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.test_docs import named_files, shown

from hocket import config
from hocket.envs import Action, Task
from hocket.extras.checks import verify
from hocket.observe import metrics
from hocket.protocol import ToolCall
from hocket.types import Prompt, Rollout, TokenSequence
from support.batches import played, scorer_of_all
from support.processes import ROOT
from support.service import Answer, Headers, Service


def test_the_missing_share_is_said_up_to_the_error_that_the_pages_name() -> None:
    assert f"; not told above {verify.MAX_ERROR:g}:" in metrics.reference()
    assert f"`sync/missing_error` is above {verify.MAX_ERROR:g} " in (ROOT / "docs" / "weight_sync.md").read_text(
        "utf-8"
    )


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


async def test_the_tool_and_the_agent_of_the_documentation_work_as_they_stand(tmp_path: Path) -> None:
    tools, second_look = shown("my_tools.py", tmp_path), shown("my_agents.py", tmp_path)
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


def test_readme_and_architecture_name_no_file_of_extras_that_is_not_there() -> None:
    named, found = named_files()
    assert {name for name in named if "extras/" in name} <= found


def test_the_reference_of_settings_is_up_to_date() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written.endswith(config.reference() + "\n"), "refresh docs/configuration.md: run.py config --reference"


def test_the_page_of_metrics_has_those_of_extras_too() -> None:
    written = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert written.endswith(metrics.reference() + "\n"), "refresh docs/metrics.md: python3 run.py config --metrics"
