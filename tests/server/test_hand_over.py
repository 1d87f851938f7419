"""New weights in a running server: right to the last tensor, or refused with the old ones serving on."""

from typing import Any

import pytest

from support.engines import error_of, flip_a_byte, make_experts, make_model, publish
from support.tiny_server import TinyServer

pytestmark = pytest.mark.engine


def assert_is_only(server: TinyServer, model: Any, other: Any) -> None:
    server.assert_is(model, temperatures=(1.0, 0.7))
    server.assert_is_not(other)


# As save_pretrained does, a tied model is written without its head: that is when vLLM's own reload on a CPU keeps the
# old head and says nothing.
@pytest.mark.parametrize(
    ("variant", "drop"),
    [
        ("tied float32", True),
        pytest.param("tied float32", False, marks=pytest.mark.long),
        pytest.param("untied float32", False, marks=pytest.mark.long),
        pytest.param("tied bfloat16", True, marks=pytest.mark.long),
    ],
)
def test_after_a_reload_of_every_weight_the_server_is_the_new_model(servers: Any, variant: str, drop: bool) -> None:
    server = servers(variant)
    old, new = server.model, make_model(tied=variant.startswith("tied"), seed=100 + server.next_version)
    assert all((a != b).any() for a, b in zip(old.parameters(), new.parameters(), strict=True))
    assert_is_only(server, old, new)
    answer = server.publish_and_load(new, drop=["lm_head.weight"] if drop else [])
    assert answer.num_tensors == 27 - drop
    assert server.health()["version"] == answer.version
    assert_is_only(server, new, old)
    server.assert_compares(answer.version)


@pytest.mark.long
def test_experts_are_the_new_ones_after_every_reload(servers: Any) -> None:
    # vLLM's own reload on a CPU copies experts to where its kernel expects packed ones, and says nothing.
    server = servers("experts float32")
    for seed in (1, 2):
        old, new = server.model, make_experts(seed=seed)
        version = server.publish_and_load(new).version
        assert_is_only(server, new, old)
        server.assert_compares(version)


@pytest.mark.long
@pytest.mark.parametrize(
    ("variant", "dtype"), [("tied float32", "bfloat16"), ("tied float32", "float16"), ("tied bfloat16", "float32")]
)
def test_files_may_be_in_another_precision_than_the_engine(servers: Any, variant: str, dtype: str) -> None:
    import torch

    server = servers(variant)
    old, new = server.model, make_model(seed=200 + server.next_version)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.copy_(parameter.to(getattr(torch, dtype)))
    server.publish_and_load(new, dtype=dtype)
    assert_is_only(server, new, old)


def test_a_cached_prompt_is_computed_again_under_new_weights(server: TinyServer) -> None:
    prompt = [5 + i % 80 for i in range(400)]  # three blocks of 128 tokens, which the CPU engine caches
    server.assert_is(prompt=prompt)
    before = server.metric("prefix_cache_hits_total")
    server.assert_is(prompt=prompt)
    assert server.metric("prefix_cache_hits_total") > before, "the prompt was not cached: this test shows nothing"
    server.publish_and_load(make_model(seed=51))
    server.assert_is(prompt=prompt)


@pytest.mark.long
def test_wrong_bytes_are_noticed_while_loading_and_stop_everything_until_a_good_version(servers: Any) -> None:
    server = servers("untied float32")
    broken = server.root / "broken"
    publish(make_model(tied=False, seed=61), broken, 500)
    flip_a_byte(broken)
    answer = server.in_flight()
    response = server.reload(500, "broken")
    assert error_of(response) == (500, "reload_failed")
    health = server.health()
    assert health["status"] == "failed"
    assert "loading version 500 failed" in health["error"]["message"]
    refused = [server.client.post(path, json={"prompts": [[5]]}) for path in ("/generate", "/v1/completions")]
    for one in (answer.result(60), *refused):
        assert error_of(one) == (503, "reload_failed")
    assert server.reload(500, "nowhere").status_code == 404
    new = make_model(tied=False, seed=62)
    server.publish_and_load(new)
    assert server.health()["status"] == "ready"
    assert_is_only(server, new, make_model(tied=False, seed=61))
