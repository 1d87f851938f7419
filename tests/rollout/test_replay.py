"""Recorded rollouts in place of a server's."""

from array import array
from pathlib import Path

import pytest

from hocket.errors import DataError
from hocket.observe.rows import lines_of
from hocket.rollout.replay import Replay
from hocket.types import Group, Prompt, Score
from support.batches import played


def recorded(step: int) -> Group:
    rollout = played(Prompt(id="p", token_ids=array("I", (1,))), f"step {step}/0/0", "x", version=step)
    return Group(id=f"step {step}/0", rollouts=(rollout,), scores=(Score(total=float(step)),))


async def test_a_replay_gives_each_step_what_was_played_for_it_or_names_the_file(tmp_path: Path) -> None:
    folder, replay = tmp_path / "rollouts", Replay(tmp_path)
    with pytest.raises(DataError, match="it has none"):
        await replay.batch(1)
    folder.mkdir()
    for step in (1, 2):
        (folder / f"step_{step:06d}.jsonl").write_text(lines_of([recorded(step)]))
        assert (await replay.batch(step)).groups == [recorded(step)]
    with pytest.raises(DataError, match=r"no rollouts of step 3 .*it has steps 1 to 2: set trainer.steps"):
        await replay.batch(3)
    (folder / "step_000001.jsonl").write_text(lines_of([recorded(1)])[:40])
    with pytest.raises(DataError, match=r"step_000001.jsonl \(JSONDecodeError"):
        await replay.batch(1)
