"""What a chat template shows: the end of a turn, system messages, tools and what they return."""

from typing import Any

import pytest

from hocket.config import DataConfig
from hocket.data import template
from hocket.data.renderer import Renderer
from hocket.errors import DataError
from support.tokenizers import STOCK, TEMPLATES, of_tags

TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
LAST = "<|im_start|>{{ messages[-1].content }}<|im_end|>"
IN_PARTS = "{% for m in messages %}{{ m.content[0].text }}<|im_end|>{% endfor %}"
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.content }}<|im_end|>{% endfor %}"
ONLY_USERS = "{% for m in messages if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("text", "end"),
    [
        (TEMPLATES["Qwen2.5"], "<|im_end|>"),
        (TEMPLATES["Llama-3"], "<|eot_id|>"),
        (TEMPLATES["Gemma"], "<end_of_turn>"),
        (TEMPLATES["Mistral"], "</s>"),
        (LAST, "<|im_end|>"),
        (IN_PARTS, "<|im_end|>"),  # as of models that take images
        (ONLY_USERS, None),  # what the model said is not in it
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),  # no special token
        (None, None),
    ],
)
def test_the_token_that_ends_a_turn_is_the_special_one_behind_an_answer(text: str | None, end: str | None) -> None:
    tokenizer = of_tags(text or "")
    tokenizer.chat_template = text
    found = template.end_of_turn(tokenizer)
    assert (None if found is None else tokenizer.convert_ids_to_tokens(found)) == end


def make(text: str, tools: Any = (), **settings: Any) -> Renderer:
    return Renderer(DataConfig(**settings), of_tags(text), tools)


@pytest.mark.parametrize("text", [TEMPLATES["Qwen3"], TEMPLATES["Llama-3"], TEMPLATES["Gemma"]])
def test_a_template_that_hides_tools_is_refused_for_environments_and_rows(text: str) -> None:
    with pytest.raises(DataError, match="does not show the model its tools"):
        make(text, [TOOL])
    with pytest.raises(ValueError, match="does not show the model its tools"):
        make(text).render([template.ASKED], tools=[TOOL])
    assert "add" in make(STOCK, [TOOL]).render([template.ASKED])


@pytest.mark.parametrize(
    ("text", "words"), [(TEMPLATES["Gemma"], "no system role"), (NO_SYSTEM, "leaves system messages out")]
)
def test_a_template_that_has_no_place_for_a_system_message_is_refused_where_there_is_one(text: str, words: str) -> None:
    with pytest.raises(DataError, match=rf"data\.system_prompt: .*{words}.*write it into the prompts"):
        make(text, system_prompt="Be brief.")
    renderer = make(text)
    with pytest.raises(ValueError, match=words):
        renderer.render([template.SYSTEM, template.ASKED])
    assert "?" in renderer.render([template.ASKED])
    assert "Be brief." in make(TEMPLATES["Qwen3"], system_prompt="Be brief.").asked("?")[0]
