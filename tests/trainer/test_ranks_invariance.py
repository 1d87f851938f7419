"""Steps in float32 give the same numbers whatever the micro-batches, their order, the ranks and the ZeRO stage."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer import worker
from tests.trainer.builders import untimed
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def reference(tied_model: str) -> dict[str, Any]:
    """Two steps of plain torch on whole sequences, one by one; the second update depends on both gradients."""
    model = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    losses, norms = [], []
    for step, rate in enumerate((0.5e-3, 1e-3)):
        optimizer.param_groups[0]["lr"] = rate
        total, num_tokens = torch.zeros(()), 0
        for sample in worker.make_samples(step):
            full = torch.log_softmax(model(torch.tensor([sample.sequence.token_ids])).logits[0, :-1], dim=-1)
            logprobs = full.gather(-1, torch.tensor(sample.sequence.token_ids[1:])[:, None])[:, 0]
            weight = (logprobs.detach() - torch.tensor(sample.sequence.logprobs[1:])).exp().clamp(max=2)
            ratio = (logprobs - logprobs.detach()).exp()
            mask = torch.tensor(sample.sequence.mask[1:])
            total = total - (weight * torch.tensor(sample.advantages[1:]) * ratio)[mask].sum()
            num_tokens += int(mask.sum())
        optimizer.zero_grad()
        (total / num_tokens).backward()
        losses.append(total.item() / num_tokens)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
        optimizer.step()
    return {"loss": losses, "grad_norm": norms, "weights": {n: p.detach() for n, p in model.named_parameters()}}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("cell", worker.MATRIX)
def test_steps_are_the_same(runs: dict[int, Path], reference: dict[str, Any], cell: str, size: int) -> None:
    steps = json.loads((runs[size] / "matrix-tied" / cell / "stats.json").read_text())
    assert [step["train/loss"] for step in steps] == pytest.approx(reference["loss"], abs=1e-5)
    assert [step["train/grad_norm"] for step in steps] == pytest.approx(reference["grad_norm"], rel=1e-5)
    saved = load_file(runs[size] / "matrix-tied" / cell / "model.safetensors")
    assert saved.keys() == reference["weights"].keys()
    for name, tensor in reference["weights"].items():
        torch.testing.assert_close(saved[name], tensor, atol=1e-5, rtol=0)
    if "smallest" in cell:
        assert steps[0]["train/micro_batches"] >= 3  # or it would show nothing
    if "one micro-batch" in cell:
        assert steps[0]["train/micro_batches"] == 1
    first = json.loads((runs[1] / "matrix-tied" / "ZeRO-0" / "stats.json").read_text())
    for step, other in zip(steps, first, strict=True):
        assert untimed(step) == pytest.approx(untimed(other), rel=1e-5, abs=1e-5)
