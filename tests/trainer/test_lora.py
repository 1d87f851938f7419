"""An adapter beside frozen weights: what moves, what is published, and that it is PEFT's."""

import importlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hocket.config import LoraConfig, ModelConfig
from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError
from hocket.protocol import AdapterConfig
from hocket.trainer import lora
from hocket.trainer.lora import Adapter
from hocket.trainer.policy import skeleton
from hocket.trainer.ranks import Ranks
from hocket.trainer.state import export
from hocket.trainer.trainer import Trainer
from support import training
from support.training import additions, assert_near, make_samples, peak_bytes, same, weights_of

IDS = torch.arange(12)[None]
LAYERS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def make_trainer(ranks: Ranks, model: str, *settings: str) -> Trainer:
    return training.make_trainer(ranks, model, "trainer.learning_rate=1e-2", "model.lora={}", *settings)


def with_peft(base: str, folder: Path) -> Any:
    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder)


def frozen_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    named = dict(trainer.policy.model.named_parameters())
    with importlib.import_module("deepspeed").zero.GatheredParameters(list(named.values())):
        return {name.replace(".base_layer", ""): p.detach().clone() for name, p in named.items() if "lora" not in name}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(IDS).logits


# Stages 0 and 1 are those of the next test; test_ranks.py compares all of them.
@pytest.mark.parametrize(("model", "stage"), [("tied_model", 2), ("untied_model", 3)])
def test_only_the_adapter_moves_and_peft_computes_the_same_with_what_is_published(
    ranks: Ranks, model: str, stage: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    with make_trainer(ranks, path, f"trainer.zero_stage={stage}") as trainer:
        trainer.export(tmp_path / "start")
        for _ in range(3):
            assert trainer.step(make_samples())["train/grad_norm"] > 0
        trainer.export(tmp_path / "end")
        trained = logits(trainer.policy.model)
        held = frozen_of(trainer)
        sent = [[item.name for item in bucket] for bucket in trainer.layout(4096)]
        streamed = weights_of(trainer, 4096)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert all(torch.equal(held[name], p) for name, p in base.named_parameters()), "a frozen weight has moved"
    start, end = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("start", "end"))
    assert len(end) == 2 * 2 * len(LAYERS)  # A and B of 7 layers in each of 2 blocks
    assert all((start[name] == 0).all() for name in start if "lora_B" in name)
    assert all((start[name] != end[name]).any() for name in end)
    assert [name for bucket in sent for name in bucket] == list(streamed)
    assert same(streamed, end)
    # At first the model is the base model; then PEFT's reading of the files is what was trained, merged or beside.
    assert torch.equal(logits(with_peft(path, tmp_path / "start")), logits(base))
    assert_near(logits(with_peft(path, tmp_path / "end")), trained, additions(path))
    merged = with_peft(path, tmp_path / "end").merge_and_unload()
    assert_near(logits(merged), trained, additions(path))
    assert (trained - logits(base)).abs().max() > 0.05


@pytest.mark.parametrize(("model", "dtype"), [("tied_model", "bfloat16"), ("untied_model", "float32")])
def test_the_merged_model_is_what_was_trained_and_complete(
    ranks: Ranks, model: str, dtype: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    base.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(path).save_pretrained(tmp_path / "base")
    with make_trainer(ranks, str(tmp_path / "base"), f"model.dtype={dtype}") as trainer:
        for _ in range(3):
            trainer.step(make_samples())
        trainer.export(tmp_path / "adapter")
        trained = logits(trainer.policy.model)
        fingerprint = tokenizers.fingerprint(trainer.tokenizer)
    export(tmp_path / "adapter", tmp_path / "model", base=None)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert merged.dtype == getattr(torch, dtype)
    if dtype == "float32":
        assert_near(logits(merged), trained, additions(path))
    else:  # weights near 0.2, which moved by up to 0.03, are rounded by up to 0.0005
        moved = (trained - logits(base)).abs().mean()
        assert (logits(merged) - trained).abs().mean() < 0.1 * moved
    names = load_file(tmp_path / "model" / "model.safetensors").keys()
    assert names == load_file(tmp_path / "base" / "model.safetensors").keys()
    assert ("lm_head.weight" in names) == (model == "untied_model")
    assert tokenizers.fingerprint(tokenizers.load(str(tmp_path / "model"))) == fingerprint
    assert not list(tmp_path.glob(".*")), "something half written is left"
    assert len({file.stat().st_mode for file in (tmp_path / "model").iterdir()}) == 1
    with pytest.raises(ConfigError, match="exists already"):
        export(tmp_path / "adapter", tmp_path / "model", base=None)
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"model\.path"):
        export(tmp_path / "adapter", tmp_path / "again", base=None)
    with pytest.raises(ConfigError, match=r"another model than checkpoints/tiny-sort.*does not fit"):
        export(tmp_path / "adapter", tmp_path / "again", base="checkpoints/tiny-sort")
    with pytest.raises(ConfigError, match="not an adapter"):
        Adapter.export(Path(path), tmp_path / "again", base=None)
    assert not (tmp_path / "again").exists()
    export(tmp_path / "adapter", tmp_path / "again", base=str(tmp_path / "moved"))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")), logits(merged))


