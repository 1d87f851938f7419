"""Every metric has a line here: name, what it is, its healthy range and what to do outside of it.

One table feeds the console, the files and the documentation (`python run.py config --metrics`).
"""

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from hocket.types import Group, StepStats

PHASES = ("generate", "reward", "turn", "measure", "train", "sync", "eval")
"""What the seconds of a step are spent on, one after the other; the rest is "other"."""


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
        meaning="share of groups whose rewards are all alike; not trained where a reward is compared with its group",
        high=0.95,
        advice="the prompts are too easy or too hard for the policy: change the data or the reward",
    ),
    Metric(
        name="rollout/no_pass_rate",
        meaning="a curriculum other than shuffle, or retire_after: share of the rewards that count for pass rates, but "
        "lie below 0 or above 1",
        high=0,
        advice="prompts are taken for too hard, too easy or solved which are not: set eval.reward to one of "
        "rewards.functions (with weight 0, if it is not to be trained) that gives 0 to 1",
    ),
    Metric(
        name="rollout/overlong_penalty", meaning="algorithm.overlong_share: mean of what was taken from the rewards"
    ),
    Metric(name="rollout/kl", meaning="algorithm.kl_in=reward: mean penalty of a token, before its coefficient"),
    Metric(name="rollout/kl_coef", meaning="algorithm.kl_in=reward: that coefficient"),
    Metric(name="rollout/length_mean", meaning="mean number of sampled tokens"),
    Metric(name="rollout/length_stopped", meaning="the same over rollouts that ended by themselves"),
    Metric(
        name="rollout/truncated",
        meaning="share of rollouts cut off at rollout.max_tokens, env.max_turns or model.max_length",
        high=0.05,
        advice="raise rollout.max_tokens, or reward shorter answers",
    ),
    Metric(name="rollout/tokens", meaning="sampled tokens of the step"),
    Metric(name="rollout/tokens_per_s", meaning="sampled tokens per second of time/batch"),
    Metric(name="rollout/turns_mean", meaning="mean number of turns of the model, where an episode has several"),
    Metric(
        name="rollout/sequences_mean",
        meaning="mean number of sequences that an agent's episode is trained as: one more for every call that does not "
        "go on from what was said before",
    ),
    Metric(
        name="staleness/mean",
        meaning="staleness of a rollout is the newest published version minus the oldest that sampled a token of it",
    ),
    Metric(name="staleness/max", meaning="the largest of them"),
    Metric(name="staleness/share_N", meaning="share of the rollouts with staleness N"),
    Metric(
        name="staleness/over_bound",
        meaning="share of the rollouts that are older than pipeline.max_staleness",
        high=0,
        advice="the servers have generated with weights that they should not have had any more: look at their logs",
    ),
    Metric(
        name="pipeline/wait_for_batch",
        meaning="share of the step in which the trainer waited for rollouts: share/generate + share/reward",
    ),
    Metric(
        name="pipeline/wait_for_policy",
        meaning="share of the time since the last step began in which no rollout was under way, for want of weights",
    ),
    Metric(name="pipeline/queued_groups", meaning="scored groups that were there when the trainer came for its batch"),
    Metric(
        name="rollout/oversampling",
        meaning="algorithm.oversampling: prompts played for the step, per prompt of rollout.prompts_per_step",
    ),
    Metric(
        name="eval/accuracy",
        meaning="held-out prompts: mean of the reward function eval.reward; of a dataset in eval.more it is "
        "eval/NAME/accuracy, as with the following",
    ),
    Metric(
        name="eval/pass@K",
        meaning="eval.samples: chance that one of K samples gets a reward of 1, unbiased (arXiv 2107.03374)",
    ),
    Metric(
        name="eval/reward_errors",
        meaning="held-out prompts: share without a score; they are not in the accuracy",
        high=0.05,
        advice="read the `error` fields in rollouts/eval_*.jsonl",
    ),
    Metric(name="eval/length_mean", meaning="held-out prompts: mean number of sampled tokens"),
    Metric(name="eval/truncated", meaning="held-out prompts: share cut off at rollout.max_tokens"),
    Metric(name="train/loss", meaning="the loss that is minimised, over all micro-batches and ranks"),
    Metric(name="train/grad_norm", meaning="global gradient norm before clipping"),
    Metric(name="train/learning_rate", meaning="AdamW's learning rate in this step"),
    Metric(name="train/tokens", meaning="trained tokens"),
    Metric(name="train/sequences", meaning="trained rollouts"),
    Metric(name="train/micro_batches", meaning="forward passes per rank"),
    Metric(
        name="train/skipped",
        meaning="1 where loss or gradient was not finite and the weights were left as they were",
        high=0,
        advice="the run folder's skipped/ holds what was trained on and what was not finite; in float16 this is normal "
        "now and then, where train/loss_scale falls",
    ),
    Metric(
        name="train/loss_scale",
        meaning="float16: factor on the loss, halved where gradients overflow, in steps that are then skipped",
        low=2,
        advice="gradients overflow at any scale: train in bfloat16",
    ),
    Metric(name="train/tokens_per_s", meaning="trained tokens per second of time/train, over all ranks"),
    Metric(
        name="train/positions_per_s",
        meaning="tokens through forward and backward, prompts included and padding not, per second of time/train",
    ),
    Metric(
        name="train/mfu",
        meaning="model FLOPs of the step / (time/train · peak FLOPs of all ranks' devices); the peak is the data "
        "sheet's for 16 bits on known GPUs, else that of a measured matrix product; recomputation is not counted",
    ),
    Metric(
        name="train/logprob_gap",
        meaning="mean |trainer log-prob − engine log-prob| over trained tokens; below 1e-3 in float32, .02 in bfloat16",
        high=0.1,
        advice="the server does not hold the trainer's weights, or samples from another distribution; or, with "
        "staleness/mean above 0, rollouts are too old for this learning rate",
    ),
    Metric(name="train/mismatch_kl", meaning="k3 estimate of KL(engine ‖ trainer)", high=0.01),
    Metric(
        name="train/clip_low", meaning="share of tokens clipped below: with clip ppo those of a negative advantage only"
    ),
    Metric(
        name="train/clip_high",
        meaning="share of tokens clipped above: with clip ppo those of a positive advantage only",
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
    Metric(name="train/importance_capped", meaning="share of tokens whose importance weight is capped or masked"),
    Metric(
        name="train/ess",
        meaning="effective sample size of the importance weights, (Σw)² / (n·Σw²)",
        low=0.5,
        advice="a few tokens decide the step: rollouts are too old, or engine and trainer disagree",
    ),
    Metric(name="train/kl", meaning="k3 estimate of KL(policy ‖ reference), mean over trained tokens"),
    Metric(name="train/entropy", meaning="mean entropy of the policy's next-token distribution, in nats"),
    Metric(name="critic/loss", meaning="value loss: half the squared error of the values, mean over trained tokens"),
    Metric(
        name="critic/explained_variance",
        meaning="1 − Var(return − value) / Var(return) over trained tokens: 1 is perfect, 0 no better than a constant",
        low=-0.5,
        advice="the critic misleads the policy: raise critic.warmup_steps or critic.learning_rate",
    ),
    Metric(name="critic/value_mean", meaning="mean value of the trained tokens"),
    Metric(name="critic/return_mean", meaning="mean return of the trained tokens, which the values should come to"),
    Metric(name="critic/grad_norm", meaning="global gradient norm of the critic before clipping"),
    Metric(
        name="critic/skipped",
        meaning="1 where the critic's loss or gradient was not finite and it was left as it was",
        high=0,
        advice="lower critic.learning_rate; look at the step's rollouts",
    ),
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
    Metric(name="step/tokens_per_s", meaning="throughput: trained tokens per second of time/step − time/eval"),
    Metric(name="time/generate", meaning="seconds that the loop waited for tokens to be sampled"),
    Metric(
        name="time/batch",
        meaning="seconds from the start of the batch to its last token; with pipeline.max_staleness they pass beside "
        "earlier steps",
    ),
    Metric(name="time/reward", meaning="seconds that it waited further, for scores alone"),
    Metric(name="time/turn", meaning="launch.share_gpu: seconds until the server is off the GPU and the trainer on it"),
    Metric(name="time/measure", meaning="seconds of the passes before the step: reference, critic, entropies"),
    Metric(name="time/train", meaning="seconds of forward, backward and update"),
    Metric(name="time/sync", meaning="seconds to publish a version and have it acknowledged"),
    Metric(name="time/checkpoint", meaning="seconds that training stood still for a checkpoint"),
    Metric(name="time/eval", meaning="seconds of held-out evaluation"),
    Metric(name="time/step", meaning="seconds of the whole step"),
    Metric(
        name="share/generate",
        meaning="time/generate / time/step, as the following; what runs beside it in the background is not in it",
    ),
    Metric(
        name="share/reward",
        meaning="share of the step in which only scores were missing",
        high=0.25,
        advice="the rewards hold up the run: make them faster, or lower rewards.timeout_s",
    ),
    Metric(name="share/turn", meaning="share of the step for server and trainer to change places on one GPU"),
    Metric(name="share/measure", meaning="share of the step for the passes before it: reference, critic, entropies"),
    Metric(name="share/train", meaning="share of the step for forward, backward and update"),
    Metric(name="share/sync", meaning="share of the step to publish weights"),
    Metric(name="share/eval", meaning="share of the step for held-out evaluation"),
    Metric(name="share/other", meaning="the rest: data, advantages, files"),
)


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Returns the reward/* and rollout/* metrics of one step."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {}
    scores = [score for group in groups for score in group.scores if score.error is None]
    stopped = [rollout.num_sampled for rollout in rollouts if rollout.finish_reason == "stop"]
    metrics = {
        "rollout/reward_errors": 1 - len(scores) / len(rollouts),
        "rollout/length_mean": statistics.fmean(rollout.num_sampled for rollout in rollouts),
        "rollout/truncated": sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts),
        "rollout/tokens": float(sum(rollout.num_sampled for rollout in rollouts)),
    }
    turns = [rollout.turns for rollout in rollouts]
    if max(turns) > 1:
        metrics["rollout/turns_mean"] = statistics.fmean(turns)
    if any(len(rollout.sequences) > 1 for rollout in rollouts):
        metrics["rollout/sequences_mean"] = statistics.fmean(len(rollout.sequences) for rollout in rollouts)
    if stopped:
        metrics["rollout/length_stopped"] = statistics.fmean(stopped)
    if scores:
        totals = [score.total for score in scores]
        metrics["reward/mean"] = statistics.fmean(totals)
        metrics["reward/std"] = statistics.pstdev(totals)
        for name in sorted({name for score in scores for name in score.parts}):  # a reward may leave a part out
            metrics[f"reward/{name}"] = statistics.fmean(s.parts[name] for s in scores if name in s.parts)
    return metrics


def staleness_metrics(groups: Sequence[Group], *, version: int, bound: int) -> dict[str, float]:
    """Returns the staleness/* metrics of one step.

    Args:
        version: the newest published weight version.
        bound: pipeline.max_staleness.
    """
    rollouts = [[s for s in rollout.sequences if s.turns] for group in groups for rollout in group.rollouts]
    ages = [version - min(s.version_min for s in sequences) for sequences in rollouts if sequences]
    if not ages:
        return {}
    shares = {f"staleness/share_{age}": count / len(ages) for age, count in sorted(Counter(ages).items())}
    over = sum(age > bound for age in ages) / len(ages)
    mean, oldest = statistics.fmean(ages), float(max(ages))
    return {"staleness/mean": mean, "staleness/max": oldest, "staleness/over_bound": over, **shares}


def train_metrics(stats: StepStats) -> dict[str, float]:
    """Returns the train/* and critic/* metrics and time/train of one optimiser step."""
    return {
        "train/loss": stats.loss,
        "train/grad_norm": stats.grad_norm,
        "train/learning_rate": stats.learning_rate,
        "train/skipped": float(stats.skipped),
        "train/tokens": float(stats.num_tokens),
        "train/sequences": float(stats.num_sequences),
        "train/micro_batches": float(stats.num_micro_batches),
        "train/tokens_per_s": stats.num_tokens / stats.seconds,
        "train/positions_per_s": stats.num_positions / stats.seconds,
        "train/mfu": stats.mfu,
        "time/train": stats.seconds,
        **{f"train/{name}": value for name, value in stats.metrics.items()},
        **{f"critic/{name}": value for name, value in stats.critic.items()},
    }


def step_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the share/* of a step and its tokens per second, from its other metrics.

    The loop does one thing at a time, so that the shares add up to 1 whatever goes on in the background.
    """
    seconds = {phase: metrics[f"time/{phase}"] for phase in PHASES if f"time/{phase}" in metrics}
    whole = metrics["time/step"]
    rates = {
        "step/tokens_per_s": metrics.get("train/tokens", 0.0) / (whole - seconds.get("eval", 0.0)),
        "pipeline/wait_for_batch": (seconds["generate"] + seconds["reward"]) / whole,
    }
    if "time/batch" in metrics:
        rates["rollout/tokens_per_s"] = metrics["rollout/tokens"] / metrics["time/batch"]
    other = whole - sum(seconds.values())
    return rates | {f"share/{phase}": value / whole for phase, value in (seconds | {"other": other}).items()}


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
