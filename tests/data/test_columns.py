"""Rows are read as tools write them: the same prompts from every kind of file, or a refusal with row and field."""

import datetime
import json
import logging
import math
import random
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from hocket.config import DataConfig
from hocket.data.columns import as_answer, checked, columns_of, sample_of
from hocket.data.prompts import load_prompts
from hocket.data.sources import read_rows
from hocket.errors import DataError
from support.records import says, user
from support.tokenizers import STOCK, of_tags

Write = Callable[..., str]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": null}'}}
CUT_CALL = {"function": {"name": "add", "arguments": '{"a": "\\ud83d"}'}}
CALLED = {"name": "add", "arguments": {"a": 2, "b": None}}
TEMPLATE = (  # shows all that a message has
    "{% for m in messages %}<{{ m.role }}{% if m.name is defined %} {{ m.name }}{% endif %}>{{ m.content }}"
    "{% if m.tool_calls is defined %}{% for c in m.tool_calls %}{{ (c.function or c).arguments | tojson }}"
    "{% endfor %}{% endif %};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def load(source: object, **settings: Any) -> list[Any]:
    data = DataConfig(source=str(source), **settings)
    return [*load_prompts(data, of_tags(TEMPLATE), max_prompt_tokens=9999)[0]]


def random_row(rng: random.Random) -> dict[str, Any]:
    chat = [{"role": "system", "content": ""}] if rng.random() < 0.5 else []
    for _ in range(rng.randrange(3)):
        chat.append(user("é 🎉\n") | ({"name": "Ann"} if rng.random() < 0.5 else {}))
        chat.append(says("ok") if rng.random() < 0.5 else {"role": "assistant", "tool_calls": [CALL]})
        if "tool_calls" in chat[-1]:
            chat.append({"role": "tool", "content": "5", "tool_call_id": "1"})
    answer = rng.choice([rng.randrange(10**6), float(rng.randrange(9)), rng.randrange(1000) / 1000, "x"])
    return {"prompt": [*chat, user(f"{rng.random()}")], "answer": answer, "level": rng.choice([None, 1])}


@pytest.mark.parametrize("answers", ["numbers", "mixed"])
def test_every_kind_of_file_gives_the_same_prompts(
    answers: str, tmp_path: Path, rng: random.Random, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [random_row(rng) for _ in range(40)]
    if answers == "numbers":  # a column of one type
        rows = [row for row in rows if row["answer"] != "x"]
    expected = [(one.token_ids, one.messages, one.text, one.answer) for one in load(write_jsonl(*rows))]
    (tmp_path / "folder").mkdir()
    folder = tmp_path / "folder" / "train.jsonl"
    folder.write_text("".join(json.dumps(row) + "\r\n" for row in rows), encoding="utf-8-sig")
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8-sig")
    as_text = [{**row, "prompt": json.dumps(row["prompt"])} for row in rows]
    sources = [folder, tmp_path / "rows.json", write_jsonl(*as_text, name="text.jsonl"), f"hf:{tmp_path}/folder"]
    loaded = datasets.load_dataset(str(tmp_path / "folder"), split="train")
    loaded.to_parquet(str(tmp_path / "datasets.parquet"))
    loaded.save_to_disk(str(tmp_path / "saved"))
    sources += [tmp_path / "datasets.parquet", f"hf:{tmp_path}/saved"]
    if answers == "numbers":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "arrow.parquet")
        pandas.DataFrame(rows).to_parquet(tmp_path / "pandas.parquet")
        sources += [tmp_path / "arrow.parquet", tmp_path / "pandas.parquet"]
    for source in sources:
        assert [(one.token_ids, one.messages, one.text, one.answer) for one in load(source)] == expected, source


@pytest.mark.parametrize(
    "value",
    [72, 72.0, "72", Decimal("72.00"), numpy.int64(72), numpy.float32(72), numpy.array(72)],
    ids=lambda value: type(value).__name__,
)
def test_a_number_is_the_same_answer_in_each_type(value: Any) -> None:
    assert as_answer(value, "answer") == "72"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.5"),
        (1e-05, "0.00001"),
        (-0.0, "0"),
        (100.0, "100"),
        (10**30, f"1{'0' * 30}"),
        (numpy.float32(0.1), "0.1"),
        (Decimal("2.50"), "2.5"),
        ("72.0", "72.0"),
        (datetime.date(2024, 5, 1), "2024-05-01"),
    ],
)
def test_digits_are_those_that_a_person_writes(value: Any, text: str) -> None:
    assert as_answer(value, "answer") == text


