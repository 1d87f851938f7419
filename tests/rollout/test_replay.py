"""Batches from files: the same groups, and what is said where they are missing."""

from pathlib import Path

import pytest

from hocket.errors import DataError
from hocket.observe.run_folder import lines_of
from hocket.rollout.replay import Replay
from hocket.types import Group, Prompt, Rollout, Score, TokenSequence


def group(step: int) -> Group:
    rollout = Rollout(
        id=f"step {step}/0/0",
        prompt=Prompt(id="p", token_ids=(1,)),
        sequences=(
            TokenSequence(
                token_ids=(1, 2),
                mask=(False, True),
                logprobs=(0.0, -0.5),
                finish_reason="length",
                version_min=step,
                version_max=step,
                text="x",
            ),
        ),
    )
    return Group(id=f"step {step}/0", rollouts=(rollout,), scores=(Score(total=float(step)),))


async def test_each_step_gets_what_was_played_for_it(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    for step in (1, 2):
        (tmp_path / "rollouts" / f"step_{step:06d}.jsonl").write_text(lines_of([group(step)]))
    replay = Replay(tmp_path)
    for step in (1, 2):
        batch = await replay.batch(step)
        assert (batch.draws, batch.groups) == ({}, [group(step)])
    with pytest.raises(DataError, match=r"no rollouts of step 3 .*it has steps 1 to 2: set trainer.steps"):
        await replay.batch(3)


async def test_a_folder_without_rollouts_or_with_half_a_line_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it has none"):
        await Replay(tmp_path).batch(1)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_000001.jsonl").write_text(lines_of([group(1)])[:40])
    with pytest.raises(DataError, match=r"step_000001.jsonl \(.*Unterminated"):
        await Replay(tmp_path).batch(1)