def test_a_base_with_code_of_its_own_is_not_run_whatever_a_terminal_would_answer(
    tied_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = shutil.copytree(tied_model, tmp_path / "base")
    own = {"model_type": "t5", "auto_map": {"AutoModelForCausalLM": "own.Own"}}  # transformers has none of this type
    (base / "config.json").write_text(json.dumps(json.loads((base / "config.json").read_text()) | own))
    (base / "own.py").write_text("raise SystemExit('it was run')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    adapter = AdapterConfig(base_model_name_or_path=str(base), r=1, lora_alpha=1, target_modules=["q_proj"])
    lora.save(tmp_path / "adapter", adapter, {})
    with pytest.raises(ConfigError, match="can't build its model"):
        export(tmp_path / "adapter", tmp_path / "model", base=None)


@torch.no_grad()
def test_an_adapter_that_peft_wrote_is_merged_if_it_is_plain_and_else_its_settings_are_named(
    tied_model: str, tmp_path: Path
) -> None:
    def written(name: str, **settings: Any) -> Path:
        torch.manual_seed(1)
        base = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32)
        values = peft.LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=7, target_modules=["q_proj"], **settings)
        made = peft.get_peft_model(base, values)
        for part, parameter in made.named_parameters():
            if "lora_B" in part:
                parameter.normal_()
        made.save_pretrained(str(tmp_path / name))
        return tmp_path / name

    for name, settings in (("plain", {}), ("dropout", {"lora_dropout": 0.1, "layers_to_transform": [1]})):
        adapter = written(name, **settings)
        export(adapter, tmp_path / f"{name}-model", base=None)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-model")
        assert_near(logits(merged), logits(with_peft(tied_model, adapter)), additions(tied_model))
    refused = {"use_rslora": True, "use_dora": True, "rank_pattern": {"q_proj": 2}, "bias": "all"}
    for name, value in (refused | {"modules_to_save": ["norm"]}).items():
        adapter = written(name, **{name: value})
        with pytest.raises(ConfigError, match=f"has {name}=.*which is more than export computes; merge it with PEFT's"):
            export(adapter, tmp_path / "none", base=None)
    assert not (tmp_path / "none").exists()


def test_targets_and_rank_are_what_the_config_says(tied_model: str) -> None:
    targets = ["q_proj", "mlp.up_proj"]
    weights = Adapter(ModelConfig(path=tied_model, lora=LoraConfig(rank=3, alpha=5, targets=targets)))
    model = skeleton(ModelConfig(path=tied_model))
    weights.prepare(model, seed=0)
    adapter = weights.adapter
    assert adapter is not None
    assert (adapter.r, adapter.lora_alpha, adapter.target_modules) == (3, 5.0, ["mlp.up_proj", "q_proj"])
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    shapes = {name: [*p.shape] for name, p in weights.published(model, trained).items()}
    assert len(shapes) == 2 * 2 * 2
    assert shapes["base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"] == [3, 32]
    assert shapes["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"] == [64, 3]
    for target in ("lm_head", "embed_tokens", "proj", "nothing"):
        with pytest.raises(ConfigError, match=rf"no linear layer '{target}'.*q_proj"):
            skeleton(ModelConfig(path=tied_model, lora=LoraConfig(targets=[target])))


