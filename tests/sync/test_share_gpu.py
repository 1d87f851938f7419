"""Who is on the GPU when: publishing to disk and a real pool, as a run brings them together, with a fake server."""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hocket.commands.parts
from hocket import config as config_module
from hocket import protocol
from hocket.client.pool import ServerPool
from hocket.errors import ServerError, SyncError
from hocket.sync.share_gpu import put_to_sleep
from hocket.types import TrainSample
from support import fakes
from support.weights import FakeTrainer


class World(FakeTrainer):
    """Server and trainer, which keep one diary of what they were asked to do; `failing` fails once."""

    url = "http://server"

    def __init__(self, root: Path) -> None:
        super().__init__({"w": torch.ones(2)})
        self.diary: list[str] = []
        self.version, self.root, self.slept = 4, root, 0
        self.failing: dict[str, ServerError] = {}
        self.blocking: list[str] = []  # work of the trainer during which the event loop stood still

    def did(self, what: str) -> None:
        if error := self.failing.pop(what, None):
            raise error
        self.diary.append(what)

    def worked(self, what: str) -> None:
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            self.blocking.append(what)
        self.did(what)

    # the server
    async def health(self, *, timeout_s: float = 1.0) -> protocol.Health:
        return fakes.health(status="asleep", version=self.version)

    async def ask(self, request: Any, *, timeout_s: float) -> Any:
        if isinstance(request, protocol.GenerateRequest):
            self.did("generate")
            completion = fakes.completion(5, 2, logprobs=(-0.1, -0.2), version=self.version)
            completions = [[completion] for _ in request.prompts]
            return protocol.GenerateResponse(version=self.version, model="", completions=completions)
        if isinstance(request, protocol.SleepRequest):
            self.slept = request.level
            return self.did(f"sleep {request.level}")
        wakes = request.version == self.version and self.slept == 1
        self.did("compare" if request.compare else "wake" if wakes else "load")
        self.version = request.version
        return fakes.reloaded(request.version, fakes.manifest_of(self.root / request.source.name).checksum)

    # the trainer
    def onload(self) -> None:
        self.worked("onload")

    def offload(self) -> None:
        self.worked("offload")

    def export(self, folder: Path) -> dict[str, protocol.TensorSpec]:
        self.worked("write")
        return super().export(folder)

    def logprobs(self, samples: Sequence[TrainSample]) -> list[tuple[float, ...]]:
        self.worked("score")
        return super().logprobs(samples)


class Parts:
    """The pool and the publishing of a run, around one world."""

    def __init__(self, tmp_path: Path, *settings: str, share: bool = True) -> None:
        sharing = f"launch.share_gpu={str(share).lower()}"
        self.config = config_module.load(None, [f"run.dir={tmp_path}/runs/a", sharing, "sync.check_share=0", *settings])
        self.pool = ServerPool([World.url])
        self.world: Any = World(tmp_path / "runs")
        self.pool.members[0].server = self.world
        console = SimpleNamespace(say=lambda line: None, alarmed=set())
        run: Any = SimpleNamespace(config=self.config.chosen(on_gpu=False), console=console)
        run.stack = contextlib.ExitStack()
        self.publisher = hocket.commands.parts.Parts.publisher(run, self.world, self.pool, lambda health: None)

    async def step(self) -> dict[str, float]:
        async with self.publisher.training(publishes=True) as metrics:
            self.world.did("step")
            return metrics | await self.publisher.publish()

    async def copy(self) -> None:
        async with self.publisher.training(publishes=False):
            self.world.did("copy")


FIRST = ["write", "offload", "load"]
UPDATE = ["sleep 2", "onload", "step", *FIRST]


async def test_without_new_weights_the_server_gets_its_own_back(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    await parts.pool.wait_up()
    parts.world.diary.clear()
    await parts.copy()
    assert parts.world.diary == ["sleep 1", "onload", "copy", "offload", "wake"]


async def test_without_sharing_nothing_more_is_asked_of_anybody(tmp_path: Path) -> None:
    parts = Parts(tmp_path, share=False)
    await parts.pool.wait_up()
    await parts.step()
    await parts.copy()
    assert parts.world.diary == ["write", "load", "step", "write", "load", "copy"]


async def test_server_and_trainer_are_never_on_the_gpu_together(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    await parts.pool.wait_up()
    for _ in range(3):
        metrics = await parts.step()
        assert (metrics["time/turn"] >= 0, metrics["sync/servers"]) == (True, 1.0)
    assert parts.world.diary == [*FIRST, *UPDATE, *UPDATE, *UPDATE]
    assert parts.world.blocking == []  # heartbeats go on while the trainer writes a version and moves


async def test_a_server_that_dies_in_the_trainer_s_turn_is_lost_and_brought_up_again(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
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
    assert world.diary == ["offload", "load"]  # written already
    assert parts.publisher.versions.current == 6


async def test_a_server_that_dies_when_it_falls_asleep_is_lost_too(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    await parts.pool.wait_up()
    parts.world.failing = {"sleep 2": ServerError("its engine's process ended", code="engine_dead", status=503)}
    await put_to_sleep(parts.pool, parts.config.sync, keep=False)  # the trainer takes its turn
    assert (parts.pool.up, parts.pool.members[0].reason) == ([], "its engine's process ended")


async def test_a_server_that_does_not_leave_the_gpu_stops_the_run_before_the_trainer_takes_it(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    await parts.pool.wait_up()
    parts.world.diary.clear()
    for error in (
        ServerError("/sleep did not finish in 300 s", code="timeout"),
        ServerError("not started to share its GPU", code="no_sleep_mode", status=409),
    ):
        parts.world.failing = {"sleep 2": error}
        with pytest.raises(SyncError, match=f"can't take turns on the GPU: {error}"):
            await parts.step()
    assert parts.world.diary == []


async def test_weights_that_no_version_brings_again_are_kept(tmp_path: Path) -> None:
    parts = Parts(tmp_path, "model.lora={}")
    await parts.step()
    assert parts.world.diary[0] == "sleep 1"
