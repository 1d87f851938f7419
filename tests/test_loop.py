"""The loop with fakes in place of server, trainer and rewards: order, versions, what is skipped, what is recorded."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket import config as config_module
from hocket import loop
from hocket.algorithm.samples import KlController, shape
from hocket.commands.runs import OnStep, OnStepPart
from hocket.data.curriculum import bind
from hocket.data.stream import PromptStream
from hocket.errors import RewardError, SyncError
from hocket.loop import Run
from hocket.observe.console import Console
from hocket.observe.run_folder import RunFolder
from hocket.protocol import SamplingParams
from hocket.rollout.collect import Slot
from hocket.rollout.evaluate import Evaluation
from hocket.rollout.pipeline import Pipeline, plan_step
from hocket.run_part import RunPart
from hocket.trainer.checkpoints import Checkpoints
from hocket.types import Columns, Metrics, Prompt, Prompts, Rollout, Score, TokenSequence, TrainSample
from support import fakes
from support.batches import played

Reward = Callable[[int, int], float | None]
"""(step, sample index) → reward, or None for a failed one."""
Wait = Callable[[Rollout], Awaitable[object]]
"""What a rollout's score waits for."""


class World:
    """Everything around the loop, keeping a diary of what it was asked to do."""

    policy_learns = True
    lie = ""  # the rollout that a check finds wrong

    def __init__(self, reward: Reward, before_score: Wait, reference: tuple[float, float] | None) -> None:
        self.reward = reward
        self.before_score = before_score
        self.played = set[str]()
        self.diary: list[Any] = []
        self.current = 4  # the server was used before
        self.keep: list[Path] = []
        self.publishes: list[bool] = []  # each time that the trainer is held
        self.checked: list[list[int]] = []  # rollouts of each prompt, in each check
        self.trains: list[bool | None] = []  # whether some of these are trained
        self.reference = reference  # its log-probs of every completion
        self.untrained = {1: "its update was not finite"}  # of the second group of each step

    async def wait_up(self) -> None:
        if "wait" not in self.diary:
            self.diary.append("wait")
            await self.publish()  # the pool has whoever publishes bring a server up

    @property
    def versions(self) -> "World":
        return self

    @contextlib.asynccontextmanager
    async def training(self, *, publishes: bool) -> AsyncIterator[dict[str, float]]:
        self.publishes.append(publishes)
        yield {}

    async def play(self, prompt: Prompt, slot: Slot) -> Rollout:
        label = slot.group.rpartition("/")[0]
        if label not in self.played:
            self.played.add(label)
            self.diary.append(("play", label, self.current))
        return played(prompt, slot.id, slot.id.rpartition("/")[2], sampled=2, version=self.current)

    async def ask(self, rollout: Rollout) -> dict[str, Score]:
        what, step, *_ = rollout.id.replace("/", " ").split()
        await self.before_score(rollout)
        value = self.reward(int(step) if what == "step" else 0, int(rollout.text))
        error = Score(total=0.0, error="broke")
        return {"one": error if value is None else Score(total=value, parts={"exact_match": value})}

    async def settle(self, rollouts: Sequence[Rollout], given: Sequence[dict[str, Score]]) -> tuple[Score, ...]:
        return tuple(one["one"] for one in given)

    def measure(self, sequences: Sequence[TokenSequence]) -> list[Columns]:
        if self.reference is None:
            return []
        self.diary.append(("measure", len(sequences)))
        return [{"ref_logprobs": (0.0, *self.reference)} for _ in sequences]

    def step(self, samples: Sequence[TrainSample], *, number: int, keep: Path, max_gap: float) -> dict[str, float]:
        assert max_gap == 0.5
        self.keep.append(keep)
        self.diary.append(("train", len(samples), sorted({sample.sequence.version_min for sample in samples})))
        metrics = {"loss": 0.5, "grad_norm": 1.0, "logprob_gap": 0.0, "tokens": 2.0 * len(samples), "mfu": 0.5}
        metrics |= {"updates": float(self.policy_learns), "skipped": 0.0}
        return {f"train/{name}": value for name, value in metrics.items()} | {"time/train": 0.1}

    def end_step(self) -> None:
        self.diary.append("pass")

    def state(self, sink: object) -> dict[str, Any]:
        self.diary.append("copy")
        return {}

    def max_gap(self, rollouts: Iterable[Rollout]) -> float:
        return 0.75  # which a part of the run lowers

    async def publish(self) -> dict[str, float]:
        self.current += 1
        self.diary.append(("publish", self.current))
        return {"sync/mebibytes": 2.0}

    def save(self) -> None:
        self.diary.append(("save", self.current))


