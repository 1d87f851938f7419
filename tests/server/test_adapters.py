"""Adapters in a running server: every request uses the one that is held, or it was refused and nothing changed."""

import asyncio
import contextlib
import copy
import dataclasses
import json
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from hocket import config, manifest, weight_group
from hocket.client import ServerClient
from hocket.protocol import AdapterConfig, ReloadResponse
from hocket.sync.collective import CollectiveTransport

pytestmark = pytest.mark.engine
ALL = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@dataclasses.dataclass
class Adapter:
    """A trainer for CollectiveTransport, and the adapted model for comparison."""

    model: Any
    adapter: AdapterConfig
    tensors: dict[str, torch.Tensor]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def layout(self, max_bytes: int) -> list[Any]:
        return [weight_group.layout(bucket) for bucket in self.buckets()]

    def stream(self, max_bytes: int, sink: Any) -> None:
        for bucket in self.buckets():
            sink(bucket)

    def buckets(self) -> list[list[tuple[str, torch.Tensor]]]:
        named = list(self.tensors.items())
        return [named[:5], named[5:]]


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
    described = AdapterConfig(
        base_model_name_or_path="base", r=rank, lora_alpha=2.0 * rank, target_modules=sorted(targets)
    )
    return Adapter(model, described, tensors)


def publish(adapter: Adapter, folder: Path, version: int) -> str:
    folder.mkdir(parents=True)
    save_file(adapter.tensors, folder / "adapter_model.safetensors")
    (folder / manifest.ADAPTER_FILE).write_text(adapter.adapter.model_dump_json())
    return manifest.write(folder, version, manifest.specs(adapter.tensors.items()))


def load_by_disk(server: Any, adapter: Adapter) -> ReloadResponse:
    version, server.next_version = server.next_version, server.next_version + 1
    checksum = publish(adapter, server.root / f"v{version:06d}", version)
    response = server.reload(version, f"v{version:06d}")
    assert response.status_code == 200, response.text
    answer = ReloadResponse.model_validate(response.json())
    assert (answer.version, answer.checksum) == (version, checksum)
    assert server.reload(version, f"v{version:06d}").json() == response.json()  # held already: nothing was loaded
    return answer


def load_by_collective(server: Any, adapter: Adapter) -> ReloadResponse:
    version, server.next_version = server.next_version, server.next_version + 1

    async def deliver() -> Any:
        async with ServerClient(str(server.client.base_url), token=None) as client:
            client._http.headers.update(server.client.headers)
            transport = CollectiveTransport(adapter, config.load(None, []).sync)
            with contextlib.closing(transport):
                return await transport.deliver(version, [client])

    delivery = asyncio.run(deliver())
    ((sent, answer),) = delivery.answers.values()
    assert isinstance(answer, ReloadResponse), answer
    assert (answer.version, answer.checksum) == (version, sent)
    # The adapter alone: A and B of rank 4 in both blocks, and at most 24 bytes of padding and checksum per tensor.
    numbers = sum(tensor.numel() for tensor in adapter.tensors.values())
    assert 4 * numbers <= delivery.metrics["sync/mebibytes"] * 2**20 <= 4 * numbers + 24 * len(adapter.tensors)
    return answer


LOADS = {"disk": load_by_disk, "collective": load_by_collective}


def openai_gaps(server: Any, kit: Any, model: Any) -> list[float]:
    body = {"model": server.health()["model"], "prompt": [5, 6, 7], "max_tokens": 48, "logprobs": 0, "n": 2}
    choices = server.client.post("/v1/completions", json={**body, "return_token_ids": True}).json()["choices"]
    gaps = []
    for choice in choices:
        expected = kit.reference_logprobs(model, [5, 6, 7], choice["token_ids"])
        gaps += [abs(a - b) for a, b in zip(choice["logprobs"]["token_logprobs"], expected, strict=True)]
    return gaps


def test_without_an_adapter_the_base_model_answers(servers: Any, kit: Any) -> None:
    server = servers.untouched("tied float32 lora")
    assert max(server.gaps()) < 1e-4
    assert max(openai_gaps(server, kit, server.model)) < 1e-4


@pytest.mark.parametrize(
    ("variant", "how"),
    [("tied float32 lora", "disk"), ("untied float32 lora", "collective")],
)
def test_every_request_uses_the_adapter_that_came_last(servers: Any, kit: Any, variant: str, how: str) -> None:
    adapters_come_and_are_used(servers(variant), kit, how)


