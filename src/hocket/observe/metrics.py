"""Define every metric once: name, meaning, healthy range, advice; and compute those of a step.

The table feeds the console, the report and the documentation (`python run.py config --metrics`).
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import NamedTuple

from hocket.common import markdown
from hocket.types import Group

PHASES = ("generate", "reward", "turn", "check", "measure", "train", "sync", "eval")
"""Of time/step, in order; the rest is `other`."""


class Metric(NamedTuple):
    """One metric: `low` and `high` bound its healthy range, `advice` says what to do outside it."""

    name: str
    meaning: str
    low: float | None = None
    high: float | None = None
    advice: str = ""


# fmt: off
METRICS = (
    Metric("reward/mean", "mean total reward of the scored rollouts"),
    Metric("reward/std", "standard deviation of the total reward over the scored rollouts (population)"),
    Metric("reward/NAME", "mean of one reward function, before its weight"),
    Metric("rollout/reward_errors", "share of rollouts without a score, as the reward failed or timed out; not trained",
           high=0.05, advice="read the `error` fields in rollouts/*.jsonl"),
    Metric("rollout/zero_variance", "share of groups with equal rewards; not trained if the baseline is the group's",
           high=0.95, advice="the prompts are too easy or too hard for the policy: change the data or the reward"),
    Metric("rollout/no_pass_rate", "curriculum by pass rates, or retire_after: share of them below 0 or above 1",
           high=0, advice="prompts are misjudged: set eval.reward to a reward that returns 0 to 1 (weight 0 will do)"),
    Metric("rollout/overlong_penalty", "algorithm.overlong_share: mean length penalty subtracted from the rewards"),
    Metric("rollout/kl", "algorithm.kl_in=reward: mean KL penalty per token, before its coefficient"),
    Metric("rollout/kl_coef", "algorithm.kl_in=reward: coefficient of the KL penalty"),
    Metric("rollout/length_mean", "mean number of sampled tokens per rollout"),
    Metric("rollout/length_stopped", "the same over rollouts that ended by themselves"),
    Metric("rollout/length_reward", "correlation of length and reward over the rollouts, both less their group's mean",
           high=0.9, advice="length may be what is learned: read rollouts/*.jsonl; gate or clip what grows with it"),
    Metric("rollout/duplicates", "share of the rollouts whose text another one of their group has, too"),
    Metric("rollout/truncated", "share of rollouts cut off at rollout.max_tokens, env.max_turns or model.max_length",
           high=0.05, advice="raise rollout.max_tokens, or reward shorter answers"),
    Metric("rollout/tokens", "sampled tokens of the step"),
    Metric("rollout/tokens_per_s", "sampled tokens per second of time/batch"),
    Metric("rollout/turns_mean", "mean number of model turns per episode, if any episode has several"),
    Metric("rollout/sequences_mean", "mean number of sequences per agent episode; each rewritten history adds one"),
    Metric("staleness/mean", "mean of newest published version − oldest version that sampled a token of the rollout"),
    Metric("staleness/max", "the largest such difference (staleness) of a rollout"),
    Metric("staleness/share_N", "share of the rollouts with staleness N"),
    Metric("staleness/over_bound", "share of the rollouts with a staleness above pipeline.max_staleness",
           high=0, advice="the servers generated with weights that should have been replaced: read their logs"),
    Metric("pipeline/wait_for_batch", "share of the step spent waiting for rollouts and their scores"),
    Metric("pipeline/wait_for_rewards", "share of the step spent waiting for scores alone, after the last token",
           high=0.25, advice="rewards slow the run down: make them faster, or lower rewards.timeout_s"),
    Metric("pipeline/wait_for_policy", "share of the time since the last step began that rollouts waited for weights"),
    Metric("pipeline/queued_groups", "scored groups that were ready when the trainer asked for its batch"),
    Metric("rollout/oversampling", "algorithm.oversampling: prompts played for the step / rollout.prompts_per_step"),
    Metric("eval/greedy", "held-out prompts, each answered once at temperature 0: mean of the reward eval.reward"),
    Metric("eval/sampled", "held-out prompts, eval.samples answers at eval.temperature: mean of that reward"),
    Metric("eval/greedy_stderr", "standard error of eval/greedy, over prompts"),
    Metric("eval/sampled_stderr", "standard error of eval/sampled, over prompts"),
    Metric("eval/zero_or_one", "held-out prompts: share of rewards that are 0 or 1; at 1 those means are accuracies"),
    Metric("eval/since_best", "checkpoint.best: evaluations since the best one"),
    Metric("eval/logprob_gap", "held-out prompts: mean |trainer − engine log-prob| of the rollouts that were checked"),
    Metric("eval/z", "held-out prompts: surprise of the sampled answers in standard errors, as sampling/z",
           low=-5, high=5, advice="eval/sampled misleads: tokens aren't drawn from what servers report"),
    Metric("eval/loss", "sft: mean cross-entropy of the taught tokens of the held-out demonstrations, in nats"),
    Metric("eval/pass@K", "unbiased chance that one of K samples has a reward >= eval.threshold (arXiv 2107.03374)"),
    Metric("eval/reward_errors", "held-out prompts: share without a score; the means leave them out",
           high=0.05, advice="read the `error` fields in rollouts/eval_*.jsonl"),
    Metric("eval/length_mean", "held-out prompts: mean number of sampled tokens"),
    Metric("eval/truncated", "held-out prompts: share cut off at rollout.max_tokens"),
    Metric("train/loss", "minimised loss over all micro-batches and ranks"),
    Metric("train/grad_norm", "global gradient norm before clipping"),
    Metric("train/learning_rate", "AdamW's learning rate in this step"),
    Metric("train/tokens", "trained tokens, of each epoch"),
    Metric("train/sequences", "trained sequences"),
    Metric("train/micro_batches", "forward passes per rank"),
    Metric("train/updates", "optimiser steps of the policy, skipped ones too; algorithm.stop_kl may end them early"),
    Metric("train/skipped", "share of the updates whose loss or gradient was not finite, so that the weights stayed",
           high=0, advice="skipped/ holds the batch and names what was not finite; normal now and then in float16"),
    Metric("train/loss_scale", "float16: factor on the loss, halved when gradients overflow; those steps are skipped",
           low=2, advice="gradients overflow at any scale: train in bfloat16"),
    Metric("train/tokens_per_s", "trained tokens per second of time/train, over all ranks"),
    Metric("train/positions_per_s", "tokens with their prompts, without padding, per second of time/train"),
    Metric("train/mfu", "model FLOPs / (time/train · peak FLOPs of all ranks' devices: data sheet, else measured)"),
    Metric("train/logprob_gap", "mean |trainer − engine log-prob| of trained tokens; float32 < 1e-4, bfloat16 < .02",
           high=0.1, advice="the server does not hold the trainer's weights, samples otherwise, or with too old ones"),
    Metric("train/mismatch_kl", "k3 estimate of KL(engine ‖ trainer)", high=0.01, advice="see train/logprob_gap"),
    Metric("train/clip_low", "share of tokens clipped below; with clip ppo only those with a negative advantage"),
    Metric("train/clip_high", "share of tokens clipped above; with clip ppo only those with a positive advantage"),
    Metric("train/ratio_mean", "mean probability ratio, policy over policy before the step; 1 in the first update"),
    Metric("train/policy_kl", "k3 estimate of KL(policy before the step ‖ policy), mean over the updates"),
    Metric("train/importance_mean", "mean importance weight, exp(trainer − engine log-prob), before its cap",
           low=0.5, high=2.0, advice="see train/logprob_gap"),
    Metric("train/importance_capped", "share of tokens whose importance weight is capped or masked"),
    Metric("train/ess", "effective sample size of the importance weights, (Σw)² / (n·Σw²)",
           low=0.5, advice="a few tokens dominate the step: rollouts are too old, or engine and trainer disagree"),
    Metric("train/kl", "k3 estimate of KL(policy ‖ reference), mean over trained tokens"),
    Metric("train/entropy", "mean entropy of the policy's next-token distribution, in nats"),
    Metric("critic/loss", "value loss: half the squared error of the values, mean over trained tokens"),
    Metric("critic/explained_variance", "1 − Var(return − value) / Var(return) of trained tokens; 0: as a constant",
           low=-0.5, advice="the critic misleads the policy: raise critic.warmup_steps or critic.learning_rate"),
    Metric("critic/value_mean", "mean value of the trained tokens"),
    Metric("critic/return_mean", "mean return of the trained tokens, the target of the values"),
    Metric("critic/grad_norm", "global gradient norm of the critic before clipping"),
    Metric("critic/skipped", "share of the updates in which the critic's loss or gradient was not finite",
           high=0, advice="lower critic.learning_rate; look at the step's rollouts"),
    Metric("sampling/logprob_gap", "mean |trainer − engine log-prob| of the rollouts checked before training"),
    Metric("sampling/surprise", "of their tokens: Σ −log p − entropy; 0 on average where tokens are drawn from p"),
    Metric("sampling/variance", "of their tokens: Σ variance of log p, the variance of that sum"),
    Metric("sampling/z", "surprise in standard errors, over that last part of the run where it is farthest from 0",
           low=-5, high=5, advice="tokens aren't drawn from what servers report: top_p, top_k, temperature, seeds"),
    Metric("sampling/colder", "−surprise / variance in that part: share by which the temperature is too low"),
    Metric("sampling/equal", "pairs of a prompt's rollouts with equal tokens"),
    Metric("sampling/equal_expected", "their number if rollouts are drawn independently"),
    Metric("sampling/equal_z", "the excess in standard errors, over that last part of the run where it is largest",
           high=5, advice="the servers repeat random numbers: do all rollouts have the same seed?"),
    Metric("sync/version", "weight version that the step published: weights/vVERSION"),
    Metric("sync/servers", "servers that hold the newest version"),
    Metric("sync/mebibytes", "MiB sent to each server, on average"),
    Metric("sync/prepare_s", "seconds until the first byte could be sent; disk: to write and verify the files"),
    Metric("sync/transfer_s", "seconds until the last server had loaded the version, including a fall-back"),
    Metric("sync/fallbacks", "servers that sync.backend=nccl could not reach and that got the version by disk",
           high=0, advice="the console names the cause; sync.backend=disk avoids the attempt"),
    Metric("sync/logprob_gap", "mean |trainer − engine log-prob| of a few completions; the largest of all servers"),
    Metric("sync/max_gap", "the most that rounding explains of any gap; above it the run stops (sync.on_mismatch)"),
    Metric("sync/missing_share", "share of the last update that the server's log-probs lack; 1: it is one behind"),
    Metric("sync/mismatches", "comparisons of parameters or log-probs that broke off or, with on_mismatch=warn, failed",
           high=0, advice="the console names server and cause; the samples are not the policy's"),
    Metric("sync/missing_error", "standard error of that share; it is not told above 0.2: rounding hides the update"),
    Metric("sync/proof_s", "seconds to compare parameters and log-probs, in versions that are checked"),
    Metric("sync/changed", "sync.backend=delta: share of the weights whose bits changed; missing for a full version"),
    Metric("step/tokens_per_s", "throughput: sampled tokens per second of time/step − time/eval"),
    Metric("time/generate", "seconds that the step waited for sampled tokens"),
    Metric("time/batch", "seconds from batch start to last token; overlaps earlier steps if max_staleness > 0"),
    Metric("time/reward", "seconds that the step then waited for scores alone"),
    Metric("time/turn", "launch.share_gpu: seconds until the server has left the GPU and the trainer is on it"),
    Metric("time/check", "seconds to check rollouts before they are trained on"),
    Metric("time/measure", "seconds of the forward passes before the updates: old log-probs, reference, critic"),
    Metric("time/train", "seconds of forward, backward and update"),
    Metric("time/sync", "seconds to publish a version and have it acknowledged"),
    Metric("time/checkpoint", "seconds that training paused for a checkpoint"),
    Metric("time/eval", "seconds of held-out evaluation"),
    Metric("time/step", "seconds of the whole step"),
)
# fmt: on
SUMS = frozenset({"updates", "tokens", "sequences", "micro_batches", "positions", "seconds_at_peak"})
"""Metrics of an update that a step has the sum of, not the mean."""
OF_ENGINE = frozenset({"logprob_gap", "mismatch_kl", "importance_mean", "importance_square", "importance_capped"})
"""Metrics that compare the engine with the policy before the step."""
ON_POLICY = {"train/logprob_gap", "train/mismatch_kl"}  # at most sync/max_gap where no rollout is stale
SUSPICIOUS = {*ON_POLICY, "train/importance_mean", "staleness/over_bound"}  # alarms after which weights are checked


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    values = defaultdict[str, list[float]](list)  # of which the metrics are means
    lengths = list[float]()  # of the scored rollouts, less their group's mean, as their rewards are
    rewards = list[float]()
    for group in groups:
        texts = Counter(rollout.text for rollout in group.rollouts)
        for rollout in group.rollouts:
            values["rollout/length_mean"].append(rollout.num_sampled)
            if rollout.finish_reason == "stop":
                values["rollout/length_stopped"].append(rollout.num_sampled)
            values["rollout/truncated"].append(rollout.finish_reason == "length")
            values["rollout/duplicates"].append(texts[rollout.text] > 1)
            values["rollout/turns_mean"].append(sum(sequence.turns for sequence in rollout.sequences))
            values["rollout/sequences_mean"].append(len(rollout.sequences))
        scored = group.scored
        for _, score in scored:
            values["reward/mean"].append(score.total)
            for name, part in score.parts.items():  # which another reward may leave out
                values[f"reward/{name}"].append(part)
        lengths += _centred([rollout.num_sampled for rollout, _ in scored])
        rewards += _centred([score.total for _, score in scored])
    if not values:
        return {}
    metrics = {name: statistics.fmean(of) for name, of in values.items()}
    for name in ("rollout/turns_mean", "rollout/sequences_mean"):
        if max(values[name]) <= 1:
            del metrics[name]
    metrics["rollout/tokens"] = float(sum(values["rollout/length_mean"]))
    metrics["rollout/reward_errors"] = 1 - len(rewards) / len(values["rollout/length_mean"])
    if rewards:
        metrics["reward/std"] = statistics.pstdev(values["reward/mean"])
    if all(max(map(abs, some), default=0.0) > 1e-6 for some in (lengths, rewards)):  # neither is constant
        metrics["rollout/length_reward"] = statistics.correlation(lengths, rewards)
    return metrics


def _centred(values: Sequence[float]) -> list[float]:
    mean = statistics.fmean(values or (0.0,))
    return [value - mean for value in values]


def staleness_metrics(groups: Sequence[Group], *, version: int, bound: int) -> dict[str, float]:
    """Return the staleness/* metrics of one step; `version` is the newest published one, `bound` max_staleness."""
    played = [[s for s in rollout.sequences if s.turns] for group in groups for rollout in group.rollouts]
    ages = [version - min(s.version_min for s in sequences) for sequences in played if sequences]
    if not ages:
        return {}
    return {
        "staleness/mean": statistics.fmean(ages),
        "staleness/max": float(max(ages)),
        "staleness/over_bound": sum(age > bound for age in ages) / len(ages),
        **{f"staleness/share_{age}": count / len(ages) for age, count in sorted(Counter(ages).items())},
    }


def effective_sample_size(mean: float, mean_square: float) -> float:
    """Return (Σw)² / (n·Σw²) of the importance weights w before the correction, by their means; 1: all are equal."""
    return mean**2 / mean_square


def over_updates(updates: Sequence[Mapping[str, float]], seconds: float, by_batch: bool) -> dict[str, float]:
    """Return the metrics of a step of the run from those of its updates, which took `seconds`.

    `by_batch`: every update compares the engine with the policy before the step, not only the first one.
    """
    tokens = [update["train/tokens"] for update in updates]
    metrics = {}
    for name in updates[0]:
        values = [update[name] for update in updates]
        kind = name.removeprefix("train/")
        if kind in SUMS:
            metrics[name] = sum(values)
        elif kind not in OF_ENGINE:
            metrics[name] = _finite_mean(values)
        else:
            metrics[name] = _finite_mean(values, tokens) if by_batch else values[0]
    if "train/importance_square" in metrics:
        square = metrics.pop("train/importance_square")
        metrics["train/ess"] = effective_sample_size(metrics["train/importance_mean"], square)
    metrics["train/tokens_per_s"] = metrics["train/tokens"] / seconds
    metrics["train/positions_per_s"] = metrics.pop("train/positions") / seconds
    metrics["train/mfu"] = metrics.pop("train/seconds_at_peak") / seconds
    return metrics


def _finite_mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Return the mean of the finite values; NaN or infinite without any."""
    finite = list(map(math.isfinite, values))
    if not any(finite):
        return statistics.fmean(values)
    return statistics.fmean(compress(values, finite), weights and compress(weights, finite))


def step_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the rates and waiting shares of a step, computed from its other metrics."""
    seconds = metrics["time/step"]
    wait = metrics["time/reward"]
    rates = {
        "step/tokens_per_s": metrics.get("rollout/tokens", 0.0) / (seconds - metrics.get("time/eval", 0.0)),
        "pipeline/wait_for_batch": (metrics["time/generate"] + wait) / seconds,
        "pipeline/wait_for_rewards": wait / seconds,
    }
    if "time/batch" in metrics:
        rates["rollout/tokens_per_s"] = metrics["rollout/tokens"] / metrics["time/batch"]
    return rates


def alarms(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return one sentence per metric that is NaN or outside its healthy range, by name."""
    found = {}
    rounding = metrics.get("sync/max_gap", math.inf) if metrics.get("staleness/max") == 0 else math.inf
    for name, meaning, low, high, advice in METRICS:
        if name not in metrics:
            continue
        value = metrics[name]
        if high is not None and name in ON_POLICY:
            high = min(high, rounding)
        bound = ""
        if high is not None and not value <= high:
            bound = f"> {high:g}"
        if low is not None and not value >= low:
            bound = f"< {low:g}"
        if bound:
            found[name] = f"{name} = {value:.4g} ({bound}): {meaning}; {advice}"
    return found


def reference() -> str:
    rows = []
    for name, meaning, low, high, advice in METRICS:
        healthy = " ".join(f"{sign} {bound:g}" for sign, bound in (("≥", low), ("≤", high)) if bound is not None)
        rows.append((f"`{name}`", meaning.replace("|", "\\|"), healthy, advice))
    return markdown.table(("metric", "what it is", "healthy", "otherwise"), rows)
