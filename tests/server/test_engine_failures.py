"""Updates and sleeps that break off, and what the engine then answers: a fake AsyncLLM under the real Engine."""

import asyncio
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from hocket import protocol
from hocket.server import worker
from hocket.server.engine import Engine
from hocket.server.errors import ApiError
from hocket.server.share_gpu import Sleeper
from support.engines import make_engine, make_llm, publish

MODEL = Path(__file__).parents[2] / "checkpoints" / "tiny-sort"


class FakeLLM:
    """Answers as an engine with two workers would; `failing` has the error of a call, "too late" or "hangs"."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.__dict__ |= attributes
        self.errored = False
        self.require_ready: Callable[[], None]
        self.failing: dict[str, str] = {}
        self.calls: list[Any] = []
        self.loading = asyncio.Event()
        self.loading.set()

    async def _do(self, call: str, *arguments: Any) -> None:
        self.calls.append((call, *arguments))
        failure = self.failing.get(arguments[0] if call == "pause" else call)
        if failure == "hangs":
            await asyncio.Event().wait()
        if failure is not None:
            raise TimeoutError if failure == "too late" else Exception(failure)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await self._do("pause", mode if clear_cache else "keep all")

    async def resume_generation(self) -> None:
        await self._do("resume")

    async def sleep(self, level: int, mode: str) -> None:
        await self._do("sleep", level, mode)

    async def wake_up(self, tags: list[str]) -> None:
        await self._do("wake", *tags)

    async def update_weight_version(self, version: str) -> None:
        await self._do("version", version)

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        await self._do(method)
        await self.loading.wait()
        read = {name: item for _, specs in worker._read(Path(args[0])) for name, item in specs.items()}
        different = self.failing.get("different", "").split() if args[-1] else []
        checksum = protocol.manifest.total_checksum(read)
        good = {"value": {"checksum": checksum, "num_tensors": len(read), "different": different}}
        return [good, {"error": self.failing["second worker"]} if "second worker" in self.failing else good]


def tiny_sort() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL)


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM(vars(make_llm()))


@pytest.fixture
def engine(llm: FakeLLM, tmp_path: Path) -> Engine:
    """An engine that may sleep, with a good version to load."""
    publish(tiny_sort(), tmp_path / "runs" / "v1", 1, drop=["lm_head.weight"])
    settings = (f"model.path={MODEL}", f"run.dir={tmp_path}/runs/a", "sync.timeout_s=60", "launch.share_gpu=true")
    return make_engine(llm, *settings)  # type: ignore[no-any-return]


async def sleep(engine: Engine, **how: Any) -> protocol.Health:
    sleeper = engine._gpu_sharing or Sleeper(engine)  # as the route has it
    assert isinstance(sleeper, Sleeper)
    return await sleeper.sleep(protocol.SleepRequest(**how))


def request(in_flight: Any = "keep", *, version: int = 1, compare: bool = False, **how: Any) -> protocol.ReloadRequest:
    source = how.pop("source", protocol.DiskSource(name="v1"))
    return protocol.ReloadRequest(version=version, source=source, in_flight=in_flight, compare=compare, **how)


async def refusal(call: Awaitable[Any]) -> tuple[int, str, str]:
    """Returns status, code and message of the call's error."""
    with pytest.raises(ApiError) as refused:
        await call
    return refused.value.status, refused.value.body.code, str(refused.value)


def said_by(engine: Engine) -> protocol.ErrorBody:
    """Returns why it has failed, as it says itself."""
    health = engine.health()
    assert health.status == "failed"
    assert health.error is not None
    return health.error


async def until(llm: FakeLLM, call: str) -> None:
    """Waits until the engine's process has been asked for something."""
    async with asyncio.timeout(60):
        while not any(call in made for made in llm.calls):
            await asyncio.sleep(0.01)


