import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.algorithm.samples import shape, signal_metrics, train_samples
from hocket.config import LossConfig, load
from hocket.observe import metrics as metrics_module
from hocket.observe.metrics import (
    Alarms,
    alarms,
    known_metrics,
    reference,
    rollout_metrics,
    staleness_metrics,
    step_metrics,
)
from hocket.types import FinishReason, Group, Prompt, Rollout, Score
from support.batches import loss_of
from support.examples import plugged, shown
from support.records import sequence


def rollout(length: int, finish_reason: FinishReason, version_min: int, **more: Any) -> Rollout:
    versions = {"version_min": version_min, "version_max": version_min}
    played = sequence(*[2] * length, finish_reason=finish_reason, **versions, **more)
    return Rollout(id="r", prompt=Prompt(id="p", token_ids=(1,)), sequences=(played,))


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
            "rollout/duplicates": 1.0,  # none has a text
            "rollout/length_reward": -1 / math.sqrt(28 / 3),  # (-8, -2, 10) / 3 with (1, -1, 0) / 2
            "staleness/mean": 0.25,
            "staleness/max": 1.0,
            "staleness/over_bound": 0.25,
            "staleness/share_0": 0.75,
            "staleness/share_1": 0.25,
            "rollout/alike": 0.5,  # two of the three are worse than the best
            "reward/mean": 0.5,  # of the three scored ones
            "reward/std": math.sqrt(0.5 / 3),
            "reward/math": 0.5,
            "reward/length": 0.25,  # of the two that have it
        }
    )


def test_length_and_reward_are_compared_within_their_groups_and_equal_texts_counted() -> None:
    def of_texts(name: str, *pairs: tuple[str, float]) -> Group:
        played = [rollout(len(text), "stop", 1, text=text) for text, _ in pairs]
        return Group(id=name, rollouts=tuple(played), scores=tuple(Score(total=total) for _, total in pairs))

    longer = of_texts("a", ("a", 0.1), ("bb", 0.2), ("bb", 0.2))  # is better within each group
    found = rollout_metrics([longer, of_texts("b", ("cccc", 0.0), ("ddddd", 0.1), ("dddddd", 0.2))])
    assert found["rollout/duplicates"] == pytest.approx(2 / 6)
    assert found["rollout/length_reward"] == pytest.approx(1.0)
    assert any("rollout/length_reward" in line for line in alarms(found))
    assert "rollout/length_reward" not in rollout_metrics([group_of(rollout(2, "stop", 1))])  # it is constant


def test_an_episode_of_several_sequences_is_one_with_all_their_tokens_and_turns() -> None:
    episode = (rollout(5, "stop", 3, turns=2), rollout(1, "length", 4), rollout(2, "stop", 5))
    joined = dataclasses.replace(episode[0], sequences=tuple(one.sequences[0] for one in episode))
    group = group_of(joined, rollout(4, "stop", 5), rollout(0, "stop", 0, turns=0))  # the last one has no version
    metrics = rollout_metrics([group]) | staleness_metrics([group], version=5, bound=2)
    wanted = {"tokens": 12.0, "length_mean": 4.0, "length_stopped": 4.0, "turns_mean": 5 / 3, "sequences_mean": 5 / 3}
    assert {name: metrics[f"rollout/{name}"] for name in wanted} == pytest.approx(wanted)
    assert (metrics["staleness/max"], metrics["staleness/share_0"]) == (2, 0.5)


def test_failing_calls_of_tools_are_a_metric_with_an_alarm() -> None:
    def of(*results: str) -> Rollout:
        return rollout(1, "stop", 1, dialogue=tuple({"role": "tool", "content": result} for result in results))

    first, second = of("error: there is no tool 'x'"), of("7")  # of an episode whose history was shortened
    whole = dataclasses.replace(second, sequences=(*first.sequences, *second.sequences))
    found = rollout_metrics([group_of(whole, of("8"), rollout(1, "stop", 1))])
    assert found["rollout/tool_errors"] == pytest.approx(1 / 3)
    assert "unknown tools, wrong arguments" in alarms(found)["rollout/tool_errors"]
    assert "rollout/tool_errors" not in rollout_metrics([group_of(rollout(1, "stop", 1))])


