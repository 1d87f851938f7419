"""The command reward-test: score the completions in a file, without a model."""

import argparse
import asyncio
import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from hocket.commands.command import SETTINGS, command, option
from hocket.common import tasks
from hocket.common.registry import load_plugins
from hocket.config import Config
from hocket.data.columns import columns_of, sample_of
from hocket.data.sources import read_rows
from hocket.errors import ConfigError, DataError
from hocket.observe.rows import DAMAGED, rollout_of, without_format
from hocket.rewards.scorer import RewardCalls, RewardScorer
from hocket.types import Rollout, Score

SAMPLES = (
    "JSONL of completions with their rows: {prompt: ..., completion: ..., answer: ...}, "
    "or a run's rollouts"
)


@command(
    "reward-test",
    SETTINGS,
    option("--samples", type=Path, required=True, metavar="FILE", help=SAMPLES),
    option(
        "--against",
        metavar="REWARD",
        help="compare the total with this reward: ranks, and order of pairs",
    ),
    examples=(
        "config/quickstart.yaml --samples runs/quickstart/rollouts/step_000001.jsonl",
        "config/quickstart.yaml --samples hand.jsonl --against exact_match",
    ),
    page="how-to/rewards.md",
)
def _reward_test(args: argparse.Namespace) -> int:
    return score_samples(args.config, args.samples, args.against)


def score_samples(config: Config, file: Path, against: str | None) -> int:
    """Print the rewards of a file's completions, and how long their calls take.

    Rollouts of a run keep their groups; other rows with the same prompt and answer are a group.
    `against` names a reward to compare their total with.

    Returns the exit status: 1 where a completion has no score, or there is none.
    """
    if not file.is_file():
        advice = "give rows in .jsonl, or a run's rollouts/step_N.jsonl"
        raise ConfigError(f"--samples {file} is not a file: {advice}")
    load_plugins(config.plugins)
    rewards = config.sole_rewards
    groups = _read_groups(config, file)

    # Score with the run's rewards and, to compare, once more with `against` alone.
    names = list(rewards.functions)
    if against:
        names.append(against)
    comparison = None
    with RewardCalls(rewards, names) as calls:
        scorer = RewardScorer(calls, rewards.functions)
        scores_by_group = tasks.run(_score_groups(config, groups, scorer))
        if against:
            # A reward that a run only measures has no weight, and so its total would be 0.
            calls.specs[against] = calls.specs[against].model_copy(update={"weight": 1.0})
            scorer = RewardScorer(calls, [against])
            others_by_group = tasks.run(_score_groups(config, groups, scorer))
            pairs_by_group = []
            for scores, others in zip(scores_by_group, others_by_group, strict=True):
                pairs_by_group.append(list(zip(scores, others, strict=True)))
            comparison = f"against {against}: {agreement(pairs_by_group)}"

    # Print a line for each completion, then a line for each reward's calls, then the sums.
    num_scores = 0
    num_failed = 0
    for group, scores in zip(groups, scores_by_group, strict=True):
        for rollout, score in zip(group, scores, strict=True):
            _print_score(rollout, score)
            num_scores += 1
            num_failed += score.error is not None
    for name, seconds in calls.seconds.items():
        times = "none"
        if seconds:
            slowest = f"slowest {1000 * max(seconds):.3g} ms"
            times = f"median {1000 * statistics.median(seconds):.3g} ms, {slowest}"
        print(f"calls of {name}: {times} (the first of a process loads it)")
    if comparison is not None:
        print(comparison)
    print(f"{num_scores} samples in {len(groups)} groups, {num_failed} without a score")
    return int(num_failed > 0 or num_scores == 0)


def _read_groups(config: Config, file: Path) -> list[list[Rollout]]:
    """Read a file's samples as rollouts, by group. Raises DataError for a damaged row."""
    groups: dict[str, list[Rollout]] = {}
    data = config.data.model_copy(update={"source": str(file), "limit": None})
    for place, row in read_rows(data):
        try:
            columns = columns_of(row, ())
            if {"group_id", "prompt_id", "parts"} <= columns.keys():  # a row that a run has written
                folder = file.absolute().parents[1]
                rollout = rollout_of(without_format(columns, file), place, folder)
                group = columns["group_id"]
            else:
                rollout = rollout_of(sample_of(columns, config.data) | {"id": place})
                prompt = rollout.prompt
                group = repr((prompt.text, prompt.messages, prompt.answer, hash(prompt.images)))
        except DAMAGED as error:
            raise DataError(f"{place} is no sample: {error}") from error
        groups.setdefault(group, []).append(rollout)
    return list(groups.values())


async def _score_groups(
    config: Config, groups: Sequence[Sequence[Rollout]], scorer: RewardScorer
) -> list[Sequence[Score]]:
    """Score groups, as many at a time as a step of training has."""
    free_slots = asyncio.Semaphore(config.rollout.prompts_per_step)

    async def score_group(group: Sequence[Rollout]) -> Sequence[Score]:
        async with free_slots:
            return await scorer.score_group(group)

    return await asyncio.gather(*map(score_group, groups))


def _print_score(rollout: Rollout, score: Score) -> None:
    """Print a rollout's total, its parts, and the note of its rewards."""
    total = f"{score.total:.4g}" if score.error is None else f"error: {score.error}"
    parts = ", ".join(f"{name} {value:.4g}" for name, value in score.parts.items())
    print(rollout.id, total, parts, sep="  ")
    for line in score.note.splitlines():
        # A program that was tested may have written it, with control characters of a terminal.
        print("   ", "".join(filter(str.isprintable, line)))


def agreement(groups: Sequence[Sequence[tuple[Score, Score]]]) -> str:
    """Describe how far two rewards agree on the order of rollouts.

    Each rollout has the scores of both rewards. The first figure is Spearman's correlation over all
    rollouts. The second is the share of pairs in the same order: a pair is two rollouts of a group
    whose second scores differ, and counts half where its first scores are equal.
    """
    totals = []  # of all rollouts with two scores
    pair_values = []  # 1: same order, 1/2: equal first scores, 0: other order
    for group in groups:
        group_totals = [(x.total, y.total) for x, y in group if math.isfinite(x.total + y.total)]
        totals += group_totals
        for (x1, y1), (x2, y2) in itertools.combinations(group_totals, 2):
            if y1 != y2:
                pair_values.append(((x1 - x2) * (y1 - y2) > 0) + (x1 == x2) / 2)
    if not pair_values:
        return "no two rollouts of a group differ"
    import pandas as pd  # its import takes long

    overall = pd.DataFrame(totals).corr("spearman").iloc[0, 1]  # NaN where all are equal
    share = statistics.fmean(pair_values)
    num_pairs = len(pair_values)
    return f"rank correlation {overall:.3f}; {share:.1%} of {num_pairs} pairs in the same order"
