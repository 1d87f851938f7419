"""The embedded policy for episodes, as it ships: its template and what it was taught belong together."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hocket.config import DataConfig
from hocket.data import Renderer
from hocket.data.tasks import TASKS
from hocket.envs.base import bind
from hocket.registry import load_plugins

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "checkpoints" / "tiny-tools"
load_plugins([str(ROOT / "config" / "tiny_tools_task.py")])


@pytest.fixture(scope="module")
def tools_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(CHECKPOINT)


def test_the_model_has_a_row_for_every_token_and_the_folder_is_small(tools_tokenizer: Any) -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    assert len(tools_tokenizer) == config["vocab_size"]
    assert config["eos_token_id"] == tools_tokenizer.eos_token_id
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) < 1_500_000


def test_the_template_shows_the_calculator_as_the_demonstrations_do(tools_tokenizer: Any) -> None:
    toolbox = bind("tools", {"tools": ["calculate"], "parser": "hermes"})().toolbox
    assert toolbox is not None
    demonstrations = (row["prompt"] for row in TASKS.get("turns")("train", 0))
    shown = next(messages for messages in demonstrations if messages[0]["role"] == "system")
    without_tools = Renderer(DataConfig(), tools_tokenizer).render(shown)
    assert Renderer(DataConfig(), tools_tokenizer, toolbox.tools).render(shown[1:]) == without_tools


def test_a_call_in_openais_form_is_rendered_as_the_model_writes_it(tools_tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": "1+2"}}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    rendered = tools_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    written = '<tool_call>{"name": "calculate", "arguments": {"expression": "1+2"}}</tool_call>'
    assert rendered == f"<|assistant|>{written}<|end|><|tool|>3<|end|><|assistant|>"
    ids = tools_tokenizer.encode(written)
    assert tools_tokenizer.decode(ids, skip_special_tokens=True) == written  # the tags are no special tokens


def test_the_tasks_of_the_examples_have_prompts_with_true_answers_and_disjoint_splits() -> None:
    rows = {split: list(itertools.islice(TASKS.get("calculate")(split, 0), 2000)) for split in ("train", "test")}
    for row in rows["train"][:50]:
        assert str(eval(row["prompt"].removeprefix("Compute: "))) == row["answer"]
    assert not {row["prompt"] for row in rows["train"]} & {row["prompt"] for row in rows["test"]}
    numbers = {row["answer"] for row in itertools.islice(TASKS.get("guess")("train", 0), 1000)}
    assert numbers == {str(number) for number in range(1, 21)}


def test_demonstrations_are_one_turn_of_an_episode_and_often_wrong() -> None:
    rows = list(itertools.islice(TASKS.get("turns")("train", 0), 2000))
    answers = [row for row in rows if row["prompt"][-1]["role"] == "tool"]
    right = sum(row["response"] == row["prompt"][-1]["content"] for row in answers)
    assert 0.4 < right / len(answers) < 0.6
    for row in rows:
        told = [message for message in row["prompt"] if message["content"] in ("higher", "lower")]
        heard = [message["content"] for message in row["prompt"] if message["role"] == "assistant"]
        low = max((int(g) for g, m in zip(heard, told, strict=False) if m["content"] == "higher"), default=0)
        high = min((int(g) for g, m in zip(heard, told, strict=False) if m["content"] == "lower"), default=21)
        assert low < high - 1  # the hints contradict each other in none