def test_a_step_without_any_score_has_no_reward_metrics() -> None:
    group = Group(id="g", rollouts=(rollout(2, "length", 1),), scores=(Score(total=0.0, error="x"),))
    metrics = rollout_metrics([group])
    assert {name.removeprefix("rollout/") for name in metrics} == {
        *("reward_errors", "length_mean", "duplicates", "alike", "truncated", "tokens")
    }
    assert metrics["rollout/reward_errors"] == 1.0
    assert rollout_metrics([]) == staleness_metrics([], version=1, bound=0) == {}


def test_an_alarm_names_value_bound_and_advice_and_healthy_values_raise_none() -> None:
    assert alarms({"train/logprob_gap": 0.05, "rollout/truncated": 0.05, "reward/std": math.nan, "unknown": 9.0}) == {}
    ((name, alarm),) = alarms({"train/logprob_gap": 0.2}).items()
    assert alarm.startswith(f"{name} = 0.2 (> 0.1): mean |trainer")
    assert "the server has other weights" in alarm
    ((name, alarm),) = alarms({"train/logprob_gap": math.nan, "train/entropy": math.nan}).items()  # outside any range
    assert alarm.startswith(f"{name} = nan (> 0.1): mean |trainer")
    assert alarms({"train/loss_scale": math.nan})["train/loss_scale"].startswith("train/loss_scale = nan (< 2)")


@pytest.mark.parametrize(
    ("measured", "rings"),
    [
        ({"staleness/max": 0.0, "train/logprob_gap": 2e-5, "train/mismatch_kl": 2e-5}, True),
        ({"staleness/max": 0.0, "train/logprob_gap": 9e-6, "train/mismatch_kl": 9e-6}, False),
        ({"staleness/max": 1.0, "train/logprob_gap": 0.2, "train/mismatch_kl": 0.2}, False),
        ({"staleness/max": 1.0, "train/ess": 0.4}, True),
        ({"train/logprob_gap": 0.09, "train/mismatch_kl": 0.009}, False),
    ],
)
def test_where_no_rollout_is_stale_the_gap_may_be_no_more_than_rounding_else_samples_must_be_of_use(
    measured: dict[str, float], rings: bool
) -> None:
    suspicious = measured.keys() - {"staleness/max"}
    assert (alarms({"sync/max_gap": 1e-5} | measured).keys() == suspicious) is rings


RECORDED = Path(__file__).parent / "recorded"


@pytest.mark.parametrize(
    ("run", "first"),
    [
        # what helps a run that goes well: half of its groups are right throughout, or not one answer is right at first
        ("quickstart", {"rollout/without_signal": 48}),
        ("own_everything", {"rollout/without_signal": 1}),
        # ten times the learning rate: cut off in step 3, always the same wrong answers from step 6 on
        ("learning_rate_too_high", {"rollout/truncated": 3, "rollout/alike": 6, "rollout/without_signal": 7}),
        # sums by SmolLM2-135M at 5e-5: an entropy of 1.64 is .17 in step 6, and what was right one time in two is lost
        ("smollm2_rate_too_high", {"rollout/without_signal": 1, "rollout/truncated": 1, "train/entropy": 6}),
    ],
)
def test_recorded_runs_ring_in_the_steps_in_which_something_can_still_be_done(run: str, first: dict[str, int]) -> None:
    rings = Alarms()
    begins: dict[str, int] = {}
    for line in (RECORDED / f"{run}.jsonl").read_text(encoding="utf-8").splitlines():
        metrics = json.loads(line)
        for name in rings.step(metrics):
            begins.setdefault(name, metrics["step"])
    assert begins == first


def test_an_entropy_that_falls_to_less_than_a_quarter_within_eight_steps_rings_however_it_began() -> None:
    def steps(*entropies: float) -> list[bool]:
        rings = Alarms()
        return ["train/entropy" in rings.step({"train/entropy": entropy}) for entropy in entropies]

    collapses = [1.38, 1.2, 0.9, 0.6, 0.36, 0.34, 0.2, 0.11]  # a small model at a rate that is too high
    assert steps(*collapses) == [False] * 5 + [True] * 3
    assert not any(steps(*(1.38 * 0.85**step for step in range(60))))  # as much in ten times as many steps: it learns
    assert not any(steps(0.19, 0.03, 0.001))  # the noise of few tokens
    assert steps(1.0, math.nan, 0.2) == [False, False, True]
    rings = Alarms()
    rings.step({"train/entropy": 1.2})
    text = rings.step({"train/entropy": 0.2})["train/entropy"]
    assert text.startswith(
        "train/entropy = 0.2 (< 0.25 of 1.2, at most 8 steps before): mean entropy of the next token"
    )


