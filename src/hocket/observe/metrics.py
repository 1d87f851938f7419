"""Define every metric once, for console, report and docs, and compute those of a step."""

import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import NamedTuple

from hocket.common.registry import Registry
from hocket.config.sections import markdown_table
from hocket.types import Group, Rollout

# The entropy has collapsed if it is below this share of the highest in this many steps before. A
# run that learns keeps more of it within so few steps. Where the highest is at most MIN_ENTROPY, in
# nats, such a fall is the noise of a few tokens.
ENTROPY_KEPT = 0.25
NUM_ENTROPIES = 8
MIN_ENTROPY = 0.2


class Metric(NamedTuple):
    """A metric that runs report, and what is healthy for it."""

    name: str  # as in metrics.jsonl; NAME stands for any word
    meaning: str  # for the docs and the page of a run
    low: float | None = None  # lowest healthy value
    high: float | None = None  # highest healthy value
    advice: str = ""  # what to do about an unhealthy value
    change: str = ""  # where health depends on the steps before: the rule, in words for the docs


# fmt: off
ENTROPY = Metric("train/entropy", "mean entropy of the next token, in nats",
                 advice="the policy stops exploring: lower trainer.learning_rate, resume from an earlier checkpoint, "
                 "or add algorithm.kl_coef or entropy_coef",
                 change=f"≥ {ENTROPY_KEPT:g} of that of any of the {NUM_ENTROPIES} steps before")
