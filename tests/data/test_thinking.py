"""Where a thought begins and ends with chat templates in the shape of well-known ones."""

from collections.abc import Callable
from typing import Any

import pytest

from hocket.config import DataConfig
from hocket.data.prompts import load_prompts, renderer_of
from hocket.errors import DataError
from hocket.rewards import builtin
from support.records import says, user
from support.tokenizers import OFF, TEMPLATES, of_tags

OPENINGS = {"Qwen3-Thinking": "<think>\n", "R1-Distill": "<think>\n"}

WHOLE, CLOSED, ABSENT, CUT_OFF = "<think>6*7</think>42", "6*7</think>42", "42", "6*7 is 42, but wait"
OPENED, NESTED = "<think>6*7 is 42, but", "<think>6<think>7</think>42"
REPEATED, AGAIN = "<think>6</think>41<think>7</think>42", "<think>6</think>42<think>hm"
# By what the prompt ends with, what `math` and `think_format` give.
REWARDS = {
    "": {WHOLE: (1, 1), CLOSED: (1, 0), ABSENT: (1, 0), CUT_OFF: (1, 0), OPENED: (0, 0), NESTED: (1, 0)}
    | {REPEATED: (1, 0), AGAIN: (0, 0)},
    "<think>\n": {WHOLE: (1, 0), CLOSED: (1, 1), ABSENT: (0, 0), CUT_OFF: (0, 0), OPENED: (0, 0), NESTED: (1, 0)}
    | {REPEATED: (1, 0), AGAIN: (0, 0)},
    "<think>\n\n</think>\n\n": {WHOLE: (1, 0), CLOSED: (1, 0), ABSENT: (1, 1), CUT_OFF: (1, 1), OPENED: (0, 0)}
    | {NESTED: (1, 0), REPEATED: (1, 0), AGAIN: (0, 0)},
}


@pytest.mark.parametrize("options", [{}, OFF], ids=["as it is", "thinking off"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_what_transformers_makes_of_them_and_rewards_know_how_they_end(
    name: str, options: dict[str, Any], write_jsonl: Callable[..., str]
) -> None:
    tokenizer, asked = of_tags(TEMPLATES[name]), [user("What is 6*7?")]
    rows = write_jsonl({"prompt": "What is 6*7?", "answer": "42"})
    data = DataConfig(source=rows, chat_template=options)
    ((prompt,), *_) = load_prompts(data, tokenizer, max_prompt_tokens=200)
    expected = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False, **options)
    assert list(prompt.token_ids) == expected
    assert prompt.opening == ("<think>\n\n</think>\n\n" if name == "Qwen3" and options else OPENINGS.get(name, ""))
    for completion, (right, formed) in REWARDS[prompt.opening].items():
        assert builtin.math(completion, prompt.answer, prompt.opening) == right, completion
        assert builtin.think_format(completion, prompt.opening) == formed, completion
    # between two turns stands what the template writes there
    more = user("And 6*8?")
    whole = tokenizer.apply_chat_template([*asked, says("42"), more], tokenize=False,
                                          add_generation_prompt=True, **options)  # fmt: skip
    following = renderer_of(data, tokenizer).following([more], ended=None)
    assert tokenizer.decode(following) == whole.partition("42")[2]


def test_a_tokenizer_that_hides_the_end_of_a_thought_from_rewards_and_hockets_options_are_refused() -> None:
    with pytest.raises(ValueError, match="tokenize can't be set, as hocket sets it"):
        DataConfig(chat_template={"tokenize": True})
    tokenizer = of_tags(TEMPLATES["Qwen3"])
    assert load_prompts(DataConfig(limit=1), tokenizer, max_prompt_tokens=200)
    tokenizer.add_tokens("</think>", special_tokens=True)
    with pytest.raises(DataError, match='set "special": false'):
        load_prompts(DataConfig(limit=1), tokenizer, max_prompt_tokens=200)
