"""Rows of demonstrations and preferences as tools write them: marks, tools, system prompts."""

import json
import logging
from typing import Any

import pytest
from tests.data.test_columns import CUT_CALL, TEMPLATE, Write

from hocket.config import DataConfig
from hocket.errors import DataError
from hocket.extras.stages.demonstrations import load_demonstrations
from hocket.extras.stages.preferences import load_preferences
from support.records import says, user
from support.tokenizers import STOCK, of_tags


@pytest.mark.parametrize("mark", ["weight", "train", "training", "trainable", "loss", "loss_mask"])
@pytest.mark.parametrize("values", [(0, 1), (False, True), (0.0, None)])
def test_a_turn_that_is_marked_is_shown_and_not_taught(mark: str, values: Any, write_jsonl: Write) -> None:
    bad, good = values
    chat = [
        says("hello", **{mark: bad}),
        user("a"),
        says("bad", **{mark: bad}),
        user("b"),
        says("good", **{mark: good}),
    ]
    chat += [user("c"), says("bad", **{mark: bad})]
    tokenizer = of_tags(TEMPLATE)
    shown = "<assistant>hello;<user>a;<assistant>bad;<user>b;<assistant>good;"
    whole = {"messages": chat}
    pair = {"chosen": chat[1:5], "rejected": [*chat[1:4], says("worse")]}
    (sample,) = load_demonstrations(DataConfig(source=write_jsonl(whole)), tokenizer, 999)
    (both,) = load_preferences(DataConfig(source=write_jsonl(pair)), tokenizer, 999)
    for row, text in (sample, shown), (both.chosen, shown.removeprefix("<assistant>hello;")):
        told = [token for token, taught in zip(row.token_ids, row.mask, strict=True) if taught]
        assert tokenizer.decode(told).startswith("good")
        assert "bad" not in tokenizer.decode(told)
        assert tokenizer.decode(list(row.token_ids)).startswith(text.rstrip(";"))


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"messages": [user("a"), says("b", weight=0)]}, "no turn of the assistant is taught, as all have the"),
        ({"messages": [says("a"), user("b"), says("c")]}, "message 0 is the assistant's, and answers nothing: mark it"),
        ({"prompt": "a", "response": [says("b", weight=0)]}, "column 'response' must be text or one message of the"),
        ({"prompt": "a", "response": " \n"}, "column 'response' must be text or one message"),
        ({"prompt": "a", "response": "b\udc00"}, "column 'response' has half a character, '\\udc00', at place 1"),
        ({"messages": [user("a"), says("b")], "tools": '[{"name": "\\ud83d"}]'}, "column 'tools' has half a character"),
        ({"messages": [user("a"), says("", tool_calls=[CUT_CALL])]}, "the rendered text has half a character"),
    ],
)  # fmt: skip
def test_a_conversation_that_can_not_be_taught_is_named_by_row(row: Any, what: str, write_jsonl: Write) -> None:
    good = {"messages": [user("a"), says("b")]}
    source = write_jsonl(good, row)
    with pytest.raises(DataError) as caught:
        load_demonstrations(DataConfig(source=source), of_tags(STOCK), 99)
    assert f"{source}:2: " in str(caught.value)
    assert what in str(caught.value)


def test_a_system_prompt_is_for_all_that_have_none_of_their_own_also_where_they_are_taught(write_jsonl: Write) -> None:
    tokenizer = of_tags(TEMPLATE)

    def data(*rows: Any) -> DataConfig:
        return DataConfig(source=write_jsonl(*rows), system_prompt="Be brief.")

    shown = "<system>Be brief.;<user>a;<assistant>"
    (taught,) = load_demonstrations(data({"messages": [user("a"), says("b")]}), tokenizer, 99)
    asked, whole = {"prompt": "a"}, [user("a")]
    answers = {"chosen": [says("b")], "rejected": [says("c")]}
    pairs = load_preferences(
        data(
            {**asked, **answers},
            {**answers, "prompt": whole},
            {side: whole + answer for side, answer in answers.items()},
        ),
        tokenizer,
        99,
    )
    for row in (taught, *(pair.chosen for pair in pairs)):
        assert tokenizer.decode(list(row.token_ids)).startswith(f"{shown}b")


def test_tools_of_a_row_are_shown_where_its_answer_is_taught(
    write_jsonl: Write, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)  # which another test may have raised
    tools = [{"name": "add"}]
    answers = {"response": "b", "chosen": "b", "rejected": "c", "answer": "b", "tools": json.dumps(tools)}
    tokenizer = of_tags(STOCK)
    shown = '<|im_start|>system\n[{"name": "add"}]<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n'
    for prompt in ("a", [user("a")]):
        data = DataConfig(source=write_jsonl({"prompt": prompt, **answers}, {"prompt": "a", **answers}))
        rows = [*load_demonstrations(data, tokenizer, 99)]
        rows += [pair.chosen for pair in load_preferences(data, tokenizer, 99)]
        assert [tokenizer.decode(row.token_ids) for row in rows] == [f"{shown}b<|im_end|>"] * 4
        plain = data.model_copy(update={"chat_template": False})
        with pytest.raises(DataError, match=r"tools are shown by the chat template|messages need data\.chat_template"):
            load_demonstrations(plain, tokenizer, 99)
    assert not caplog.records
