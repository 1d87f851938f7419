"""The commands of stages."""

from pathlib import Path

import pytest
from tests.commands.test_cli import check_advice, ends

from hocket.commands.cli import main


def test_what_ends_a_stage_after_a_checkpoint_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = MemoryError()
    monkeypatch.setattr("hocket.extras.stages.driver.run", ends(tmp_path, error, "COMPLETE"))
    check_advice("sft", error, True, tmp_path, capsys, monkeypatch)


def test_a_setting_of_a_stage_that_begins_with_dashes_is_answered_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["sft", "--trainer.steps=5"])
    assert caught.value.code == 2
    assert "--trainer.steps=5; settings have no dashes: trainer.steps=5" in capsys.readouterr().err
