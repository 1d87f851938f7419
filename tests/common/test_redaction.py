from collections.abc import Callable
from pathlib import Path

import pytest

from hocket import config
from hocket.commands import cli
from hocket.common.redaction import SESSION_KEY, redacted, secret
from hocket.observe.console import Console
from hocket.observe.rows import lines_of
from hocket.rewards.scores import no_score
from hocket.types import Group, Prompt, Rollout, TokenSequence

TOKEN = "a-secret+of(ours)"
SESSION = f"{SESSION_KEY}{'0f' * 16}"


def of_a_file(error: str) -> str:
    prompt = Prompt(id="p", token_ids=(1,))
    sequence = TokenSequence(token_ids=(1,), mask=(False,), logprobs=(0.0,))
    rollout = Rollout(id="a", prompt=prompt, sequences=(sequence,), error=error)
    return lines_of([Group(id="g", rollouts=(rollout,), scores=(no_score(error),))])


@pytest.mark.parametrize(
    "way",
    [of_a_file, lambda error: Console(1).say(error), lambda error: no_score("", error).note],
)
def test_no_secret_of_the_run_is_in_what_is_kept_or_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, way: Callable[[str], str | None]
) -> None:
    monkeypatch.setenv("HOCKET_TOKEN", f"{TOKEN}\n")
    assert config.load(None, ["run.dir=runs/a"]).token == TOKEN
    told = f"{way(f'it said {TOKEN}, {SESSION}.')}{capsys.readouterr().out}"
    assert "it said [secret], [secret]." in told
    assert TOKEN not in told
    assert SESSION not in told


def test_a_command_that_fails_or_is_interrupted_shows_no_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (KeyboardInterrupt(), KeyError(TOKEN)):

        def train(*args: object, error: BaseException = error, **how: object) -> int:
            raise error

        monkeypatch.setattr("hocket.commands.runs.train", train)
        cli.main(["train", f"server.token={TOKEN}", "run.dir=runs/none"])
        told = capsys.readouterr().err
        assert redacted(TOKEN) in told
        assert TOKEN not in told
        if "the traceback is in " in told:
            assert TOKEN not in Path(told.strip().rpartition(" ")[2]).read_text()


@pytest.mark.parametrize(
    "form", ["k/e+y=of%20mine", "k%2Fe%2By%3Dof%2520mine", "k%2fe%2by%3dof%2520mine", "ay9lK3k9b2YlMjBtaW5l"]
)
def test_a_key_that_comes_back_in_a_usual_form_is_taken_out(form: str) -> None:
    secret("k/e+y=of%20mine", "K")
    assert redacted(f"no such key: {form}.") == "no such key: [secret]."


def test_a_secret_that_begins_like_another_one_is_taken_out_whole() -> None:
    for length in range(8, 40):
        secret("ours-and-more-of-it-than-anybody-can-hold"[:length], "KEY")
    assert redacted("ours-and-more-of-it-than-anybody-can-ho!") == "[secret]!"
