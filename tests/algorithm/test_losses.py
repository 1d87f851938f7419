import dataclasses
import functools
import math
import random

import pytest
import torch
from torch import Tensor

from hocket import config as config_module
from hocket.algorithm.choices import aggregate, objective
from hocket.config import LossConfig
from hocket.config.algorithm import PRESETS
from support.batches import loss_of, preset_loss
from support.numbers import rounding

double = functools.partial(torch.tensor, dtype=torch.float64)
"""In float64, of which a dozen operations leave 14 digits: figures worked by hand are met to default precision."""
RATIO = double([[1.0, 1.5, 0.5], [1.1, 0.7, 1.0]])
ADVANTAGES = double([[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]])
MASK = torch.tensor([[True, True, True], [True, True, False]])


@pytest.mark.parametrize("correction", ["truncate", "none"])
def test_the_metrics_of_importance_weights_by_hand(correction: str) -> None:
    # w = exp(lp − mu) = 4 (capped at 2), 0.5, 1; without a correction these are the ratios to the policy before, too
    rollout, mask = torch.full((1, 3), -3.0).double(), torch.ones(1, 3, dtype=torch.bool)
    logprobs = rollout + double([[4.0, 0.5, 1.0]]).log()
    config = LossConfig(correction=correction)
    output = loss_of(logprobs, rollout, mask.double(), mask, config=config, num_tokens=3, num_sequences=1)
    metrics = {name: value.item() for name, value in output.metrics.items()}
    kl = (4 - 1 - math.log(4) + 0.5 - 1 + math.log(2)) / 3
    assert metrics["importance_mean"] == pytest.approx(5.5 / 3)
    assert metrics["importance_capped"] == pytest.approx(1 / 3 if correction == "truncate" else 0.0)
    assert metrics["logprob_gap"] == pytest.approx((math.log(4) + math.log(2)) / 3)
    assert metrics["mismatch_kl"] == pytest.approx(kl)
    assert metrics["policy_kl"] == pytest.approx(0.0 if correction == "truncate" else kl)
    assert metrics["importance_square"] == pytest.approx((16 + 0.25 + 1) / 3)


@pytest.mark.parametrize(
    ("objective", "low", "high"),
    [("ppo", 2, 1), ("cispo", 3, 2), ("none", 0, 0)],  # ppo: below where A < 0, above where A > 0
)
def test_what_counts_as_clipped_by_hand(objective: str, low: int, high: int) -> None:
    # The bounds are .9 and 1.3: three ratios lie below, two above, one between.
    ratio, advantages = double([[0.85, 0.85, 1.35, 1.35, 1.2, 0.8]]), double([[1.0, -1.0, 1.0, -1.0, 1.0, -1.0]])
    config = LossConfig(objective=objective, clip_low=0.1, clip_high=0.3, correction="none")
    metrics = loss_of(ratio.log(), ratio * 0, advantages, ratio > 0, config=config, num_tokens=6).metrics
    assert (metrics["clip_low"].item(), metrics["clip_high"].item()) == pytest.approx((low / 6, high / 6))
    # A ratio of 1 is within bounds of 1 and 1.
    at = config.model_copy(update={"clip_low": 0.0, "clip_high": 0.0})
    metrics = loss_of(ratio * 0, ratio * 0, advantages, ratio > 0, config=at, num_tokens=6).metrics
    assert (metrics["clip_low"].item(), metrics["clip_high"].item()) == (0.0, 0.0)


def test_a_choice_gets_zeros_outside_the_mask_whatever_stands_there() -> None:
    given: dict[str, Tensor] = {}

    @objective("noting")
    def noting(
        logprobs_bt: Tensor, entropy_bt: Tensor, advantages_bt: Tensor, rollout_logprobs_bt: Tensor, ratio_bt: Tensor
    ) -> Tensor:
        given.update(logprobs=logprobs_bt, entropy=entropy_bt, advantages=advantages_bt, rollout=rollout_logprobs_bt)
        return ratio_bt

    numbers, mask = double([[-1.0, math.nan]]), torch.tensor([[True, False]])
    loss_of(numbers, numbers, numbers, mask, config=LossConfig(objective="noting"), num_tokens=1, entropy=numbers)
    assert len(given) == 4
    assert all(values.tolist() == [[-1.0, 0.0]] for values in given.values()), given


