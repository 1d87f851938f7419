"""What the model computes with, against what was published: a server's loader alters one tensor, and is found out."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hocket.errors import ConfigError
from hocket.server.vllm_weights import COMPARISONS, comparison
from support.engines import error_of, flip_a_byte, make_adapter, make_model, publish
from support.tiny_server import Altering


def test_a_reload_still_calls_what_a_comparison_replaces() -> None:
    from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding
    from vllm.model_executor.model_loader.reload import layerwise, meta, types

    layers = (linear.UnquantizedLinearMethod, vocab_parallel_embedding.UnquantizedEmbeddingMethod)
    callers: list[tuple[Any, str, Any]] = [
        (layerwise._layerwise_process, "_copy_and_restore_kernel_tensors(layer, info)", layerwise),
    ]
    for layer in layers:
        process = layer.process_weights_after_loading
        callers.append((process, "dispatch_cpu_unquantized_gemm(layer, remove_weight=", utils))
    for caller, call, module in callers:
        source, name = inspect.getsource(caller), call.partition("(")[0]
        assert call in source, name
        assert hasattr(module, name)
        is_late = module is not utils or f"layers.utils import {name}" in source
        assert is_late, f"{name} is imported too early"
    names = ("SKIP_TENSORS", "get_layer_tensors")
    assert all(hasattr(meta, name) for name in names)
    assert hasattr(layerwise, "_place_kernel_tensors")
    fields = {"kernel_tensors", "kernel_non_persistent_buffers", "loaded_weights"}
    assert fields <= types.LayerReloadingInfo.__dataclass_fields__.keys()


def test_a_plugin_can_compare_otherwise_and_an_unknown_comparison_is_refused() -> None:
    @comparison("nothing")
    def compare(worker: Any, weights: Any, adapter: Any) -> list[str]:
        return [name for name, _ in weights if name not in worker.names]

    try:
        worker = SimpleNamespace(names={"a"})
        assert COMPARISONS.get("nothing")(worker, iter([("a", 1), ("b", 2)]), None) == ["b"]
        assert "bitwise" in COMPARISONS.names
        with pytest.raises(ConfigError, match="there is no comparison 'bytewise'"):
            COMPARISONS.get("bytewise")
    finally:
        COMPARISONS.forget("nothing")


def of_every_kind(model: Any) -> list[str]:
    """Embedding, last norm, an untied head, and all of a layer: biases and norms, and what the engine fuses."""
    return [name for name, _ in model.named_parameters() if "layers.0" not in name]


@pytest.mark.engine
@pytest.mark.long
def test_a_bit_that_differs_or_a_part_that_is_missing_is_found_in_every_tensor_and_adapter(tmp_path: Path) -> None:
    with Altering(tmp_path, make_model(seed=0), "model.dtype=float32", "model.lora.rank=8") as server:
        root = server.root
        adapter = make_adapter(server.model, seed=1, targets=["q_proj", "down_proj"])
        adapter.publish(root / "v000001", 1)
        server.assert_holds(1)
        for name in adapter.tensors:
            server.find(1, name, "changed", found_by="comparison")
        server.assert_holds(1)

        model = make_model(seed=2)
        publish(model, root / "v000002", 2, drop=["lm_head.weight"])
        server.assert_holds(2)
        for name in of_every_kind(model):
            server.find(2, name, "changed", found_by="comparison")
            server.find(2, name, "missing", found_by="load")
        server.assert_holds(2)
        publish(make_model(seed=3), root / "v000003", 3, drop=["lm_head.weight"])
        server.find(3, "lm_head.weight", "stale", found_by="comparison")
        server.assert_holds(2)
        # A comparison that breaks off leaves the model as it was.
        before = server.seeded()
        flip_a_byte(root / "v000002")
        broken = server.reload(2, compare=True)
        assert error_of(broken) == (500, "compare_failed")
        assert "not those that were published" in broken.json()["error"]["message"]
        assert server.seeded() == before


@pytest.mark.engine
@pytest.mark.long
def test_the_smallest_step_of_bfloat16_is_found_too(tmp_path: Path) -> None:
    model = make_model(tied=False, seed=2)
    with Altering(tmp_path, make_model(tied=False, seed=0), "model.dtype=bfloat16") as server:
        publish(model, server.root / "v000001", 1, dtype="bfloat16")
        server.assert_holds(1)
        for name in of_every_kind(model):
            server.find(1, name, "changed", found_by="comparison")
        server.assert_holds(1)