class Checks(RunPart):
    """Takes the rollouts and metrics of a world, and finds its lie."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def rolled_out(self, groups: Sequence[Sequence[Rollout]], trains: bool | None) -> Metrics:
        world = self._world
        world.checked.append([len(rollouts) for rollouts in groups])
        world.trains.append(trains)
        if world.lie in {rollout.id for rollouts in groups for rollout in rollouts}:
            raise SyncError("a server lies")
        if trains is None:
            return {"eval/logprob_gap": 0.25}
        return {"sampling/logprob_gap": 0.25}

    def max_gap(self) -> float:
        return 0.5

    def trained(self, metrics: Metrics) -> Metrics:
        if self._world.lie == "gap" and "train/logprob_gap" in metrics:
            raise SyncError("a server lies")
        return {}


async def trained(
    tmp_path: Path,
    reward: Reward,
    *settings: str,
    held_out: int = 2,
    before_score: Wait = lambda rollout: asyncio.sleep(0),
    reference: tuple[float, float] | None = None,
    on_step: OnStep = None,
    parts_of_run: Sequence[RunPart] = (),
) -> tuple[World, list[Any], Any]:
    fixed = ["rollout.prompts_per_step=2", "rollout.group_size=2", "trainer.steps=2"]
    config = config_module.load(None, [f"run.dir={tmp_path}/runs/a", "pipeline.max_staleness=0", *fixed, *settings])
    max_staleness = int(config.pipeline.max_staleness)
    world: Any = World(reward, before_score, reference)
    parts: dict[str, Any] = {}
    with (
        RunFolder(config) as folder,
        Console(config.trainer.steps) as console,
        Checkpoints(config, world.state, parts) as kept,
    ):
        prompts, others = (Prompts(Prompt(id=f"{name}{i}", token_ids=(1,)) for i in range(3)) for name in "ph")
        chosen = config.curriculum
        stream = PromptStream(prompts, bind(chosen), seed=config.trainer.seed, retire_after=chosen.retire_after)
        parts["prompts"] = stream
        evaluation = Evaluation(
            prompts=others[:held_out],
            play=world.play,
            scorer=world,
            rewards={"": "exact_match"},
            samples=1,
            threshold=1.0,
            sampling=SamplingParams(seed=1),
            timeout_s=60.0,
            max_error_rate=config.rewards.max_error_rate,
        )
        chosen = {"oversampling": config.algorithm.oversampling, "max_staleness": max_staleness}
        plan = functools.partial(plan_step, config=config.rollout, seed=config.trainer.seed, **chosen)
        batches = functools.partial(Pipeline, plan=plan, steps=config.trainer.steps, max_staleness=max_staleness)
        summary = await Run(
            config=config,
            trainer=world,
            servers=world,
            stream=stream,
            play=world.play,
            scorer=world,
            shape=functools.partial(
                shape,
                algorithm=config.algorithm,
                max_tokens=config.rollout.max_tokens,
                pass_reward=config.default_source.pass_reward,
            ),
            batches=batches,
            evaluation=evaluation,
            publisher=world,
            kl=KlController(config.algorithm),
            folder=folder,
            console=console,
            checkpoints=kept,
            parts=[Checks(world), *parts_of_run, *map(OnStepPart, filter(None, [on_step]))],
        ).train()
    lines = (tmp_path / "runs" / "a" / "metrics.jsonl").read_text().splitlines()
    return world, [json.loads(line) for line in lines], summary


async def test_while_only_the_critic_learns_nothing_is_published_and_no_step_counts_as_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "policy_learns", False)
    world, _, summary = await trained(tmp_path, lambda step, j: float(j))
    published = [entry for entry in world.diary if entry[0] == "publish"]
    assert published == [("publish", 5)]  # before the first step
    assert world.publishes == [False] * 4  # two evaluations, two steps
    assert (summary["steps"], summary["updated"], summary["final_version"]) == (2, 0, 5)


async def test_each_step_generates_trains_and_publishes_in_this_order(tmp_path: Path) -> None:
    world, metrics, summary = await trained(tmp_path, lambda step, j: float(j))
    assert world.diary == [
        "wait",
        ("publish", 5),  # before anything is generated: both sides start from the trainer's weights
        ("play", "eval 0", 5),  # held-out accuracy before
        ("play", "step 1", 5),
        ("train", 4, [5]),  # on what these very weights sampled
        ("publish", 6),
        ("play", "step 2", 6),
        ("train", 4, [6]),
        "copy",  # for the checkpoint after the last step; by then nothing has made room for the server
        ("publish", 7),
        ("play", "eval 2", 7),  # held-out accuracy after
        ("save", 7),
    ]
    assert [line["step"] for line in metrics] == [0, 1, 2]
    assert metrics[0]["eval/logprob_gap"] == metrics[2]["eval/logprob_gap"] == 0.25
    assert (world.checked[0], world.trains[0]) == ([2, 2], None)  # of each prompt the greedy and the sampled answer
    assert metrics[1]["reward/mean"] == 0.5
    assert metrics[2]["train/loss"] == 0.5
    assert metrics[2]["staleness/max"] == 0
    assert metrics[2]["sync/mebibytes"] == 2.0
    assert (summary["steps"], summary["final_version"]) == (2, 7)
    assert summary["before"]["greedy"] == summary["after"]["greedy"] == 0.0
    written = sorted(path.stem for path in (tmp_path / "runs/a/rollouts").iterdir())
    assert written == ["eval_000000", "eval_000002", "step_000001", "step_000002"]


@pytest.mark.parametrize("kind", [bool, np.bool_])
async def test_the_users_on_step_sees_every_step_and_ends_the_run(
    kind: type, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[float] = []
    _, metrics, summary = await trained(
        tmp_path, lambda step, j: float(j), "trainer.steps=9",
        on_step=lambda step, metrics: seen.append(metrics["reward/mean"]) or kind(step == 2) or 1.0,  # which does not
    )  # fmt: skip
    assert ([line["step"] for line in metrics], seen) == ([0, 1, 2], [0.5, 0.5])
    assert summary["before"]["greedy"] == summary["after"]["greedy"] == 0.0  # evaluated once more at its end
    assert capsys.readouterr().out.count("OnStepPart ends the run after step 2\n") == 1


async def test_every_prompt_that_was_drawn_is_in_the_ledger_with_its_outcome(tmp_path: Path) -> None:
    rewards = {1: [0.0, 1.0], 2: [1.0, 1.0], 3: [0.0, None]}
    settings = ("trainer.steps=4", "rewards.max_error_rate=1")
    await trained(tmp_path, lambda step, j: rewards.get(step, [None, None])[j], *settings, held_out=0)
    lines = [json.loads(line) for line in (tmp_path / "runs/a/ledger.jsonl").open()]
    places = [(line["step"], line["draw"], line["epoch"]) for line in lines]
    assert places == [(i // 2 + 1, i, i // 3) for i in range(8)]
    assert [(line["state"], line.get("why"), line.get("pass_rate")) for line in lines[::2]] == [
        ("trained", None, 0.5),
        ("filtered", "every reward is 1", 1.0),
        ("filtered", "one score alone", 0.0),
        ("failed", "no score", None),
    ]
    assert [line.get("why") for line in lines[1:4]] == ["its update was not finite", *["every reward is 1"] * 2]
    for epoch in (0, 1):
        assert {line["prompt"] for line in lines if line["epoch"] == epoch} == {"p0", "p1", "p2"}


@pytest.mark.parametrize("staleness", [0, 2])
async def test_when_every_prompt_is_retired_the_run_evaluates_saves_and_ends_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], staleness: int
) -> None:
    settings = ("curriculum.retire_after=1", "trainer.steps=9", f"pipeline.max_staleness={staleness}")
    world, metrics, summary = await trained(tmp_path, lambda step, j: 1.0, *settings)
    (last, *_) = [line for line in metrics[1:] if "rollout/tokens" not in line]  # the step that found no prompt
    assert last is metrics[-1]
    assert last["step"] == summary["steps"] == len(metrics) - 1 < 9
    assert last["eval/sampled"] == summary["before"]["sampled"] == summary["after"]["sampled"] == 1.0
    assert ("train", 4, [5]) not in world.diary
    assert world.diary.count("copy") == 1  # the checkpoint of the last step, which is not trainer.steps
    assert [path.name for path in (tmp_path / "runs/a/checkpoints").iterdir()] == [f"step_{last['step']:06d}"]
    assert "every prompt is retired (curriculum.retire_after)" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "runs/a/ledger.jsonl").open()]
    assert {row["prompt"] for row in rows} == {"p0", "p1", "p2"}
    if staleness == 0:  # step 1: two of the three; step 2: the third, and one again; step 3: none
        assert last["step"] == 3


async def test_a_step_without_signal_trains_and_publishes_nothing(tmp_path: Path) -> None:
    world, metrics, summary = await trained(tmp_path, lambda step, j: 1.0 if step == 1 else float(j), held_out=0)
    assert world.diary == [
        "wait",
        ("publish", 5),
        ("play", "step 1", 5),  # all rewards are alike
        "pass",  # the learning rate goes by steps
        ("play", "step 2", 5),
        ("train", 4, [5]),
        "copy",
        ("publish", 6),
        ("save", 6),
    ]
    assert world.publishes == [False, True]  # in the first one rollouts are checked alone
    assert world.checked == [[2, 2], [2, 2]]  # with or without a signal
    assert world.trains == [False, True]
    assert metrics[1]["rollout/zero_variance"] == 1.0
    assert "train/loss" not in metrics[1]
    assert summary["final_version"] == 6
    assert summary["before"] == {}


@pytest.mark.parametrize("lie", ["step 1/1/0", "eval 0/0/0"])
async def test_nothing_is_learnt_or_told_from_rollouts_that_fail_a_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lie: str
) -> None:
    monkeypatch.setattr(World, "lie", lie)
    with pytest.raises(SyncError, match="a server lies"):
        await trained(tmp_path, lambda step, j: float(j))
    assert "train/loss" not in (tmp_path / "runs/a/metrics.jsonl").read_text()
    assert ("step 0/2  " in capsys.readouterr().out) == lie.startswith("step")  # its figures, not what it is doing
    assert (tmp_path / "runs/a/rollouts" / f"{lie[:4]}_{int(lie[5]):06d}.jsonl").exists()


async def test_parts_of_a_run_are_called_in_the_order_in_which_their_methods_stand(tmp_path: Path) -> None:
    calls: list[tuple[str, int]] = []

    class Diary(RunPart):
        def samples(self, step: int, samples: Sequence[TrainSample]) -> None:
            calls.append(("samples", step))

        def evaluated(self, step: int, metrics: Metrics) -> Metrics:
            calls.append(("evaluated", step))
            return {"eval/mine": 7.0}

        def ends(self, step: int, metrics: Metrics) -> bool:
            calls.append(("ends", step))
            return False

        def recorded(self, step: int, metrics: Metrics) -> None:
            calls.append(("recorded", step))

        def summary(self) -> dict[str, Any]:
            return {"mine": 1}

    settings = ("eval.every_steps=2", "eval.data.source=task:sort")
    _, metrics, summary = await trained(tmp_path, lambda step, j: float(j), *settings, parts_of_run=[Diary()])
    first = [("samples", 1), ("ends", 1), ("recorded", 1)]
    second = [("samples", 2), ("evaluated", 2), ("ends", 2), ("recorded", 2)]
    assert calls == [("evaluated", 0), ("recorded", 0), *first, *second]
    assert [row.get("eval/mine") for row in metrics] == [7.0, None, 7.0]
    assert summary["mine"] == 1


@pytest.mark.parametrize("on_step", [None, lambda step, metrics: step == 1])
async def test_the_next_batch_begins_while_an_evaluation_waits_for_its_last_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_step: OnStep
) -> None:
    seen: list[Any] = []
    play = World.play

    async def told(world: World, prompt: Prompt, slot: Slot) -> Rollout:
        rollout = await play(world, prompt, slot)
        seen.append(slot.group.rpartition("/")[0])
        return rollout

    def reward(step: int, sample: int) -> float:
        seen.append(step)  # 0: of an evaluation
        return float(sample)

    async def late(rollout: Rollout) -> None:
        """Waits with the evaluation until step 2 is played, and with step 2 until the evaluation has its rewards."""
        name, times = {"eval 1": ("step 2", 4), "step 2": (0, 8)}.get(rollout.id.partition("/")[0], (0, 0))
        async with asyncio.timeout(300):
            while seen.count(name) < times:
                await asyncio.sleep(0)

    monkeypatch.setattr(World, "play", told)
    every = ("eval.every_steps=1", "checkpoint.every_steps=1")
    world, metrics, _ = await trained(tmp_path, reward, *every, before_score=late, on_step=on_step)
    first = seen.index("eval 1")
    assert seen[first:][:12] == ["eval 1"] * 4 + ["step 2"] * 4 + [0] * 4
    assert ("play", "step 2", 6) in world.diary  # with the weights of step 1
    # Where the evaluation ends the run, nothing of the batch is left, and its prompts wait in the checkpoint.
    last = 2 if on_step is None else 1
    assert [line["step"] for line in metrics] == [*range(last + 1)]
    rows = [json.loads(line) for line in (tmp_path / "runs/a/ledger.jsonl").open()]
    assert [(row["step"], row["draw"]) for row in rows] == [(1 + i // 2, i) for i in range(2 * last)]
    assert asyncio.all_tasks() == {asyncio.current_task()}
    state = json.loads((tmp_path / f"runs/a/checkpoints/step_{last:06d}/state.json").read_text())
    assert [draw["draw"] for draw in state["parts"]["prompts"]["in_flight"]] == [2, 3][: 4 - 2 * last]


async def test_a_step_is_shared_out_among_what_the_loop_waited_for(tmp_path: Path) -> None:
    late = {"before_score": lambda rollout: asyncio.sleep(0.05)}
    world, metrics, _ = await trained(tmp_path, lambda step, j: float(j), "trainer.steps=1", held_out=0, **late)
    (first, step) = metrics
    assert "time/step" not in first
    assert step["time/reward"] > 0.04  # the scores are waited for when all tokens are there
    assert step["time/generate"] + step["time/reward"] <= step["time/step"]
    assert step["pipeline/wait_for_rewards"] == pytest.approx(step["time/reward"] / step["time/step"])
    assert step["step/tokens_per_s"] == pytest.approx(8 / step["time/step"])
    assert world.keep == [tmp_path / "runs/a/skipped/step_000001.json"]


@pytest.mark.parametrize("on_step", [None, lambda step, metrics: step == 1])
async def test_the_seconds_of_a_step_are_those_of_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_step: OnStep
) -> None:
    """By a clock that only work moves; the second run ends with an evaluation that a part of the run asks for."""
    clock = fakes.Clock()
    for module in ("common.tasks", "rollout.collect", "rollout.pipeline", "trainer.checkpoints"):
        monkeypatch.setattr(f"hocket.{module}.time", clock)

    def takes(seconds: float, owner: Any, name: str) -> None:
        work = getattr(owner, name)

        @functools.wraps(work)
        def slow(*args: Any, **known: Any) -> Any:
            clock.now += seconds
            return work(*args, **known)

        monkeypatch.setattr(owner, name, slow)

    class Slow(RunPart):
        async def rolled_out(self, groups: Sequence[Sequence[Rollout]], trains: bool | None) -> Metrics:
            clock.now += 16.0
            return {} if trains is None else {"time/check": 16.0}

        def samples(self, step: int, samples: Sequence[TrainSample]) -> None:
            clock.now += 32.0

        def evaluated(self, step: int, metrics: Metrics) -> Metrics:
            clock.now += 64.0
            return {}

    takes(1.0, World, "play")  # of each rollout
    takes(2.0, RunFolder, "rollouts")
    takes(4.0, loop, "rollout_metrics")
    takes(8.0, World, "measure")
    takes(0.1, World, "step")  # which says so
    takes(128.0, loop, "train_samples")
    takes(256.0, World, "state")
    takes(512.0, World, "publish")
    every = ("eval.every_steps=2", "checkpoint.every_steps=1")
    known: dict[str, Any] = {"on_step": on_step, "parts_of_run": [Slow()]}
    _, rows, _ = await trained(tmp_path, lambda step, j: float(j), *every, **known)
    assert (rows[-1]["step"], "time/eval" in rows[1]) == ((2, False) if on_step is None else (1, True))
    for row in rows[1:]:
        seconds = {name: value for name, value in row.items() if name.startswith("time/")}
        whole, _ = seconds.pop("time/step"), seconds.pop("time/batch")
        assert math.fsum(seconds.values()) == pytest.approx(whole)
        evaluation = 4 + 2 + 16 + 64  # four answers are played, written, checked, and taken by the part
        assert seconds.get("time/eval", evaluation) == evaluation
        expected = {"record": 6, "check": 16, "measure": 8, "samples": 160, "train": 0.1, "checkpoint": 256}
        for name, value in (expected | {"sync": 512}).items():
            assert seconds[f"time/{name}"] == pytest.approx(value)


@pytest.mark.parametrize("sequences", [1, 2])
async def test_what_the_trainer_measures_shapes_the_rewards_and_the_coefficient_adapts(
    tmp_path: Path, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = World.play

    async def of_several(world: World, prompt: Prompt, slot: Slot) -> Rollout:
        rollout = await play(world, prompt, slot)
        return dataclasses.replace(rollout, sequences=rollout.sequences * sequences)

    monkeypatch.setattr(World, "play", of_several)
    settings = ["algorithm.preset=reinforce_pp", "algorithm.kl_in={name: reward, target: 0.1}"]
    world, metrics, _ = await trained(tmp_path, lambda step, j: float(j), *settings, held_out=0, reference=(-0.4, -0.5))
    assert world.diary[2:6] == [
        ("play", "step 1", 5),
        ("measure", 4 * sequences),
        ("train", 4 * sequences, [5]),
        ("publish", 6),
    ]
    assert [line["rollout/kl"] for line in metrics[1:]] == pytest.approx([0.3, 0.3])  # −0.1 + 0.4 and −0.2 + 0.5
    # 0.3 is too far by more than 20 %: · (1 + 0.2 · 4 rollouts / 10,000)
    assert [line["rollout/kl_coef"] for line in metrics[1:]] == pytest.approx([0.01, 0.0100008])


async def test_evaluations_come_at_their_interval_and_at_the_end(tmp_path: Path) -> None:
    _, metrics, _ = await trained(tmp_path, lambda step, j: float(j), "eval.every_steps=2", "trainer.steps=5")
    assert [line["step"] for line in metrics if "eval/greedy" in line] == [0, 2, 4, 5]


async def test_the_time_of_an_evaluation_has_that_of_its_check(tmp_path: Path) -> None:
    class Slow(RunPart):
        async def rolled_out(self, groups: Sequence[Sequence[Rollout]], trains: bool | None) -> Metrics:
            await asyncio.sleep(0.1)
            return {}

    _, metrics, _ = await trained(tmp_path, lambda step, j: float(j), "trainer.steps=1", parts_of_run=[Slow()])
    assert all(line["time/eval"] > 0.09 for line in metrics)


async def test_a_run_whose_rewards_mostly_fail_stops_with_the_cause(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"4 of 4 scores failed.*broke"):
        await trained(tmp_path, lambda step, j: None if step == 1 else 1.0)
    rows = (tmp_path / "runs/a/rollouts/step_000001.jsonl").read_text().splitlines()
    assert [json.loads(row)["error"] for row in rows] == ["broke"] * 4  # they explain why it stopped
