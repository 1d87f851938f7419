"""Tools: what the model is shown, what it is told, and that nothing it writes can hurt."""

import threading
from typing import Any

import pytest
from PIL import Image

from hocket.envs import tool
from hocket.envs.base import bind
from hocket.errors import ConfigError
from hocket.extras.tools.tools import TOOLS, Tools, calculate
from hocket.protocol import ToolCall
from support.episodes import action

release, both = threading.Event(), threading.Barrier(2)


@tool
def slow_of_tests() -> None:
    """Waits."""
    release.wait(60)


@tool
def meet_of_tests() -> str:
    """Returns once it has been called twice."""
    both.wait(20)
    return "met"


@tool
async def exit_of_tests() -> None:
    """Ends everything, were it not held."""
    raise SystemExit(3)


@tool
async def weather_of_tests(city: str, days: int = 1) -> dict[str, Any]:
    """Tells the weather.

    Args:
        city: Where.
        days: How many.
    """
    return {"city": city, "sun": [True] * days}


def call(name: str, arguments: str, id: str = "") -> ToolCall:
    return ToolCall(name=name, arguments=arguments, id=id)


@tool
def slope_of_tests(function: str) -> str:
    """Tells the slope.

    Args:
        function: As a formula.
    """
    return f"d/dx {function}"


CUT = "\n[cut after 9 of 10 characters]"
NAMES = ["calculate", "slow_of_tests", "meet_of_tests", "weather_of_tests", "exit_of_tests", "slope_of_tests"]


def toolset(*names: str, **options: Any) -> Tools:
    made = bind("tools", {"tools": names, "parser": "hermes", **options})()
    assert isinstance(made, Tools)
    return made


async def results(*calls: ToolCall, timeout_s: float = 20.0) -> list[dict[str, Any]]:
    step = await toolset(*NAMES, call_timeout_s=timeout_s).step(action("", *calls))
    assert step.done == (not calls)
    return [dict(message) for message in step.messages]


def test_the_model_is_shown_name_types_and_docstring() -> None:
    toolbox = toolset("calculate", "weather_of_tests").toolbox
    assert toolbox is not None
    assert toolbox.parser == "hermes"
    function = toolbox.tools[1]["function"]
    assert (function["name"], function["description"]) == ("weather_of_tests", "Tells the weather.")
    assert function["parameters"]["properties"]["days"] == {"type": "integer", "description": "How many."}
    assert function["parameters"]["required"] == ["city"]


def test_a_function_without_hints_or_docstring_is_refused() -> None:
    @tool
    def bare_of_tests(x):  # type: ignore[no-untyped-def]
        return x

    assert TOOLS.get("bare_of_tests") is bare_of_tests
    with pytest.raises(ConfigError, match="tool 'bare_of_tests' can't be shown to a model"):
        toolset("bare_of_tests")


async def test_calls_run_at_the_same_time_and_answer_in_order_with_their_ids() -> None:
    answers = await results(
        call("meet_of_tests", "{}"),
        call("meet_of_tests", "{}", id="functions.meet:1"),
        call("weather_of_tests", '{"city": "Köln", "days": 2}'),
        call("calculate", '{"expression": "12*34"}'),
        call("slope_of_tests", '{"function": "x"}'),
    )
    said = ["met", "met", '{"city": "Köln", "sun": [true, true]}', "408", "d/dx x"]
    assert [answer["content"] for answer in answers] == said
    ids = ["call00001", "functions.meet:1", "call00003", "call00004", "call00005"]
    assert [answer["tool_call_id"] for answer in answers] == ids
    assert {answer["role"] for answer in answers} == {"tool"}
    assert await results() == []  # an answer without a call ends the episode


