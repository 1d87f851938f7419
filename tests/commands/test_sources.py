from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hocket.commands import sources as sources_module
from hocket.commands.sources import PromptSource
from hocket.common.registry import load_plugins
from hocket.config import load
from hocket.data import tokenizer as tokenizers
from hocket.data.tokenizer import SequenceLimit
from hocket.observe.console import Console
from support.examples import shown

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "checkpoints" / "tiny-tools"
LOOP = "{%- for message in messages -%}"
WITHOUT_RESULTS = LOOP.replace(" -%}", " if message.role != 'tool' -%}")
WITHOUT_ANSWERS = LOOP.replace(" -%}", " if message.role != 'assistant' -%}")
ONE_QUESTION = "{%- if messages[2:] -%}{{ raise_exception('one question') }}{%- endif -%}"
GUESS = ("data.source=task:guess", "env.name=guess", "rewards.functions={env: 1.0}")


@pytest.fixture
def source() -> Callable[..., tuple[PromptSource, list[str]]]:
    load_plugins([f"{ROOT}/config/tiny_tools.py"])

    def make(edit: Callable[[str], str], *settings: str) -> tuple[PromptSource, list[str]]:
        config = load(None, [f"model.path={MODEL}", "data.limit=4", *settings])
        tokenizer: Any = tokenizers.load(str(MODEL))
        tokenizer.chat_template = edit(tokenizer.chat_template)
        said: list[str] = []
        with Console(1) as console:
            console.say = said.append  # type: ignore[method-assign]
            return PromptSource(
                config.default_source, config, tokenizer, SequenceLimit(1024, "model.max_length=1024"), console
            ), said

    return make


def test_it_is_said_before_a_run_where_the_template_shows_no_second_turn_to_an_environment(
    source: Callable[..., tuple[PromptSource, list[str]]],
) -> None:
    """It may answer with text, which needs no template."""
    made, said = source(lambda template: template.replace(LOOP, WITHOUT_ANSWERS), *GUESS)
    made.training()
    (line,) = said
    assert "no turn can follow a message of env.name=guess" in line
    assert "does not show what the model said before" in line
    for settings in (GUESS[:1], (*GUESS, "env.max_turns=1"), (*GUESS, "data.chat_template=false")):
        made, said = source(lambda template: template.replace(LOOP, WITHOUT_ANSWERS), *settings)
        made.training()
        assert not said
    made, said = source(lambda template: template, *GUESS)
    made.training()
    assert not said


def test_held_out_prompts_have_their_own_template_options(
    source: Callable[..., tuple[PromptSource, list[str]]],
) -> None:
    optional = "{%- if brief and messages[2:] -%}{{ raise_exception('brief') }}{%- endif -%}"
    made, said = source(
        lambda template: optional + template, *GUESS, "eval.data={source: task:guess, chat_template: {brief: true}}"
    )
    made.training()
    assert not said
    made.held_out()
    assert "eval.data: no turn can follow" in said[0]


def test_the_example_of_a_source_loads_its_prompts() -> None:
    with Console(1) as console:
        names: dict[str, Any] = {
            "PromptSource": PromptSource,
            "config": load(None, [f"model.path={MODEL}", "data.limit=4", "rollout.max_tokens=16"]),
            "tokenizer": tokenizers.load(str(MODEL)),
            "limit": SequenceLimit(1024, "model.max_length=1024"),
            "console": console,
        }
        exec(shown(sources_module, "source = PromptSource"), names)
    assert len(names["stream"].take(4)) == len(names["prompts"]) == 4
    assert names["needed"] == 16 + max(len(prompt.token_ids) for prompt in names["prompts"])
