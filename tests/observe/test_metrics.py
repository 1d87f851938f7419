import dataclasses
import math
import re

import pytest
import torch

from hocket.algorithm.losses import LossConfig, policy_loss
from hocket.algorithm.samples import Measured, shape, signal_metrics, train_samples
from hocket.config import load
from hocket.observe.metrics import (
    METRICS,
    alarms,
    reference,
    rollout_metrics,
    staleness_metrics,
    step_metrics,
)
from hocket.types import FinishReason, Group, Prompt, Rollout, Score, TokenSequence


def rollout(length: int, finish_reason: FinishReason, version_min: int, turns: int = 1) -> Rollout:
    sequence = TokenSequence(
        token_ids=(1,) + (2,) * length,
        mask=(False,) + (True,) * length,
        logprobs=(0.0,) + (-1.0,) * length,
        finish_reason=finish_reason,
        version_min=version_min,
        version_max=version_min,
        turns=turns,
    )
    return Rollout(id="r", prompt=Prompt(id="p", token_ids=(1,)), sequences=(sequence,))


def group_of(*rollouts: Rollout) -> Group:
    return Group(id="g", rollouts=rollouts, scores=(Score(total=1.0),) * len(rollouts))


def test_rollout_metrics_of_four_rollouts_by_hand() -> None:
    group = Group(
        id="g",
        rollouts=(rollout(2, "stop", 5), rollout(4, "stop", 4), rollout(8, "length", 5), rollout(2, "stop", 5)),
        scores=(
            Score(total=1.0, parts={"math": 1.0, "length": 0.5}),
            Score(total=0.0, parts={"math": 0.0, "length": 0.0}),
            Score(total=0.5, parts={"math": 0.5}),
            Score(total=0.0, error="math: hung"),
        ),
    )
    assert rollout_metrics([group]) | staleness_metrics([group], version=5, bound=0) == pytest.approx(
        {
            "rollout/reward_errors": 0.25,
            "rollout/length_mean": 4.0,
            "rollout/length_stopped": 8 / 3,
            "rollout/truncated": 0.25,
            "rollout/tokens": 16.0,
            "staleness/mean": 0.25,
            "staleness/max": 1.0,
            "staleness/over_bound": 0.25,
            "staleness/share_0": 0.75,
            "staleness/share_1": 0.25,
            "reward/mean": 0.5,  # of the three scored ones
            "reward/std": math.sqrt(0.5 / 3),
            "reward/math": 0.5,
            "reward/length": 0.25,  # of the two that have it
        }
    )


def test_rollouts_within_the_bound_on_staleness_are_no_cause_for_alarm() -> None:
    group = group_of(*(rollout(2, "stop", version) for version in (3, 4, 5)))
    within, beyond = (staleness_metrics([group], version=5, bound=bound) for bound in (2, 1))
    assert within["staleness/over_bound"] == 0
    assert not [name for name in alarms(within) if name.startswith("staleness/")]
    assert beyond["staleness/over_bound"] == pytest.approx(1 / 3)
    assert "staleness/over_bound" in alarms(beyond)


def test_turns_are_counted_where_there_are_several_and_an_episode_without_any_has_no_version() -> None:
    group = group_of(rollout(2, "stop", 5, turns=3), rollout(2, "stop", 5), rollout(0, "stop", 0, turns=0))
    assert rollout_metrics([group])["rollout/turns_mean"] == pytest.approx(4 / 3)
    assert staleness_metrics([group], version=5, bound=0)["staleness/max"] == 0


