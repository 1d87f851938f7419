"""Steps in float32 give the same numbers whatever the micro-batches, their order, the ranks and the ZeRO stage.

Each world size runs every cell of the matrix in the same processes, to pay start-up once.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer import worker
from tests.trainer.test_ranks import DEADLINE_S, WORKER, environment, outputs_of, start_two
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def cells(tied_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders of the scenario `matrix`, by number of ranks."""
    folders = {size: tmp_path_factory.mktemp(f"matrix{size}") for size in (1, 2)}
    alone = [sys.executable, WORKER, "matrix", tied_model, str(folders[1])]
    done = subprocess.run(alone, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    processes = start_two("matrix", tied_model, folders[2])
    outputs = outputs_of(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    return folders


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
            full = torch.log_softmax(model(torch.tensor([sample.token_ids])).logits[0, :-1], dim=-1)
            logprobs = full.gather(-1, torch.tensor(sample.token_ids[1:])[:, None])[:, 0]
            weight = (logprobs.detach() - torch.tensor(sample.rollout_logprobs[1:])).exp().clamp(max=2)
            ratio = (logprobs - logprobs.detach()).exp()
            mask = torch.tensor(sample.mask[1:])
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
def test_steps_are_the_same(cells: dict[int, Path], reference: dict[str, Any], cell: str, size: int) -> None:
    steps = json.loads((cells[size] / cell / "stats.json").read_text())
    assert [step["loss"] for step in steps] == pytest.approx(reference["loss"], abs=1e-5)
    assert [step["grad_norm"] for step in steps] == pytest.approx(reference["grad_norm"], rel=1e-5)
    saved = load_file(cells[size] / cell / "model.safetensors")
    assert saved.keys() == reference["weights"].keys()
    for name, tensor in reference["weights"].items():
        torch.testing.assert_close(saved[name], tensor, atol=1e-5, rtol=0)
    if "smallest" in cell:
        assert steps[0]["num_micro_batches"] >= 3  # or it would show nothing
    if "one micro-batch" in cell:
        assert steps[0]["num_micro_batches"] == 1
    first = json.loads((cells[1] / "ZeRO-0" / "stats.json").read_text())
    for step, other in zip(steps, first, strict=True):
        assert step["metrics"] == pytest.approx(other["metrics"], abs=1e-5)
