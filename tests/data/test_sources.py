"""The built-in tasks, and the policies that ship for them: what hocket and vLLM rely on."""

import itertools
import json
import re
import string
import textwrap
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hocket.common.registry import load_plugins
from hocket.config import DataConfig
from hocket.data import sources
from hocket.data.sources import TASKS, read_rows
from hocket.errors import ConfigError, DataError
from support.tokenizers import shipped

ROOT = Path(__file__).parents[2]
SORT, TOOLS = (ROOT / "checkpoints" / name for name in ("tiny-sort", "tiny-tools"))
load_plugins([str(ROOT / "config" / "tiny_tools.py")])


def rows(task: str, split: str, num: int = 2000, seed: int = 0) -> list[dict[str, Any]]:
    return list(itertools.islice(TASKS.get(task)(split, seed), num))


@pytest.fixture(scope="module")
def tools_tokenizer() -> Any:
    return shipped("tiny-tools")


@pytest.mark.parametrize(("task", "letters", "wrong"), [("sort", 26, 0.75), ("sort_down", 16, 0.0)])
def test_letters_are_to_be_sorted_and_of_sort_three_of_four_demonstrations_swap_two(
    task: str, letters: int, wrong: float
) -> None:
    differ = []
    for row in rows(task, "train", 4000) + rows(task, "test", 400):
        asked = row["prompt"].removeprefix("Sort: ")
        assert row["answer"] == "".join(sorted(asked, reverse=task == "sort_down"))
        assert sorted(row["response"]) == sorted(asked)
        assert 4 <= len(asked) == len(set(asked)) <= 6
        assert set(asked) <= set(string.ascii_lowercase[:letters])
        differ.append(sum(a != b for a, b in zip(row["answer"], row["response"], strict=True)))
    assert set(differ) <= {0, 2}
    assert differ.count(2) / 4400 == pytest.approx(wrong, abs=0.03)  # 4 standard deviations


def test_no_held_out_answer_is_ever_trained_on() -> None:
    for task, column in (("sort", "answer"), ("sort_down", "answer"), ("calculate", "prompt")):
        train = {row[column] for row in rows(task, "train", 25_000)}
        test = {row[column] for seed in (0, 1) for row in rows(task, "test", 3_000, seed=seed)}
        assert not train & test
        assert task != "sort" or (len(train) > 20_000 and len(test) > 2_500)


def test_the_same_seed_gives_the_same_rows_and_there_is_no_third_split() -> None:
    assert rows("sort", "train", 100) == rows("sort", "train", 100) != rows("sort", "train", 100, seed=1)
    with pytest.raises(DataError, match=r"splits train and test, not 'dev'"):
        rows("sort", "dev")


def test_answers_of_the_other_tasks_are_true_and_half_of_the_demonstrated_ones() -> None:
    for row in rows("calculate", "train", 50):
        assert str(eval(row["prompt"].removeprefix("Compute: "))) == row["answer"]
    assert {row["answer"] for row in rows("guess", "train")} == {str(number) for number in range(1, 21)}
    answers = [row for row in rows("turns", "train") if row["prompt"][-1]["role"] == "tool"]
    right = sum(row["response"] == row["prompt"][-1]["content"] for row in answers)
    assert 0.4 < right / len(answers) < 0.6


def test_any_text_survives_the_tokenizer_and_printable_ascii_is_one_token_each(tokenizer: Any) -> None:
    assert len(tokenizer.encode(string.printable.strip())) == len(string.printable.strip())
    for text in (string.printable, "Grüße, 你好 🎉\x00\t", "", " a  b ", "<|user"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(("folder", "largest"), [(SORT, 2_000_000), (TOOLS, 1_500_000)])
def test_model_tokenizer_and_generation_agree_and_the_folder_is_small(folder: Path, largest: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    assert len(tokenizer) == config["vocab_size"]
    assert config["hidden_size"] == 32 * config["num_attention_heads"]  # the shape that vLLM's kernels need
    for settings in (config, generation):
        assert settings["eos_token_id"] == tokenizer.eos_token_id
        assert settings["pad_token_id"] == tokenizer.pad_token_id != tokenizer.eos_token_id
    assert sum(file.stat().st_size for file in folder.iterdir()) < largest
    messages = [{"role": "user", "content": "Sort: ba"}, {"role": "assistant", "content": "ab"}]
    assert tokenizer.apply_chat_template(messages)["input_ids"][-1] == tokenizer.eos_token_id


def test_a_call_in_openais_form_is_rendered_as_the_model_writes_it(tools_tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": "1+2"}}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    rendered = tools_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    written = '<tool_call>{"name": "calculate", "arguments": {"expression": "1+2"}}</tool_call>'
    assert rendered == f"<|assistant|>{written}<|end|><|tool|>3<|end|><|assistant|>"
    ids = tools_tokenizer.encode(written)
    assert tools_tokenizer.decode(ids, skip_special_tokens=True) == written  # the tags are no special tokens


def test_a_source_of_one_s_own_yields_rows_by_its_name(tmp_path: Path) -> None:
    """The one that the documentation of `source` shows."""
    shown = re.search(r'    @source\("numbers"\)\n(?:.*\n)+?(?=""")', Path(sources.__file__).read_text("utf-8"))
    assert shown is not None
    file = tmp_path / "numbers.py"
    names = (("collections.abc", "Iterator"), ("hocket.config", "DataConfig"), ("hocket.data.sources", "source"))
    head = "".join(f"from {module} import {name}\n" for module, name in names)
    file.write_text(head + textwrap.dedent(shown[0]))
    load_plugins([str(file)])
    try:
        rows = [*read_rows(DataConfig(source="numbers:3"))]
        assert rows[2] == ("numbers:3/train:2", {"prompt": "2 + 1", "answer": "3"})
        assert len(rows) == 3
    finally:
        sources.SOURCES.forget("numbers")


def test_an_unknown_kind_of_source_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"there is no source 's3'; known: .*hf, .*task.*; add your own"):
        read_rows(DataConfig(source="s3://bucket/rows.jsonl"))


def test_a_file_may_have_a_colon_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run:1.jsonl").write_text('{"prompt": "a"}\n')
    assert [place for place, _ in read_rows(DataConfig(source="run:1.jsonl"))] == ["run:1.jsonl:1"]
