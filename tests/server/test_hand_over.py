"""New weights in a running server: right to the last tensor, or refused with the old ones serving on."""

import shutil
import statistics
import threading
from pathlib import Path
from typing import Any

import pytest

from hocket.protocol import ReloadResponse

pytestmark = pytest.mark.engine
VARIANTS = ["tied float32", "untied float32", "tied bfloat16", "untied bfloat16"]


def assert_serves(server: Any, model: Any, other: Any) -> None:
    """The server's log-probs are the model's, up to rounding, and clearly not the other model's."""
    exact = server.health()["dtype"] == "float32"
    for temperature in (1.0, 0.7):
        gaps = server.gaps(model=model, temperature=temperature)
        assert max(gaps) < (1e-4 if exact else 0.4)
        assert statistics.mean(gaps) < (1e-5 if exact else 0.04)
    assert statistics.mean(server.gaps(model=other)) > 0.3


@pytest.mark.parametrize("variant", VARIANTS)
def test_after_a_reload_of_every_weight_the_server_is_the_new_model(servers: Any, kit: Any, variant: str) -> None:
    server = servers(variant)
    old = server.model
    new = kit.make_model(tied=variant.startswith("tied"), seed=100)
    assert all((a != b).any() for a, b in zip(old.parameters(), new.parameters(), strict=True))
    assert_serves(server, old, new)
    # As save_pretrained does, a tied model is written without its head: that is when vLLM's own reload on a CPU
    # keeps the old head and says nothing.
    drop = ["lm_head.weight"] if variant.startswith("tied") else []
    answer = ReloadResponse.model_validate(server.publish_and_load(new, drop=drop))
    assert answer.num_tensors == 27 - len(drop)
    assert server.health()["version"] == answer.version
    assert_serves(server, new, old)


def test_experts_are_the_new_ones_after_every_reload(servers: Any, kit: Any) -> None:
    # vLLM's own reload on a CPU copies experts to where its kernel expects packed ones, and says nothing.
    server = servers("experts float32")
    for seed in (1, 2):
        old, new = server.model, kit.make_experts(seed=seed)
        server.publish_and_load(new)
        assert_serves(server, new, old)


