import pytest

from hocket.algorithm.samples import KlController
from hocket.config import AdaptiveKl, AlgorithmConfig


def test_a_fixed_coefficient_stays_and_an_adaptive_one_follows_the_distance_within_bounds() -> None:
    controller = KlController(AlgorithmConfig(kl="k1", kl_in="reward", scale="none", kl_coef=0.3))
    controller.update(100.0, 1000)
    controller.restore({"coef": 0.9})  # a run that goes on with another coefficient
    assert controller.coef == 0.3
    kl_in = AdaptiveKl(name="reward", target=0.1, horizon=1000)
    config = AlgorithmConfig(kl="k1", kl_in=kl_in, scale="none", kl_coef=0.5)
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
