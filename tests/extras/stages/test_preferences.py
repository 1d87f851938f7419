"""Rows of preferences become pairs of sequences behind one prompt, as TRL's rows do but for what is said here."""

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from tests.extras.stages.test_demonstrations import shown

from hocket.config import DataConfig
from hocket.errors import DataError
from hocket.extras.stages.preferences import Preference, load_preferences
from support.records import read_and_taught, says, user
from support.tokenizers import STOCK, TEMPLATES, of_tags

Write = Callable[..., str]
ASKED = [user("a b")]
BOTH = {"chosen": [says("c")], "rejected": [says("d e")]}
WHOLE = {name: ASKED + said for name, said in BOTH.items()}


def sides(pair: Preference) -> list[tuple[list[int], list[int]]]:
    """The tokens of each side that are read and those that are taught."""
    return [read_and_taught(side) for side in (pair.chosen, pair.rejected)]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a b", "chosen": "c", "rejected": "d e"},
        {"prompt": ASKED, "chosen": "c", "rejected": [says("d e")]},
        {"prompt": ASKED, **BOTH},
        {"prompt": "a b", **BOTH},
        WHOLE,
        {"prompt": "another text", **WHOLE},  # as in UltraFeedback
    ],
)
def test_a_pair_has_the_same_tokens_however_it_is_written(row: Any, bos_tokenizer: Any, write_jsonl: Write) -> None:
    (pair,) = load_preferences(DataConfig(source=write_jsonl(row)), bos_tokenizer, 20)
    prompt = [0, 8, 3, 4, 2, 9]  # <s> user a b <eot> assistant
    assert sides(pair) == [(prompt, [5, 2]), (prompt, [6, 7, 2])]
    assert pair.margin is None


def test_a_plain_text_ends_with_the_tokenizers_own_token_and_a_margin_is_kept(
    bos_tokenizer: Any, write_jsonl: Write
) -> None:
    row = {"question": "a b", "chosen": "c", "rejected": "d e"}
    data = DataConfig(source=write_jsonl({**row, "margin": 2}, row), chat_template=False, prompt_column="question")
    first, second = load_preferences(data, bos_tokenizer, 20)
    assert sides(first) == [([0, 3, 4], [5, 1]), ([0, 3, 4], [6, 7, 1])]
    assert (first.margin, second.margin) == (2.0, None)


