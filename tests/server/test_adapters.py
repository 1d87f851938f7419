"""Adapters in a running server: every request uses the one that is held, or it was refused and nothing changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from hocket.protocol import manifest
from support.engines import error_of, make_adapter, make_model, write_version
from support.tiny_server import TinyServer, adapters_come_and_are_used, load_amid_requests

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.fixture
def server(servers: Any) -> Any:
    """One with room for adapters, of which others may have come before."""
    return servers("tied float32 lora")


def test_every_request_uses_the_adapter_that_came_last(server: TinyServer) -> None:
    adapters_come_and_are_used(server, server.load_adapter)


def test_requests_in_flight_go_on_with_the_new_adapter(server: TinyServer) -> None:
    def load(seed: int) -> Any:
        adapter = make_adapter(server.model, seed=seed)
        server.load_adapter(adapter)
        return adapter.model

    load_amid_requests(server, load(11), load)


def drop_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors.pop(next(iter(tensors)))
    write_version(tensors, folder, 1000, "adapter_model.safetensors")


def change_config(folder: Path, **change: Any) -> None:
    path = folder / manifest.ADAPTER_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


SPOILERS: list[tuple[Callable[[Path], None], str]] = [
    (drop_a_tensor, "is missing in the version"),
    (lambda folder: change_config(folder, r=5), ") in the version, ("),
    (lambda folder: change_config(folder, use_dora=True), "can't read adapter_config.json"),
    (lambda folder: change_config(folder, target_modules=["x"]), "missing in the model"),
    (lambda folder: (folder / manifest.ADAPTER_FILE).unlink(), "tensor 'base_model."),
]


def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_serves_on(server: TinyServer) -> None:
    held = make_adapter(server.model, seed=31)
    server.load_adapter(held)
    before = server.health()
    for number, (spoil, reason) in enumerate(SPOILERS):
        folder = server.root / f"bad{number}"
        make_adapter(server.model, seed=32).publish(folder, 1000)
        spoil(folder)
        response = server.reload(1000, folder.name)
        assert response.status_code == 409, response.text
        assert reason in response.json()["error"]["message"]
        assert server.health() == before
    server.assert_is(held.model)


def test_a_server_without_room_for_an_adapter_refuses_it_and_says_how_to_start_it(servers: Any) -> None:
    for name, rank in (("tied float32", 4), ("tied float32 lora", 9)):
        server = servers(name)
        make_adapter(server.model, seed=41, rank=rank).publish(server.root / "adapter", 1000)
        refused = server.reload(1000, "adapter")
        assert error_of(refused) == (409, "rank_too_high")
        assert f"model.lora.rank={rank}" in refused.json()["error"]["hint"]


def test_whole_weights_drop_the_adapter_and_then_no_adapter_of_the_old_ones_is_taken(server: TinyServer) -> None:
    base, new = server.model, make_model(seed=52)  # tests of adapters come before
    server.load_adapter(make_adapter(base, seed=51))
    server.publish_and_load(new)
    server.assert_is(new)
    server.assert_openai_is(new)
    make_adapter(base, seed=53).publish(server.root / "late", 1000)
    refused = server.reload(1000, "late")
    assert error_of(refused) == (409, "base_replaced")
    assert "restart the server" in refused.json()["error"]["hint"]
    server.assert_is(new)
