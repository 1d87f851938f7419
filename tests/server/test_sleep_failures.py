"""Falling asleep and waking up where vLLM does not do what it is asked to: a fake AsyncLLM under the real Engine."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from hocket.protocol import SleepRequest, WakeRequest
from hocket.server.engine import Engine
from hocket.server.errors import ApiError


class FakeLLM:
    """Does at once what it is asked to, or what `failing` says instead: "hang", or an error's message."""

    def __init__(self) -> None:
        self.errored = False
        self.failing: dict[str, str] = {}
        self.calls: list[Any] = []
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 96, max_model_len=64, dtype="torch.float32")
        self.vllm_config = SimpleNamespace(
            device_config=SimpleNamespace(device_type="cuda"),
            parallel_config=SimpleNamespace(world_size=1),
            cache_config=SimpleNamespace(num_gpu_blocks=4, block_size=16),
        )

    async def _do(self, call: str, *arguments: Any) -> None:
        self.calls.append((call, *arguments))
        failure = self.failing.get(call)
        if failure == "hang":
            await asyncio.sleep(1000)
        elif failure is not None:
            raise RuntimeError(failure)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert clear_cache
        await self._do("pause", mode)

    async def resume_generation(self) -> None:
        await self._do("resume")

    async def sleep(self, level: int, mode: str) -> None:
        await self._do("sleep", level, mode)

    async def wake_up(self, tags: list[str]) -> None:
        await self._do("wake", *tags)


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM()


@pytest.fixture
def engine(kit: Any, llm: FakeLLM) -> Engine:
    return kit.make_engine(llm, "launch.share_gpu=true", "sync.timeout_s=0.2")  # type: ignore[no-any-return]


async def test_requests_are_settled_before_the_memory_goes_and_the_engine_wakes_up_in_two_parts(
    engine: Engine, llm: FakeLLM
) -> None:
    await engine.sleep(SleepRequest(level=1, in_flight="drain"))
    await engine.wake_up(WakeRequest(tags=["kv_cache", "weights"]))
    await engine.sleep(SleepRequest(level=1))
    await engine.wake_up(WakeRequest(tags=["weights"]))
    await engine.sleep(SleepRequest(level=2))  # half awake: it is paused already
    assert llm.calls == [
        ("pause", "wait"),
        ("sleep", 1, "keep"),
        ("wake", "weights", "kv_cache"),
        ("pause", "keep"),
        ("sleep", 1, "keep"),
        ("wake", "weights"),
        ("sleep", 2, "keep"),
    ]


async def test_requests_that_do_not_end_in_time_go_on_and_the_engine_stays_awake(engine: Engine, llm: FakeLLM) -> None:
    llm.failing = {"pause": "hang"}
    with pytest.raises(ApiError, match="did not end within") as refused:
        await engine.sleep(SleepRequest(in_flight="drain"))
    assert (refused.value.status, refused.value.body.code) == (503, "busy")
    assert llm.calls == [("pause", "wait"), ("resume",)]
    assert engine.health().status == "ready"


@pytest.mark.parametrize(
    ("failure", "cause"),
    [("hang", r"not done after sync\.timeout_s=0\.2"), ("CUDA out of memory\nTrace", "of memory$")],
)
async def test_an_engine_that_cannot_come_back_to_the_gpu_has_failed_and_says_so(
    engine: Engine, llm: FakeLLM, failure: str, cause: str
) -> None:
    await engine.sleep(SleepRequest(level=1))
    llm.failing = {"wake": failure}
    for _ in range(2):  # and nothing brings it back
        with pytest.raises(ApiError, match=cause) as refused:
            await engine.wake_up(WakeRequest())
        assert refused.value.body.code == "sleep_failed"
    assert "gpu_memory_utilization" in refused.value.body.hint
    health = engine.health()
    assert (health.status, health.error) == ("failed", refused.value.body)


async def test_an_engine_that_dies_asleep_is_dead(engine: Engine, llm: FakeLLM) -> None:
    await engine.sleep(SleepRequest(level=1))
    assert engine.health().status == "asleep"
    llm.errored = True
    health = engine.health()
    assert health.status == "failed"
    assert health.error is not None
    assert health.error.code == "engine_dead"
