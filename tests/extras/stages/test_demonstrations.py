"""Rows become demonstrations: of a conversation, the turns of the assistant are taught, behind what it would read."""

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers.pre_tokenizers import Metaspace

from hocket.config import DataConfig, HeldOutConfig
from hocket.errors import DataError
from hocket.extras.stages.demonstrations import load_demonstrations
from hocket.types import TokenSequence
from support.records import read_and_taught, says, user
from support.tokenizers import HARMONY, OFF, STOCK, TEMPLATES, make_tokenizer, of_tags

Write = Callable[..., str]
TURNS = ("<think>a</think>1", "<think>b</think>2")


def shown(rows: Sequence[TokenSequence], tokenizer: Any) -> list[str]:
    """Each row as text, with what is taught in «quotes»."""
    texts = []
    for row in rows:
        parts = [i for i in range(len(row.mask)) if i == 0 or row.mask[i] is not row.mask[i - 1]]
        spans = zip(parts, [*parts[1:], len(row.mask)], strict=True)
        decoded = [(tokenizer.decode(list(row.token_ids[a:b])), row.mask[a]) for a, b in spans]
        texts.append("".join(f"«{text}»" if on else text for text, on in decoded))
    return texts


def test_every_turn_of_the_assistant_is_taught_with_its_end_and_nothing_else(
    bos_tokenizer: Any, write_jsonl: Write
) -> None:
    chat = [user("a b"), says("c"), user("d"), says("e a")]
    # <s> user a b <eot> assistant c <eot> user d <eot> assistant e a <eot>
    tokens = (0, 8, 3, 4, 2, 9, 5, 2, 8, 6, 2, 9, 7, 3, 2)
    (whole,) = load_demonstrations(DataConfig(source=write_jsonl({"messages": chat})), bos_tokenizer, 20)
    assert tuple(whole.token_ids) == tokens
    assert "".join(str(int(on)) for on in whole.mask) == "000000" + "11" + "0000" + "111"
    assert list(tokens) == bos_tokenizer.apply_chat_template(chat)["input_ids"]
    for row, columns in (
        ({"conversation": chat[:2]}, {"prompt_column": "conversation"}),
        ({"prompt": "a b", "response": "c", "messages": chat}, {}),
        ({"prompt": chat[:1], "completion": chat[1:2]}, {"response_column": "completion"}),  # as TRL's
    ):
        data = DataConfig(source=write_jsonl(row), **columns)
        assert [*map(read_and_taught, load_demonstrations(data, bos_tokenizer, 20))] == [([0, 8, 3, 4, 2, 9], [5, 2])]