def test_alike_are_duplicates_with_less_than_the_best_reward_of_the_step() -> None:
    def of_texts(name: str, *pairs: tuple[str, float]) -> Group:
        played = [rollout(1, "stop", 1, text=text) for text, _ in pairs]
        return Group(id=name, rollouts=tuple(played), scores=tuple(Score(total=total) for _, total in pairs))

    learned = of_texts("a", ("right", 1.0), ("right", 1.0), ("right", 1.0), ("wrong", 0.0))
    stuck = of_texts("b", ("wrong", 0.5), ("wrong", 0.5), ("other", 0.5), ("right", 1.0))
    assert rollout_metrics([learned, stuck])["rollout/alike"] == 2 / 8
    assert rollout_metrics([of_texts("c", ("same", 0.0), ("same", 0.0))])["rollout/alike"] == 0.0  # none is better


def loss_metrics() -> dict[str, float]:
    zeros_bt = torch.zeros(1, 1)
    mask_bt = torch.ones(1, 1, dtype=torch.bool)
    output = loss_of(zeros_bt, zeros_bt, zeros_bt, mask_bt, config=LossConfig(), num_tokens=1, ref_logprobs=zeros_bt)
    return {f"train/{name}": 1.0 for name in output.metrics.keys() - {"importance_square"} | {"tokens", "entropy"}}


def test_every_metric_that_is_measured_has_a_line_in_the_table() -> None:
    known = {metric.name for metric in known_metrics()}
    group = group_of(rollout(2, "stop", 1))
    settings = load(None, ["algorithm.preset=reinforce_pp", "algorithm.overlong_share=0.5"])
    after = shape(group, settings.algorithm, settings.rollout.max_tokens, pass_reward="exact_match")
    shaping = train_samples([after], [{"ref_logprobs": (0.0, -1.0, -1.0)}], settings.algorithm, 0.01)[1]
    assert len(shaping) == 3
    signal = signal_metrics([after], uses_pass_rates=True)
    measured = rollout_metrics([group]) | loss_metrics() | staleness_metrics([group], version=1, bound=0)
    measured |= {"time/batch": 1.0, "time/generate": 1.0, "time/reward": 0.5, "time/step": 2.0}
    measured |= step_metrics(measured) | shaping | signal
    assert {re.sub("share_[0-9]+", "share_N", name) for name in measured} <= known
    assert all(f"| `{name}` |" in reference() for name in known)


def test_rates_of_a_step_by_hand() -> None:
    # 8 seconds: 2 of sampling, 1 until the last score, 4 of evaluation, 1 of the rest
    metrics = {"time/step": 8.0, "time/generate": 2.0, "time/reward": 1.0, "time/eval": 4.0}
    metrics |= {"rollout/tokens": 120.0, "time/batch": 3.0}  # the batch began while the step before was trained
    assert step_metrics(metrics) == {
        "step/tokens_per_s": 30.0,
        "rollout/tokens_per_s": 40.0,
        "pipeline/wait_for_batch": 0.375,
        "pipeline/wait_for_rewards": 0.125,
    }


def test_a_plugin_s_metric_is_healthy_as_its_table_says(tmp_path: Path) -> None:
    """The one that the documentation of `metric_table` shows."""
    head = "from hocket.observe.metrics import Metric, metric_table\n"
    code = head + shown(metrics_module, 'metric_table("moves")')
    with plugged(tmp_path, code, (metrics_module.METRIC_TABLES, "moves")):
        assert alarms({"env/moves": 40.0}) == {}
        said = "env/moves = 41 (> 40): moves of a game; the policy moves in circles"
        assert alarms({"env/moves": 41.0}) == {"env/moves": said}
        assert "| `env/moves` | moves of a game | ≤ 40 |" in reference()
    assert alarms({"env/moves": 41.0}) == {}
