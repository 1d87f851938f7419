"""The critic: it learns what it is told to expect, beside a policy that may have to wait for it."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from hocket.errors import TrainerError
from hocket.trainer.critic import explained_variance, value_loss
from hocket.trainer.ranks import Ranks
from hocket.trainer.trainer import Trainer
from hocket.types import TokenSequence, TrainSample
from support import training
from support.numbers import rounding
from support.training import additions, assert_same_metrics, load, same, save, weights_of

ROLLOUTS = training.make_rollouts(12, longest=14, seed=3)


def make_trainer(ranks: Ranks, model: str, *settings: str) -> Trainer:
    defaults = (
        "algorithm.preset=ppo",
        "algorithm.epochs=1",
        "critic.learning_rate=3e-3",
        "trainer.micro_batch_tokens=1000",
    )
    return training.make_trainer(ranks, model, *defaults, *settings)


def expected_of(rollout: TokenSequence) -> float:
    """1 or -1 by what the prompt begins with: the critic sees it before each token."""
    return 1.0 if rollout.token_ids[0] < 31 else -1.0


def make_samples(trainer: Trainer) -> list[TrainSample]:
    """Returns the rollouts with the critic's values of now, and what it should have said of each token."""
    return [
        training.sample_of(one, 0.5, columns={**measured, "returns": tuple(expected_of(one) * m for m in one.mask)})
        for one, measured in zip(ROLLOUTS, trainer.measure(ROLLOUTS), strict=True)
    ]


def train(trainer: Trainer, steps: int) -> list[dict[str, float]]:
    return [trainer.step(make_samples(trainer)) for _ in range(steps)]


def test_the_value_loss_takes_the_worse_of_free_and_clipped_and_has_no_slope_where_that_is_clipped() -> None:
    # V, V_old, return: (1, 0, 2): clipped .5: worse (.5 − 2)² = 2.25, no slope. (−1, 0, 2): free (−3)² = 9, slope −3.
    # (.2, 0, 1): both (.8)² = .64, slope −.8. The masked one is not seen
    values = torch.tensor([[1.0, -1.0, 0.2, math.inf]], requires_grad=True)
    old, returns = torch.tensor([[0.0, 0.0, 0.0, math.nan]]), torch.tensor([[2.0, 2.0, 1.0, 0.0]])
    mask = torch.tensor([[True, True, True, False]])
    loss = value_loss(values, old, returns, mask, num_tokens=4, clip=0.5)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, torch.tensor(0.5 * (2.25 + 9 + 0.64) / 4))
    torch.testing.assert_close(values.grad, torch.tensor([[0.0, -3.0, -0.8, 0.0]]) / 4)
    free = value_loss(values, old, returns, mask, num_tokens=4, clip=None)
    torch.testing.assert_close(free, torch.tensor(0.5 * (1 + 9 + 0.64) / 4))


def test_a_critic_is_trained_and_explains_as_plain_torch_would(ranks: Ranks, untied_model: str) -> None:
    settings = ("trainer.max_grad_norm=1e9", "trainer.micro_batch_tokens=20", "critic.value_clip=0.02")
    with make_trainer(ranks, untied_model, *settings) as trainer:
        stats, values = [], []
        for _ in range(4):
            samples = make_samples(trainer)
            values.append([sample.columns["values"] for sample in samples])
            stats.append(trainer.step(samples))
    backbone = AutoModel.from_pretrained(untied_model, dtype=torch.float32)
    head = torch.zeros(32, requires_grad=True)
    optimizer = torch.optim.AdamW([*backbone.parameters(), head], lr=3e-3, weight_decay=0.0)
    num_tokens = sum(sum(rollout.mask[1:]) for rollout in ROLLOUTS)
    for step in range(4):
        loss = torch.zeros(())
        for rollout, old in zip(ROLLOUTS, values[step], strict=True):
            value = backbone(torch.tensor([rollout.token_ids])).last_hidden_state[0] @ head
            for t in range(1, len(rollout.token_ids)):
                if rollout.mask[t]:
                    now = value[t - 1]  # where token t is predicted
                    assert float(now.detach()) == pytest.approx(old[t], abs=rounding(additions(untied_model)))
                    target = expected_of(rollout)
                    near = old[t] + (now - old[t]).clamp(-0.02, 0.02)
                    loss = loss + 0.5 * torch.maximum((now - target) ** 2, (near - target) ** 2) / num_tokens
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.get_total_norm(p.grad for p in [*backbone.parameters(), head] if p.grad is not None)
        expected = {"critic/loss": float(loss.detach()), "critic/grad_norm": float(norm)}
        assert_same_metrics({name: stats[step][name] for name in expected}, expected, untied_model)
        optimizer.step()
    assert stats[-1]["train/micro_batches"] > 3
    places = [(s, t) for s in samples for t, trained in enumerate(s.sequence.mask) if trained]
    returns, known = (torch.tensor([s.columns[name][t] for s, t in places]) for name in ("returns", "values"))
    explained = 1 - float((returns - known).var() / returns.var())
    assert stats[-1]["critic/explained_variance"] == pytest.approx(explained, abs=rounding(num_tokens))
    assert 0.1 < explained < 1
    alike = {"return_mean": 2.0, "return_square": 4.0, "error_mean": 1.0, "error_square": 1.5}
    assert math.isnan(explained_variance(alike))