METRICS = (
    Metric("reward/mean", "mean total reward of scored rollouts"),
    Metric("reward/std", "its standard deviation (population)"),
    Metric("reward/NAME", "mean of one reward, before its weight"),
    Metric("source/NAME/METRIC", "data.sources: a metric of reward or rollout, of one source"),
    Metric("source/NAME/share", "data.sources: its share of the prompts"),
    Metric("rollout/reward_errors", "share of rollouts whose reward failed or timed out; not trained",
           high=0.05, advice="read `error` in rollouts/*.jsonl"),
    Metric("rollout/zero_variance", "share of groups with equal rewards; not trained if the baseline is the group's"),
    Metric("rollout/without_signal", "share of sampled tokens in groups that train nothing, mostly of equal rewards",
           high=0.5, advice="prompts too easy: the task is learned, take harder ones; too hard: easier ones "
           "(docs/how-to/curriculum.md), a reward with steps between, or larger groups"),
    Metric("rollout/no_pass_rate", "curriculum by pass rates, retire_after: share of rates below 0 or above 1",
           high=0, advice="set eval.reward to one that returns 0 to 1 (weight 0 will do)"),
    Metric("rollout/overlong_penalty", "algorithm.overlong_share: mean penalty of length, subtracted from rewards"),
    Metric("rollout/kl", "algorithm.kl_in=reward: mean KL penalty per token, before its coefficient"),
    Metric("rollout/kl_coef", "algorithm.kl_in=reward: coefficient of the KL penalty"),
    Metric("rollout/length_mean", "mean sampled tokens of a rollout"),
    Metric("rollout/length_stopped", "the same of rollouts that ended by themselves"),
    Metric("rollout/length_reward", "correlation of length and reward, both less their group's mean",
           high=0.9, advice="length may be what is learned: read rollouts/*.jsonl, clip what grows with it"),
    Metric("rollout/duplicates", "share of rollouts whose text another one of their group has"),
    Metric("rollout/alike", "share of rollouts that are duplicates with less than the step's best reward",
           high=0.7, advice="the policy repeats itself before it has learned: see train/entropy"),
    Metric("rollout/truncated", "share of rollouts cut off at rollout.max_tokens, env.max_turns or model.max_length",
           high=0.05, advice="raise rollout.max_tokens, or reward shorter answers; if all are, the model may have "
           "never learned to end its turn"),
    Metric("rollout/tokens", "sampled tokens of the step"),
    Metric("rollout/tokens_per_s", "sampled tokens per second of time/batch"),
    Metric("rollout/turns_mean", "mean turns of an episode, if any has several"),
    Metric("rollout/tool_errors", "share of tools' results that begin with `error: `",
           high=0.25, advice="read rollouts/*.jsonl: unknown tools, wrong arguments, tools that fail"),
    Metric("env/NAME", "mean of a number that the environment gives for an episode"),
    Metric("rollout/sequences_mean", "mean sequences of an episode; each rewritten history adds one"),
    Metric("staleness/mean", "mean of newest version − oldest that sampled a token of the rollout"),
    Metric("staleness/max", "the largest such staleness"),
    Metric("staleness/share_N", "share of rollouts with staleness N"),
    Metric("staleness/over_bound", "share of rollouts above pipeline.max_staleness",
           high=0, advice="servers kept old weights: read their logs"),
    Metric("pipeline/wait_for_batch", "share of the step spent waiting for rollouts and scores"),
    Metric("pipeline/wait_for_rewards", "share of the step spent waiting for scores after the last token",
           high=0.25, advice="make rewards faster, or lower rewards.timeout_s"),
    Metric("pipeline/wait_for_policy", "share of the time since the last step began that rollouts waited for weights"),
    Metric("pipeline/queued_groups", "scored groups that were ready for the trainer"),
    Metric("rollout/oversampling", "algorithm.oversampling: prompts played / rollout.prompts_per_step"),
    Metric("eval/greedy", "held-out prompts, one answer at temperature 0: mean of eval.reward"),
    Metric("eval/NAME/METRIC", "data.sources: a metric of one held-out set; eval/METRIC is their mean"),
    Metric("eval/sampled", "held-out prompts, eval.samples answers at eval.temperature: mean of it"),
    Metric("eval/greedy_stderr", "its standard error, over prompts"),
    Metric("eval/sampled_stderr", "its standard error, over prompts"),
    Metric("eval/zero_or_one", "share of these rewards that are 0 or 1; at 1 the means are accuracies"),
    Metric("eval/pass@K", "unbiased chance of one reward >= eval.threshold in K samples (arXiv 2107.03374)"),
    Metric("eval/reward_errors", "share of held-out answers without a score, left out of the means",
           high=0.05, advice="read `error` in rollouts/eval_*.jsonl"),
    Metric("eval/length_mean", "mean sampled tokens of held-out answers"),
    Metric("eval/truncated", "share of them cut off at rollout.max_tokens"),
    Metric("train/loss", "minimized loss of all micro-batches and ranks"),
    Metric("train/grad_norm", "global gradient norm before clipping"),
    Metric("train/learning_rate", "AdamW's learning rate"),
    Metric("train/tokens", "trained tokens, of each epoch"),
    Metric("train/sequences", "trained sequences"),
    Metric("train/micro_batches", "forward passes per rank"),
    Metric("train/updates", "optimizer steps, with skipped ones; algorithm.stop_kl may end them early"),
    Metric("train/skipped", "share of updates that kept the weights, as loss or gradient was not finite",
           high=0, advice="skipped/ has the batch and what was not finite; normal now and then in float16"),
    Metric("train/loss_scale", "float16: factor on the loss, halved at an overflow, which skips the step",
           low=2, advice="gradients overflow at any scale: train in bfloat16"),
    Metric("train/tokens_per_s", "trained tokens per second of time/train, all ranks"),
    Metric("train/shared", "trainer.share_prefixes: share of positions that were not computed, as others begin alike"),
    Metric("train/positions_per_s", "tokens with prompts, without padding, per second of time/train"),
    Metric("train/mfu", "model FLOPs / (time/train · peak FLOPs of all ranks: data sheet, else measured)"),
    Metric("train/logprob_gap", "mean |trainer − engine log-prob| of trained tokens; float32 < 1e-4, bfloat16 < .06",
           high=0.1, advice="the server has other weights, or samples otherwise"),
    Metric("train/mismatch_kl", "k3 estimate of KL(engine ‖ trainer)", high=0.01, advice="see train/logprob_gap"),
    Metric("train/clip_low", "share of tokens clipped below; objective ppo: of negative advantage"),
    Metric("train/clip_high", "share clipped above; objective ppo: of positive advantage"),
    Metric("train/ratio_mean", "mean of policy / policy before the step; 1 in the first update"),
    Metric("train/policy_kl", "k3 estimate of KL(policy before the step ‖ policy)"),
    Metric("train/importance_mean", "mean importance weight, exp(trainer − engine log-prob), before its cap",
           low=0.5, high=2.0, advice="see train/logprob_gap"),
    Metric("train/importance_capped", "share of tokens whose weight is capped or masked"),
    Metric("train/ess", "effective sample size of the importance weights, (Σw)² / (n·Σw²)",
           low=0.5, advice="few tokens dominate: rollouts are too old, or see train/logprob_gap"),
    Metric("train/kl", "k3 estimate of KL(policy ‖ reference)"),
    ENTROPY,
    Metric("critic/loss", "mean of half the squared error of values"),
    Metric("critic/explained_variance", "1 − Var(return − value) / Var(return); 0: as a constant",
           low=-0.5, advice="the critic misleads: raise critic.warmup_steps or critic.learning_rate"),
    Metric("critic/value_mean", "mean value"),
    Metric("critic/return_mean", "mean return, the target of values"),
    Metric("critic/grad_norm", "global gradient norm before clipping"),
    Metric("critic/skipped", "share of updates whose loss or gradient was not finite",
           high=0, advice="lower critic.learning_rate; look at the step's rollouts"),
    Metric("sync/version", "version that the step published: weights/vVERSION"),
    Metric("sync/servers", "servers that hold the newest version"),
    Metric("sync/mebibytes", "MiB sent to each server, on average"),
    Metric("sync/prepare_s", "seconds until the first byte could be sent; disk: to write and verify files"),
    Metric("sync/transfer_s", "seconds until the last server had loaded it"),
    Metric("sync/fallbacks", "servers that nccl could not reach, and that got it by disk",
           high=0, advice="the console has the cause; sync.backend=disk avoids the attempt"),
    Metric("sync/max_gap", "the most that rounding explains; above it the run stops (sync.on_mismatch)"),
    Metric("step/tokens_per_s", "sampled tokens per second of time/step − time/eval"),
    Metric("time/generate", "seconds that the step waited for sampled tokens"),
    Metric("time/batch", "seconds from batch start to last token; overlaps earlier steps if max_staleness > 0"),
    Metric("time/reward", "seconds that the step then waited for scores alone"),
    Metric("time/record", "seconds to write rollouts and to compute their metrics"),
    Metric("time/turn", "launch.share_gpu: seconds in which the GPU changes hands, without those of a sync"),
    Metric("time/measure", "seconds of forward passes before updates: old log-probs, reference, critic"),
    Metric("time/samples", "seconds to make samples of rollouts: advantages"),
    Metric("time/train", "seconds of forward, backward and update"),
    Metric("time/sync", "seconds to publish a version"),
    Metric("time/checkpoint", "seconds that training paused for a checkpoint"),
    Metric("time/eval", "seconds of held-out evaluation and of its check"),
    Metric("time/step", "seconds of the whole step: all other time/* but time/batch, and the little between them"),
)
# fmt: on
METRIC_TABLES: Registry[Sequence[Metric]] = Registry(
    "table of metrics",
    checks="hocket.extras.checks",
    tools="hocket.extras.tools",
    stages="hocket.extras.stages",
    best="hocket.extras.best",
    delta="hocket.extras.delta",
)
metric_table = METRIC_TABLES.register
"""Register the metrics that an optional module or a plugin reports: metric_table(NAME)(METRICS).

They get alarms, and a line on the page of a run.

Args:
    name: name of the table.

Example: a plugin file that defines what is healthy for a number that its environment measures.

    metric_table("moves")((Metric("env/moves", "moves of a game", high=40, advice="the policy moves in circles"),))
"""

