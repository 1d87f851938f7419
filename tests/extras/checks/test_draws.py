import dataclasses
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hocket.errors import SyncError
from hocket.extras.checks.draws import DRAWN, Draws
from hocket.trainer.ranks import Ranks
from support.numbers import rounding
from support.training import additions, assert_near, make_rollouts, make_trainer, same, sample_of, sequence, weights_of


def greedy_ids(folder: Path, count: int) -> list[int]:
    """Returns a prompt of two tokens and what a model continues greedily."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = [5, 7]
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids


def test_the_first_update_measures_what_was_drawn(ranks: Ranks, tied_model: str, tmp_path: Path) -> None:
    rollouts = make_rollouts(4, longest=30, seed=3)
    with make_trainer(ranks, tied_model, "algorithm.epochs=2", "algorithm.correction=none") as trainer:
        trainer.export(tmp_path)
        greedy = sequence(greedy_ids(tmp_path, 5))
        certain = dataclasses.replace(greedy, logprobs=(0.0, 0.0, *(-0.1 for _ in range(5))))  # counted by the engine's
        samples = [sample_of(one, group=place) for place, one in enumerate([*rollouts, greedy, certain])]
        samples[:2] = [dataclasses.replace(one, is_unbiased=True) for one in samples[:2]]
        _, sums = trainer.compare([*samples[:2], samples[4]])
        expected = [sums[name] for name in DRAWN]
        (row,) = trainer.logprobs(samples[4:5])
        one = rounding(additions(tied_model)) * 5  # of a log-prob, which is about 5
        assert expected[2] == pytest.approx(math.log1p(math.exp(-math.fsum(row)) / 7), abs=5 * one)
        found = trainer.step(samples)
        assert [found[name] for name in DRAWN] == pytest.approx(expected, abs=60 * one)  # fewer are sampled
        assert not {"train/surprise", "train/greedy", "train/variance"} & found.keys()


@pytest.mark.parametrize("setting", ["trainer.zero_stage=0", "trainer.zero_stage=1", "critic.warmup_steps=1"])
def test_above_the_gap_that_is_allowed_no_model_learns(ranks: Ranks, tied_model: str, setting: str) -> None:
    samples = [sample_of(one, 1.0, group=place) for place, one in enumerate(make_rollouts(4, longest=30, seed=3))]
    settings = ("algorithm.minibatches=2", setting)
    if "critic" in setting:
        settings += ("algorithm.preset=ppo",)
        samples = [
            dataclasses.replace(one, columns={name: (0.0,) * len(one.advantages) for name in ("values", "returns")})
            for one in samples
        ]
    with make_trainer(ranks, tied_model, *settings) as trainer:
        learners = trainer.learners
        held = [one for one in trainer.all_tensors() if not one.is_meta]
        before = [one.clone() for one in held]
        counters = [learner.engine.counters() for learner in learners]
        with pytest.raises(SyncError, match=r"is more than 0\.001 .* Nothing was trained on them"):
            trainer.step(samples, max_gap=1e-3)
        assert all(map(torch.equal, held, before))
        assert [learner.engine.counters() for learner in learners] == counters


def test_where_a_mismatch_is_a_warning_the_step_is_taken(ranks: Ranks, tied_model: str) -> None:
    samples = [sample_of(one, 1.0) for one in make_rollouts(4, longest=30, seed=3)]
    with make_trainer(ranks, tied_model, "sync.on_mismatch=warn") as trainer:
        before = weights_of(trainer)
        assert trainer.step(samples, max_gap=1e-3)["train/grad_norm"] > 0
        assert not same(before, weights_of(trainer))


def test_the_surprise_of_samples_is_the_sum_over_their_sampled_tokens(
    ranks: Ranks, tied_model: str, tmp_path: Path
) -> None:
    rollouts = make_rollouts(4, longest=30, seed=3)
    with make_trainer(ranks, tied_model) as trainer:
        trainer.export(tmp_path)
        _, sums = trainer.compare([sample_of(rollout, 0.0, is_unbiased=True) for rollout in rollouts])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    num_tokens = 0
    expected = torch.zeros(2, dtype=torch.float64)
    for rollout in rollouts:
        ids, mask = torch.tensor(rollout.token_ids), torch.tensor(rollout.mask)
        with torch.no_grad():
            rows = model(ids[None]).logits[0, :-1].log_softmax(-1)[mask[1:]]
        own = rows.gather(-1, ids[1:][mask[1:], None])[:, 0]
        entropy = -(rows.exp() * rows).sum(-1)
        variance = (rows.exp() * (rows + entropy[:, None]) ** 2).sum(-1)
        expected += torch.stack([(-own - entropy).sum(), variance.sum()])
        num_tokens += len(own)
    one = rounding(additions(tied_model)) * 5  # of a log-prob, which is about 5
    assert [sums[name] for name in DRAWN] == pytest.approx([*expected.tolist(), 0.0], abs=one * num_tokens)


def test_the_variance_of_a_draws_log_prob_is_that_of_the_softmax_without_impossible_tokens() -> None:
    # p = 1/2, 1/4, 1/4, 0 has the entropy 1.5 log 2, the mean square 2.5 log² 2, the variance 0.25 log² 2.
    logprobs = torch.tensor([[0.5, 0.25, 0.25, 0.0]]).log()
    entropies = torch.special.entr(logprobs.exp())
    variance, highest = Draws().of_tokens(logprobs, entropies, entropies.sum(-1))
    log2 = math.log(2)
    assert_near(torch.stack([variance, highest]).flatten(), [0.25 * log2**2, -log2], 2 * 4)
