"""What the model computes with, against what was published: a server's loader alters one tensor, and is found out."""

from pathlib import Path
from typing import Any

import pytest

from support.engines import error_of, flip_a_byte, make_adapter, make_model, publish
from support.tiny_server import Altering

pytestmark = [pytest.mark.engine, pytest.mark.long]


def of_every_kind(model: Any) -> list[str]:
    """Embedding, last norm, an untied head, and all of a layer: biases and norms, and what the engine fuses."""
    return [name for name, _ in model.named_parameters() if "layers.0" not in name]


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


def test_the_smallest_step_of_bfloat16_is_found_too(tmp_path: Path) -> None:
    model = make_model(tied=False, seed=2)
    with Altering(tmp_path, make_model(tied=False, seed=0), "model.dtype=bfloat16") as server:
        publish(model, server.root / "v000001", 1, dtype="bfloat16")
        server.assert_holds(1)
        for name in of_every_kind(model):
            server.find(1, name, "changed", found_by="comparison")
        server.assert_holds(1)
