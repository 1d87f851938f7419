"""Every metric has a line here: name, what it is, its healthy range and what to do outside of it.

One table feeds the console, the files and the documentation (`python run.py config --metrics`).
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from hocket.types import Group, StepStats


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric: `low` and `high` bound its healthy range, `advice` says what to do outside of it."""

    name: str
    meaning: str
    low: float | None = None
    high: float | None = None
    advice: str = ""


METRICS = (
    Metric(name="reward/mean", meaning="mean total reward of the scored rollouts"),
    Metric(name="reward/std", meaning="deviation of the total reward over the scored rollouts (population)"),
    Metric(name="reward/NAME", meaning="mean of one reward function, before its weight"),
    Metric(
        name="rollout/reward_errors",
        meaning="share of rollouts without a score (the reward raised, hung or gave no number); not trained",
        high=0.05,
        advice="read the `error` fields in rollouts/*.jsonl",
    ),
    Metric(
        name="rollout/zero_variance",
        meaning="share of groups whose rewards are all alike; they carry no signal and are not trained",
        high=0.95,
        advice="the prompts are too easy or too hard for the policy: change the data or the reward",
    ),
    Metric(name="rollout/length_mean", meaning="mean number of sampled tokens"),
    Metric(name="rollout/length_stopped", meaning="the same over rollouts that ended by themselves"),
    Metric(
        name="rollout/truncated",
        meaning="share of rollouts cut off at rollout.max_tokens, env.max_turns or model.max_length",
        high=0.05,
        advice="raise rollout.max_tokens, or reward shorter answers",
    ),
    Metric(name="rollout/tokens", meaning="sampled tokens of the step"),
    Metric(name="rollout/turns_mean", meaning="mean number of turns of the model, where an episode has several"),
    Metric(
        name="rollout/version_lag", meaning="newest published version minus the oldest that sampled a token", high=0
    ),
    Metric(name="eval/accuracy", meaning="held-out prompts: mean of the reward function eval.reward"),
    Metric(
        name="eval/reward_errors",
        meaning="held-out prompts: share without a score; they are not in the accuracy",
        high=0.05,
        advice="read the `error` fields in rollouts/eval_*.jsonl",
    ),
    Metric(name="eval/length_mean", meaning="held-out prompts: mean number of sampled tokens"),
    Metric(name="eval/truncated", meaning="held-out prompts: share cut off at rollout.max_tokens"),
    Metric(name="train/loss", meaning="clipped policy loss, mean over trained tokens of all ranks"),
    Metric(name="train/grad_norm", meaning="global gradient norm before clipping"),
    Metric(name="train/learning_rate", meaning="AdamW's learning rate in this step"),
    Metric(name="train/tokens", meaning="trained tokens"),
    Metric(name="train/sequences", meaning="trained rollouts"),
    Metric(name="train/micro_batches", meaning="forward passes per rank"),
    Metric(
        name="train/skipped",
        meaning="1 where loss or gradient was not finite and the weights were left as they were",
        high=0,
        advice="lower trainer.learning_rate; look at the step's rollouts",
    ),
    Metric(
        name="train/logprob_gap",
        meaning="mean |trainer log-prob − engine log-prob| over trained tokens; below 1e-3 in float32, .02 in bfloat16",
        high=0.1,
        advice="the server does not hold the trainer's weights, or samples from another distribution",
    ),
    Metric(name="train/mismatch_kl", meaning="k3 estimate of KL(engine ‖ trainer)", high=0.01),
    Metric(
        name="train/clip_low", meaning="share of tokens whose ratio is below 1 − clip_low with a negative advantage"
    ),
    Metric(
        name="train/clip_high", meaning="share of tokens whose ratio is above 1 + clip_high with a positive advantage"
    ),
    Metric(
        name="train/ratio_mean",
        meaning="mean probability ratio that is clipped; 1 with one optimiser step per batch and a correction",
    ),
    Metric(
        name="train/importance_mean",
        meaning="mean importance weight between engine and trainer, exp(trainer − engine log-prob), before its cap",
        low=0.5,
        high=2.0,
        advice="see train/logprob_gap",
    ),
    Metric(name="train/importance_capped", meaning="share of tokens whose importance weight is capped"),
    Metric(
        name="train/ess",
        meaning="effective sample size of the importance weights, (Σw)² / (n·Σw²)",
        low=0.5,
        advice="a few tokens decide the step: rollouts are too old, or engine and trainer disagree",
    ),
    Metric(name="train/entropy", meaning="mean entropy of the policy's next-token distribution, in nats"),
    Metric(name="sync/servers", meaning="servers that hold the newest version"),
    Metric(name="sync/mebibytes", meaning="what each server was sent, in MiB"),
    Metric(
        name="sync/prepare_s", meaning="seconds until the first byte could be sent; disk: to write and verify the files"
    ),
    Metric(
        name="sync/transfer_s", meaning="seconds until the last server had loaded the version, a fall-back included"
    ),
    Metric(
        name="sync/fallbacks",
        meaning="servers that could not be reached by sync.backend=nccl and got the version by disk",
        high=0,
        advice="the console names the cause; sync.backend=disk avoids the attempt",
    ),
    Metric(
        name="sync/canary_gap",
        meaning="mean |trainer log-prob − engine log-prob| of a few completions, the largest of all servers",
        high=0.05,
        advice="the run stops at sync.max_logprob_gap; see train/logprob_gap",
    ),
    Metric(
        name="sync/changed",
        meaning="sync.delta: share of the weights whose bits changed since the version before; none in full ones",
    ),
    Metric(name="time/generate", meaning="seconds until the last group was generated and scored"),
    Metric(name="time/turn", meaning="launch.share_gpu: seconds until the server is off the GPU and the trainer on it"),
    Metric(name="time/train", meaning="seconds of forward, backward and update"),
    Metric(name="time/sync", meaning="seconds to publish a version and have it acknowledged"),
    Metric(name="time/eval", meaning="seconds of held-out evaluation"),
    Metric(name="time/step", meaning="seconds of the whole step"),
)


