"""What a chat template shows: the end of a turn, system messages, tools and what they return, and the run's day."""

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import transformers.utils.chat_template_utils as templates

from hocket import config as config_module
from hocket.config import DataConfig
from hocket.data import template
from hocket.data.renderer import Renderer
from hocket.errors import DataError
from hocket.trainer import checkpoints
from hocket.trainer.checkpoints import Checkpoints
from support.engines import make_tokenizer
from support.tokenizers import STOCK, TEMPLATES, of_tags

TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
LAST = "<|im_start|>{{ messages[-1].content }}<|im_end|>"
IN_PARTS = "{% for m in messages %}{{ m.content[0].text }}<|im_end|>{% endfor %}"
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.content }}<|im_end|>{% endfor %}"
ONLY_USERS = "{% for m in messages if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
EVENING = datetime.fromisoformat("2026-11-28T23:50:00+00:00")
MORNING = datetime.fromisoformat("2026-11-29T08:10:00+00:00")
Set = Callable[[datetime], None]


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


def test_a_template_that_hides_the_assistants_text_has_no_end_of_turn() -> None:
    """Its whole text would be taken for the end: a turn would end with the question's first token."""
    assert make(LAST).after_turn == "<|im_end|>"
    for text in (ONLY_USERS, IN_PARTS):
        with pytest.raises(DataError, match="does not show what the assistant said"):
            make(text).end_of_turn()


@pytest.mark.parametrize("text", [TEMPLATES["Qwen3"], TEMPLATES["Llama-3"], TEMPLATES["Gemma"]])
def test_a_template_that_hides_tools_is_refused_for_environments_and_rows(text: str) -> None:
    with pytest.raises(DataError, match="does not show the model its tools"):
        make(text, [TOOL])
    with pytest.raises(ValueError, match="does not show the model its tools"):
        make(text).render([template.QUESTION], tools=[TOOL])
    assert "add" in make(STOCK, [TOOL]).render([template.QUESTION])


@pytest.mark.parametrize(
    ("text", "words"), [(TEMPLATES["Gemma"], "no system role"), (NO_SYSTEM, "leaves system messages out")]
)
def test_a_template_that_has_no_place_for_a_system_message_is_refused_where_there_is_one(text: str, words: str) -> None:
    with pytest.raises(DataError, match=rf"data\.system_prompt: .*{words}.*write it into the prompts"):
        make(text, system_prompt="Be brief.")
    renderer = make(text)
    with pytest.raises(ValueError, match=words):
        renderer.render([template.SYSTEM, template.QUESTION])
    assert "?" in renderer.render([template.QUESTION])
    assert "Be brief." in make(TEMPLATES["Qwen3"], system_prompt="Be brief.").asked("?")[0]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Set:
    """Sets the time that hocket and transformers see; a new process has a day of its own."""

    def at(now: datetime) -> None:
        fixed = type("Fixed", (datetime,), {"now": classmethod(lambda *_: now)})
        monkeypatch.setattr(template, "datetime", fixed)
        monkeypatch.setattr(templates, "datetime", fixed)
        started = template.Day()
        for module in ("hocket.data.renderer", "hocket.trainer.checkpoints"):
            monkeypatch.setattr(f"{module}.DAY", started)

    return at


def with_day(form: str = "%d %b %Y") -> str:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('" + form + "') }};{% for m in messages %}{{ m.content }}{% endfor %}"
    return Renderer(DataConfig(source="rows.jsonl"), tokenizer, ()).render([{"role": "user", "content": "a"}])


class Nothing:
    """A trainer, or a part of a run, without a state."""

    def state(self, sink: Callable[[Mapping[str, Any]], None] | None = None) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("form", ["%d %b %Y", "%F", "%B %d, %Y"])  # Llama 3.2, gpt-oss, Granite
def test_a_resumed_run_renders_the_day_on_which_it_began_and_another_one_its_own(
    form: str, tmp_path: Path, clock: Set
) -> None:
    config = config_module.load(None, [f"run.dir={tmp_path}/run", "trainer.steps=1", "checkpoint.resume=true"])
    other = config_module.load(None, [f"run.dir={tmp_path}/other"])
    clock(EVENING)
    assert checkpoints.find(config, lambda line: None) is None
    assert with_day(form) == f"{EVENING.strftime(form)};a"
    with Checkpoints(config, Nothing().state, {}) as kept:
        kept.copy(1, last=True)
        kept.complete(1, {})
    clock(MORNING)
    assert with_day(form) == f"{MORNING.strftime(form)};a"
    assert checkpoints.find(config, lambda line: None) is not None
    assert with_day(form) == f"{EVENING.strftime(form)};a"
    checkpoints.find(other, lambda line: None)  # in the same process
    assert with_day(form) == f"{MORNING.strftime(form)};a"
