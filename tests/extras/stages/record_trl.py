"""Record what TRL's own code gives: losses of pairs in float64, metrics, and whole trainings of 20 steps.

    pip install trl==1.16.0 && python tests/extras/stages/record_trl.py

It writes trl.json beside this file. The losses are methods of TRL's trainers on a stand-in that has the settings they
read; the trainings are whole ones, on the rows and in the order of `rows`.
"""

import itertools
import json
import math
import random
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

ROOT = Path(__file__).parents[3]
START = ROOT / "checkpoints" / "tiny-sort"
PAIRS, TOKENS = 6, 7
SMOOTHING = 0.1
STEPS, BATCH, RATE = 20, 8, 3e-4
LOSSES: dict[str, dict[str, Any]] = {
    "dpo": {"loss_types": ["sigmoid"]},
    "dpo_normalised": {"loss_types": ["sigmoid_norm"]},
    "ipo": {"loss_types": ["ipo"]},
    "robust": {"loss_types": ["robust"], "label_smoothing": SMOOTHING},
    "cdpo": {"loss_types": ["aot"], "label_smoothing": SMOOTHING},  # pair by pair, where its sorting does nothing
}
REWARDS: dict[str, dict[str, Any]] = {"plain": {}, "margin": {"margin": True}, "centred": {"centre": 0.01}}
REWARDS["both"] = REWARDS["margin"] | REWARDS["centred"]
TRAININGS: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.1},
    "ipo": {"beta": 0.1, "loss_type": ["ipo"]},
    "rm": {"center_rewards_coefficient": 0.01},
}


def rows() -> list[dict[str, Any]]:
    """Returns pairs of the task sort: right answers are chosen, wrong ones rejected."""
    from hocket.data.sources import TASKS

    wrong = (row for row in TASKS.get("sort")("train", 0) if row["response"] != row["answer"])
    return [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "chosen": [{"role": "assistant", "content": row["answer"]}],
            "rejected": [{"role": "assistant", "content": row["response"]}],
            "margin": len(row["answer"]) / 10,
        }
        for row in itertools.islice(wrong, STEPS * BATCH)
    ]


def make_classifier(folder: Path) -> str:
    """Writes the small policy with a head of one output, the same on every machine."""
    model = AutoModelForSequenceClassification.from_pretrained(START, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.copy_(0.05 * torch.sin(torch.arange(model.score.weight.numel())))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(START).save_pretrained(folder)
    return str(folder)


def made() -> dict[str, Any]:
    """Returns random inputs: chosen rows, then rejected ones, of different lengths."""
    torch.manual_seed(0)
    lengths = torch.tensor([7, 1, 4, 6, 2, 5, 3, 7, 4, 1, 6, 2])
    return {
        "logprobs": -3 * torch.rand(2 * PAIRS, TOKENS, dtype=torch.float64),
        "reference": (torch.randn(2 * PAIRS) - 1.5 * lengths).double(),  # which float32 has, as columns of samples are
        "lengths": lengths,
        "rewards": 3 * torch.randn(2 * PAIRS, dtype=torch.float64),
        "margins": torch.rand(PAIRS).double(),  # likewise
    }


def accelerator() -> Any:
    return SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x, device="cpu", parallelism_config=None)