async def test_requests_that_are_not_drained_in_time_go_on_with_the_old_weights(engine: Engine, llm: FakeLLM) -> None:
    llm.failing = {"wait": "too late"}
    for call in (engine.reload(request("drain")), sleep(engine, in_flight="drain")):
        llm.calls.clear()
        status, code, message = await refusal(call)
        assert (status, code, "did not end within" in message) == (503, "busy", True)
        assert llm.calls == [("pause", "wait"), ("resume",)]  # no worker was asked for anything
    assert (engine.health().status, engine.health().version) == ("ready", 0)
    llm.failing["resume"] = "too late"
    llm.calls.clear()
    status, code, message = await refusal(engine.reload(request("drain")))
    assert (status, code) == (503, "not_resumed")
    assert message.endswith(", and the engine does not go on: TimeoutError")
    assert llm.calls == [("pause", "wait"), ("resume",), ("pause", "abort")]
    assert "publish a good version" in said_by(engine).hint
    llm.failing = {}
    assert (await engine.reload(request())).version == 1
    assert engine.health().status == "ready"


async def test_a_version_held_is_answered_at_once_and_one_refused_changes_nothing(engine: Engine, llm: FakeLLM) -> None:
    held, *others = await asyncio.gather(*(engine.reload(request()) for _ in range(3)))
    assert others == [held] * 2  # the same seconds, too
    group = protocol.GroupAddress(name="g", host="127.0.0.1", port=1, device=None, timeout_s=1.0)
    foreign = protocol.CollectiveSource(
        group=group, turn=1, buckets=[[protocol.TensorLayout(name="x", dtype="float32", shape=[1])]]
    )
    for bad, said in (
        (request(source=protocol.DiskSource(name="nowhere")), "there is no 'nowhere'"),
        (request(version=2), "the manifest is of version 1, not 2"),
        (request(version=2, source=foreign), "tensor 'x' is (1,) in the version, missing in the model"),
        (request(source=protocol.OtherSource(kind="pigeon")), "no part of this server reads 'pigeon'; it reads "),
    ):
        assert said in (await refusal(engine.reload(bad)))[2]
    assert [call for (call, *_) in llm.calls] == ["pause", "hocket_load_disk", "version", "resume"]
    assert (engine.health().status, engine.health().version) == ("ready", 1)
    same = engine.root / "other"  # under another name it may be another run's version of the same number
    same.symlink_to(engine.root / "v1")
    assert await engine.reload(request(source=protocol.DiskSource(name="other"))) != held


async def test_a_version_written_again_with_other_weights_is_not_the_held_one(engine: Engine, llm: FakeLLM) -> None:
    held, model = await engine.reload(request()), tiny_sort()
    model.model.norm.weight.data *= 2
    shutil.rmtree(engine.root / "v1")
    checksum = publish(model, engine.root / "v1", 1)  # by a run that was resumed from before it
    llm.calls.clear()
    assert (await refusal(engine.reload(request(compare=True))))[:2] == (503, "other_version")
    assert llm.calls == []
    answer = await engine.reload(request())
    assert (answer.checksum, answer.checksum == held.checksum) == (checksum, False)


async def test_a_worker_that_fails_stops_the_engine_until_a_load_that_all_finish(engine: Engine, llm: FakeLLM) -> None:
    llm.failing = {"second worker": "no room for layers.1"}
    failed = await refusal(engine.reload(request()))
    assert failed == (500, "reload_failed", "loading version 1 failed: no room for layers.1")
    assert ("resume",) not in llm.calls
    assert engine.health().status == "failed"
    # A request that was let in just before: nothing would ever end it.
    with pytest.raises(ApiError, match=r"no room for layers\.1"):
        llm.require_ready()  # as every request begins
    llm.failing = {}
    answer = await engine.reload(request())
    assert (answer.version, answer.num_tensors) == (1, 26)
    assert llm.calls[-2:] == [("version", "1"), ("resume",)]
    assert engine.health().status == "ready"