@pytest.mark.parametrize("options", [{}, OFF], ids=["as it is", "thinking off"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_each_turn_is_taught_behind_what_the_model_reads_before_it(
    name: str, options: dict[str, Any], write_jsonl: Write
) -> None:
    tokenizer = of_tags(TEMPLATES[name])
    chat = [user("x"), says(TURNS[0]), user("y"), says(TURNS[1])]

    def load(row: Any) -> list[TokenSequence]:
        return load_demonstrations(DataConfig(source=write_jsonl(row), chat_template=options), tokenizer, 500)

    samples = load({"messages": chat})
    one_by_one = [load({"prompt": chat[:n], "response": chat[n]["content"]})[0] for n in (1, 3)]
    # R1-Distill leaves thoughts out, this Qwen3 the empty one of the prompt; Qwen3-Thinking has <think>a, not <think>\n
    splits = name in ("R1-Distill", "Qwen3-Thinking") or (name == "Qwen3" and options)
    if splits:
        assert samples == one_by_one
    else:
        (whole,) = samples
        told = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False, **options)
        assert list(whole.token_ids) == told[: len(whole.token_ids)]
        assert tokenizer.decode(told[len(whole.token_ids) :]) in ("", "\n")
        ends = [tokenizer.decode(row.token_ids[-1:]) for row in one_by_one]
        space = " " if name == "Mistral" else ""  # of the template, before each turn
        said = [f"{space}{turn}{end}" for turn, end in zip(TURNS, ends, strict=True)]
        assert tokenizer.decode(read_and_taught(whole)[1]) == "".join(said)


def test_calls_and_thoughts_are_taught_and_old_thoughts_are_in_no_sample_that_the_template_keeps_without_them(
    write_jsonl: Write,
) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": null}'}, "index": None}
    chat = [user("2+3?"), says(None, reasoning_content="add", tool_calls=[call]), {"role": "tool", "content": "5"}]
    chat += [says("5", reasoning_content="so"), user("Thanks"), says("Bye", tool_calls=None)]
    row = {"messages": chat, "tools": json.dumps([{"name": "add", "strict": None}])}
    tokenizer = of_tags(STOCK)
    first, second = shown(load_demonstrations(DataConfig(source=write_jsonl(row)), tokenizer, 500), tokenizer)
    read = '<|im_start|>system\n[{"name": "add"}]<|im_end|>\n<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n'
    called = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": null}}<|im_end|>'
    told = "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
    assert first == f"{read}«<think>\nadd\n</think>\n\n{called}»{told}«<think>\nso\n</think>\n\n5<|im_end|>»"
    asked = "\n<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n"
    assert second == f"{read}{called}{told}5<|im_end|>{asked}«<think>\n\n</think>\n\nBye<|im_end|>»"


def test_a_turn_with_an_end_of_its_own_is_taught_with_that(write_jsonl: Write) -> None:
    chat = [user("x"), says("", tool_calls=[{}]), {"role": "tool", "content": "1"}, says("one"), user("y"), says("two")]
    tokenizer = of_tags(HARMONY)
    data = DataConfig(source=write_jsonl({"messages": chat}))
    first, second = shown(load_demonstrations(data, tokenizer, 99), tokenizer)
    read, called = "<|im_start|>user:x<|im_end|><|im_start|>assistant:", "<tool_call><|call|>"
    told = "<|im_start|>tool:1<|im_end|><|im_start|>assistant:"
    assert first == f"{read}«{called}»{told}«one<|return|>»"
    asked = "<|im_end|><|im_start|>user:y<|im_end|><|im_start|>assistant:"
    assert second == f"{read}{called}{told}one{asked}«two<|return|>»"


def test_a_tokenizer_that_puts_a_space_before_any_text_puts_none_before_a_turn(write_jsonl: Write) -> None:
    words = ["<s>", "</s>", "\u2581", "\n", *"abu:", "a\n", "\nb"]
    merges = [("a", "\n"), ("\n", "b")]
    split = Metaspace(prepend_scheme="always", split=False)  # as Llama 2's
    template = (
        "{% for m in messages %}{{ m.role[0] }}:\n{{ m.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}a:\n{% endif %}"
    )
    fast = make_tokenizer(words, template, split=split, merges=merges, bos_token="<s>", eos_token="</s>")
    chat = [user("a"), says("a"), user("a"), says("b")]
    (row,) = load_demonstrations(DataConfig(source=write_jsonl({"messages": chat})), fast, 99)
    read, taught = read_and_taught(row)
    assert fast.convert_ids_to_tokens(taught)[:2] == ["a", "</s>"]
    # "\nb" is one token, but the model reads "\n" before it writes "b": encoded alone, with its space
    assert fast.convert_ids_to_tokens(taught)[2:] == ["\u2581", "b", "</s>"]
    assert fast.convert_ids_to_tokens(read)[:4] == ["\u2581", "u", ":", "\n"]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"messages": [user("x"), says("y"), user("z")]}, "ends with a message of 'user', which nothing answers"),
        ({"messages": []}, "column 'messages' must be text or a list of messages, got []"),
        ({"messages": [user("x"), says(None)]}, "column 'messages' has an empty turn of the assistant"),
        ({"messages": [{"content": "x"}, says("y")]}, "message 0 of column 'messages' must be {'role': text"),
        ({"prompt": [user("x")], "response": [says("y"), user("z")]}, "must be text or one message of the assistant"),
        (
            {"prompt": [user("x")], "response": [says("y", tool_calls=[{}])]},
            "or one message of the assistant (else join",
        ),
        ({"messages": [user("x"), says("y")], "tools": "add"}, "Expecting value"),
        ({"messages": [user("x"), says("y")], "tools": {"a": 1}}, "Tools should either be a JSON schema"),
        ({"prompt": "x"}, "or eval.data.prompt_column to one of whole conversations, or eval.num_prompts=0"),
        ({"messages": [user("x"), says("", tool_calls=[{}])]}, "does not write message 1 as it lets the model begin"),
        (
            {"messages": [user("x"), says("<think>\ny", tool_calls=[{"name": "add"}])]},
            "leaves the tool calls of message 1",
        ),
        ({"messages": [user("x"), says("y")]}, "message 1 never closes it: begin it with the thought and </think>"),
    ],
)
def test_a_conversation_that_teaches_nothing_is_named_by_file_and_line(row: Any, what: str, write_jsonl: Write) -> None:
    source, tokenizer = write_jsonl("", row), of_tags(TEMPLATES["Qwen3-Thinking"])
    with pytest.raises(DataError) as caught:
        load_demonstrations(HeldOutConfig(source=source), tokenizer, 99)
    assert f"{source}:2: " in str(caught.value)
    assert what in str(caught.value)