def test_nothing_outside_the_mask_is_in_the_loss_also_where_an_aggregate_does_not_look_at_it() -> None:
    @aggregate("all_alike")
    def all_alike(mask_bt: Tensor) -> Tensor:
        return torch.ones_like(mask_bt)

    config = LossConfig(objective="none", correction="none", aggregate="all_alike")
    zeros, mask = double([[0.0, 0.0]]), torch.tensor([[True, False]])
    assert loss_of(zeros, zeros, double([[3.0, 5.0]]), mask, config=config, num_tokens=1).loss.item() == -3.0


# Each preset's loss and gradient on the batch above, worked by hand. The terms −min(rA, clip(r)A) under a clip of .2/.2
# are −1, −1.2, −.5 | 1.1, .8 and their slopes −1, 0, −.5 | 1.1, 0. GSPO: s₁ = .75^⅓ below its clip, s₂ = √.77 clipped
# to .9997. CISPO: r·A·lp with lp = −2 + ln r.
CLIPPED = [[-1.0, 0.0, -0.5], [1.1, 0.0, 0.0]]
BY_HAND = {
    "grpo": ((-2.7 / 3 + 1.9 / 2) / 2, [[-1 / 6, 0, -0.5 / 6], [1.1 / 4, 0, 0]]),
    "dapo": ((-1 - 1.28 - 0.5 + 1.1 + 0.8) / 5, [[g / 5 for g in row] for row in CLIPPED]),
    "dr_grpo": (-0.8 / (2 * 4), [[g / 8 for g in row] for row in CLIPPED]),
    "bnpo": (-0.16, [[g / 5 for g in row] for row in CLIPPED]),
    "gspo": ((-(0.75 ** (1 / 3)) + 0.9997) / 2, [[-(0.75 ** (1 / 3)) / 6] * 3, [0, 0, 0]]),
    "cispo": (
        -sum(r * a * (math.log(r) - 2) for r, a in ((1, 1), (1.5, 1), (0.5, 1), (1.1, -1), (0.7, -1))) / 5,
        [[-0.2, -0.3, -0.1], [0.22, 0.14, 0]],
    ),
    "rloo": (-0.16, [[g / 5 for g in row] for row in CLIPPED]),
    "reinforce_pp": (-0.16, [[g / 5 for g in row] for row in CLIPPED]),
    "reinforce_pp_baseline": (-0.16, [[g / 5 for g in row] for row in CLIPPED]),
    "ppo": (-0.16, [[g / 5 for g in row] for row in CLIPPED]),
    "distill": (-(1 + 1.5 + 0.5 - 1.1 - 0.7) / 5, [[-0.2, -0.3, -0.1], [0.22, 0.14, 0]]),
}


# Besides: (config, ratio to the rollout's log-probs, advantages, loss, gradient).
OTHERS = {
    # A = −1: r = 5 → c·A = −3, no slope; r = 2 → rA = −2; r = .5 → clipped at .8. A = 1: as without
    "dual_clip": (
        LossConfig(clip_low=0.2, clip_high=0.2, correction="none", objective={"name": "ppo", "dual_clip": 3.0}),
        double([[5.0, 2.0, 0.5, 0.5]]),
        double([[-1.0, -1.0, -1.0, 1.0]]),
        (3 + 2 + 0.8 - 0.5) / 4,
        [[0.0, 0.5, 0.0, -0.125]],
    ),
    **{  # with a correction, ratio and slope are the weight, and every r is 1; bounds: [.5, 5] and [.99, 1.01]
        name: (
            LossConfig(correction=correction),
            double([[4.8, 1 / 4.8, 1.0], [1.05, 1.05, 1.05], [0.95, 0.95, 0.95]]),
            torch.ones(3, 3, dtype=torch.float64),
            -sum(map(sum, weights)) / 9,
            [[-w / 9 for w in row] for row in weights],
        )
        for name, correction, weights in (
            ("truncate", {"name": "truncate", "bounds": (0.5, 2.0)}, [[2.0, 0.5, 1.0], [1.05] * 3, [0.95] * 3]),
            ("mask", "mask", [[4.8, 0.0, 1.0], [1.05] * 3, [0.95] * 3]),
            # geometric means (4.8 · 1/4.8 · 1)^⅓ = 1, 1.05, .95; a token of the one that is kept counts at most 2
            ("sequence_mask", "sequence_mask", [[2.0, 1 / 4.8, 1.0], [0.0] * 3, [0.0] * 3]),
        )
    },
}
PRESET_CASES = {name: (preset_loss(name, constant_length=4), RATIO, ADVANTAGES, *BY_HAND[name]) for name in PRESETS}


