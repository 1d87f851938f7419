"""Updates that break off, and what the engine then answers: a fake AsyncLLM under the real Engine, real files."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hocket import config as config_module
from hocket import manifest
from hocket.protocol import DiskSource, ReloadRequest, SamplingParams
from hocket.server import worker
from hocket.server.engine import Engine
from hocket.server.errors import ApiError
from hocket.server.requests import Job

MODEL = Path(__file__).parents[2] / "checkpoints" / "tiny-sort"


class FakeLLM:
    """Answers as an engine with two workers would; `failing` says what a call does instead."""

    def __init__(self) -> None:
        self.errored = False
        self.failing: dict[str, str] = {}
        self.calls: list[Any] = []
        self.loading = asyncio.Event()
        self.loading.set()
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 261, max_model_len=64, dtype="torch.float32")
        self.vllm_config = SimpleNamespace(
            device_config=SimpleNamespace(device_type="cpu"),
            parallel_config=SimpleNamespace(world_size=2),
            cache_config=SimpleNamespace(num_gpu_blocks=4, block_size=16),
        )

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert clear_cache
        self.calls.append(("pause", mode))
        if self.failing.get(mode) == "hang":
            await asyncio.sleep(1000)
        if mode in self.failing:
            raise Exception(self.failing[mode])

    async def resume_generation(self) -> None:
        self.calls.append("resume")
        if "resume" in self.failing:
            await asyncio.sleep(1000)

    async def update_weight_version(self, version: str) -> None:
        self.calls.append(("version", version))

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        self.calls.append(method)
        await self.loading.wait()
        read = {name: item for _, specs in worker._read(Path(args[0])) for name, item in specs.items()}
        good = {"value": {"checksum": manifest.total_checksum(read), "num_tensors": len(read)}}
        return [good, {"error": self.failing["second worker"]} if "second worker" in self.failing else good]


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM()


@pytest.fixture
def engine(llm: FakeLLM, kit: Any, tmp_path: Path) -> Engine:
    from transformers import AutoModelForCausalLM

    kit.publish(AutoModelForCausalLM.from_pretrained(MODEL), tmp_path / "runs" / "v1", 1, drop=["lm_head.weight"])
    settings = [f"model.path={MODEL}", f"run.dir={tmp_path}/runs/a", "sync.timeout_s=5"]
    engine = Engine(llm, config_module.load(None, settings))
    engine._status = "ready"
    return engine


def request(in_flight: Any = "keep") -> ReloadRequest:
    return ReloadRequest(version=1, source=DiskSource(name="v1"), in_flight=in_flight)


async def test_requests_that_are_not_drained_in_time_go_on_with_the_old_weights(engine: Engine, llm: FakeLLM) -> None:
    engine._timeout_s = 2.0  # long enough to read the files on a busy machine
    await engine._model_shapes()
    llm.failing = {"wait": "hang"}
    with pytest.raises(ApiError, match="did not end within") as refused:
        await engine.reload(request("drain"))
    assert (refused.value.status, refused.value.body.code) == (503, "busy")
    assert llm.calls == [("pause", "wait"), "resume"]  # no worker was asked for anything
    assert (engine.health().status, engine.health().version) == ("ready", 0)


async def test_an_engine_that_does_not_go_on_after_a_drain_ends_its_requests_and_says_what_brings_it_back(
    engine: Engine, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.server.engine.ABORT_TIMEOUT_S", 0.2)
    await engine._model_shapes()
    engine._timeout_s = 2.0  # long enough to read the files on a busy machine
    llm.failing = {"wait": "hang", "resume": "hang"}
    with pytest.raises(
        ApiError, match=r"did not end within .*, and the engine does not go on: TimeoutError"
    ) as refused:
        await engine.reload(request("drain"))
    assert (refused.value.status, refused.value.body.code) == (503, "not_resumed")
    assert "publish a good version" in refused.value.body.hint
    assert llm.calls == [("pause", "wait"), "resume", ("pause", "abort")]
    assert engine.health().status == "failed"
    engine._timeout_s, llm.failing = 5, {}
    assert (await engine.reload(request())).version == 1
    assert engine.health().status == "ready"


async def test_one_worker_that_fails_stops_the_engine_with_its_reason_until_a_load_that_all_finish(
    engine: Engine, llm: FakeLLM
) -> None:
    llm.failing = {"second worker": "no room for layers.1"}
    with pytest.raises(ApiError, match=r"loading version 1 failed: no room for layers\.1"):
        await engine.reload(request())
    assert "resume" not in llm.calls
    assert engine.health().status == "failed"
    # A request that was let in just before: nothing would ever end it.
    job = Job(prompt=0, index=0, token_ids=[5], sampling=SamplingParams(), seed=None)
    with pytest.raises(ApiError, match=r"no room for layers\.1"):
        await asyncio.wait_for(engine._sampler.complete(job), 5)
    llm.failing = {}
    answer = await engine.reload(request())
    assert (answer.version, answer.num_tensors) == (1, 26)
    assert llm.calls[-2:] == [("version", "1"), "resume"]
    assert engine.health().status == "ready"


async def test_a_file_that_changes_between_its_proof_and_its_load_is_noticed(
    engine: Engine, llm: FakeLLM, tmp_path: Path
) -> None:
    path = tmp_path / "runs" / "v1" / "model.safetensors"
    good = path.read_bytes()
    llm.loading.clear()
    loading = asyncio.create_task(engine.reload(request()))
    async with asyncio.timeout(30):
        while "hocket_load_disk" not in llm.calls:
            await asyncio.sleep(0.01)
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    llm.loading.set()
    with pytest.raises(ApiError, match="are not those that were published"):
        await loading
    assert "resume" not in llm.calls
    path.write_bytes(good)
    await engine.reload(request())
    assert engine.health().status == "ready"


async def test_the_reason_is_told_even_if_nothing_can_be_aborted_any_more(engine: Engine, llm: FakeLLM) -> None:
    llm.failing = {"second worker": "it broke", "abort": "Call to pause_scheduler method failed"}
    with pytest.raises(ApiError, match="it broke") as refused:
        await engine.reload(request())
    assert refused.value.body.code == "reload_failed"
    llm.errored = True
    health = engine.health()
    assert health.error is not None
    assert health.error.code == "engine_dead"  # which no good version mends


async def test_a_load_that_ends_while_the_server_stops_does_not_bring_it_back(engine: Engine, llm: FakeLLM) -> None:
    llm.loading.clear()
    loading = asyncio.create_task(engine.reload(request()))
    async with asyncio.timeout(30):
        while "hocket_load_disk" not in llm.calls:
            await asyncio.sleep(0.01)
    await engine.stop()
    llm.loading.set()
    with pytest.raises(ApiError, match="shutting down"):
        await loading
    assert "resume" not in llm.calls
    failure = engine.failure()
    assert failure is not None
    assert failure.code == "shutting_down"
