"""What the model computes with, against what was published: a server's loader alters one tensor, and is found out."""

from pathlib import Path
from typing import Any

import pytest
from tests.server.test_adapters import make_adapter, publish

pytestmark = pytest.mark.engine
ALTERING = (str(Path(__file__).with_name("altering.py")),)
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
FUSED |= {"up_proj": "gate_up_proj"}


class Altering:
    """A server that alters a tensor on its way into the model."""

    def __init__(
        self,
        kit: Any,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *overrides: str,
        tied: bool = True,
        base: Any = None,
        tokenizer: Any = None,
    ) -> None:
        self.file, self.loads = folder / "alter", 0
        self.file.touch()
        monkeypatch.setenv("ALTER", str(self.file))
        base = base or kit.make_model(tied=tied, seed=0)
        self.server = kit.Server(folder, base, *overrides, program=ALTERING, tokenizer=tokenizer)

    def load(self, version: int, name: str, how: str) -> Any:
        """Loads the version, held or not: under another name it is another one."""
        self.file.write_text(f"{name} {how}")
        self.loads += 1
        folder = self.server.root / f"v{version}"
        folder.with_name(f"again{self.loads}").symlink_to(folder)
        return self.server.reload(version, f"again{self.loads}")

    def find(self, version: int, name: str, how: str, *, found_by: str) -> None:
        """Loads the version with the tensor altered: it is found out, by name, and what comes next mends it."""
        response = self.load(version, name, how)
        if found_by == "comparison":
            assert (response.status_code, response.json()["version"]) == (200, version)
            response = self.server.reload(version, f"v{version}", compare=True)
            assert (response.status_code, response.json()["error"]["code"]) == (409, "not_held"), name
        else:
            assert (response.status_code, response.json()["error"]["code"]) == (500, "reload_failed"), name
        layer = ".".join(FUSED.get(part, part) for part in name.removeprefix("base_model.model.").split(".")[:-1])
        assert layer.removesuffix(".lora_A").removesuffix(".lora_B") in response.json()["error"]["message"]
        error = self.server.health()["error"]
        assert (error["code"], error["message"]) == ("reload_failed", response.json()["error"]["message"])
        refused = self.server.client.post("/generate", json={"prompts": [[5]]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "reload_failed")

    def assert_holds(self, version: int) -> None:
        """Loads the version as it is: the comparison finds nothing, and later tokens are the same to the last bit."""
        answer = self.load(version, "", "")
        assert answer.status_code == 200, answer.text
        self.server.assert_compares(version, f"v{version}")


def of_every_kind(model: Any) -> list[str]:
    """Embedding, last norm, an untied head, and all of a layer: biases and norms, and what the engine fuses."""
    return [name for name, _ in model.named_parameters() if "layers.0" not in name]


@pytest.fixture
def altering(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    started: list[Altering] = []

    def start(*overrides: str, tied: bool) -> Altering:
        started.append(Altering(kit, tmp_path, monkeypatch, *overrides, tied=tied))
        return started[0]

    yield start
    for one in started:
        one.server.stop()


def test_a_bit_that_differs_or_a_part_that_is_missing_is_found_in_every_tensor_and_adapter(
    altering: Any, kit: Any
) -> None:
    lab = altering("model.dtype=float32", "model.lora.rank=8", tied=True)
    root = lab.server.root
    adapter = make_adapter(lab.server.model, seed=1, targets=["q_proj", "down_proj"])
    publish(adapter, root / "v1", 1)
    lab.assert_holds(1)
    for name in adapter.tensors:
        lab.find(1, name, "changed", found_by="comparison")
    lab.assert_holds(1)

    model = kit.make_model(tied=True, seed=2)
    kit.publish(model, root / "v2", 2, drop=["lm_head.weight"])
    lab.assert_holds(2)
    for name in of_every_kind(model):
        lab.find(2, name, "changed", found_by="comparison")
        lab.find(2, name, "missing", found_by="load")
    lab.assert_holds(2)
    kit.publish(kit.make_model(tied=True, seed=3), root / "v3", 3, drop=["lm_head.weight"])
    lab.find(3, "lm_head.weight", "stale", found_by="comparison")
    lab.assert_holds(2)
    # A comparison that breaks off leaves the model as it was.
    before = lab.server.seeded()
    kit.flip_a_byte(root / "v2")
    broken = lab.server.reload(2, "v2", compare=True)
    assert (broken.status_code, broken.json()["error"]["code"]) == (500, "compare_failed")
    assert "not those that were published" in broken.json()["error"]["message"]
    assert lab.server.seeded() == before


def test_the_smallest_step_of_bfloat16_is_found_too(altering: Any, kit: Any) -> None:
    lab = altering("model.dtype=bfloat16", tied=False)
    model = kit.make_model(tied=False, seed=2)
    kit.publish(model, lab.server.root / "v1", 1, dtype="bfloat16")
    lab.assert_holds(1)
    for name in of_every_kind(model):
        lab.find(1, name, "changed", found_by="comparison")
    lab.assert_holds(1)