# Metrics of updates, without train/. A step has the sum of these over its updates, and the mean of
# all others.
SUMS = frozenset(
    {"updates", "tokens", "sequences", "micro_batches", "positions", "seconds_at_peak"}
)
# These compare the engine with the policy before the step.
OF_ENGINE = frozenset(
    {"logprob_gap", "mismatch_kl", "importance_mean", "importance_square", "importance_capped"}
)
# Metrics with this prefix compare samples with the weights that sampled them, which only the first
# update has.
OF_FIRST_UPDATE = "sampling/"

# Gaps between engine and trainer. They are at most sync/max_gap where no rollout is stale.
ON_POLICY = frozenset({"train/logprob_gap", "train/mismatch_kl"})


def known_metrics() -> list[Metric]:
    """List all metrics, those of optional modules and plugins last."""
    metrics = list(METRICS)
    for table in METRIC_TABLES.each():
        metrics += table
    return metrics


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Compute the reward/* and rollout/* metrics of a batch, and those of each of data.sources."""
    metrics = _rollout_metrics(groups)
    for source, groups_of_source in by_source(groups).items():
        if source:
            metrics[f"source/{source}/share"] = len(groups_of_source) / len(groups)
            for name, value in _rollout_metrics(groups_of_source).items():
                metrics[f"source/{source}/{name}"] = value
    return metrics


def by_source(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Divide groups by their names in data.sources; all have the name "" without data.sources."""
    groups_by_source = defaultdict[str, list[Group]](list)
    for group in groups:
        groups_by_source[group.source].append(group)
    return groups_by_source


def _rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Compute the metrics of one source. Most are the mean of a list of values."""
    values = defaultdict[str, list[float]](list)
    of_environments = defaultdict[str, list[float]](list)
    best = max((score.total for group in groups for _, score in group.scored), default=0.0)
    for group in groups:
        texts = Counter(rollout.text for rollout in group.rollouts)
        for rollout, score in zip(group.rollouts, group.scores, strict=True):
            has_score = score.error is None
            is_duplicate = texts[rollout.text] > 1
            _add_rollout(values, rollout)
            values["rollout/duplicates"].append(is_duplicate)
            values["rollout/alike"].append(is_duplicate and has_score and score.total < best)
            for name, value in rollout.metrics.items():
                of_environments[name].append(value)
            if has_score:
                values["reward/mean"].append(score.total)
                for name, part in score.parts.items():  # other rollouts may lack it
                    values[f"reward/{name}"].append(part)
    if not values:
        return {}

    # These are left out where every episode has a single turn or sequence.
    for name in ("rollout/turns_mean", "rollout/sequences_mean"):
        if max(values[name]) <= 1:
            del values[name]
    metrics = {}
    for name, numbers in (of_environments | values).items():
        metrics[name] = statistics.fmean(numbers)
    lengths = values["rollout/length_mean"]
    rewards = values["reward/mean"]
    metrics["rollout/tokens"] = float(sum(lengths))
    metrics["rollout/reward_errors"] = 1 - len(rewards) / len(lengths)
    if rewards:
        metrics["reward/std"] = statistics.pstdev(rewards)
    return metrics | _length_reward(groups)


def _add_rollout(values: Mapping[str, list[float]], rollout: Rollout) -> None:
    """Add to the lists of values what one rollout has, with a score or without."""
    length = rollout.num_sampled
    values["rollout/length_mean"].append(length)
    if rollout.finish_reason == "stop":
        values["rollout/length_stopped"].append(length)
    values["rollout/truncated"].append(rollout.finish_reason == "length")
    num_turns = sum(sequence.turns for sequence in rollout.sequences)
    values["rollout/turns_mean"].append(num_turns)
    values["rollout/sequences_mean"].append(len(rollout.sequences))
    for sequence in rollout.sequences:
        for message in sequence.dialogue:
            if message.get("role") == "tool":
                is_error = str(message.get("content")).startswith("error: ")
                values["rollout/tool_errors"].append(is_error)


def _length_reward(groups: Sequence[Group]) -> dict[str, float]:
    """Correlate length and reward of scored rollouts; nothing where one of them is constant."""
    lengths: list[float] = []
    rewards: list[float] = []
    for group in groups:
        lengths += _centred([rollout.num_sampled for rollout, _ in group.scored])
        rewards += _centred([score.total for _, score in group.scored])
    if not (_varies(lengths) and _varies(rewards)):
        return {}
    return {"rollout/length_reward": statistics.correlation(lengths, rewards)}


def _centred(values: Sequence[float]) -> list[float]:
    mean = statistics.fmean(values or (0.0,))
    return [value - mean for value in values]


def _varies(centred: Sequence[float]) -> bool:
    return max(map(abs, centred), default=0.0) > 1e-6


def staleness_metrics(groups: Sequence[Group], *, version: int, bound: int) -> dict[str, float]:
    """Compute the staleness/* metrics of a step.

    Args:
        groups: the step's batch.
        version: the newest published version of the weights.
        bound: pipeline.max_staleness.
    """
    ages: list[int] = []  # versions between the newest and the oldest that sampled the rollout
    for group in groups:
        for rollout in group.rollouts:
            versions = [sequence.version_min for sequence in rollout.sequences if sequence.turns]
            if versions:
                ages.append(version - min(versions))
    if not ages:
        return {}
    metrics = {
        "staleness/mean": statistics.fmean(ages),
        "staleness/max": float(max(ages)),
        "staleness/over_bound": sum(age > bound for age in ages) / len(ages),
    }
    for age, count in sorted(Counter(ages).items()):
        metrics[f"staleness/share_{age}"] = count / len(ages)
    return metrics


def over_updates(
    updates: Sequence[Mapping[str, float]], seconds: float, by_batch: bool
) -> dict[str, float]:
    """Combine the metrics of a step's updates, which took `seconds`.

    `by_batch`: old log-probs were measured before the step, so that the comparison of engine and
    policy holds for the samples of every update. Without them only the first update has it.
    """
    tokens = [update["train/tokens"] for update in updates]
    metrics = {}
    for name in updates[0]:
        values = [update[name] for update in updates]
        kind = name.removeprefix("train/")
        if kind in SUMS:
            metrics[name] = sum(values)
        elif kind in OF_ENGINE and by_batch:
            metrics[name] = _finite_mean(values, tokens)
        elif kind in OF_ENGINE or name.startswith(OF_FIRST_UPDATE):
            metrics[name] = values[0]
        else:
            metrics[name] = _finite_mean(values, [1.0] * len(values))

    # These are computed from the means and sums.
    if "train/importance_square" in metrics:
        mean_square = metrics.pop("train/importance_square")
        metrics["train/ess"] = metrics["train/importance_mean"] ** 2 / mean_square
    metrics["train/tokens_per_s"] = metrics["train/tokens"] / seconds
    metrics["train/positions_per_s"] = metrics.pop("train/positions") / seconds
    metrics["train/mfu"] = metrics.pop("train/seconds_at_peak") / seconds
    return metrics


def _finite_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Compute the weighted mean of the finite values; NaN or infinite where none is finite."""
    finite = [math.isfinite(value) for value in values]
    if not any(finite):
        return statistics.fmean(values)
    return statistics.fmean(compress(values, finite), compress(weights, finite))


def step_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Compute the rates of a step from its metrics: tokens per second, and shares of its time."""
    seconds = metrics["time/step"]
    training_s = seconds - metrics.get("time/eval", 0.0)
    wait_s = metrics["time/reward"]
    rates = {
        "step/tokens_per_s": metrics.get("rollout/tokens", 0.0) / training_s,
        "pipeline/wait_for_batch": (metrics["time/generate"] + wait_s) / seconds,
        "pipeline/wait_for_rewards": wait_s / seconds,
    }
    if "time/batch" in metrics:
        rates["rollout/tokens_per_s"] = metrics["rollout/tokens"] / metrics["time/batch"]
    return rates


def alarms(metrics: Mapping[str, float]) -> dict[str, str]:
    """Find the metrics of one step outside their healthy range, NaN included: name → sentence."""
    sentences = {}
    for metric in known_metrics():
        if metric.name not in metrics:
            continue
        value = metrics[metric.name]
        high = _upper_bound(metric, metrics)
        # Negated, since NaN is neither inside a range nor beyond a bound.
        bound = ""
        if high is not None and not value <= high:
            bound = f"> {high:g}"
        if metric.low is not None and not value >= metric.low:
            bound = f"< {metric.low:g}"
        if bound:
            sentences[metric.name] = _sentence(metric, value, bound)
    return sentences


def _upper_bound(metric: Metric, metrics: Mapping[str, float]) -> float | None:
    """Find the value above which a metric of this step is unhealthy, or None."""
    if metric.name not in ON_POLICY or metric.high is None:
        return metric.high
    staleness = metrics.get("staleness/max")
    if staleness is None:
        return metric.high
    if staleness > 0:
        return None  # with stale rollouts a gap shows how far the policy has moved
    return min(metric.high, metrics.get("sync/max_gap", metric.high))


class Alarms:
    """Finds unhealthy metrics in the steps of a run: by `alarms`, and an entropy that collapses.

    A resumed run begins anew: it compares only steps of its own process.
    """

    def __init__(self) -> None:
        self._entropies: deque[float] = deque(maxlen=NUM_ENTROPIES)

    def step(self, metrics: Mapping[str, float]) -> dict[str, str]:
        """Find the unhealthy metrics of the next step: name → sentence."""
        sentences = alarms(metrics)
        entropy = metrics.get("train/entropy", math.nan)
        if math.isfinite(entropy):
            highest = max(self._entropies, default=0.0)
            if entropy < ENTROPY_KEPT * highest and highest > MIN_ENTROPY:
                bound = f"< {ENTROPY_KEPT:g} of {highest:.4g}, at most {NUM_ENTROPIES} steps before"
                sentences["train/entropy"] = _sentence(ENTROPY, entropy, bound)
            self._entropies.append(entropy)
        return sentences


def _sentence(metric: Metric, value: float, bound: str) -> str:
    return f"{metric.name} = {value:.4g} ({bound}): {metric.meaning}; {metric.advice}"


def reference() -> str:
    """Write the table of all metrics, for docs/reference/metrics.md."""
    rows = []
    for metric in known_metrics():
        healthy = []
        if metric.low is not None:
            healthy.append(f"≥ {metric.low:g}")
        if metric.high is not None:
            healthy.append(f"≤ {metric.high:g}")
        if metric.change:
            healthy.append(metric.change)
        rows.append((f"`{metric.name}`", metric.meaning, " ".join(healthy), metric.advice))
    return markdown_table(("metric", "what it is", "healthy", "otherwise"), rows)