def test_an_episode_of_several_sequences_is_one_with_all_their_tokens_and_turns() -> None:
    episode = (rollout(5, "stop", 3, turns=2), rollout(1, "length", 4), rollout(2, "stop", 5))
    joined = dataclasses.replace(episode[0], sequences=tuple(one.sequences[0] for one in episode))
    group = group_of(joined, rollout(4, "stop", 5))
    metrics = rollout_metrics([group]) | staleness_metrics([group], version=5, bound=2)
    wanted = {"tokens": 12.0, "length_mean": 6.0, "length_stopped": 6.0, "turns_mean": 2.5, "sequences_mean": 2.0}
    assert {name: metrics[f"rollout/{name}"] for name in wanted} == wanted
    assert (metrics["staleness/max"], metrics["staleness/share_0"]) == (2, 0.5)


def test_a_step_without_any_score_has_no_reward_metrics() -> None:
    group = Group(id="g", rollouts=(rollout(2, "length", 1),), scores=(Score(total=0.0, error="x"),))
    metrics = rollout_metrics([group])
    assert "reward/mean" not in metrics
    assert "rollout/length_stopped" not in metrics
    assert metrics["rollout/reward_errors"] == 1.0


def test_an_alarm_names_value_bound_and_advice_and_healthy_values_raise_none() -> None:
    assert alarms({"train/logprob_gap": 0.05, "rollout/truncated": math.nan, "unknown": 9.0}) == {}
    found = alarms({"train/logprob_gap": 0.2})
    assert list(found) == ["train/logprob_gap"]
    assert found["train/logprob_gap"].startswith("train/logprob_gap = 0.2 (> 0.1)")
    assert "does not hold the trainer's weights" in found["train/logprob_gap"]


def loss_metrics() -> dict[str, float]:
    zeros_bt = torch.zeros(1, 1)
    mask_bt = torch.ones(1, 1, dtype=torch.bool)
    sizes = {"num_tokens": 1, "num_sequences": 1}
    output = policy_loss(zeros_bt, zeros_bt, zeros_bt, mask_bt, config=LossConfig(), ref_logprobs_bt=zeros_bt, **sizes)
    return {f"train/{name}": 1.0 for name in output.metrics.keys() - {"importance_square"} | {"tokens", "entropy"}}


def test_every_metric_that_is_measured_has_a_line_in_the_table() -> None:
    known = {metric.name for metric in METRICS}
    group = group_of(rollout(2, "stop", 1))
    settings = load(None, ["algorithm.preset=reinforce_pp", "algorithm.overlong_share=0.5"])
    after = shape(group, settings.algorithm, settings.rollout.max_tokens)
    shaping = train_samples([after], [Measured(ref_logprobs=(0.0, -1.0, -1.0))], settings.algorithm, 0.01)[1]
    assert len(shaping) == 3
    signal = signal_metrics([after], "exact_match")
    measured = rollout_metrics([group]) | loss_metrics() | staleness_metrics([group], version=1, bound=0)
    measured |= {"time/batch": 1.0, "time/generate": 1.0, "time/reward": 0.5, "time/step": 2.0}
    measured |= step_metrics(measured) | shaping | signal
    assert {re.sub("share_[0-9]+", "share_N", name) for name in measured} <= known
    assert all(f"| `{name}` |" in reference() for name in known)


def test_rates_of_a_step_by_hand() -> None:
    # 8 seconds: 2 of sampling, 1 until the last score, 4 of evaluation, 1 of the rest
    metrics = {"time/step": 8.0, "time/generate": 2.0, "time/reward": 1.0, "time/eval": 4.0, "train/tokens": 100.0}
    metrics |= {"rollout/tokens": 120.0, "time/batch": 3.0}  # the batch began while the step before was trained
    assert step_metrics(metrics) == {
        "step/tokens_per_s": 25.0,
        "rollout/tokens_per_s": 40.0,
        "pipeline/wait_for_batch": 0.375,
        "pipeline/wait_for_rewards": 0.125,
    }


def test_a_step_in_which_nothing_was_trained_has_no_throughput() -> None:
    metrics = {"time/step": 2.0, "time/generate": 1.0, "time/reward": 0.0, "time/batch": 1.0, "rollout/tokens": 5.0}
    assert step_metrics(metrics)["step/tokens_per_s"] == 0