def rollout_metrics(groups: Sequence[Group], *, version: int) -> dict[str, float]:
    """Returns the reward/* and rollout/* metrics of one step.

    Args:
        version: the newest published weight version.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scores = [score for group in groups for score in group.scores if score.error is None]
    stopped = [rollout.num_sampled for rollout in rollouts if rollout.finish_reason == "stop"]
    metrics = {
        "rollout/reward_errors": 1 - len(scores) / len(rollouts),
        "rollout/length_mean": statistics.fmean(rollout.num_sampled for rollout in rollouts),
        "rollout/truncated": sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts),
        "rollout/tokens": float(sum(rollout.num_sampled for rollout in rollouts)),
        "rollout/version_lag": float(
            version - min((rollout.version_min for rollout in rollouts if rollout.turns), default=version)
        ),
    }
    if any(rollout.turns > 1 for rollout in rollouts):
        metrics["rollout/turns_mean"] = statistics.fmean(rollout.turns for rollout in rollouts)
    if stopped:
        metrics["rollout/length_stopped"] = statistics.fmean(stopped)
    if scores:
        totals = [score.total for score in scores]
        metrics["reward/mean"] = statistics.fmean(totals)
        metrics["reward/std"] = statistics.pstdev(totals)
        for name in sorted({name for score in scores for name in score.parts}):  # a reward may leave a part out
            metrics[f"reward/{name}"] = statistics.fmean(s.parts[name] for s in scores if name in s.parts)
    return metrics


def train_metrics(stats: StepStats) -> dict[str, float]:
    """Returns the train/* metrics and time/train of one optimiser step."""
    return {
        "train/loss": stats.loss,
        "train/grad_norm": stats.grad_norm,
        "train/learning_rate": stats.learning_rate,
        "train/skipped": float(stats.skipped),
        "train/tokens": float(stats.num_tokens),
        "train/sequences": float(stats.num_sequences),
        "train/micro_batches": float(stats.num_micro_batches),
        "time/train": stats.seconds,
    } | {f"train/{name}": value for name, value in stats.metrics.items()}


def alarms(metrics: Mapping[str, float]) -> dict[str, str]:
    """Returns metric name → sentence for each metric outside its healthy range."""
    found = {}
    for metric in METRICS:
        value = metrics.get(metric.name, math.nan)
        if metric.high is not None and value > metric.high:
            bound = f"> {metric.high:g}"
        elif metric.low is not None and value < metric.low:
            bound = f"< {metric.low:g}"
        else:
            continue  # nan compares false: a metric that is missing raises no alarm
        advice = f"; {metric.advice}" if metric.advice else ""
        found[metric.name] = f"{metric.name} = {value:.4g} ({bound}): {metric.meaning}{advice}"
    return found


def reference() -> str:
    """Returns the table of metrics as Markdown."""
    rows = ["| metric | what it is | healthy | otherwise |", "|---|---|---|---|"]
    for metric in METRICS:
        healthy = " ".join(
            part
            for part in (
                f"≥ {metric.low:g}" if metric.low is not None else "",
                f"≤ {metric.high:g}" if metric.high is not None else "",
            )
            if part
        )
        rows.append(f"| `{metric.name}` | {metric.meaning.replace('|', chr(92) + '|')} | {healthy} | {metric.advice} |")
    return "\n".join(rows)