def test_without_a_template_the_tokenizers_own_token_ends_a_demonstration(
    bos_tokenizer: Any, write_jsonl: Write
) -> None:
    bos_tokenizer.chat_template = None
    source = write_jsonl({"prompt": "a b", "answer": "c d"})
    said = r"put one as chat_template\.jinja into its folder, or set data\.chat_template=false"
    with pytest.raises(DataError, match=said):
        load_demonstrations(DataConfig(source=source), bos_tokenizer, 20)
    plain = DataConfig(source=source, chat_template=False, response_column="answer")
    (row,) = load_demonstrations(plain, bos_tokenizer, 20)
    assert read_and_taught(row) == ([0, 3, 4], [5, 6, 1])


def test_a_template_that_hides_the_assistants_text_teaches_nothing(write_jsonl: Write) -> None:
    tokenizer = of_tags("{% for m in messages if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    data = DataConfig(source=write_jsonl({"prompt": "x", "response": "y"}))
    with pytest.raises(DataError, match="does not show what the assistant said"):
        load_demonstrations(data, tokenizer, 20)


@pytest.mark.parametrize("chat_template", [True, False])
@pytest.mark.parametrize("response", ["b<|end|>", "b<|end|><|user|>c<|end|>"])
def test_a_special_token_that_a_response_spells_is_said_once(
    response: str, chat_template: bool, tokenizer: Any, write_jsonl: Write, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)  # which another test may have raised
    source = write_jsonl({"prompt": "a", "response": response}, {"prompt": "a", "response": "<|end|>"})
    load_demonstrations(DataConfig(source=source, chat_template=chat_template), tokenizer, 20)
    assert caplog.text.count("a text spells '<|end|>', which is read as that special token") == 1
    assert ("or set data.chat_template=false" in caplog.text) is chat_template  # which is no way out of itself


def test_over_long_demonstrations_are_left_out_and_those_without_a_response_refused(
    tokenizer: Any, write_jsonl: Write, caplog: pytest.LogCaptureFixture
) -> None:
    data = DataConfig(source=write_jsonl(*({"prompt": "a", "response": "b" * n} for n in (1, 5, 6))))
    with caplog.at_level(logging.WARNING):
        rows = load_demonstrations(data, tokenizer, 10)  # 4 + 5 + 1 tokens just fit
    assert [len(row.token_ids) for row in rows] == [6, 10]
    assert "left out 1 of 3 demonstrations with more than" in caplog.text
    with pytest.raises(DataError, match=r"all rows of .* have more than 5 tokens, .*the longest has 11: shorten"):
        load_demonstrations(data, tokenizer, 5)
    write_jsonl({"prompt": "a", "response": ""}, {"prompt": "a", "response": 3})
    with pytest.raises(DataError, match=r"(?s)column 'response' must be text or .*, got ''.*got 3"):
        load_demonstrations(data, tokenizer, 10)
