import asyncio

import pytest

from hocket.commands import servers
from hocket.config import load


@pytest.mark.parametrize(
    ("gpus", "settings", "waits"),
    [
        ("", [], False),
        ("0", [], True),
        ("0,1", [], True),  # both take the first one
        ("1", ["launch.gpus_apart=true"], False),  # as `launch` says it
        ("0", ["launch.gpus_apart=false", "server.urls=[http://10.0.0.5:8000]"], True),
        ("0", ["server.urls=[http://10.0.0.5:8000]"], False),
        ("", ["launch.share_gpu=true"], True),
    ],
)
def test_a_trainer_waits_for_a_server_that_may_be_on_its_gpu_before_it_takes_memory(
    gpus: str, settings: list[str], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[str]()

    class Pool:
        async def __aenter__(self) -> "Pool":
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def wait_up(self) -> None:
            done.append("waited")

    async def put_to_sleep(*_: object, keep: bool) -> None:
        done.append("put to sleep")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setenv("HOCKET_DEVICE", "cuda")  # else a machine without a driver has no GPU
    monkeypatch.setattr(servers.Servers, "pool", lambda *_: Pool())
    monkeypatch.setattr(servers, "put_to_sleep", put_to_sleep)
    asyncio.run(servers.Servers(load(None, settings)).wait_for_gpu())
    assert done == ["waited"] * waits + ["put to sleep"] * ("launch.share_gpu=true" in settings)