async def test_the_model_sees_what_a_tool_draws() -> None:
    @tool
    def draw_of_tests(colour: str) -> Any:
        """Draws.

        Args:
            colour: Of the picture.
        """
        return Image.new("RGB", (4, 4), colour)

    step = await toolset("draw_of_tests").step(action("", call("draw_of_tests", '{"colour": "red"}')))
    (part,) = step.messages[0]["content"]
    assert (part["type"], part["image"].getpixel((0, 0))) == ("image", (255, 0, 0))


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("calculator", "{}", "error: there is no tool 'calculator', only calculate, slow_of_tests, meet_of_tests"),
        ("calculate", "{", "error: JSONDecodeError"),
        ("calculate", "[1]", "error: the arguments must be a JSON object"),
        ("calculate", '{"x": "1"}', "error: TypeError: calculate() got an unexpected keyword argument 'x'"),
        (
            "calculate",
            '{"expression": "1", "y": 2}',
            "error: TypeError: calculate() got an unexpected keyword argument 'y'",
        ),
        ("calculate", '{"expression": "1/0"}', "error: ZeroDivisionError"),
        ("calculate", '{"expression": 5}', "error: TypeError"),
        ("exit_of_tests", "{}", "error: SystemExit: 3"),
        ("slow_of_tests", "{}", "error: no result within 0.2 s"),
    ],
)
async def test_whatever_goes_wrong_is_told_to_the_model(name: str, arguments: str, said: str) -> None:
    try:
        (answer,) = await results(call(name, arguments), timeout_s=0.2 if name == "slow_of_tests" else 20.0)
    finally:
        release.set()
    release.clear()
    assert answer["content"].startswith(said)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12*34", "408"), ("10-99", "-89"), ("(1+2)*-3", "-9"), ("7/2", "3.5"), ("6/2", "3"), ("7//2 + 7 % 4", "6")],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression", ["__import__('os').getcwd()", "2**999999999", "True+1", "'a'*9", "", "1" * 201, "(" * 99]
)
def test_the_calculator_runs_no_code(expression: str) -> None:
    with pytest.raises((ValueError, SyntaxError, MemoryError)):
        calculate(expression)


@pytest.mark.parametrize(("result", "most", "said"), [("x" * 9, 9, "x" * 9), ("x" * 10, 9, "x" * 9 + CUT)])
async def test_a_result_of_megabytes_is_cut_with_a_note(result: str, most: int, said: str) -> None:
    @tool
    def long_of_tests() -> str:
        """Says much."""
        return result

    try:
        step = await toolset("long_of_tests", max_result=most).step(action("", call("long_of_tests", "{}")))
        assert step.messages[0]["content"] == said
    finally:
        TOOLS.forget("long_of_tests")


async def test_an_episode_has_so_many_seconds_for_tools_and_counts_each_tool() -> None:
    episode = toolset("calculate", "slow_of_tests", tool_seconds=0.3)
    calls = (call("calculate", '{"expression": "1/0"}'), call("slow_of_tests", "{}"), call("nothing", "{}"))
    answers = []
    try:
        for _ in range(2):
            step = await episode.step(action("", *calls))
            answers.append([str(message["content"]) for message in step.messages])
    finally:
        release.set()
    release.clear()
    assert answers[0][1] == "error: no result within 0.3 s"
    assert answers[1][:2] == ["error: the 0.3 s for tools are used up"] * 2
    counted = {name: value for name, value in episode.metrics.items() if not name.endswith("seconds")}
    slow = {"tool/slow_of_tests/calls": 2, "tool/slow_of_tests/errors": 2}
    assert counted == {"tool/calculate/calls": 2, "tool/calculate/errors": 2, **slow}
    assert 0.3 <= episode.metrics["tool/slow_of_tests/seconds"] < 20


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("tool", {}, r"no environment 'tool' \(did you mean 'tools'\?\).*single_turn"),
        ("tools", {"tools": ["calculat"], "parser": "hermes"}, r"no tool 'calculat' \(did you mean 'calculate'\?\)"),
        ("tools", {"tools": [], "parser": "hermes"}, "env.tools: Value should have at least 1 item"),
        ("tools", {"tools": ["x"], "parser": "hermes", "call_timeout_s": 0}, "env.call_timeout_s: .* greater than 0"),
    ],
)
def test_wrong_names_and_options_are_refused_before_anything_is_loaded(name: str, options: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        bind(name, options)
