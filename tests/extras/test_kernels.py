"""Other kernels than torch's own, operation by operation: the same numbers to rounding, where they are used."""

import sys
import types
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.trainer.conftest import peak  # noqa: F401 - for each test here
from torch import Tensor, nn
from transformers.models.qwen2 import modeling_qwen2

from hocket.config import LoraConfig, ModelConfig, load
from hocket.errors import ConfigError
from hocket.extras import kernels, long_rows
from hocket.trainer.choices import check
from hocket.trainer.policy import Policy
from support.training import assert_near, gradient_additions, make_rollouts, pack, sample_of

LIGER = "liger_kernel.transformers.monkey_patch"


def numbers_of(policy: Policy, count: int, device: str = "cpu") -> list[Tensor]:
    """Returns log-probs of so many sequences in a row, and the gradient of their weighted sum."""
    samples = [sample_of(rollout) for rollout in make_rollouts(count, longest=20, seed=count)]
    [[batch]] = pack(samples, torch.device(device))
    policy.zero_grad()
    logprobs_bt, *_ = policy(batch)
    (logprobs_bt * torch.arange(logprobs_bt.numel(), device=device).sin()).sum().backward()
    return [logprobs_bt.detach(), *(p.grad for p in policy.parameters() if p.grad is not None)]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compiled_layers_have_the_numbers_of_eager_ones_and_are_not_compiled_for_every_row(
    backend: str, tied_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_place = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda layer, **options: in_place(layer, **options, backend=backend))
    torch._dynamo.reset()
    adapted = backend == "aot_eager"  # which is fast to compile
    config = ModelConfig(path=tied_model, lora=LoraConfig(rank=4) if adapted else None)
    options: dict[str, Any] = {"dtype": torch.float32, "temperature": 1.0, "gradient_checkpointing": adapted}
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        eager, compiled = (Policy(config, **options, kernels=kind) for kind in ("eager", "compile"))
    graphs = []
    for count in (3, 5, 1, 40):
        for found, expected in zip(numbers_of(compiled, count), numbers_of(eager, count), strict=True):
            assert_near(found, expected, gradient_additions(tied_model))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[1:] == graphs[1:2] * 3  # the second one is for rows of any length


def test_compiling_what_it_would_slow_down_or_not_change_is_refused(tied_model: str) -> None:
    with pytest.raises(ConfigError, match="compile needs a CUDA device; set eager here"):
        Policy(ModelConfig(path=tied_model), dtype=torch.float32, temperature=1.0, kernels="compile")
    with pytest.raises(ConfigError, match="finds no layers in a Linear"):
        kernels.Compiled().apply(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="compile has no effect on layers of zero_stage=3"):
        check(load(None, ["trainer.kernels=compile", "trainer.offload_optimizer=true"]).trainer)


def test_liger_computes_all_but_the_loss_and_what_it_lacks_is_named(
    tied_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Policy:
        return Policy(ModelConfig(path=tied_model), dtype=torch.float32, temperature=1.0, kernels="liger")

    with pytest.raises(ConfigError, match="liger needs a CUDA device"):
        make()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, LIGER, None)
    with pytest.raises(ConfigError, match=r"needs the package liger-kernel .*pip install liger-kernel"):
        make()
    apply, known = Mock(), {"qwen2": None}
    module = types.SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN=known, _apply_liger_kernel_to_instance=apply)
    monkeypatch.setitem(sys.modules, LIGER, module)
    policy = make()
    apply.assert_called_once_with(model=policy.model, cross_entropy=False, fused_linear_cross_entropy=False)
    known["llama"] = known.pop("qwen2")
    with pytest.raises(ConfigError, match="no kernels for models of type qwen2, only for llama; set compile or eager"):
        make()


def test_tiles_of_long_rows_are_computed_by_other_kernels(tied_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int]()

    def fuse(kernels: object, model: Any) -> None:
        for layer in model.model.layers:  # as Liger does
            layer.mlp.forward = lambda hidden: seen.append(hidden.shape[1]) or hidden

    monkeypatch.setattr(kernels.Liger, "apply", fuse)
    monkeypatch.setattr(long_rows, "TILE", 5)
    options: Any = {"gradient_checkpointing": "long", "kernels": "liger"}
    numbers_of(Policy(ModelConfig(path=tied_model), dtype=torch.float32, temperature=1.0, **options), 5)
    assert max(seen) == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["compile", "liger"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_kernels_on_a_gpu_have_the_numbers_of_eager_ones_to_rounding(
    kind: str, dtype: torch.dtype, tied_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "liger":
        pytest.importorskip("liger_kernel")
        for name in ("apply_rotary_pos_emb", "Qwen2RMSNorm", "Qwen2MLP"):  # Liger leaves its own there
            monkeypatch.setattr(modeling_qwen2, name, getattr(modeling_qwen2, name))
    policies = (
        Policy(ModelConfig(path=tied_model), dtype=d, temperature=1.0, kernels=k).cuda()
        for d, k in ((torch.float32, "eager"), (dtype, "eager"), (dtype, kind))
    )
    exact, eager, other = (numbers_of(policy, 40, "cuda") for policy in policies)
    for one, plain, found in zip(exact, eager, other, strict=True):
        rounding = (plain.float() - one).norm() + 1e-4 * one.norm()
        assert (found.float() - one).norm() < 2 * rounding