@pytest.mark.long
def test_the_policy_waits_for_the_critic(ranks: Ranks, tied_model: str, tmp_path: Path) -> None:
    settings = ("critic.warmup_steps=2", "trainer.steps=4", "trainer.schedule=linear")
    start = load_file(Path(tied_model) / "model.safetensors")
    with make_trainer(ranks, tied_model, *settings) as trainer:
        waiting = train(trainer, 2)
        assert {*trainer.untrained.values()} == {"only the critic learnt: critic.warmup_steps"}
        held = weights_of(trainer)
        save(trainer, tmp_path / "checkpoint")
        learning = train(trainer, 2)
        assert trainer.untrained == {}
        moved = weights_of(trainer)
    assert same(held, start)
    assert not same(moved, start)
    assert waiting[1]["critic/explained_variance"] > waiting[0]["critic/explained_variance"]
    held_back = ("train/learning_rate", "train/grad_norm", "train/skipped", "train/updates")
    assert [[s[name] for name in held_back] for s in waiting] == [[0.0, 0.0, 0.0, 0.0]] * 2
    assert waiting[0]["train/entropy"] > 1, "the policy is looked at all the same"
    # The schedule is that of the policy's own two steps: the peak, then half of it.
    assert [s["train/learning_rate"] for s in learning] == pytest.approx([1e-3, 5e-4])
    with make_trainer(ranks, tied_model, *settings) as trainer:
        trainer.end_step()  # a step without a signal is one of the first two, and one of the schedule
        assert [s["train/learning_rate"] for s in train(trainer, 2)] == pytest.approx([0.0, 1e-3])
    with make_trainer(ranks, tied_model, *settings) as trainer:
        load(trainer, tmp_path / "checkpoint")
        again = train(trainer, 2)
    assert [*map(training.untimed, again)] == [*map(training.untimed, learning)]


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 3])
def test_returns_that_are_not_finite_leave_the_critic_as_it_was_and_end_the_run_in_the_end(
    ranks: Ranks, tied_model: str, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.trainer.guards.MAX_SKIPPED_STEPS", 2)
    with make_trainer(ranks, tied_model, f"trainer.zero_stage={stage}") as trainer:
        train(trainer, 1)
        samples = make_samples(trainer)
        before = trainer.measure(ROLLOUTS)
        infinite = (math.inf,) * len(samples[0].advantages)
        bad = [dataclasses.replace(samples[0], columns={**samples[0].columns, "returns": infinite}), *samples[1:]]
        stats = trainer.step(bad)
        assert stats["critic/skipped"] == 1
        assert math.isnan(stats["critic/grad_norm"])
        assert not stats["train/skipped"], "the policy's own step was good"
        assert trainer.measure(ROLLOUTS) == before
        assert trainer.step(samples)["critic/skipped"] == 0
        trainer.step(bad)
        with pytest.raises(TrainerError, match=r"2 steps in a row.*returns of sample 0\. Look"):
            trainer.step(bad)


@pytest.mark.long
def test_a_critic_may_start_from_another_model_and_stays_whole_beside_an_adapter(
    ranks: Ranks, tied_model: str, experts_model: str, untied_model: str
) -> None:
    for settings in ((f"critic.path={experts_model}",), ("model.lora={}", f"critic.path={untied_model}")):
        with make_trainer(ranks, tied_model, "critic.learning_rate=1e-2", *settings) as trainer:
            stats = train(trainer, 10)
            assert stats[-1]["critic/explained_variance"] > 0.5
            assert stats[-1]["train/grad_norm"] > 0