@pytest.mark.parametrize("name", [*PRESET_CASES, *OTHERS])
def test_loss_and_gradient_are_what_one_works_out_by_hand(name: str) -> None:
    config, ratio, advantages, loss, gradient = (PRESET_CASES | OTHERS)[name]
    mask = MASK if name in PRESETS else torch.ones_like(ratio, dtype=torch.bool)
    num_tokens, rollout = int(mask.sum()), torch.full_like(ratio, -2.0)
    logprobs = (rollout + ratio.log()).requires_grad_()
    known = {"config": config, "num_tokens": num_tokens, "num_sequences": len(ratio)}
    output = loss_of(logprobs, rollout, advantages, mask, **known)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss)
    torch.testing.assert_close(logprobs.grad, double(gradient))
    if name in PRESETS:  # of each token, whatever the ratio is
        kl = sum(r - 1 - math.log(r) for r in ratio[mask].tolist()) / num_tokens
        assert output.metrics["policy_kl"].item() == pytest.approx(kl)
    if name == "bnpo":
        assert output.metrics["clip_high"].item() == pytest.approx(0.2)
        assert output.metrics["clip_low"].item() == pytest.approx(0.2)
        assert output.metrics["ratio_mean"].item() == pytest.approx(4.8 / 5)


def test_a_kl_in_the_loss_is_added_where_tokens_are_trained_and_is_aggregated_like_it() -> None:
    # x = .5, −1 | 2: k2 = .125, .5 | 2, slopes x. Mean of sequences: (.625/2 + 2) / 2, slopes / (tokens · 2)
    reference = double([[-1.0, -1.0], [-1.0, -math.inf]])
    logprobs = double([[-0.5, -2.0], [1.0, -math.inf]], requires_grad=True)
    mask, zeros = torch.tensor([[True, True], [True, False]]), double([[0.0] * 2] * 2)
    config = LossConfig(aggregate="seq_mean_token_mean", kl="k2", kl_coef=0.1)
    known = {"config": config, "num_tokens": 3, "num_sequences": 2}
    output = loss_of(logprobs, zeros - 1, zeros, mask, ref_logprobs=reference, **known)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(0.1 * (0.625 / 2 + 2) / 2)
    torch.testing.assert_close(logprobs.grad, 0.1 * double([[0.5 / 4, -1 / 4], [2 / 2, 0.0]]))
    k3 = (math.exp(-0.5) - 0.5 + math.e - 2 + math.exp(-2) + 1) / 3
    assert output.metrics["kl"].item() == pytest.approx(k3)


def test_the_entropy_is_rewarded_and_aggregated_like_the_loss() -> None:
    entropy = double([[1.0, 2.0], [4.0, math.nan]], requires_grad=True)
    mask, zeros = torch.tensor([[True, True], [True, False]]), double([[0.0] * 2] * 2)
    config = LossConfig(aggregate="seq_mean_token_sum", entropy_coef=0.01)
    known = {"config": config, "num_tokens": 3, "num_sequences": 2}
    output = loss_of(zeros, zeros, zeros, mask, entropy=entropy, **known)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-0.01 * 7 / 2)
    torch.testing.assert_close(entropy.grad, double([[-0.005, -0.005], [-0.005, 0.0]]))


@dataclasses.dataclass
class Token:
    logprob: float
    rollout: float
    old: float
    reference: float
    advantage: float
    trained: bool


