"""Adapters in a running server: every request uses the one that is held, or it was refused and nothing changed."""

import copy
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from hocket.protocol import AdapterConfig, ReloadResponse, manifest

pytestmark = pytest.mark.engine
ALL = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


class Adapter(NamedTuple):
    """An adapter, and the adapted model for comparison."""

    model: Any
    config: AdapterConfig
    tensors: dict[str, torch.Tensor]


def make_adapter(base: Any, *, seed: int, rank: int = 4, targets: Sequence[str] = ALL) -> Adapter:
    """Returns an adapter of the model whose every number depends on the seed."""
    made = peft.LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules=list(targets))
    model = peft.get_peft_model(copy.deepcopy(base), made).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    tensors = {name: tensor.contiguous() for name, tensor in peft.get_peft_model_state_dict(model).items()}
    settings: dict[str, Any] = {"r": rank, "lora_alpha": 2.0 * rank, "target_modules": sorted(targets)}
    return Adapter(model, AdapterConfig(base_model_name_or_path="base", **settings), tensors)


def publish(adapter: Adapter, folder: Path, version: int) -> str:
    folder.mkdir(parents=True)
    (folder / manifest.ADAPTER_FILE).write_text(adapter.config.model_dump_json())
    save_file(adapter.tensors, folder / "adapter_model.safetensors")
    return manifest.write(folder, version, manifest.specs(adapter.tensors.items()))


def load_by_disk(server: Any, kit: Any, adapter: Adapter) -> ReloadResponse:
    version = server.new_version()
    checksum = publish(adapter, server.root / f"v{version:06d}", version)
    response = server.reload(version, f"v{version:06d}")
    assert response.status_code == 200, response.text
    answer = ReloadResponse.model_validate(response.json())
    assert (answer.version, answer.checksum) == (version, checksum)
    assert server.reload(version, f"v{version:06d}").json() == response.json()  # held already: nothing was loaded
    server.assert_compares(version, f"v{version:06d}")
    return answer


def load_by_collective(server: Any, kit: Any, adapter: Adapter) -> ReloadResponse:
    delivery = server.deliver(kit.Source(adapter.tensors.items(), adapter=adapter.config), compare=True)
    ((sent, answer),) = delivery.answers.values()
    assert isinstance(answer, ReloadResponse), answer
    assert (answer.version, answer.checksum) == (server.next_version - 1, sent)
    # The adapter alone: A and B of rank 4 in both blocks, and at most 24 bytes of padding and checksum per tensor.
    numbers = sum(tensor.numel() for tensor in adapter.tensors.values())
    assert 4 * numbers <= delivery.metrics["sync/mebibytes"] * 2**20 <= 4 * numbers + 24 * len(adapter.tensors)
    return answer


def openai_gaps(server: Any, kit: Any, model: Any) -> list[float]:
    body = {"model": server.health()["model"], "prompt": [5, 6, 7], "max_tokens": 48, "logprobs": 0, "n": 2}
    choices = server.client.post("/v1/completions", json={**body, "return_token_ids": True}).json()["choices"]
    gaps = []
    for choice in choices:
        expected = kit.reference_logprobs(model, [5, 6, 7], choice["token_ids"])
        gaps += [abs(a - b) for a, b in zip(choice["logprobs"]["token_logprobs"], expected, strict=True)]
    return gaps


def test_every_request_uses_the_adapter_that_came_last(servers: Any, kit: Any) -> None:
    adapters_come_and_are_used(servers("tied float32 lora"), kit, load_by_disk)


def adapters_come_and_are_used(server: Any, kit: Any, load: Any) -> None:
    if server.health()["version"] == 0:  # no adapter has come
        assert max(server.gaps()) < 1e-4
        assert max(openai_gaps(server, kit, server.model)) < 1e-4
    others = [server.model]
    for seed, targets in ((1, ALL), (2, ["q_proj", "down_proj"])):
        adapter = make_adapter(server.model, seed=seed, targets=targets)
        answer = load(server, kit, adapter)
        assert answer.num_tensors == 2 * 2 * len(targets)
        assert server.health()["version"] == answer.version
        for temperature in (1.0, 0.7):
            assert max(server.gaps(model=adapter.model, temperature=temperature)) < 1e-4
        assert max(openai_gaps(server, kit, adapter.model)) < 1e-4
        for other in others:
            assert statistics.mean(server.gaps(model=other)) > 0.1
        others.append(adapter.model)


def test_requests_in_flight_go_on_with_the_new_adapter(servers: Any, kit: Any) -> None:
    server = servers("tied float32 lora")

    def load(seed: int) -> Any:
        adapter = make_adapter(server.model, seed=seed)
        load_by_disk(server, kit, adapter)
        return adapter.model

    kit.load_amid_requests(server, load(11), load)


def drop_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors.pop(next(iter(tensors)))
    save_file(tensors, folder / "adapter_model.safetensors")
    manifest.write(folder, 1000, manifest.specs(tensors.items()))


def change_config(folder: Path, **change: Any) -> None:
    path = folder / manifest.ADAPTER_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


SPOILERS: list[tuple[Any, str]] = [
    (drop_a_tensor, "is missing in the version"),
    (lambda folder: change_config(folder, r=5), ") in the version, ("),
    (lambda folder: change_config(folder, use_dora=True), "can't read adapter_config.json"),
    (lambda folder: change_config(folder, target_modules=["x"]), "missing in the model"),
    (lambda folder: (folder / manifest.ADAPTER_FILE).unlink(), "tensor 'base_model."),
]


def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_serves_on(servers: Any, kit: Any) -> None:
    server = servers("tied float32 lora")
    held = make_adapter(server.model, seed=31)
    load_by_disk(server, kit, held)
    before = server.health()
    for number, (spoil, reason) in enumerate(SPOILERS):
        folder = server.root / f"bad{number}"
        publish(make_adapter(server.model, seed=32), folder, 1000)
        spoil(folder)
        response = server.reload(1000, folder.name)
        assert response.status_code == 409, response.text
        assert reason in response.json()["error"]["message"]
        assert server.health() == before
    assert max(server.gaps(model=held.model)) < 1e-4


def test_a_server_without_room_for_an_adapter_refuses_it_and_says_how_to_start_it(servers: Any) -> None:
    for name, rank in (("tied float32", 4), ("tied float32 lora", 9)):
        server = servers(name)
        publish(make_adapter(server.model, seed=41, rank=rank), server.root / "adapter", 1000)
        response = server.reload(1000, "adapter")
        assert (response.status_code, response.json()["error"]["code"]) == (409, "rank_too_high")
        assert f"model.lora.rank={rank}" in response.json()["error"]["hint"]


def test_whole_weights_drop_the_adapter_and_then_no_adapter_of_the_old_ones_is_taken(servers: Any, kit: Any) -> None:
    server = servers("tied float32 lora")  # tests of adapters come before
    base, new = server.model, kit.make_model(tied=True, seed=52)
    load_by_disk(server, kit, make_adapter(base, seed=51))
    server.publish_and_load(new)
    assert max(server.gaps(model=new)) < 1e-4
    assert max(openai_gaps(server, kit, new)) < 1e-4
    publish(make_adapter(base, seed=53), server.root / "late", 1000)
    response = server.reload(1000, "late")
    assert (response.status_code, response.json()["error"]["code"]) == (409, "base_replaced")
    assert "restart the server" in response.json()["error"]["hint"]
    assert max(server.gaps(model=new)) < 1e-4