def pair_loss(name: str, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    from trl import DPOTrainer

    leaf = given["logprobs"].clone().requires_grad_()
    mask = torch.arange(TOKENS) < given["lengths"][:, None]
    one = SimpleNamespace(
        **({"beta": 0.1, "label_smoothing": 0.0} | LOSSES[name]),
        loss_weights=[1.0],
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        aux_loss_enabled=False,
        accelerator=accelerator(),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )

    def loss_of(places: list[int]) -> torch.Tensor:
        both = torch.tensor([*places, *(place + PAIRS for place in places)])
        own = mask[both]
        nothing = torch.zeros(own.shape, dtype=torch.float64)
        outputs = SimpleNamespace(log_probs=leaf[both] * own, entropy=nothing, mean_logits=nothing, is_top1=own)

        def model(**_: Any) -> Any:
            return outputs

        model.training = True  # type: ignore[attr-defined]
        one.model = model
        reference = given["reference"][both]
        inputs = {
            "input_ids": torch.zeros(len(both), TOKENS + 1, dtype=torch.long),
            "attention_mask": torch.ones(len(both), TOKENS + 1),
            "completion_mask": torch.cat([torch.zeros(len(both), 1, dtype=torch.bool), own], 1).long(),
            "ref_chosen_logps": reference[: len(places)],
            "ref_rejected_logps": reference[len(places) :],
        }
        found: torch.Tensor = DPOTrainer._compute_loss(one, model, inputs, False)
        return found

    batches = [[place] for place in range(PAIRS)] if name == "cdpo" else [[*range(PAIRS)]]
    loss = sum(loss_of(places) for places in batches) / len(batches)
    assert isinstance(loss, torch.Tensor)
    (gradient,) = torch.autograd.grad(loss, leaf)
    metrics = {key: sum(values) / len(values) for key, values in one._metrics["train"].items()}
    return {
        "loss": loss.item(),
        "gradient": gradient.tolist(),
        "metrics": {key: value for key, value in metrics.items() if key.startswith(("rewards/", "logps/"))},
    }


def simpo(given: dict[str, torch.Tensor]) -> dict[str, Any]:
    from trl.experimental.cpo import CPOTrainer

    leaf = given["logprobs"].clone().requires_grad_()
    mask = torch.arange(TOKENS) < given["lengths"][:, None]
    means = (leaf * mask).sum(1) / given["lengths"]
    settings = {"beta": 2.0, "simpo_gamma": 0.5, "label_smoothing": 0.0, "alpha": 0.0}
    one = SimpleNamespace(**settings, loss_type="simpo", accelerator=accelerator())
    loss = CPOTrainer.cpo_loss(one, means[:PAIRS], means[PAIRS:])[0].mean()
    (gradient,) = torch.autograd.grad(loss, leaf)
    return {"loss": loss.item(), "gradient": gradient.tolist()}


def reward_loss(name: str, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    from trl import RewardTrainer

    leaf = given["rewards"].clone().requires_grad_()

    def model(**_: Any) -> Any:
        return SimpleNamespace(logits=leaf[:, None])

    model.training = True  # type: ignore[attr-defined]
    one = SimpleNamespace(
        model=model,
        args=SimpleNamespace(center_rewards_coefficient=REWARDS[name].get("centre")),
        accelerator=accelerator(),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"attention_mask": torch.ones(2 * PAIRS, 1)}
    if "margin" in REWARDS[name]:
        inputs["margin"] = given["margins"]
    loss = RewardTrainer.compute_loss(one, model, inputs)
    (gradient,) = torch.autograd.grad(loss, leaf)
    metrics = {key: one._metrics["train"][key][0] for key in ("mean_reward", "accuracy", "margin")}
    return {"loss": loss.item(), "gradient": gradient.tolist(), "metrics": metrics}


def training(name: str, folder: Path) -> list[float]:
    """Returns the losses of the steps of a whole training."""
    import datasets
    import trl

    kind = trl.RewardTrainer if name.startswith("rm") else trl.DPOTrainer
    losses: list[float] = []

    class Recorded(kind):  # type: ignore[misc, valid-type]  # TRL is not there
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.item())
            return loss

    settings = (trl.RewardConfig if name.startswith("rm") else trl.DPOConfig)(
        output_dir=str(folder / name),
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        train_sampling_strategy="sequential",
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **TRAININGS[name],
    )
    model = make_classifier(folder / "classifier") if name.startswith("rm") else str(START)
    pairs = random.Random("0:0").sample(rows(), STEPS * BATCH)  # our order of a first epoch at seed 0
    Recorded(model, args=settings, train_dataset=datasets.Dataset.from_list(pairs)).train()
    assert len(losses) == STEPS
    assert all(map(math.isfinite, losses))
    return losses


if __name__ == "__main__":
    import trl

    sys.path.insert(0, str(ROOT / "src"))
    inputs = made()
    content: dict[str, Any] = {"trl": trl.__version__, "inputs": {key: value.tolist() for key, value in inputs.items()}}
    content["losses"] = {name: pair_loss(name, inputs) for name in LOSSES} | {"simpo": simpo(inputs)}
    content["rewards"] = {name: reward_loss(name, inputs) for name in REWARDS}
    with tempfile.TemporaryDirectory() as name:
        content["trainings"] = {case: training(case, Path(name)) for case in TRAININGS}
    Path(__file__).with_name("trl.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