@pytest.mark.parametrize("kind", ["olmoe", "qwen3_moe"])
def test_experts_that_an_adapter_leaves_as_they_are_are_named_before_the_weights_are_loaded(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)  # which another test may have raised
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 16, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    heads = {"num_key_value_heads": 4 if kind == "olmoe" else 2, "head_dim": 8, "eos_token_id": 1, "pad_token_id": 0}
    AutoConfig.for_model(kind, **sizes, **heads).save_pretrained(tmp_path)
    whole = skeleton(ModelConfig(path=str(tmp_path)))
    assert not caplog.messages
    share = 2 * 4 * 3 * 32 * 16 / whole.num_parameters()  # layers, experts, and three products of each
    skeleton(ModelConfig(path=str(tmp_path), lora=LoraConfig()))
    assert caplog.messages == [
        f"model.lora changes linear layers alone, and the experts of {tmp_path}, {share:.0%} of its weights, "
        "are none, so they stay as they are; leave model.lora out to train them"
    ]


def test_four_bits_without_a_gpu_or_the_package_are_refused_and_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"model\.lora\.quantize needs a CUDA device"):
        lora.quantization(torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"model\.lora\.quantize needs the package bitsandbytes"):
        lora.quantization(torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_adapter_learns_beside_a_base_in_four_bits_and_is_published_as_ever(
    ranks: Ranks, untied_model: str, stage: int, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    settings = (f"trainer.zero_stage={stage}", "model.dtype=bfloat16")
    with make_trainer(ranks, untied_model, *settings) as trainer:
        exact = training.gap_of(trainer, make_samples())
        full = sum(p.nbytes for p in trainer.policy.parameters())
    with make_trainer(ranks, untied_model, *settings, "model.lora.quantize=nf4") as trainer:
        held = {name: p for name, p in trainer.policy.named_parameters() if not p.requires_grad}
        packed = [name for name, p in held.items() if p.dtype == torch.uint8]
        assert len(packed) == 2 * len(LAYERS)  # not the output head, embeddings and norms
        before = {name: p.detach().clone() for name, p in held.items()}
        assert sum(p.nbytes for p in trainer.policy.parameters()) < 0.7 * full
        # Rounding to 4 bits shows, but little: both are about |log p + 3|.
        assert 0 < abs(training.gap_of(trainer, make_samples()) - exact) < 0.5
        losses = [trainer.step(make_samples())["train/loss"] for _ in range(5)]
        trainer.offload()
        trainer.onload()
        assert trainer.step(make_samples())["train/loss"] < losses[0]
        trainer.export(tmp_path / "adapter")
    assert all(torch.equal(p, before[name]) for name, p in held.items()), "a frozen weight has moved"
    with_peft(untied_model, tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all((tensors[name] != 0).any() for name in tensors if "lora_B" in name)


def test_an_adapted_layer_computes_what_peft_does_with_one_tensor_of_its_size_less(tied_model: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32)
    Adapter(ModelConfig(path=tied_model, lora=LoraConfig(rank=1, alpha=8))).prepare(model, seed=0)
    layer = model.model.layers[0].mlp.down_proj
    torch.nn.init.ones_(layer.lora_B["default"].weight)
    assert layer.lora_variant.keys() == {"default"}
    x = torch.randn(1, 512, layer.in_features)
    results, gradients, peaks = [], [], []
    for _ in range(2):
        layer.zero_grad()
        result = layer(x)
        result.square().sum().backward()
        results.append(result.detach())
        gradients.append(layer.lora_A["default"].weight.grad.clone())
        with torch.no_grad():
            peaks.append(peak_bytes(lambda: layer(x)))
        layer.lora_variant.clear()  # PEFT's own way is next
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(gradients[0], gradients[1])
    assert peaks[1] - peaks[0] > 0.9 * results[0].nbytes  # A x counts, too, which is small