def adapters_come_and_are_used(server: Any, kit: Any, how: str, number: int = 2) -> None:
    others = [server.model]
    for seed, targets in ((1, ALL), (2, ["q_proj", "down_proj"]))[:number]:
        adapter = make_adapter(server.model, seed=seed, targets=targets)
        answer = LOADS[how](server, adapter)
        assert answer.num_tensors == 2 * 2 * len(targets)
        assert server.health()["version"] == answer.version
        for temperature in (1.0, 0.7):
            assert max(server.gaps(model=adapter.model, temperature=temperature)) < 1e-4
        assert max(openai_gaps(server, kit, adapter.model)) < 1e-4
        for other in others:
            assert statistics.mean(server.gaps(model=other)) > 0.1
        others = [server.model, adapter.model]


def test_requests_in_flight_go_on_with_the_new_adapter(servers: Any, kit: Any) -> None:
    server = servers("tied float32 lora")
    old, new = make_adapter(server.model, seed=11), make_adapter(server.model, seed=12)
    held = load_by_disk(server, old).version
    with kit.asking(server, prompts=[[5, 6, 7, 8]], n=32, sampling={"max_tokens": 400}) as answers:
        version = load_by_disk(server, new).version
    kit.assert_spans(answers, [5, 6, 7, 8], {held: old.model, version: new.model}, mixed=True)


def test_a_cached_prompt_is_computed_again_under_a_new_adapter(servers: Any) -> None:
    server = servers("tied float32 lora")
    prompt = [5 + i % 80 for i in range(400)]  # three blocks of 128 tokens, which the CPU engine caches

    def hits() -> float:
        lines = server.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))

    old, new = make_adapter(server.model, seed=21), make_adapter(server.model, seed=22)
    load_by_disk(server, old)
    server.gaps(prompt=prompt, model=old.model)
    before = hits()
    assert max(server.gaps(prompt=prompt, model=old.model)) < 1e-4
    assert hits() > before, "the prompt was not cached: this test shows nothing"
    load_by_disk(server, new)
    assert max(server.gaps(prompt=prompt, model=new.model)) < 1e-4


def drop_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors.pop(next(iter(tensors)))
    rewrite(folder, tensors)


def adapt_the_head(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(4, 64)
    rewrite(folder, tensors)


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "adapter_model.safetensors")
    manifest.write(folder, 1000, manifest.specs(tensors.items()))


def change_config(folder: Path, **change: Any) -> None:
    path = folder / manifest.ADAPTER_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


SPOILERS: dict[str, Any] = {
    "missing tensor": (drop_a_tensor, "is missing"),
    "unknown tensor": (adapt_the_head, "the model has no tensor"),
    "another rank": (lambda folder: change_config(folder, r=5), "has shape"),
    "another kind of adapter": (lambda folder: change_config(folder, use_dora=True), "not of plain LoRA"),
    "a layer the model has not": (lambda folder: change_config(folder, target_modules=["x"]), "has no tensor"),
    "no config": (lambda folder: (folder / manifest.ADAPTER_FILE).unlink(), "has no tensor 'base_model."),
}


@pytest.mark.parametrize("kind", [*SPOILERS, "a rank too high"])
def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_serves_on(servers: Any, kind: str) -> None:
    server = servers("tied float32 lora")
    held = make_adapter(server.model, seed=31)
    load_by_disk(server, held)
    before = server.health()
    folder = server.root / "bad"
    shutil.rmtree(folder, ignore_errors=True)
    publish(make_adapter(server.model, seed=32, rank=9 if kind == "a rank too high" else 4), folder, 1000)
    spoil, reason = SPOILERS.get(kind, (lambda folder: None, "takes adapters up to rank 8"))
    spoil(folder)
    response = server.reload(1000, "bad")
    assert response.status_code == 409, response.text
    assert reason in response.json()["error"]["message"]
    assert server.health() == before
    assert max(server.gaps(model=held.model)) < 1e-4


def test_a_server_without_room_for_adapters_refuses_them_and_says_how_to_start_it(server: Any) -> None:
    publish(make_adapter(server.model, seed=41), server.root / "adapter", 1000)
    response = server.reload(1000, "adapter")
    assert (response.status_code, response.json()["error"]["code"]) == (409, "rank_too_high")
    assert "model.lora.rank=4" in response.json()["error"]["hint"]
    assert max(server.gaps()) < 1e-4


def test_whole_weights_drop_the_adapter_and_then_no_adapter_of_the_old_ones_is_taken(servers: Any, kit: Any) -> None:
    server = servers.take("untied float32 lora")
    try:
        base = server.model
        load_by_disk(server, make_adapter(base, seed=51))
        new = kit.make_model(tied=False, seed=52)
        server.publish_and_load(new)
        assert max(server.gaps(model=new)) < 1e-4
        assert max(openai_gaps(server, kit, new)) < 1e-4
        publish(make_adapter(base, seed=53), server.root / "late", 1000)
        response = server.reload(1000, "late")
        assert (response.status_code, response.json()["error"]["code"]) == (409, "base_replaced")
        assert "restart the server" in response.json()["error"]["hint"]
        assert max(server.gaps(model=new)) < 1e-4
    finally:
        server.stop()
