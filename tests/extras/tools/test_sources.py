"""Sources whose environment has tools."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.commands.test_sources import LOOP, ONE_QUESTION, WITHOUT_ANSWERS, WITHOUT_RESULTS
from tests.data.test_sources import rows

from hocket.commands.sources import PromptSource
from hocket.config import DataConfig
from hocket.data.prompts import renderer_of
from hocket.envs.base import bind
from hocket.errors import DataError

TOOLS = ("data.source=task:calculate", "env={name: tools, tools: [calculate], parser: hermes}")


@pytest.mark.parametrize(
    ("loop", "problem"),
    [
        (WITHOUT_RESULTS, "leaves out messages of the role tool"),
        (WITHOUT_ANSWERS, "does not show what the model said before"),
        (ONE_QUESTION + LOOP, "one question"),
    ],
)
def test_tools_are_refused_where_the_template_shows_no_turn_behind_their_results(
    source: Callable[..., tuple[PromptSource, list[str]]], loop: str, problem: str
) -> None:
    made, _ = source(lambda template: template.replace(LOOP, loop), *TOOLS)
    with pytest.raises(DataError, match=f"no turn can follow a tool's result: .*{problem}.*set env.max_turns=1"):
        made.training()
    made, _ = source(lambda template: template.replace(LOOP, loop), *TOOLS[:1], TOOLS[1][:-1] + ", max_turns: 1}")
    made.training()


def test_the_template_shows_the_calculator_as_the_demonstrations_do(tools_tokenizer: Any) -> None:
    toolbox = bind("tools", {"tools": ["calculate"], "parser": "hermes"})().toolbox
    assert toolbox is not None
    demonstrations = (row["prompt"] for row in rows("turns", "train"))
    shown = next(messages for messages in demonstrations if messages[0]["role"] == "system")
    without_tools = renderer_of(DataConfig(), tools_tokenizer).render(shown)
    assert renderer_of(DataConfig(), tools_tokenizer, toolbox.tools).render(shown[1:]) == without_tools
