"""Several updates on the samples of one step, against a plain loop in torch."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer import worker
from transformers import AutoModelForCausalLM

from hocket.common.tasks import seed_of
from hocket.errors import TrainerError
from hocket.trainer.batching import minibatches
from hocket.trainer.ranks import Ranks
from hocket.trainer.trainer import Trainer
from hocket.types import TrainSample
from support import training
from support.parameters import mostly_long
from support.training import (
    assert_near,
    assert_same_states,
    load,
    make_groups,
    make_trainer,
    measured,
    same,
    save,
    weights_of,
)

NUMBER = 3
SEED = seed_of(0, "minibatches", NUMBER)
RATE = 1e-3
EPOCHS, MINIBATCHES = 3, 2
SETTINGS = (f"algorithm.epochs={EPOCHS}", f"algorithm.minibatches={MINIBATCHES}")


def by_hand(path: str, samples: list[TrainSample], algorithm: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns a trainer's state after all updates, one sequence after the other, in plain torch."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)

    def logprobs_of_one(sample: TrainSample) -> torch.Tensor:
        ids = torch.tensor(sample.sequence.token_ids)
        full = torch.log_softmax(model(ids[None]).logits[0, :-1], dim=-1)
        return full.gather(-1, ids[1:, None])[:, 0][torch.tensor(sample.sequence.mask[1:])]

    def of_sampled(values: tuple[float, ...], sample: TrainSample) -> torch.Tensor:
        return torch.tensor(values[1:])[torch.tensor(sample.sequence.mask[1:])]

    with torch.no_grad():
        start = [logprobs_of_one(sample) for sample in samples]
    for part in minibatches([sample.group for sample in samples], epochs=EPOCHS, count=MINIBATCHES, seed=SEED):
        losses = []
        for sample, before in ((samples[place], start[place]) for place in part):
            now, advantage = logprobs_of_one(sample), of_sampled(sample.advantages, sample)
            engines = of_sampled(sample.sequence.logprobs, sample)
            old = engines if algorithm["correction"] == "none" else before
            weight = torch.ones(()) if algorithm["correction"] == "none" else (before - engines).exp().clamp(max=2)
            ratio = (now - old).exp()
            if algorithm.get("ratio") == "sequence":
                ratio = (now - now.detach() + (now - old).mean().detach()).exp()
            clipped = ratio.clamp(1 - algorithm["clip_low"], 1 + algorithm["clip_high"])
            if algorithm.get("objective") == "cispo":
                objective = clipped.detach() * advantage * now
            else:
                objective = torch.minimum(ratio * advantage, clipped * advantage)
            loss = -weight * objective
            if algorithm.get("kl") == "k2":
                loss = loss + algorithm["kl_coef"] * (now - before).square() / 2  # the reference is the start
            losses.append(loss)
        optimizer.zero_grad()
        torch.cat(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return training.plain_state(model, optimizer)


ALGORITHMS: dict[str, dict[str, Any]] = {
    "corrected": worker.CORRECTED,
    "on the engine's log-probs": {"correction": "none", "clip_low": 0.2, "clip_high": 0.2},
    "sequence ratio": {"correction": "truncate", "ratio": "sequence", "clip_low": 0.02, "clip_high": 0.02},
    "cispo": {"correction": "none", "objective": "cispo", "clip_low": 1.0, "clip_high": 0.5},
    "kl in the loss": {"correction": "truncate", "clip_low": 0.2, "clip_high": 0.28, "kl": "k2", "kl_coef": 0.5},
}


@pytest.mark.parametrize("name", mostly_long(ALGORITHMS, "corrected", "kl in the loss"))
def test_several_updates_are_those_of_a_plain_loop(ranks: Ranks, untied_model: str, name: str) -> None:
    algorithm = ALGORITHMS[name]
    knobs = [f"algorithm.{key}={value}" for key, value in algorithm.items()]
    samples = make_groups(untied_model)
    expected = by_hand(untied_model, samples, algorithm)
    for micro_batch_tokens in (40, 1000):
        rate = (f"trainer.learning_rate={RATE}", f"trainer.micro_batch_tokens={micro_batch_tokens}")
        with make_trainer(ranks, untied_model, *SETTINGS, *rate, *knobs) as trainer:
            metrics = trainer.step(measured(trainer, samples), number=NUMBER)
            assert_same_states(training.state_of(trainer), expected, untied_model, updates=6, rate=RATE)
        assert metrics["train/updates"] == 6
        assert metrics["train/policy_kl"] > 0
        assert metrics["train/clip_low"] + metrics["train/clip_high"] > 0.01  # or it would show nothing about the clip


def test_mini_batches_are_of_whole_groups_and_an_epoch_has_each_once_in_an_order_of_the_seed() -> None:
    groups = [0, 0, 1, 1, 2, 3, 3, 4]
    parts = minibatches(groups, epochs=2, count=2, seed=1)
    assert len(parts) == 4
    for epoch in (parts[:2], parts[2:]):
        assert sorted(epoch[0] + epoch[1]) == list(range(8))
        assert [len({groups[place] for place in part}) for part in epoch] == [3, 2]
        assert not {groups[place] for place in epoch[0]} & {groups[place] for place in epoch[1]}
    assert parts == minibatches(groups, epochs=2, count=2, seed=1)
    assert len({str(minibatches(groups, epochs=1, count=2, seed=seed)) for seed in range(20)}) > 5
    assert len(minibatches([0, 0, 3], epochs=3, count=16, seed=0)) == 6  # no empty ones
    assert minibatches([0, 0, 1, 2], epochs=1, count=1, seed=5) == [[0, 1, 2, 3]]  # in their order


def test_the_updates_of_a_step_end_at_stop_kl(ranks: Ranks, untied_model: str) -> None:
    samples, seen = make_groups(untied_model), {}
    for stop in ("null", 1e9, 1e-4):
        settings = ("algorithm.epochs=4", f"algorithm.stop_kl={stop}", f"trainer.learning_rate={RATE}")
        with make_trainer(ranks, untied_model, *settings) as trainer:
            metrics = trainer.step(measured(trainer, samples))
            seen[stop] = metrics["train/updates"], weights_of(trainer)
    assert [count for count, _ in seen.values()] == [4, 4, 2]  # the second update is the first with a KL above 0
    assert same(seen["null"][1], seen[1e9][1])
    assert not same(seen["null"][1], seen[1e-4][1])


@pytest.mark.parametrize(
    ("schedule", "steps", "expected"),
    [
        ("schedule=linear", "+--+", [1.0, 0.25]),  # two steps without a signal
        ("schedule=cosine", "-+-+", [0.5 * (1 + math.cos(math.pi / 4)), 0.5 * (1 + math.cos(3 * math.pi / 4))]),
        ("warmup_steps=4", "-+-+", [0.5, 1.0]),
        ("warmup_steps=2 trainer.schedule=linear", "---+", [0.5]),
    ],
)
def test_the_learning_rate_counts_steps_not_updates_with_a_signal_or_without(
    ranks: Ranks, untied_model: str, tmp_path: Path, schedule: str, steps: str, expected: list[float]
) -> None:
    settings = (*SETTINGS, "trainer.steps=4", "trainer.learning_rate=1e-3", *f"trainer.{schedule}".split())
    rates, again = [], []
    with make_trainer(ranks, untied_model, *settings) as trainer:
        samples = measured(trainer, make_groups(untied_model))
        for number, step in enumerate(steps):
            if number == 2:
                save(trainer, tmp_path / "state")
            rates += [take(trainer, samples, step)]
        load(trainer, tmp_path / "state")
        again = [take(trainer, samples, step) for step in steps[2:]]
    assert [rate for rate in rates if rate] == pytest.approx([1e-3 * factor for factor in expected])
    assert again == rates[2:]


def take(trainer: Trainer, samples: list[TrainSample], step: str) -> float:
    """Takes a step with a signal, or one without, and returns its learning rate, 0 without."""
    if step == "-":
        trainer.end_step()
        return 0.0
    return trainer.step(samples)["train/learning_rate"]


@pytest.mark.long
def test_a_critic_takes_the_same_updates_and_its_value_clip_limits_them(ranks: Ranks, untied_model: str) -> None:
    ppo = ("algorithm.preset=ppo", "critic.learning_rate=5e-3")
    gains = {}
    for epochs, clip in ((1, "0.5"), (16, "0.5"), (16, "null")):
        settings = (f"algorithm.epochs={epochs}", f"critic.value_clip={clip}")
        with make_trainer(ranks, untied_model, *ppo, *settings) as trainer:
            samples = measured(trainer, make_groups(untied_model), returns=10.0)
            trainer.step(samples)
            values = [one["values"] for one in trainer.measure([sample.sequence for sample in samples])]
            gains[epochs, clip] = sum(map(sum, values)) / sum(sum(one.sequence.mask) for one in samples)
    assert 0 < gains[1, "0.5"] < gains[16, "0.5"] < 0.7 * gains[16, "null"]


def test_a_mini_batch_that_is_not_finite_is_skipped_alone_and_kept(
    ranks: Ranks, untied_model: str, tmp_path: Any
) -> None:
    samples = make_groups(untied_model)
    samples[4] = dataclasses.replace(samples[4], advantages=(float("nan"),) * len(samples[4].advantages), id="the bad")
    settings = ("algorithm.minibatches=4", "algorithm.epochs=2", "algorithm.correction=none")
    with make_trainer(ranks, untied_model, *settings) as trainer:
        before = weights_of(trainer)
        metrics = trainer.step(samples, keep=tmp_path / "kept.json")
        assert metrics["train/skipped"] == 0.25
        assert not same(before, weights_of(trainer))
    kept = (tmp_path / "kept.json").read_text()
    assert '"not_finite": "advantages of the bad.' in kept
    assert kept.count('"token_ids"') == 3  # its mini-batch, a group of three
    assert trainer.untrained == {1: "its update was not finite"}


def test_a_step_counts_as_skipped_only_if_all_of_its_updates_were(ranks: Ranks, untied_model: str) -> None:
    """Six bad updates in as many steps end no run; five bad steps do."""
    samples = make_groups(untied_model)
    samples[4] = dataclasses.replace(samples[4], advantages=(float("nan"),) * len(samples[4].advantages))
    settings = ("algorithm.epochs=2", "algorithm.correction=none")
    with make_trainer(ranks, untied_model, "algorithm.minibatches=2", "algorithm.correction=none") as trainer:
        assert [trainer.step(samples, number=n)["train/skipped"] for n in range(6)] == [0.5] * 6
    with make_trainer(ranks, untied_model, *settings) as trainer:
        assert [trainer.step(samples, number=n)["train/skipped"] for n in range(4)] == [1.0] * 4
        with pytest.raises(TrainerError, match="5 steps in a row"):
            trainer.step(samples, number=4)


def test_a_group_that_no_update_trained_is_named_with_the_reason(ranks: Ranks, untied_model: str) -> None:
    with make_trainer(ranks, untied_model, "algorithm.minibatches=4", "algorithm.stop_kl=1e-12") as trainer:
        assert trainer.step(measured(trainer, make_groups(untied_model)))["train/updates"] == 2
        assert list(trainer.untrained.values()) == ["stop_kl ended the step before its update"] * 2


def test_the_gap_between_engine_and_trainer_is_that_of_the_whole_batch(ranks: Ranks, untied_model: str) -> None:
    found = []
    for parts in (1, 4):
        with make_trainer(ranks, untied_model, f"algorithm.minibatches={parts}") as trainer:
            metrics = trainer.step(measured(trainer, make_groups(untied_model)))
            names = ("logprob_gap", "mismatch_kl", "importance_mean", "importance_capped", "ess")
            found.append([metrics[f"train/{name}"] for name in names])
    assert_near(found[1], found[0], training.additions(untied_model) + training.POSITIONS)
