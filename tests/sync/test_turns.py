"""Who is on the GPU when: the loop, real publishing to disk and a real pool, with a fake server and a fake trainer."""

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import fakes
from hocket import config as config_module
from hocket import manifest
from hocket.algorithm.kl import KlController
from hocket.checkpoints import Checkpoints
from hocket.data import PromptStream
from hocket.errors import ServerError, SyncError
from hocket.loop import Run
from hocket.observe.console import Console
from hocket.observe.run_folder import RunFolder
from hocket.pool import ServerPool
from hocket.protocol import (
    Completion,
    Health,
    ReloadRequest,
    ReloadResponse,
    SamplingParams,
    SleepRequest,
    SleepResponse,
    TensorSpec,
    WakeRequest,
)
from hocket.rollout.pipeline import Pipeline
from hocket.sync.base import WeightSync
from hocket.sync.disk import DiskTransport
from hocket.sync.turns import Turns, put_to_sleep
from hocket.types import Measured, Prompt, Rollout, Score, StepStats, TrainSample


class World:
    """Server, trainer, prompts and rewards, which keep one diary of what they were asked to do."""

    kv_tokens = 4096

    url = "http://server"

    def __init__(self) -> None:
        self.diary: list[str] = []
        self.version = 4
        self.failing: dict[str, ServerError] = {}
        self.root = Path()
        self.alike = False  # all rewards

    def did(self, what: str) -> None:
        if error := self.failing.pop(what, None):
            raise error
        self.diary.append(what)

    # the server
    async def health(self, *, timeout_s: float = 1.0) -> Health:
        return fakes.health(status="asleep", version=self.version)

    async def sleep(self, request: SleepRequest, *, timeout_s: float) -> SleepResponse:
        self.did(f"sleep {request.level}")
        return SleepResponse(asleep=["weights", "kv_cache"], session="s")

    async def wake_up(self, request: WakeRequest, *, timeout_s: float) -> SleepResponse:
        self.did(f"wake {' '.join(request.tags)}")
        return SleepResponse(asleep=[], session="s")

    async def reload_weights(self, request: ReloadRequest, *, timeout_s: float) -> ReloadResponse:
        self.did("load")
        self.version = request.version
        manifest = json.loads((self.root / request.source.name / "manifest.json").read_text())  # type: ignore[union-attr]
        return ReloadResponse(
            version=request.version, seconds=0.1, num_tensors=1, checksum=manifest["checksum"], session="s"
        )

    async def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, n: int = 1, **rest: object
    ) -> AsyncIterator[tuple[int, int, Completion]]:
        self.did("generate")
        for i in range(len(prompts)):
            for j in range(n):
                done = Completion(
                    token_ids=(5, 2),
                    logprobs=(-0.1, -0.2),
                    finish_reason="stop",
                    versions=((self.version, 0, 2),),
                    text=str(j),
                )
                yield i, j, done

    # the trainer
    def check_same_model(self, health: Health) -> None: ...

    def onload(self) -> None:
        self.did("onload")

    def offload(self) -> None:
        self.did("offload")

    def export(self, folder: Path) -> dict[str, TensorSpec]:
        import torch
        from safetensors.torch import save_file

        self.did("write")
        save_file({"w": torch.ones(2)}, folder / "model.safetensors")
        return manifest.specs([("w", torch.ones(2))])

    def beat(self) -> None:
        pass

    def measure(self, rollouts: object) -> list[Measured]:
        return []

    def state(self, sink: object) -> dict[str, Any]:
        self.did("copy")
        return {}

    def logprob_gap(self, samples: Sequence[TrainSample]) -> float:
        self.did("score")
        return 0.001

    def step(self, samples: Sequence[TrainSample], *, keep: Path) -> StepStats:
        self.did("step")
        numbers: dict[str, Any] = {"loss": 0.5, "grad_norm": 1.0, "learning_rate": 0.1, "seconds": 0.1, "mfu": 0.1}
        counts = {"num_tokens": 8, "num_positions": 12, "num_sequences": 4, "num_micro_batches": 1}
        return StepStats(**numbers, **counts, skipped=False, metrics={"logprob_gap": 0.0})

    # rewards
    async def score(self, rollout: Rollout) -> Score:
        return Score(total=1.0 if self.alike else float(rollout.text), parts={"exact_match": 1.0})


class Parts:
    """The pool, publishing and turns of a run, around one world."""

    def __init__(self, tmp_path: Path, world: Any, *settings: str, share: bool = True) -> None:
        sizes = ["rollout.prompts_per_step=2", "rollout.group_size=2", "trainer.steps=2", "checkpoint.every_steps=1"]
        more = [
            f"run.dir={tmp_path}/runs/a",
            "observe.tensorboard=false",
            f"launch.share_gpu={str(share).lower()}",
            *sizes,
            *settings,
        ]
        self.world = world
        world.root = tmp_path / "runs"
        self.config = config_module.load(None, more)
        self.pool = ServerPool(["http://server"])
        self.pool.members[0].server = world
        self.turns = Turns(self.config, world, self.pool) if share else None
        self.sync = WeightSync(
            self.config,
            world,
            self.pool,
            DiskTransport(self.config, world),
            canary=[Prompt(id="c", token_ids=(1,))],
            turns=self.turns,
        )

    async def train(self) -> None:
        world = self.world
        stream = PromptStream([Prompt(id=f"p{i}", token_ids=(1,)) for i in range(4)], seed=0)
        with (
            RunFolder(self.config) as folder,
            Console("plain", 2) as console,
            Checkpoints(self.config, world, {}) as kept,
        ):
            await Run(
                config=self.config,
                trainer=world,
                servers=self.pool,
                stream=stream,
                pipeline=Pipeline(self.config, stream, server=self.pool, scorer=world, informative=lambda group: True),
                held_out={},
                judge=world,
                sync=self.sync,
                kl=KlController(self.config.algorithm),
                folder=folder,
                console=console,
                checkpoints=kept,
                turns=self.turns,
            ).train()


