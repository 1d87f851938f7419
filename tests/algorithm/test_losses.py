import math

import pytest
import torch
from torch import Tensor

from hocket.algorithm.losses import LossConfig, effective_sample_size, policy_loss, sft_loss

RATIO = torch.tensor([[1.0, 1.5, 0.5], [1.1, 0.7, 1.0]])
ADVANTAGES = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]])
MASK = torch.tensor([[True, True, True], [True, True, False]])
PPO = LossConfig(clip_low=0.2, clip_high=0.2, correction="none")


def test_clipped_loss_of_a_hand_worked_batch() -> None:
    # −min(rA, clip(r)A) = −1, −1.2 (clipped), −.5, 1.1, .8 (clipped): sum −.8, N = 5
    old = torch.full((2, 3), -2.0)
    logprobs = (old + RATIO.log()).requires_grad_()
    output = policy_loss(
        logprobs, old, ADVANTAGES, MASK, config=PPO, num_tokens=5, num_sequences=2, old_logprobs_bt=old
    )
    output.loss.backward()
    torch.testing.assert_close(output.loss, torch.tensor(-0.16))
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.2, 0.0, -0.1], [0.22, 0.0, 0.0]]))
    torch.testing.assert_close(output.metrics["clip_high"], torch.tensor(0.2))
    torch.testing.assert_close(output.metrics["clip_low"], torch.tensor(0.2))
    torch.testing.assert_close(output.metrics["ratio_mean"], torch.tensor(4.8 / 5))


def test_micro_batches_with_a_global_denominator_add_up() -> None:
    total = 0.0
    for row in (slice(0, 1), slice(1, 2)):
        logprobs = RATIO[row].log()
        output = policy_loss(
            logprobs, torch.zeros(1, 3), ADVANTAGES[row], MASK[row], config=PPO, num_tokens=5, num_sequences=2
        )
        total += output.loss.item()
    assert total == pytest.approx(-0.16)


def test_without_old_and_correction_the_ratio_is_against_the_rollout() -> None:
    logprobs = RATIO.log().requires_grad_()
    output = policy_loss(logprobs, torch.zeros(2, 3), ADVANTAGES, MASK, config=PPO, num_tokens=5, num_sequences=2)
    torch.testing.assert_close(output.loss, torch.tensor(-0.16))


def test_truncation_weighs_each_token_by_the_capped_detached_engine_ratio() -> None:
    # w = exp(lp − mu) = 4 → 2 (capped), 0.5, 1; r = 1. Loss −(2·1 + .5·3 + 1·(−2)) / 3 = −.5, gradient −wA/3
    rollout = torch.full((1, 3), -3.0)
    logprobs = (rollout + torch.tensor([[4.0, 0.5, 1.0]]).log()).requires_grad_()
    advantages, mask = torch.tensor([[1.0, 3.0, -2.0]]), torch.ones(1, 3, dtype=torch.bool)
    output = policy_loss(logprobs, rollout, advantages, mask, config=LossConfig(), num_tokens=3, num_sequences=1)
    output.loss.backward()
    torch.testing.assert_close(output.loss, torch.tensor(-0.5))
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-2 / 3, -0.5, 2 / 3]]))
    metrics = {name: value.item() for name, value in output.metrics.items()}
    assert metrics["importance_mean"] == pytest.approx(5.5 / 3)
    assert metrics["importance_capped"] == pytest.approx(1 / 3)
    assert metrics["logprob_gap"] == pytest.approx((math.log(4) + math.log(2)) / 3)
    assert metrics["mismatch_kl"] == pytest.approx((4 - 1 - math.log(4) + 0.5 - 1 + math.log(2)) / 3)
    assert effective_sample_size(metrics) == pytest.approx(5.5**2 / (3 * (16 + 0.25 + 1)))