def plain_loss(
    sequences: list[list[Token]], config: LossConfig, *, with_old: bool, num_tokens: int, num_sequences: int
) -> tuple[float, list[float]]:
    """The same loss and its derivative by each log-prob, sequence by sequence and token by token in plain Python."""
    loss, slopes = 0.0, []
    corrected = config.correction != "none"
    for sequence in sequences:
        trained = [token for token in sequence if token.trained]
        before = {id(t): t.old if with_old else (t.logprob if corrected else t.rollout) for t in trained}
        mean_log_ratio = sum(t.logprob - before[id(t)] for t in trained) / max(len(trained), 1)
        trainer = {id(t): t.old if with_old else t.logprob for t in trained}
        geometric = math.exp(sum(trainer[id(t)] - t.rollout for t in trained) / max(len(trained), 1))
        for token in sequence:
            if not token.trained:
                slopes.append(0.0)
                continue
            a = token.advantage
            r = math.exp(mean_log_ratio if config.ratio == "sequence" else token.logprob - before[id(token)])
            w = math.exp(trainer[id(token)] - token.rollout)
            correction = config.correction if isinstance(config.correction, dict) else {"name": config.correction}
            low, high = correction.get("bounds", (0.0, 2.0))
            weight = {
                "none": 1.0,
                "truncate": min(max(w, low), high),
                "mask": w if low <= w <= high else 0.0,
                "sequence_mask": min(w, 2.0) if low <= geometric <= high else 0.0,
            }[correction["name"]]
            clipped = min(max(r, 1 - config.clip_low), 1 + config.clip_high)
            if config.objective == "none":
                value, slope = r * a, r * a
            elif config.objective == "cispo":
                value, slope = clipped * a * token.logprob, clipped * a
            else:
                value, slope = (r * a, r * a) if r * a <= clipped * a else (clipped * a, 0.0)
                dual_clip = config.objective["dual_clip"] if isinstance(config.objective, dict) else None
                if dual_clip is not None and a < 0 and value < dual_clip * a:
                    value, slope = dual_clip * a, 0.0
            value, slope = -weight * value, -weight * slope
            x = token.logprob - token.reference
            if config.kl == "k2":
                value, slope = value + config.kl_coef * x * x / 2, slope + config.kl_coef * x
            elif config.kl == "k3":
                value += config.kl_coef * (math.exp(-x) - 1 + x)
                slope += config.kl_coef * (1 - math.exp(-x))
            share = {
                "token_mean": 1 / num_tokens,
                "seq_mean_token_mean": 1 / num_sequences / len(trained),
                "seq_mean_token_sum": 1 / num_sequences,
                "constant": 1 / num_sequences / (config.constant_length or 1),
            }[config.aggregate]
            loss += share * value
            slopes.append(share * slope)
    return loss, slopes


def random_sequences(rng: random.Random) -> list[list[Token]]:
    def token() -> Token:
        rollout = -3 * rng.random()
        near = rollout + rng.gauss(0, 0.3)
        return Token(
            logprob=near + rng.gauss(0, 0.2),
            rollout=rollout,
            old=near,
            reference=rollout + rng.gauss(0, 0.5),
            advantage=rng.gauss(0, 1),
            trained=rng.random() < 0.7,
        )

    sequences = [[token() for _ in range(rng.randint(1, 9))] for _ in range(12)]
    return [*sequences, [dataclasses.replace(token(), trained=False) for _ in range(3)]]


def packed_loss(
    sequences: list[list[Token]], rows: list[list[int]], config: LossConfig, *, with_old: bool, num_tokens: int
) -> tuple[float, dict[int, list[float]]]:
    """policy_loss of one micro-batch whose rows hold these sequences: its loss, and slopes by sequence."""
    width = max(sum(len(sequences[i]) for i in row) for row in rows) + 1  # a padding position at least

    def column(name: str, padding: float) -> Tensor:
        filled = [[getattr(token, name) for i in row for token in sequences[i]] for row in rows]
        return torch.tensor([v + [padding] * (width - len(v)) for v in filled], dtype=torch.float64)

    sample = [[i for i in row for _ in sequences[i]] for row in rows]
    logprobs = column("logprob", -math.inf).requires_grad_()
    output = loss_of(
        logprobs,
        column("rollout", math.nan),
        column("advantage", math.nan),
        column("trained", 0.0).bool(),
        config=config,
        num_tokens=num_tokens,
        num_sequences=sum(any(token.trained for token in sequence) for sequence in sequences),
        old_logprobs=column("old", math.nan) if with_old else None,
        ref_logprobs=column("reference", math.nan) if config.kl != "off" else None,
        sample=torch.tensor([v + [-1] * (width - len(v)) for v in sample]),
    )
    output.loss.backward()
    assert logprobs.grad is not None
    assert all(math.isfinite(value) for value in output.metrics.values())  # whatever the padding holds
    slopes = {}
    for row, members in enumerate(rows):
        start = 0
        for i in members:
            slopes[i] = logprobs.grad[row, start : start + len(sequences[i])].tolist()
            start += len(sequences[i])
        assert logprobs.grad[row, start:].abs().sum() == 0
    return output.loss.item(), slopes


