"""The stages in which a run is made: frozen, and what parts know of each other is set in one file."""

import dataclasses
import re
from pathlib import Path

import pytest

from hocket.commands.parts import LoadedPrompts, Parts, Servers
from hocket.config import SourceSettings
from hocket.loop import Run

SRC = Path(__file__).resolve().parents[2] / "src"
HOOKS = {"trainer_turn", "bring_up", "on_change", "after", "parts"}


@pytest.mark.parametrize("stage", [Parts, LoadedPrompts, Servers, Run, SourceSettings])
def test_a_stage_that_is_made_does_not_change(stage: type) -> None:
    made = object.__new__(stage)
    for field in dataclasses.fields(stage):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, None)


def test_no_other_file_sets_what_two_parts_of_a_run_know_of_each_other() -> None:
    assignment = re.compile(rf"(?<!\bself)\.({'|'.join(HOOKS)}) = ")
    places = set()
    for path in SRC.rglob("*.py"):
        for hook in assignment.findall(path.read_text(encoding="utf-8")):
            places.add((path.name, hook))
    assert places == {("parts.py", hook) for hook in HOOKS}
