"""Record what TRL's own code gives for random inputs, in float64: the losses that examples/algorithms must equal.

    pip install trl==1.16.0 && python tests/algorithm/record_trl.py

It writes trl.json beside this file. GRPOTrainer's methods run on a stand-in that has the settings they read.
"""

import dataclasses
import inspect
import json
import math
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import trl
from trl.experimental.gmpo import GMPOTrainer
from trl.trainer import grpo_trainer

ROWS, TOKENS = 6, 7
CASES: dict[str, dict[str, Any]] = {
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.05},
    "gmpo": {"epsilon_low": 0.4, "epsilon_high": 0.4},
    "off_policy_mask": {"off_policy_mask_threshold": 0.1},
    "unbiased_kl": {"beta": 0.3, "use_bias_correction_kl": True},
    "high_entropy": {"top_entropy_quantile": 0.4},
    "adaptive_entropy": {"use_adaptive_entropy": True, "_entropy_bonus_enabled": True},
}


def trainer_like(kind: type, inputs: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Returns a stand-in with the settings of a case, on one process that accumulates nothing."""
    defaults = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    own = {
        "loss_type": "bnpo",
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "use_bias_correction_kl": False,
        "steps_per_generation": 1,
        "sapo_temperature_neg": 1.0625,  # which float32 has, as TRL makes it one
        "entropy_target": 1.0,
        "entropy_coef_max": 0.1,
        "_entropy_bonus_enabled": False,
        "_last_world_entropy": float("inf"),
        "_entropy_window_stats": None,
        "aux_loss_enabled": False,
        "current_gradient_accumulation_steps": 1,
    }
    known = defaults | own | settings
    accelerator = SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        pad_across_processes=lambda x, **_: x,
        reduce=lambda x, **_: x,
    )
    one = SimpleNamespace(**known, args=SimpleNamespace(**known), accelerator=accelerator)
    one.model = SimpleNamespace(training=True)
    one.vllm_importance_sampling_correction = False
    one._metrics = defaultdict(lambda: defaultdict(list))
    one._get_per_token_logps_and_entropies = lambda *_, **__: (inputs["logprobs"], inputs["entropies"], None)
    base = grpo_trainer.GRPOTrainer
    one.get_off_policy_mask, one.get_gamma_weights = base.get_off_policy_mask, base.get_gamma_weights
    one.get_high_entropy_mask = MethodType(base.get_high_entropy_mask, one)
    one.loss = MethodType(kind._compute_loss, one)
    return one


def made() -> dict[str, torch.Tensor]:
    """Returns random inputs: rows of different lengths, ratios within and outside the bounds."""
    torch.manual_seed(0)
    shape = (ROWS, TOKENS)
    rollout = -2 * torch.rand(shape, dtype=torch.float64) - 0.1
    old = rollout + 0.05 * torch.randn(shape, dtype=torch.float64)
    return {
        "rollout": rollout,
        "old": old,
        "logprobs": old + 0.3 * torch.randn(shape, dtype=torch.float64),
        "reference": old + 0.3 * torch.randn(shape, dtype=torch.float64),
        "entropies": 1.6 * torch.rand(shape, dtype=torch.float64),
        "advantages": torch.randn(ROWS, dtype=torch.float64),
        "lengths": torch.tensor([7, 1, 4, 6, 2, 5]),
    }


def loss_of(name: str, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    inputs = dict(given)
    for leaf in ("logprobs", "entropies"):
        inputs[leaf] = given[leaf].clone().requires_grad_()
    mask = (torch.arange(TOKENS) < given["lengths"][:, None]).double()
    batch = {
        "prompt_ids": torch.zeros(ROWS, 1),
        "prompt_mask": torch.ones(ROWS, 1),
        "completion_ids": torch.zeros(ROWS, TOKENS),
        "completion_mask": mask,
        "advantages": given["advantages"],
        "old_per_token_logps": given["old"],
        "sampling_per_token_logps": given["rollout"],
        "ref_per_token_logps": given["reference"],
        "num_items_in_batch": mask.sum(),
    }
    one = trainer_like(GMPOTrainer if name == "gmpo" else grpo_trainer.GRPOTrainer, inputs, CASES[name])
    found = []
    for _ in range(3 if name == "adaptive_entropy" else 1):  # its coefficient grows
        loss = one.loss(None, batch)
        leaves = inputs["logprobs"], inputs["entropies"]
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        found.append([loss.item(), *(gradient.tolist() for gradient in gradients)])
    return {"loss": [row[0] for row in found], "gradient": found[-1][1], "entropy_gradient": found[-1][2]}


def gdpo(absent: Sequence[tuple[int, int]] = ()) -> dict[str, Any]:
    """Runs the lines of GRPOTrainer that normalize each reward, then sum; `absent`: (rollout, reward) without one."""
    torch.manual_seed(1)
    rewards_per_func = torch.randn(8, 2, dtype=torch.float64)
    for place in absent:
        rewards_per_func[place] = torch.nan
    source = inspect.getsource(grpo_trainer.GRPOTrainer).split(
        'self.multi_objective_aggregation == "normalize_then_sum":\n'
    )
    lines = textwrap.dedent(source[1].split("        else:\n")[0])
    known: dict[str, Any] = {
        "torch": torch,
        "nanstd": grpo_trainer.nanstd,
        "rewards_per_func": rewards_per_func,
        "num_generations": 4,
        "device": "cpu",
        "unscorable_mask": rewards_per_func.isnan().all(dim=1),
        "self": SimpleNamespace(reward_funcs=[0, 1], reward_weights=torch.tensor([1.0, 0.5], dtype=torch.float64)),
    }
    exec(lines, known)
    parts = [[None if math.isnan(one) else one for one in of_reward] for of_reward in rewards_per_func.T.tolist()]
    return {"parts": parts, "advantages": known["advantages"].tolist()}


if __name__ == "__main__":
    inputs = made()
    cases = {name: loss_of(name, inputs) for name in CASES}
    # The second of two sources lacks a reward; one rollout of the first has only the other.
    mixed = gdpo([(2, 0), (4, 1), (5, 1), (6, 1), (7, 1)])
    content = {"trl": trl.__version__, "inputs": {name: value.tolist() for name, value in inputs.items()}}
    content |= {"cases": cases, "gdpo": gdpo(), "gdpo_mixed": mixed}
    target = Path(__file__).with_name("trl.json")
    target.write_text(json.dumps(content) + "\n", encoding="utf-8")