@pytest.mark.parametrize(
    ("value", "what"),
    [
        *((value, "must be text or a number, got") for value in (None, math.nan, math.inf, -math.inf, True, b"1")),
        *((value, "must be text or a number, got") for value in (["1"], {"a": 1}, Decimal("NaN"))),
        (datetime.datetime(2024, 5, 1), "name the .jsonl file itself without hf:; write it as text"),
        (1e17, "is 1e+17, a float that may have lost digits: write it as text"),
        (" \n", "is empty"),
        ("a\ud83d", "has half a character, '\\ud83d', at place 1"),
    ],
)
def test_what_is_no_answer_is_refused(value: Any, what: str) -> None:
    with pytest.raises(ValueError, match="column 'solution' ") as caught:
        as_answer(value, "solution")
    assert what in str(caught.value)


@pytest.mark.parametrize(
    ("chat", "shown"),
    [
        ([{**user("a"), "name": None, "tool_calls": None, "weight": None}], "<user>a;"),
        ([{**user("a"), "name": math.nan, "tool_calls": []}], "<user>a;"),
        ([user([{"type": "text", "text": "a", "image_url": None}, {"type": "text", "text": "b"}])], "<user>ab;"),
        (f" {json.dumps([user('a'), says('b', weight=0), user('c')])}\n", "<user>a;<assistant>b;<user>c;"),
        (numpy.array([user("a")]), "<user>a;"),
        ([user("a"), says(None, tool_calls=[CALL]), user("b")], '<user>a;<assistant>{"a": 2, "b": null};<user>b;'),
        ([user("a"), says("", tool_calls=[CALLED]), user("b")], '<user>a;<assistant>{"a": 2};<user>b;'),
        ([says(None, tool_calls=json.dumps([CALL])), user("b")], '<assistant>{"a": 2, "b": null};<user>b;'),
        ([says("hello"), user("a")], "<assistant>hello;<user>a;"),
        ('[{"value": 3}]', '<user>[{"value": 3}];'),  # no chat
        ("[see 'role': x]", None),
    ],
)  # fmt: skip
def test_a_chat_is_shown_without_what_its_table_has_filled_in(chat: Any, shown: str | None) -> None:
    from hocket.data.prompts import renderer_of

    renderer = renderer_of(DataConfig(), of_tags(TEMPLATE))
    if shown is None:
        with pytest.raises(ValueError, match=r"column 'prompt' is a chat as text, but not as JSON: .*json\.dumps"):
            columns_of({"prompt": chat}, ["prompt"])
        return
    text, messages = renderer.prompt(columns_of({"prompt": chat}, ["prompt"]))
    assert text == f"{shown}<assistant>"
    assert all("weight" not in message for message in messages or ())


@pytest.mark.parametrize(
    ("chat", "what"),
    [
        ([{"from": "human", "value": "a"}], "rename 'from' to 'role' (human: user, gpt: assistant) and 'value' to 'c"),
        ([{"role": "human", "content": "a"}], "message 0 of column 'x' has the role 'human', which chat temp"),
        ([user("a"), {"role": "Assistant ", "content": "a"}], "has the role 'Assistant ', which chat templates do"),
        ([user("a"), {"role": None, "content": "a"}], "message 1 of column 'x' must be {'role': text"),
        ([user(math.nan)], "message 0 of column 'x' must be {'role': text"),
        ([user([{"type": "image"}, {"type": "text", "text": "a"}])], ": only models that take images have parts"),
        ([user(" \n")], "column 'x' has an empty turn of the user: remove it"),
        ([says("\t", weight=1)], "column 'x' has an empty turn of the assistant: remove it"),
        ([{"role": "tool", "content": None}], "message 0 of column 'x' must be {'role': text"),
        ([says(None, function_call={"name": "add"})], "has a function_call, which chat templates leave out"),
        ([says("", tool_calls="add")], "must have a list of tool_calls, got 'add'"),
        ([says("a", weight=0.5)], "is marked {'weight': 0.5}, but a turn is taught (1) or only shown (0)"),
        ([says("a", loss_mask=[1, 0])], "is marked {'loss_mask': [1, 0]}, but a turn is"),
        ([user("a") | {"train": True}], "is marked {'train': True}, but only turns of the assistant are taught"),
        ([user("a\ud83d")], "column 'x' has half a character"),
    ],
)  # fmt: skip
def test_a_message_that_is_none_is_refused_with_the_fix(chat: Any, what: str) -> None:
    with pytest.raises(ValueError, match="column 'x'") as caught:
        checked(columns_of({"x": chat}, ["x"])["x"], "x")
    assert what in str(caught.value)


