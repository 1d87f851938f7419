"""The stages in which a run is made: frozen, and what parts know of each other is set in one file."""

import dataclasses
import re
from pathlib import Path

import pytest

from hocket.commands import parts as parts_module
from hocket.commands.parts import LoadedPrompts, Parts
from hocket.commands.servers import Servers
from hocket.config import SourceSettings, load
from hocket.loop import Run
from hocket.observe.console import Console
from support.examples import shown

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
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


def test_the_example_of_the_parts_prints_the_first_prompts() -> None:
    printed: list[str] = []
    model = f"model.path={ROOT}/checkpoints/tiny-sort"
    with Console(1) as console:
        console.say = printed.append  # type: ignore[method-assign]
        names = {"Parts": Parts, "config": load(None, [model, "eval.num_prompts=2"]), "console": console}
        exec(shown(parts_module, "with Parts.make"), names)
    prompts = [line for line in printed if line.startswith("<")]
    assert len(prompts) == 2, printed