def test_of_several_turns_those_of_the_assistant_behind_the_common_ones_are_taught(write_jsonl: Write) -> None:
    call = says("", reasoning_content="add", tool_calls=[{"function": {"name": "add", "arguments": {"a": 2}}}])
    before = [user("x"), says("y"), user("2+3?")]
    row = {"chosen": [*before, call, {"role": "tool", "content": "5"}, says("5", reasoning_content="so")]}
    row["rejected"] = [*before, says("6")]
    tokenizer = of_tags(STOCK)
    data = DataConfig(source=write_jsonl({**row, "tools": json.dumps([{"name": "add"}])}))
    (pair,) = load_preferences(data, tokenizer, 500)
    tools = '<|im_start|>system\n[{"name": "add"}]<|im_end|>\n'
    prompt = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in before)
    read = f"{tools}{prompt}<|im_start|>assistant\n"
    called = '<tool_call>{"name": "add", "arguments": {"a": 2}}<|im_end|>'
    told = "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
    first, last, none = (f"<think>\n{thought}\n</think>\n\n" for thought in ("add", "so", ""))
    assert shown([pair.chosen], tokenizer) == [f"{read}«{first}{called}»{told}«{last}5<|im_end|>»"]
    assert shown([pair.rejected], tokenizer) == [f"{read}«{none}6<|im_end|>»"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_are_trls_but_for_what_the_template_writes_behind_the_end_of_a_turn(
    name: str, write_jsonl: Write
) -> None:
    tokenizer = of_tags(TEMPLATES[name])
    answers = [says(f"<think>\n{thought}\n</think>\n\n{text}") for thought, text in (("a", "1"), ("b", "2"))]
    rows = {"chosen": [user("x"), answers[0]], "rejected": [user("x"), answers[1]]}
    (pair,) = load_preferences(DataConfig(source=write_jsonl(rows)), tokenizer, 500)
    asked = tokenizer.apply_chat_template([user("x")], add_generation_prompt=True, return_dict=False)
    assert sides(pair)[0][0] == sides(pair)[1][0] == asked
    for side, row in zip((pair.chosen, pair.rejected), rows.values(), strict=True):
        trl = tokenizer.apply_chat_template(row, return_dict=False)  # DPOTrainer._prepare_dataset of TRL 1.16
        differ = (i for i, both in enumerate(zip(side.token_ids, trl, strict=False)) if both[0] != both[1])
        common = next(differ, len(side.token_ids))
        behind = tokenizer.decode(trl[common:])
        drops_thought = name == "R1-Distill"  # TRL teaches no thought there, and drops the end of the prompt
        assert drops_thought or (common == len(side.token_ids) and behind in ("", "\n"))


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "x", "chosen": "y"}, "no columns 'chosen' and 'rejected', only 'prompt', 'chosen': rename"),
        ({"chosen": "x y", "rejected": "x z"}, "no column 'prompt', only 'chosen', 'rejected': set data"),
        ({"prompt": "x", "chosen": "y", "rejected": "y"}, "'chosen' and 'rejected' are equal: no one prefers either"),
        ({**WHOLE, "rejected": WHOLE["chosen"]}, "'chosen' and 'rejected' are equal: no one prefers either"),
        ({"prompt": "x", "chosen": "y", "rejected": ""}, "column 'rejected' must be text or one message of"),
        ({"prompt": ASKED, "chosen": None, "rejected": "y"}, "column 'chosen' must be text or one message of"),
        ({"prompt": ASKED, "chosen": None, "rejected": None}, "column 'chosen' must be text or a list of messages"),
        ({"prompt": ASKED, "chosen": 3, "rejected": []}, "column 'chosen' must be text or a list of messages, got 3"),
        ({"prompt": 3, "chosen": "y", "rejected": "z"}, "column 'prompt' must be text or a list of messages, got 3"),
        ({**WHOLE, "chosen": [user("x"), says("")]}, "column 'chosen' has an empty turn of the assistant: remove it"),
        ({**WHOLE, "rejected": [*ASKED, user("d")]}, "column 'rejected' ends with a message of 'user', which nothing"),
        ({**WHOLE, "rejected": [{"from": "gpt"}]}, "message 0 of column 'rejected' must be {'role': text, 'content'"),
        ({"chosen": [user("x"), says("y")], "rejected": [user("z"), says("y")]}, "'chosen' has a message of 'user'"),
        ({"prompt": ASKED, **WHOLE}, "column 'chosen' has a message of 'user' behind the prompt: chosen and rej"),
        ({**WHOLE, "chosen": [*ASKED, says("c"), user("d"), says("e")]}, "the chat template rewrites earlier turns"),
        ({**WHOLE, "tools": "add"}, "Expecting value"),
        *(
            ({"prompt": "x", "chosen": "y", "rejected": "z", "margin": margin}, "column 'margin' must be a finite")
            for margin in (float("nan"), float("inf"), "1", True)
        ),
    ],
)  # fmt: skip
def test_a_row_that_is_no_preference_is_named_by_file_and_line(row: Any, what: str, write_jsonl: Write) -> None:
    source, tokenizer = write_jsonl("", row), of_tags(STOCK)
    with pytest.raises(DataError) as caught:
        load_preferences(DataConfig(source=source), tokenizer, 99)
    assert f"{source}:2: " in str(caught.value)
    assert what in str(caught.value)


def test_messages_need_a_chat_template(tokenizer: Any, write_jsonl: Write) -> None:
    for row in (WHOLE, {"prompt": "x", **BOTH, "chosen": [says("c"), user("d"), says("e")]}):
        with pytest.raises(DataError, match=r"messages need data\.chat_template: true"):
            load_preferences(DataConfig(source=write_jsonl(row), chat_template=False), tokenizer, 99)


def test_a_pair_of_which_one_side_is_too_long_is_left_out(
    tokenizer: Any, write_jsonl: Write, caplog: pytest.LogCaptureFixture
) -> None:
    rows = ({"prompt": "a", "chosen": "b" * n, "rejected": "c"} for n in (2, 5, 6))
    data = DataConfig(source=write_jsonl(*rows))
    with caplog.at_level(logging.WARNING):
        found = load_preferences(data, tokenizer, 10)  # 4 + 5 + 1 tokens just fit
    assert [(len(pair.chosen.mask), len(pair.rejected.mask)) for pair in found] == [(7, 6), (10, 6)]
    assert "left out 1 of 3 pairs with more than 10 tokens" in caplog.text
    with pytest.raises(DataError, match=r"all rows of .* have more than 5 tokens, .*the longest has 11: shorten"):
        load_preferences(data, tokenizer, 5)


def test_a_whole_side_has_what_the_template_writes_behind_it_and_may_be_too_long_for_that(
    tokenizer: Any, write_jsonl: Write
) -> None:
    tokenizer.chat_template += "{% if messages[-1].role == 'assistant' %}abc{% endif %}"
    data = DataConfig(source=write_jsonl(*({"prompt": "a", "chosen": "b" * n, "rejected": "c"} for n in (2, 5))))
    sampled, whole = (load_preferences(data, tokenizer, 10, whole=whole) for whole in (False, True))
    assert [len(pair.chosen.mask) for pair in sampled] == [7, 10]
    assert [tuple(pair.chosen.token_ids) for pair in whole] == [
        (*sampled[0].chosen.token_ids, *tokenizer("abc", add_special_tokens=False)["input_ids"])
    ]