def test_columns_that_are_not_read_stay_as_they_are() -> None:
    row = {"prompt": "a", "messages": '[{"role": "user", "content": null}]', "more": "\ud800", "one": numpy.array([1])}
    assert columns_of(row, ["prompt"]) == row


def test_a_system_prompt_is_for_all_that_have_none_of_their_own(
    write_jsonl: Write, caplog: pytest.LogCaptureFixture
) -> None:
    own = [{"role": "system", "content": "own"}, user("a")]
    tokenizer = of_tags(TEMPLATE)

    def data(*rows: Any) -> DataConfig:
        return DataConfig(source=write_jsonl(*rows), system_prompt="Be brief.")

    rows = [{"prompt": "a", "answer": 1}, {"prompt": [user("a")], "answer": 1}]
    kept = {"prompt": own, "answer": 1}
    with caplog.at_level(logging.WARNING):
        two, _ = load_prompts(data(*rows), tokenizer, max_prompt_tokens=99)
        assert not caplog.records
        three, _ = load_prompts(data(*rows, kept, kept), tokenizer, max_prompt_tokens=99)
    shown = "<system>Be brief.;<user>a;<assistant>"
    assert [tokenizer.decode(one.token_ids) for one in two] == [shown] * 2
    assert tokenizer.decode(three[2].token_ids) == "<system>own;<user>a;<assistant>"
    (record,) = caplog.records
    said = "rows.jsonl that have a system message of their own keep it; data.system_prompt is for the others"
    assert record.getMessage().endswith(said)


def test_it_is_said_that_a_run_shows_its_own_tools_and_not_those_of_a_row(
    write_jsonl: Write, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)  # which another test may have raised
    tools = [{"name": "add"}]
    row = {"response": "b", "chosen": "b", "rejected": "c", "answer": "b", "tools": json.dumps(tools)}
    data = DataConfig(source=write_jsonl({"prompt": [user("a")], **row}, {"prompt": "a", **row}))
    tokenizer = of_tags(STOCK)
    two, _ = load_prompts(data, tokenizer, max_prompt_tokens=99)
    assert tokenizer.decode(two[0].token_ids) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert json.loads(two[0].meta["tools"]) == tools
    (record,) = caplog.records
    assert "the column 'tools' of" in record.getMessage()
    assert record.getMessage().endswith("shown the tools of env.tools alone, which the environment can call")


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.jsonl", b'{"prompt": "a", "answer": "1", "answer": "2"}\n', "a.jsonl:1: the key 'answer' stands tw"),
        ("a.jsonl", b'{"prompt": "a", "answer": "1", "x": {"y": 1, "y": 1}}\n', "a.jsonl:1: the key 'y' stands tw"),
        ("a.json", b'[{"prompt": "a", "prompt": "b", "answer": "1"}]', "is not valid JSON: the key 'prompt' stands tw"),
        ("a.jsonl", '{"prompt": "é", "answer": "1"}\n'.encode("latin-1"), "a.jsonl:1: 'utf-8' codec can't decode byte"),
        ("a.jsonl", '{"prompt": "a", "answer": 1}\n{}\n'.encode("utf-16"), "a line is one object in UTF-8"),
        ("a.jsonl", b'{"prompt": ' + b"[" * 9999 + b"]" * 9999 + b"}", "a.jsonl:1: maximum recursion depth"),
        ("a.json", b"[" * 9999, "a.json is not valid JSON: maximum recursion depth"),
        ("a.jsonl", b"\n\r\n", "a.jsonl has no rows"),
        ("a.json", b"", "a.json is not valid JSON: Expecting value"),
        ("a.jsonl.gz", b"", "a.jsonl.gz is none of file.jsonl, file.json, file.parquet"),
        ("a.parquet", b"", "a.parquet is not a readable parquet file"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_such_file_is_refused(name: str, content: bytes, what: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load(write(tmp_path / name, content))
    assert what in str(caught.value)


def test_a_table_that_can_not_be_read_rightly_is_refused_and_its_short_floats_and_maps_are(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(
        pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 3, names=["prompt", "answer", "answer"]), path
    )
    with pytest.raises(DataError, match=r"a\.parquet has two columns called 'answer': rename one of them"):
        load(path)
    buffers = [None, pyarrow.py_buffer(numpy.array([0, 1], numpy.int32)), pyarrow.py_buffer(b"\xff")]
    text = pyarrow.Array.from_buffers(pyarrow.string(), 1, buffers)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": text, "answer": ["a"]}), path)
    with pytest.raises(DataError, match=r"a\.parquet is not readable: 'utf-8' codec can't decode byte 0xff"):
        load(path)
    kind = pyarrow.list_(pyarrow.map_(pyarrow.string(), pyarrow.string()))
    chats = pyarrow.array([[[("role", "user"), ("content", "hi")]]] * 2, kind)
    for short in (pyarrow.float16(), pyarrow.float32()):
        numbers = pyarrow.array([0.1, 7], pyarrow.float32()).cast(short)
        pyarrow.parquet.write_table(pyarrow.table({"prompt": chats, "answer": numbers}), path)
        assert [(one.messages, one.answer) for one in load(path)] == [((user("hi"),), "0.1"), ((user("hi"),), "7")]


@pytest.mark.parametrize("short", [pyarrow.float16(), pyarrow.float32()])
def test_short_floats_have_the_digits_of_their_json_within_lists_and_objects_too(
    short: pyarrow.DataType, tmp_path: Path
) -> None:
    row = {"boxes": [[0.1, None], []], "grade": {"score": 0.3, "n": 1}, "rates": [0.7, 2.0], "by_name": {"a": 0.2}}
    kinds = {
        "boxes": pyarrow.list_(pyarrow.large_list(short)),
        "grade": pyarrow.struct({"score": short, "n": pyarrow.int64()}),
        "rates": pyarrow.list_(short, 2),
        "by_name": pyarrow.map_(pyarrow.string(), short),
    }
    written = row | {"by_name": [("a", 0.2)]}
    arrays = [pyarrow.array([numpy_of(written[name], short)], kind) for name, kind in kinds.items()]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, names=list(kinds)), path)
    assert [columns for _, columns in read_rows(DataConfig(source=str(path)))] == [row]


