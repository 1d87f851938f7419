"""How an environment is found, given its options, and refused."""

from pathlib import Path

import numpy
import pytest

from hocket.common.registry import load_plugins
from hocket.envs import Action, Environment, Step, base, environment
from hocket.envs.base import ENVIRONMENTS, Observation, bind
from hocket.errors import ConfigError
from hocket.types import Prompt
from support.episodes import action, user
from support.examples import plugged, shown
from support.processes import ROOT


@environment("echo_of_tests")
class Echo(Environment):
    def __init__(self, word: str, times: int = 2) -> None:
        if times < 1:
            raise ValueError("times must be at least 1")
        self.word, self.left = word, times

    async def step(self, action: Action) -> Step:
        self.left -= 1
        return Step(messages=user(self.word), done=self.left == 0)


async def test_every_episode_gets_an_instance_of_its_own_with_the_options_of_the_config() -> None:
    make = bind("echo_of_tests", {"word": "hi", "times": 1})
    first, second = make(), make()
    assert first is not second
    assert (await first.step(action("x"))).done
    assert (await second.step(action("x"))).done  # the first one's count is not its own
    assert (await first.reset(Prompt(id="p", token_ids=(1,)), 0), await first.truncated()) == (None, 0.0)


async def test_the_environment_that_the_docstring_shows_plays_as_it_stands(tmp_path: Path) -> None:
    with plugged(tmp_path, shown(base, "import random"), (ENVIRONMENTS, "guess_number")):
        guess = bind("guess_number", {"highest": 1})()
        shows = await guess.reset(Prompt(id="p", token_ids=(1,)), 0)
        steps = [await guess.step(action(text)) for text in ("2", "0", "1")]
    assert shows == Observation(text="Guess, 0 to 1: ", max_tokens=4)
    assert steps[0] == Step(text="No. Again: ", max_tokens=4)
    assert [step.reward for step in steps] in ([0.0, 1.0, 0.0], [0.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("single_turns", {}, r"no environment 'single_turns' \(did you mean 'single_turn'\?\)"),
        ("echo_of_tests", {"word": "a", "time": 3}, r"no option 'time' \(did you mean 'times'\?\)"),
        ("echo_of_tests", {}, "set env.word"),
        ("echo_of_tests", {"word": "a", "times": 0}, "refuses its options: times must be at least 1"),
    ],
)
def test_wrong_names_and_options_are_refused_before_anything_is_loaded(name: str, options: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        bind(name, options)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": [{}], "text": "a"}, "messages end the model's turn: leave them out, or text and goes_on"),
        ({"messages": [{}], "goes_on": True}, "messages end the model's turn"),
        ({"max_tokens": 0}, "max_tokens\n  Input should be greater than or equal to 1"),
        ({"text": b"hi"}, "text\n  Input should be a valid string"),
        ({"stop": "ab"}, "stop\n  Input should be a valid tuple"),
        ({"stop": ("",)}, "stop.0\n  String should have at least 1 character"),
        ({"reward": "1"}, "reward.*\n  Input should be a valid number"),
    ],
)
def test_nonsense_is_refused_where_it_is_said(fields: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Step(**fields)
    assert Observation(max_tokens=1).stop is None
    assert [Step(reward=number).reward for number in (True, 2, numpy.float32(0.5))] == [1, 2, 0.5]


def test_half_a_surrogate_pair_which_has_no_encoding_is_told_as_a_question_mark() -> None:
    call = {"role": "tool", "name": "\ud800", "content": "é😀\ud83d", "parts": [{"\udfff": 1}]}
    told = {"role": "tool", "name": "?", "content": "é😀?", "parts": [{"?": 1}]}
    assert (Step(messages=[call]).messages, Observation(text="0\ud83d").text) == ([told], "0?")


async def test_guess_tells_where_the_number_is_and_rewards_finding_it() -> None:
    load_plugins([str(ROOT / "config" / "tiny_tools.py")])
    make = bind("guess", {"guesses": 3, "near": 0.5, "width": 10})
    prompt = Prompt(id="p", token_ids=(1,), answer="12")
    episode = make()
    assert await episode.reset(prompt, 0) is None
    steps = [await episode.step(action(text)) for text in ("5", " 15", "12")]
    assert [step.messages[0]["content"] for step in steps[:2]] == ["higher", "lower"]
    assert [(step.done, step.reward) for step in steps] == [(False, 0.0), (False, 0.0), (True, 1.0)]
    episode = make()
    await episode.reset(prompt, 0)
    last = [await episode.step(action("14")) for _ in range(3)][-1]
    assert (last.done, last.reward) == (True, 0.5 * 0.8)  # 2 of 10 away
    assert (await episode.step(action("fourteen"))).done
    with pytest.raises(ValueError, match="no answer to guess"):
        await make().reset(Prompt(id="p", token_ids=(1,)), 0)
