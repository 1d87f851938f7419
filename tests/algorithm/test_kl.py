import math

import pytest
import torch

from hocket.algorithm import kl
from hocket.algorithm.kl import KlController, kl_penalty
from hocket.algorithm.ratios import masked_log_ratio
from hocket.config import AlgorithmConfig


def test_the_three_estimators_and_their_gradients_by_hand() -> None:
    # x = 0.5 and −1. k1 = x; k2 = 0.125, 0.5; k3 = e^−0.5 − 1 + 0.5 = 0.1065307, e − 2 = 0.7182818
    # gradients: 1; x; 1 − e^−x = 0.3934693, −1.7182818
    expected = {
        "k1": ([0.5, -1.0], [1.0, 1.0]),
        "k2": ([0.125, 0.5], [0.5, -1.0]),
        "k3": ([0.1065307, 0.7182818], [0.3934693, -1.7182818]),
    }
    for name, (values, gradients) in expected.items():
        x = torch.tensor([0.5, -1.0], requires_grad=True)
        penalty = kl_penalty(x, name)  # type: ignore[arg-type]
        penalty.sum().backward()
        torch.testing.assert_close(penalty.detach(), torch.tensor(values))
        torch.testing.assert_close(x.grad, torch.tensor(gradients))


def test_log_ratios_are_bounded_and_masked_before_anything_can_become_nan() -> None:
    numerator = torch.tensor([-1.0, -900.0, -math.inf], requires_grad=True)
    ratio = masked_log_ratio(numerator, torch.tensor([-1.5, 0.0, math.nan]), torch.tensor([True, True, False]))
    assert ratio.tolist() == [0.5, -20.0, 0.0]
    ratio.exp().sum().backward()
    torch.testing.assert_close(numerator.grad, torch.tensor([math.exp(0.5), 0.0, 0.0]))


def test_a_fixed_coefficient_stays_and_an_adaptive_one_follows_the_distance_within_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    controller = KlController(AlgorithmConfig(kl="k1", kl_in="reward", scale="none", kl_coef=0.3))
    controller.update(100.0, 1000)
    controller.restore({"coef": 0.9})  # a run that goes on with another coefficient
    assert controller.coef == 0.3
    monkeypatch.setattr(kl, "HORIZON", 1000)
    config = AlgorithmConfig(kl="k1", kl_in="reward", scale="none", kl_coef=0.5, kl_target=0.1)
    controller = KlController(config)
    controller.update(0.11, 100)  # 10 % too far: 0.5 · (1 + 0.1 · 100 / 1000)
    assert controller.coef == pytest.approx(0.505)
    controller.update(5.0, 100)  # far too far counts as 20 %: · (1 + 0.2 · 0.1)
    assert controller.coef == pytest.approx(0.505 * 1.02)
    controller.update(-1.0, 500)  # · (1 − 0.2 · 0.5)
    assert controller.coef == pytest.approx(0.505 * 1.02 * 0.9)
    controller.update(None, 500)
    assert controller.coef == pytest.approx(0.505 * 1.02 * 0.9)
    other = KlController(config)
    other.restore(controller.state())
    assert other.coef == controller.coef