def numpy_of(value: Any, short: pyarrow.DataType) -> Any:
    """Replaces the floats of a value by numpy's of an Arrow type: pyarrow makes no float16 of others."""
    if isinstance(value, list | tuple):
        return type(value)(numpy_of(part, short) for part in value)
    if isinstance(value, dict):
        return {name: numpy_of(part, short) for name, part in value.items()}
    return short.to_pandas_dtype()(value) if isinstance(value, float) else value


def test_a_column_of_mixed_types_is_what_its_json_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"prompt": "a", "answer": "x", "n": {"a": 1}}, {"prompt": "b", "answer": 2, "n": {"a": "y"}}]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row for _, row in read_rows(DataConfig(source=f"hf:{tmp_path}/folder"))] == rows


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"question": "a", "solution": "so #### 5 "}, "5"),
        ({"question": "a", "solution": 5.0}, "5"),  # cut out already
        ({"prompt": "a", "answer": "5"}, "5"),
        ({"prompt": "a", "answer": "so #### 5"}, "5"),
        ({"prompt": "a", "answer": None}, None),
        ({"prompt": "a"}, None),
    ],
)
def test_a_sample_has_the_columns_of_its_section_or_prompt_and_answer(row: Any, answer: str | None) -> None:
    data = DataConfig(prompt_column="question", answer_column="solution", answer_pattern="#### (.+)")
    sample = sample_of({**row, "completion": "5", "level": 3}, data)
    assert (sample["prompt"], sample["answer"], sample["meta"]) == ("a", answer, {"level": 3})


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "a", "answer": math.nan}, "column 'answer' must be text or a number, got nan"),
        ({"prompt": "a\ud83d"}, "column 'prompt' has half a character"),
        ({"prompt": 3}, "column 'prompt' must be text or a list of messages, got 3"),
        ({"messages": [{"from": "human", "value": "a"}]}, "rename 'from' to 'role'"),
    ],
)
def test_a_sample_that_is_none_is_refused(row: Any, what: str) -> None:
    with pytest.raises(ValueError, match="column '") as caught:
        sample_of(row, DataConfig())
    assert what in str(caught.value)
