"""New weights in a running server: right to the last tensor, or refused with the old ones serving on."""

import statistics
from typing import Any

import pytest

from hocket.protocol import ReloadResponse

pytestmark = pytest.mark.engine


def assert_serves(server: Any, model: Any, other: Any) -> None:
    """The server's log-probs are the model's, up to rounding, and clearly not the other model's."""
    exact = server.health()["dtype"] == "float32"
    for temperature in (1.0, 0.7):
        gaps = server.gaps(model=model, temperature=temperature)
        assert max(gaps) < (1e-4 if exact else 0.4)
        assert statistics.mean(gaps) < (1e-5 if exact else 0.04)
    assert statistics.mean(server.gaps(model=other)) > 0.3


# As save_pretrained does, a tied model is written without its head: that is when vLLM's own reload on a CPU keeps the
# old head and says nothing.
@pytest.mark.parametrize(
    ("variant", "drop"),
    [("tied float32", True), ("tied float32", False), ("untied float32", False), ("tied bfloat16", True)],
)
def test_after_a_reload_of_every_weight_the_server_is_the_new_model(
    servers: Any, kit: Any, variant: str, drop: bool
) -> None:
    server = servers(variant)
    old, new = server.model, kit.make_model(tied=variant.startswith("tied"), seed=100 + server.next_version)
    assert all((a != b).any() for a, b in zip(old.parameters(), new.parameters(), strict=True))
    assert_serves(server, old, new)
    answer = ReloadResponse.model_validate(server.publish_and_load(new, drop=["lm_head.weight"] if drop else []))
    assert answer.num_tensors == 27 - drop
    assert server.health()["version"] == answer.version
    assert_serves(server, new, old)
    server.assert_compares(answer.version, f"v{answer.version:06d}")


def test_experts_are_the_new_ones_after_every_reload(servers: Any, kit: Any) -> None:
    # vLLM's own reload on a CPU copies experts to where its kernel expects packed ones, and says nothing.
    server = servers("experts float32")
    for seed in (1, 2):
        old, new = server.model, kit.make_experts(seed=seed)
        version = server.publish_and_load(new)["version"]
        assert_serves(server, new, old)
        server.assert_compares(version, f"v{version:06d}")


@pytest.mark.parametrize(
    ("variant", "dtype"), [("tied float32", "bfloat16"), ("tied float32", "float16"), ("tied bfloat16", "float32")]
)
def test_files_may_be_in_another_precision_than_the_engine(servers: Any, kit: Any, variant: str, dtype: str) -> None:
    import torch

    server = servers(variant)
    old, new = server.model, kit.make_model(tied=True, seed=200 + server.next_version)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.copy_(parameter.to(getattr(torch, dtype)))
    server.publish_and_load(new, dtype=dtype)
    assert_serves(server, new, old)


def test_a_cached_prompt_is_computed_again_under_new_weights(server: Any, kit: Any) -> None:
    prompt = [5 + i % 80 for i in range(400)]  # three blocks of 128 tokens, which the CPU engine caches
    server.gaps(prompt=prompt)
    before = server.metric("prefix_cache_hits_total")
    assert max(server.gaps(prompt=prompt)) < 1e-4
    assert server.metric("prefix_cache_hits_total") > before, "the prompt was not cached: this test shows nothing"
    server.publish_and_load(kit.make_model(tied=True, seed=51))
    assert max(server.gaps(prompt=prompt)) < 1e-4


def test_wrong_bytes_are_noticed_while_loading_and_stop_everything_until_a_good_version(servers: Any, kit: Any) -> None:
    server = servers("untied float32")
    broken = server.root / "broken"
    kit.publish(kit.make_model(tied=False, seed=61), broken, 500)
    kit.flip_a_byte(broken)
    answer = server.in_flight()
    response = server.reload(500, "broken")
    assert (response.status_code, response.json()["error"]["code"]) == (500, "reload_failed")
    health = server.health()
    assert health["status"] == "failed"
    assert "loading version 500 failed" in health["error"]["message"]
    refused = [server.client.post(path, json={"prompts": [[5]]}) for path in ("/generate", "/v1/completions")]
    for one in (answer.result(60), *refused):
        assert (one.status_code, one.json()["error"]["code"]) == (503, "reload_failed")
    assert server.reload(500, "nowhere").status_code == 404
    new = kit.make_model(tied=False, seed=62)
    server.publish_and_load(new)
    assert server.health()["status"] == "ready"
    assert_serves(server, new, kit.make_model(tied=False, seed=61))