async def test_a_comparison_disturbs_no_request_and_leaves_all_as_it_was(engine: Engine, llm: FakeLLM) -> None:
    assert (await refusal(engine.reload(request(compare=True))))[:2] == (503, "other_version")  # it is not held
    held = await engine.reload(request())
    for failing in ({}, {"second worker": "no room for layers.1"}, {}):
        llm.failing = failing
        llm.calls.clear()
        comparing = engine.reload(request("abort", compare=True))
        if failing:
            said = "comparing with version 1 failed: no room for layers.1"
            assert await refusal(comparing) == (500, "compare_failed", said)
        else:
            answer = await comparing
            assert answer.model_copy(update={"seconds": held.seconds}) == held
        assert llm.calls == [("pause", "keep all"), ("hocket_load_disk",), ("resume",)]
        assert (engine.health().status, engine.health().error) == ("ready", None)


async def test_a_model_that_is_not_its_version_fails_until_the_next_load(engine: Engine, llm: FakeLLM) -> None:
    await engine.reload(request())
    llm.failing = {"different": "layers.2.a layers.0.b layers.1.c layers.3.d"}
    said = "comparing with version 1 failed: the model differs in layers.0.b, layers.1.c, layers.2.a (4 in all)"
    assert await refusal(engine.reload(request(compare=True))) == (409, "not_held", said)
    assert said_by(engine).code == "reload_failed"
    assert llm.calls[-1] == ("pause", "abort")
    assert await refusal(engine.reload(request(compare=True))) == (503, "reload_failed", said)
    llm.failing = {}
    await engine.reload(request())
    assert engine.health().status == "ready"