@pytest.mark.parametrize("variant", ["tied float32", "untied bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_files_may_be_in_another_precision_than_the_engine(servers: Any, kit: Any, variant: str, dtype: str) -> None:
    import torch

    server = servers(variant)
    old = server.model
    new = kit.make_model(tied=variant.startswith("tied"), seed=200 + server.next_version)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.copy_(parameter.to(getattr(torch, dtype)))
    server.publish_and_load(new, dtype=dtype)
    assert_serves(server, new, old)


def test_a_tied_model_is_loaded_with_its_redundant_head_too(server: Any, kit: Any) -> None:
    old, new = server.model, kit.make_model(tied=True, seed=7)
    answer = server.publish_and_load(new)
    assert answer["num_tensors"] == 27
    assert_serves(server, new, old)


def test_a_version_already_held_is_answered_at_once(server: Any, kit: Any) -> None:
    first = server.publish_and_load(kit.make_model(tied=True, seed=21))
    name = f"v{first['version']:06d}"
    assert server.reload(first["version"], name).json() == first  # the same seconds, too: nothing was loaded
    # Another run's version of the same number is another version.
    other = kit.make_model(tied=True, seed=22)
    checksum = kit.publish(other, server.root / "other" / name, first["version"])
    answer = server.reload(first["version"], f"other/{name}").json()
    assert answer["checksum"] == checksum != first["checksum"]
    assert_serves(server, other, server.model)
    server.model = other


def test_simultaneous_reloads_of_one_version_load_it_once(server: Any, kit: Any) -> None:
    model = kit.make_model(tied=True, seed=23)
    version, server.next_version = server.next_version, server.next_version + 1
    kit.publish(model, server.root / f"v{version:06d}", version)
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(server.reload(version, f"v{version:06d}").json()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(answer == answers[0] for answer in answers)
    assert max(server.gaps(model=model)) < 1e-4
    server.model = model


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-500])


SPOILERS: dict[str, Any] = {
    "truncated": truncate,
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "no COMPLETE": lambda folder: (folder / "COMPLETE").unlink(),
    "empty": lambda folder: [path.unlink() for path in folder.iterdir()],
}


@pytest.mark.parametrize("kind", [*SPOILERS, "wrong shape", "missing tensor", "wrong version", "unknown name", "path"])
def test_a_bad_folder_is_refused_and_the_old_weights_serve_on(server: Any, kit: Any, kind: str) -> None:
    before = server.health()
    version = 1000
    folder = server.root / "bad"
    shutil.rmtree(folder, ignore_errors=True)
    size = 128 if kind == "wrong shape" else 96
    drop = ["model.norm.weight"] if kind == "missing tensor" else []
    kit.publish(kit.make_model(tied=True, seed=31, vocab_size=size), folder, version, drop=drop)
    SPOILERS.get(kind, lambda folder: None)(folder)
    name = {"unknown name": "nowhere", "path": "../bad"}.get(kind, "bad")
    response = server.reload(1001 if kind == "wrong version" else version, name)
    assert response.status_code in (404, 409, 422)
    assert set(response.json()["error"]) == {"code", "message", "hint"}
    assert server.health() == before
    assert max(server.gaps()) < 1e-4


def test_requests_in_flight_go_on_with_the_new_weights(server: Any, kit: Any) -> None:
    old, new = server.model, kit.make_model(tied=True, seed=41)
    held = server.health()["version"]
    with kit.asking(server, prompts=[[5, 6, 7, 8]], n=64, sampling={"max_tokens": 400}) as answers:
        version = server.publish_and_load(new)["version"]
    assert answers[-1].json()["version"] == version
    kit.assert_spans(answers, [5, 6, 7, 8], {held: old, version: new}, mixed=True)


def test_a_cached_prompt_is_computed_again_under_new_weights(server: Any, kit: Any) -> None:
    prompt = [5 + i % 80 for i in range(400)]  # three blocks of 128 tokens, which the CPU engine caches

    def hits() -> float:
        lines = server.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))

    server.gaps(prompt=prompt)
    before = hits()
    assert max(server.gaps(prompt=prompt)) < 1e-4
    assert hits() > before, "the prompt was not cached: this test shows nothing"
    server.publish_and_load(kit.make_model(tied=True, seed=51))
    assert max(server.gaps(prompt=prompt)) < 1e-4


def test_wrong_bytes_are_noticed_while_loading_and_stop_everything_until_a_good_version(servers: Any, kit: Any) -> None:
    server = servers("untied float32")
    broken = server.root / "broken"
    kit.publish(kit.make_model(tied=False, seed=61), broken, 500)
    kit.flip_a_byte(broken)
    outcome: list[Any] = []
    body = {"prompts": [[5]], "n": 32, "sampling": {"max_tokens": 500}}
    thread = threading.Thread(target=lambda: outcome.append(server.client.post("/generate", json=body)))
    thread.start()
    server.wait_for(lambda health: health["in_flight"] > 0)
    response = server.reload(500, "broken")
    assert (response.status_code, response.json()["error"]["code"]) == (500, "reload_failed")
    health = server.health()
    assert health["status"] == "failed"
    assert "loading version 500 failed" in health["error"]["message"]
    thread.join(60)
    assert outcome[0].status_code == 503, "a request in flight must end with the reason"
    assert outcome[0].json()["error"]["code"] == "reload_failed"
    for path in ("/generate", "/v1/completions"):
        refused = server.client.post(path, json={"prompts": [[5]]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "reload_failed")
    assert server.reload(500, "nowhere").status_code == 404
    new = kit.make_model(tied=False, seed=62)
    server.publish_and_load(new)
    assert server.health()["status"] == "ready"
    assert_serves(server, new, kit.make_model(tied=False, seed=61))