VARIANTS = [
    *(preset_loss(name, constant_length=7) for name in PRESETS),
    LossConfig(),
    LossConfig(correction={"name": "truncate", "bounds": (0.8, 1.2)}, aggregate="seq_mean_token_sum"),
    LossConfig(correction={"name": "mask", "bounds": (0.7, 1.4)}, aggregate="seq_mean_token_mean"),
    LossConfig(correction={"name": "sequence_mask", "bounds": (0.85, 1.15)}),
    LossConfig(correction="none", objective="none", ratio="sequence", aggregate="seq_mean_token_sum"),
    LossConfig(correction="none", objective={"name": "ppo", "dual_clip": 1.1}, clip_low=0.1, clip_high=0.1),
    LossConfig(correction="none", kl="k3", kl_coef=0.3, objective="cispo", aggregate="constant", constant_length=5),
    LossConfig(kl="k2", kl_coef=0.3),
]


@pytest.mark.parametrize("config", VARIANTS)
@pytest.mark.parametrize("with_old", [False, True])
def test_loss_and_gradient_equal_a_plain_implementation_however_sequences_are_packed(
    config: LossConfig, with_old: bool, rng: random.Random
) -> None:
    sequences = random_sequences(rng)
    num_tokens = sum(token.trained for sequence in sequences for token in sequence)
    num_sequences = sum(any(token.trained for token in sequence) for sequence in sequences)
    config = config.model_copy(update={"kl": "off"}) if config.kl_in == "reward" else config
    loss, slopes = plain_loss(sequences, config, with_old=with_old, num_tokens=num_tokens, num_sequences=num_sequences)
    every = list(range(len(sequences)))
    for micro_batches in (
        [[[i] for i in every]],  # one sequence a row
        [[every]],  # all of them in one row
        [[[3, 0], [7, 12, 1]], [[2, 11, 4, 5]], [[6], [8], [9, 10]]],
    ):
        results = [
            packed_loss(sequences, rows, config, with_old=with_old, num_tokens=num_tokens) for rows in micro_batches
        ]
        away = 100 * rounding(108, torch.float64)  # sums of 12 sequences of 9 terms at most, each of them below 100
        assert sum(result for result, _ in results) == pytest.approx(loss, abs=away)
        found = {i: values for _, by_sequence in results for i, values in by_sequence.items()}
        assert [value for i in every for value in found[i]] == pytest.approx(slopes, abs=away)


def test_a_preset_takes_changes_and_the_runs_settings_become_the_losses_knobs() -> None:
    gspo = preset_loss("gspo", clip_high=5e-4)
    assert (gspo.ratio, gspo.clip_low, gspo.clip_high, gspo.correction) == ("sequence", 3e-4, 5e-4, "none")
    settings = config_module.load(None, ["algorithm.preset=dr_grpo"])
    assert settings.algorithm.loss(max_tokens=99) == preset_loss("dr_grpo", constant_length=99)
    assert config_module.Config().algorithm.loss(max_tokens=9) == LossConfig(constant_length=9)


def test_a_batch_without_trained_tokens_has_loss_zero_and_extreme_ratios_stay_finite() -> None:
    logprobs = torch.tensor([[0.0, -900.0]], requires_grad=True)
    rollout, advantages, mask = torch.tensor([[-900.0, 0.0]]), torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2)
    output = loss_of(logprobs, rollout, advantages, mask.bool(), config=preset_loss("bnpo"), num_tokens=2)
    output.loss.backward()
    assert output.loss.isfinite()
    assert output.metrics["logprob_gap"] == 20.0
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()
    for name in ("token_mean", "seq_mean_token_sum"):
        logprobs.grad = None
        config = preset_loss("bnpo", aggregate=name)
        output = loss_of(logprobs, rollout, advantages, ~mask.bool(), config=config, num_tokens=0, num_sequences=0)
        output.loss.backward()
        assert (output.loss.item(), logprobs.grad.abs().sum()) == (0.0, 0.0)
        assert {value.item() for value in output.metrics.values()} == {0.0}