def plain_loss(
    logprobs: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor, old: Tensor | None, config: LossConfig, n: int
) -> float:
    """The same loss, token by token in plain Python."""
    total = 0.0
    for index in torch.nonzero(mask).tolist():
        lp, mu, advantage = (float(x[tuple(index)]) for x in (logprobs, rollout, advantages))
        corrected = config.correction == "truncate"
        before = float(old[tuple(index)]) if old is not None else (lp if corrected else mu)
        ratio = math.exp(lp - before)
        weight = min(math.exp(before - mu), config.correction_high) if corrected else 1.0
        clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        total -= weight * min(ratio * advantage, clipped * advantage)
    return total / n


@pytest.mark.parametrize("correction", ["none", "truncate"])
@pytest.mark.parametrize("with_old", [False, True])
def test_loss_equals_a_plain_python_implementation(correction: str, with_old: bool) -> None:
    torch.manual_seed(0)
    logprobs, rollout, old = (-torch.rand(5, 7, dtype=torch.float64) * 3 for _ in range(3))
    advantages, mask = torch.randn(5, 7, dtype=torch.float64), torch.rand(5, 7) < 0.6
    config = LossConfig(clip_low=0.1, clip_high=0.3, correction=correction, correction_high=1.5)  # type: ignore[arg-type]
    before = old if with_old else None
    expected = plain_loss(logprobs, rollout, advantages, mask, before, config, 50)
    output = policy_loss(
        logprobs, rollout, advantages, mask, config=config, num_tokens=50, num_sequences=5, old_logprobs_bt=before
    )
    assert output.loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("correction", ["none", "truncate"])
def test_padding_may_hold_anything(correction: str) -> None:
    rollout = torch.tensor([[-1.0, -math.inf, math.nan]])
    logprobs = torch.tensor([[-1.0, -math.inf, -math.inf]], requires_grad=True)
    advantages, mask = torch.tensor([[1.0, math.nan, 5.0]]), torch.tensor([[True, False, False]])
    config = LossConfig(correction=correction)  # type: ignore[arg-type]
    output = policy_loss(logprobs, rollout, advantages, mask, config=config, num_tokens=1, num_sequences=1)
    output.loss.backward()
    torch.testing.assert_close(output.loss, torch.tensor(-1.0))
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-1.0, 0.0, 0.0]]))
    assert all(math.isfinite(value) for value in output.metrics.values())


def test_a_batch_without_trained_tokens_has_loss_zero_and_zero_gradient() -> None:
    logprobs = torch.zeros(1, 2, requires_grad=True)
    zeros, mask = torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool)
    output = policy_loss(logprobs, zeros, zeros, mask, config=LossConfig(), num_tokens=0, num_sequences=0)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert logprobs.grad is not None
    assert logprobs.grad.abs().sum() == 0


def test_extreme_ratios_stay_finite() -> None:
    logprobs = torch.tensor([[0.0, -900.0]], requires_grad=True)
    rollout, advantages = torch.tensor([[-900.0, 0.0]]), torch.tensor([[-1.0, 1.0]])
    output = policy_loss(
        logprobs, rollout, advantages, torch.ones(1, 2, dtype=torch.bool), config=PPO, num_tokens=2, num_sequences=1
    )
    output.loss.backward()
    assert math.isfinite(output.loss.item())
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


def test_inputs_are_not_changed() -> None:
    tensors = [RATIO.log(), torch.zeros(2, 3), ADVANTAGES.clone(), MASK.clone()]
    copies = [tensor.clone() for tensor in tensors]
    policy_loss(*tensors, config=LossConfig(), num_tokens=5, num_sequences=2)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))


def test_sft_loss_is_the_mean_cross_entropy_of_the_unmasked_tokens() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -math.inf]], requires_grad=True)
    output = sft_loss(logprobs, torch.tensor([[True, True, False]]), num_tokens=4)
    output.loss.backward()
    torch.testing.assert_close(output.loss, torch.tensor(0.75))
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.25, -0.25, 0.0]]))
