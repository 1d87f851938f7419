"""Who is on the GPU when, where servers are checked."""

from pathlib import Path
from typing import Any

from tests.sync.test_share_gpu import FIRST, UPDATE, Parts

from hocket.errors import ServerError
from hocket.extras.checks.verify import Verification
from hocket.types import Prompt

CHECK = ["offload", "compare", "generate", "sleep 1", "onload", "score", "offload", "wake"]


class Checked(Parts):
    def __init__(self, tmp_path: Path, *settings: str, **options: Any) -> None:
        super().__init__(tmp_path, *settings, **options)
        verification = Verification(
            publisher=self.publisher,
            prompts=[Prompt(id="c", token_ids=(1,))],
            trainer=self.world,
            rollout=self.config.rollout,
            sync=self.config.sync,
            alarmed=lambda: False,
        )
        self.publisher.parts = [verification]


async def test_without_sharing_a_check_moves_nobody(tmp_path: Path) -> None:
    parts = Checked(tmp_path, share=False)
    await parts.pool.wait_up()
    await parts.step()
    await parts.copy()
    check = ["compare", "generate", "score"]
    assert parts.world.diary == ["write", "load", *check, "step", "write", "load", *check, "copy"]


async def test_server_and_trainer_are_never_on_the_gpu_together_and_the_server_keeps_its_weights_for_a_check(
    tmp_path: Path,
) -> None:
    parts = Checked(tmp_path, "sync.check_every=8")
    await parts.pool.wait_up()
    for _ in range(3):
        metrics = await parts.step()
        assert (metrics["time/turn"] >= 0, metrics["sync/servers"]) == (True, 1.0)
    # versions 5 to 8: the first two are always checked
    assert parts.world.diary == [*FIRST, *CHECK, *UPDATE, *CHECK, *UPDATE, *UPDATE, *CHECK]
    assert parts.world.blocking == []  # heartbeats go on while the trainer writes a version and moves


async def test_a_server_that_dies_in_the_trainer_s_turn_is_checked_when_it_is_brought_up_again(tmp_path: Path) -> None:
    parts = Checked(tmp_path, "sync.check_every=0")
    world = parts.world
    await parts.pool.wait_up()
    async with parts.publisher.training(publishes=True):
        gone = ServerError("can't reach it", code="unreachable")
        world.failing = {"load": gone}
        world.diary.clear()
        metrics = await parts.publisher.publish()
    assert metrics["sync/servers"] == 0
    assert world.diary == ["write", "offload"]  # the trainer is away, so that a new server has the GPU to start on
    world.diary.clear()
    await parts.pool.wait_up()
    assert world.diary == ["offload", "load", *CHECK]  # written already
    assert parts.publisher.versions.current == 6
