"""Where a thought begins and ends in demonstrations, with chat templates in the shape of well-known ones."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.data.test_thinking import CLOSED, WHOLE

from hocket.config import DataConfig
from hocket.data.prompts import load_prompts
from hocket.errors import DataError
from hocket.extras.stages.demonstrations import load_demonstrations
from support.records import read_and_taught, user
from support.tokenizers import OFF, TEMPLATES, of_tags

END = {"Llama-3": "<|eot_id|>", "Gemma": "<end_of_turn>", "R1-Distill": "</s>", "Mistral": "</s>"}


@pytest.mark.parametrize(
    ("template", "options", "response", "trained"),
    [
        ("Qwen3-Thinking", {}, "<think>\n6*7</think>42", "6*7</think>42"),
        ("Qwen3-Thinking", {}, "42", None),
        ("Qwen3", OFF, "<think>\n\n</think>\n\n42", "42"),
        ("Qwen3", OFF, "42", "42"),
        ("Qwen3", {}, "42", "42"),
    ],
)
def test_a_demonstration_goes_on_from_the_thought_that_the_template_opens_and_closes_it(
    template: str, options: dict[str, Any], response: str, trained: str | None, write_jsonl: Callable[..., str]
) -> None:
    rows, tokenizer = write_jsonl({"prompt": "What is 6*7?", "response": response}), of_tags(TEMPLATES[template])
    data = DataConfig(source=rows, chat_template=options)
    if trained is None:
        with pytest.raises(DataError, match=r"rows\.jsonl:1: .* column 'response' never closes it: begin it with"):
            load_demonstrations(data, tokenizer, 200)
    else:
        (row,) = load_demonstrations(data, tokenizer, 200)
        assert tokenizer.decode(read_and_taught(row)[1]) == f"{trained}<|im_end|>"


@pytest.mark.parametrize("options", [{}, OFF], ids=["as it is", "thinking off"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_demonstration_has_the_prompt_that_transformers_makes_and_no_thought_begins_twice(
    name: str, options: dict[str, Any], write_jsonl: Callable[..., str]
) -> None:
    tokenizer, asked = of_tags(TEMPLATES[name]), [user("What is 6*7?")]
    data = DataConfig(
        source=write_jsonl({"prompt": "What is 6*7?", "answer": "42", "response": WHOLE}), chat_template=options
    )
    ((prompt,), *_) = load_prompts(data, tokenizer, max_prompt_tokens=200)
    expected = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False, **options)
    (row,) = load_demonstrations(data, tokenizer, 200)
    read, taught = read_and_taught(row)
    assert read == expected
    said = CLOSED if prompt.opening == "<think>\n" else WHOLE  # what the template has begun is not said again
    assert tokenizer.decode(taught) == f"{said}{END.get(name, '<|im_end|>')}"