FIRST = ["write", "offload", "wake weights", "load", "wake kv_cache"]
CANARY = ["generate", "sleep 1", "onload", "score", "offload", "wake weights", "wake kv_cache"]
UPDATE = ["sleep 2", "onload", "step", "copy", *FIRST]


async def test_server_and_trainer_are_never_on_the_gpu_together(tmp_path: Path) -> None:
    world = World()
    await Parts(tmp_path, world).train()
    assert world.diary == [*FIRST, *CANARY, "generate", *UPDATE, "generate", *UPDATE]
    metrics = [json.loads(line) for line in (tmp_path / "runs/a/metrics.jsonl").read_text().splitlines()]
    assert metrics[1]["time/turn"] >= 0


async def test_a_step_without_signal_has_the_trainer_back_only_for_its_checkpoint(tmp_path: Path) -> None:
    world = World()
    world.alike = True
    await Parts(tmp_path, world, "checkpoint.every_steps=2").train()
    copied = ["sleep 1", "onload", "copy", "offload", "wake weights", "wake kv_cache"]
    assert world.diary == [*FIRST, *CANARY, "generate", "generate", *copied]  # after the last of two steps


async def test_without_sharing_nothing_more_is_asked_of_anybody(tmp_path: Path) -> None:
    world = World()
    await Parts(tmp_path, world, share=False).train()
    update = ["generate", "step", "copy", "write", "load"]
    assert world.diary == ["write", "load", "generate", "score", *update, *update]


async def test_the_canary_brings_the_trainer_back_and_the_server_keeps_its_weights(tmp_path: Path) -> None:
    world = World()
    await Parts(tmp_path, world, "sync.canary_every=2").train()
    # versions 5, 6, 7: the first is always checked, then each even one
    assert world.diary == [*FIRST, *CANARY, "generate", *UPDATE, *CANARY, "generate", *UPDATE]


async def test_a_server_that_dies_in_the_trainer_s_turn_is_lost_and_brought_up_again(tmp_path: Path) -> None:
    world = World()
    parts = Parts(tmp_path, world, "sync.canary_every=0")
    await parts.pool.wait_up()
    assert parts.turns is not None
    await parts.turns.trainer()
    gone = ServerError("can't reach it", code="unreachable")
    world.failing = {"wake weights": gone, "load": gone}
    world.diary.clear()
    metrics = await parts.sync.publish()
    assert metrics["sync/servers"] == 0
    assert world.diary == ["write", "offload"]  # the trainer is away, so that a new server has the GPU to start on
    world.diary.clear()
    await parts.pool.wait_up()
    assert world.diary == ["offload", "wake weights", "load", "wake kv_cache", *CANARY]  # written already
    assert parts.sync.version == 6


async def test_a_server_that_does_not_leave_the_gpu_stops_the_run_before_the_trainer_takes_it(tmp_path: Path) -> None:
    world = World()
    parts = Parts(tmp_path, world)
    await parts.pool.wait_up()
    world.diary.clear()
    assert parts.turns is not None
    for error in (
        ServerError("/sleep did not finish in 300 s", code="timeout"),
        ServerError("not started to share its GPU", code="no_sleep_mode", status=409),
    ):
        world.failing = {"sleep 2": error}
        with pytest.raises(SyncError, match=f"can't take turns on the GPU: {error}"):
            await parts.turns.trainer()
    assert world.diary == []


async def test_a_dead_server_does_not_keep_the_trainer_from_its_turn(tmp_path: Path) -> None:
    world = World()
    parts = Parts(tmp_path, world)
    await parts.pool.wait_up()
    world.diary.clear()
    world.failing = {"sleep 2": ServerError("its engine's process ended", code="engine_dead", status=503)}
    await put_to_sleep(parts.pool, parts.config)
    assert parts.pool.up == []


@pytest.mark.parametrize(("settings", "level"), [((), 2), (("model.lora={}",), 1)])
async def test_weights_that_no_version_brings_again_are_kept(
    tmp_path: Path, settings: tuple[str, ...], level: int
) -> None:
    slept: list[int] = []

    async def sleep(request: Any, *, timeout_s: float) -> None:
        slept.append(request.level)

    config = config_module.load(None, [f"run.dir={tmp_path}/runs/a", *settings])
    pool = ServerPool(["http://server"])
    pool.members[0].server.sleep = sleep  # type: ignore[method-assign,assignment]
    await put_to_sleep(pool, config)
    await put_to_sleep(pool, config, keep=True)
    assert slept == [level, 1]