async def test_files_on_a_disk_that_hangs_are_given_up_with_the_old_weights_in_place(
    engine: Engine, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    monkeypatch.setattr("hocket.server.versions.read", lambda *_: answered.wait())
    engine.timeout_s = 0.05
    try:
        status, code, message = await refusal(engine.reload(request()))
    finally:
        answered.set()
    assert (status, code) == (503, "slow_disk")
    assert "not read within sync.timeout_s=0.05: does their disk hang?" in message
    assert (llm.calls, engine.health().status) == ([], "ready")


async def test_the_reason_is_told_even_if_nothing_can_be_aborted_any_more(engine: Engine, llm: FakeLLM) -> None:
    llm.failing = {"second worker": "it broke", "abort": "Call to pause_scheduler method failed"}
    assert (await refusal(engine.reload(request())))[1:] == ("reload_failed", "loading version 1 failed: it broke")
    llm.errored = True
    assert said_by(engine).code == "engine_dead"  # which no good version mends


@pytest.mark.parametrize("reason", ["engine_dead", "shutting_down"])
@pytest.mark.parametrize("call", ["keep", "hocket_load_disk", "version", "resume", "resume after a comparison"])
async def test_a_reload_that_a_lost_engine_leaves_without_an_answer_is_told_why(
    engine: Engine, llm: FakeLLM, call: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.server.vllm_api.LOOK_S", 0.01)
    call, compare, _ = call.partition(" after a comparison")
    if compare:
        await engine.reload(request())
        llm.calls.clear()
        llm.failing = {"second worker": "no room"}
    llm.failing[call] = "hangs"
    loading = asyncio.create_task(engine.reload(request(compare=bool(compare))))
    await until(llm, call)
    if reason == "engine_dead":
        llm.errored = True
    else:
        await engine.stop()
    status, code, _ = await asyncio.wait_for(refusal(loading), 60)
    assert (status, code, said_by(engine).code) == (503, reason, reason)


async def test_a_load_that_ends_while_the_server_stops_does_not_bring_it_back(engine: Engine, llm: FakeLLM) -> None:
    llm.loading.clear()
    loading = asyncio.create_task(engine.reload(request()))
    await until(llm, "hocket_load_disk")
    await engine.stop()
    llm.loading.set()
    assert (await refusal(loading))[1] == "shutting_down"
    assert ("resume",) not in llm.calls
    with pytest.raises(ApiError, match="shutting down"):
        engine.require_ready()


async def test_requests_are_settled_before_a_sleep_that_ends_in_two_parts(engine: Engine, llm: FakeLLM) -> None:
    for _ in range(2):  # twice is as once
        assert (await sleep(engine, level=2, in_flight="drain")).status == "asleep"
    await engine.reload(request())
    await sleep(engine, level=1)
    assert (await refusal(engine.reload(request(compare=True))))[1] == "asleep"
    assert (await engine.reload(request())).version == 1  # it is held already
    assert engine.health().status == "ready"
    assert llm.calls == [
        *[("pause", "wait"), ("sleep", 2, "keep"), ("wake", "weights")],
        *[("hocket_load_disk",), ("version", "1"), ("wake", "kv_cache")],
        *[("pause", "keep"), ("sleep", 1, "keep"), ("wake", "weights", "kv_cache")],
    ]
    assert (await refusal(sleep(make_engine(llm, f"model.path={MODEL}"))))[1] == "no_sleep_mode"


async def test_a_load_that_fails_while_the_cache_sleeps_stops_the_engine(engine: Engine, llm: FakeLLM) -> None:
    await sleep(engine, level=1)
    llm.failing = {"second worker": "no room"}
    assert (await refusal(engine.reload(request())))[1] == "reload_failed"
    assert engine.health().status == "failed"
    llm.failing = {}
    await sleep(engine, level=2)  # half awake: it is paused already
    await engine.reload(request())
    assert engine.health().status == "ready"
    assert ("resume",) not in llm.calls
    assert [call for call in llm.calls if call[0] in ("pause", "wake")] == [
        *[("pause", "keep"), ("wake", "weights"), ("pause", "abort")],
        *[("wake", "weights"), ("wake", "kv_cache")],
    ]


@pytest.mark.parametrize(
    ("failure", "cause"),
    [("too late", "not done after sync.timeout_s=60"), ("CUDA out of memory\nTrace", "of memory")],
)
async def test_an_engine_that_cannot_come_back_to_the_gpu_has_failed_and_says_so(
    engine: Engine, llm: FakeLLM, failure: str, cause: str
) -> None:
    await sleep(engine, level=1)
    llm.failing = {"wake": failure}
    for _ in range(2):  # and nothing brings it back
        _, code, message = await refusal(engine.reload(request()))
        assert (code, message.endswith(cause)) == ("sleep_failed", True)
    assert said_by(engine).code == "sleep_failed"
    assert "gpu_memory_utilization" in said_by(engine).hint


async def test_an_engine_that_dies_asleep_is_dead(engine: Engine, llm: FakeLLM) -> None:
    await sleep(engine, level=1)
    assert engine.health().status == "asleep"
    llm.errored = True
    assert engine.health().status == "failed"
    with pytest.raises(ApiError, match="the engine's process ended"):
        engine.require_ready(admits={"asleep"})


async def test_an_engine_works_for_one_trainer_and_for_those_who_are_none(engine: Engine, llm: FakeLLM) -> None:
    session = {"sampling": protocol.SamplingParams(), "max_length": 9, "max_calls": 1, "idle_timeout_s": 9.0}

    async def admit(trainer: str) -> None:
        engine.admit(protocol.SessionRequest(trainer=trainer, **session))

    await engine.heartbeat(protocol.HeartbeatRequest(trainer="first"))
    for call in (
        engine.read(protocol.GenerateRequest(trainer="second", prompts=[[5]]).model_dump_json().encode()),
        admit("second"),
        engine.reload(request(trainer="second")),
        sleep(engine, trainer="second"),
        engine.heartbeat(protocol.HeartbeatRequest(trainer="second")),
    ):
        assert (await refusal(call))[1] == "other_trainer"
    assert llm.calls == []
    await engine.heartbeat(protocol.HeartbeatRequest(trainer="second", take_over=True))
    assert "works for trainer second" in (await refusal(engine.reload(request(trainer="first"))))[2]
    await engine.heartbeat(protocol.HeartbeatRequest(trainer="second", leaving=True))
    for trainer in (None, "first"):
        assert (await engine.reload(request(trainer=trainer))).version == 1
