"""Read what rewards return, and make scores of it: an error is never a number."""

import itertools
import math
import numbers
import statistics
import traceback
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from hocket.common.redaction import redacted
from hocket.types import Score

if TYPE_CHECKING:
    from hocket.config import RewardSpec  # would take most of a worker's start

MAX_TEXT = 2000  # characters of an error, a note or a part's name
MAX_PARTS = 1000  # of a rollout: each becomes a metric
LARGEST = 1e30  # reward: the loss, a float32, ends at 3e38, and means of float64 at 1e308
_EPS = 1e-6


class NoScoreError(Exception):
    """Says why a call gives no score, where its place in the code does not matter."""


class LateError(NoScoreError):
    """Says that a call gave no result within its deadline."""


def as_scores(returned: Any, size: int, of_group: bool) -> list[Score]:
    """Return the score of one rollout, or those of a group."""
    if not of_group:
        return [as_score(returned)]
    if isinstance(returned, str | bytes | Mapping | Set) or not hasattr(returned, "__len__"):
        raise NoScoreError(
            f"returned {_kind(returned)} instead of a list of {size} results, one per completion"
        )
    if len(returned) != size:
        raise NoScoreError(f"returned {len(returned)} results for {size} completions")
    return [as_score(one) for one in returned]


def as_score(returned: Any) -> Score:
    """Return the score: an error where the number is not finite."""
    try:
        score = returned
        if isinstance(returned, Mapping):
            score = Score(total=math.fsum(map(_number, returned.values())), parts=returned)
            if not returned:
                raise NoScoreError("returned no parts")
        elif not isinstance(returned, Score):
            score = Score(total=returned)
        if score.error is not None:
            return no_score(score.error, score.note)
        parts = {_plain(name): _number(value) for name, value in score.parts.items()}
        return Score(total=_number(score.total), parts=parts, note=_plain(score.note))
    except Exception as error:  # noqa: BLE001 - others of its group have their scores
        return failure(error)


def no_score(error: object, note: object = "") -> Score:
    return Score(total=math.nan, error=_plain(error), note=_plain(note))


def failure(error: BaseException) -> Score:
    """Return the score of a call that raised; the error names the line."""
    if isinstance(error, NoScoreError):
        return no_score(str(error))
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    text = _plain(error)[: MAX_TEXT // 2]
    return no_score(f"{type(error).__name__}: {text} ({frame.f_code.co_filename}:{line})")


def compose(
    specs: Mapping[str, "RewardSpec"], results: Mapping[str, Sequence[Score]]
) -> list[Score]:
    """Return the scores of a group: each total is the sum of weight · value.

    A value is clipped, then normalised: (value − mean) / (deviation + 1e-6), mean and unbiased deviation over those
    of the group that have it. Where the value of a gate is not above 0, the other rewards can only cost.
    """
    rows = [dict(zip(results, row, strict=True)) for row in zip(*results.values(), strict=True)]
    is_open = [
        all(row[name].total > 0 for name, spec in specs.items() if spec.gate) for row in rows
    ]  # NaN is not
    totals = [0.0] * len(rows)
    for name, spec in specs.items():
        for i, value in _adjusted(results[name], spec).items():
            term = spec.weight * value
            totals[i] += term if spec.gate or is_open[i] else min(term, 0.0)
    return list(map(_whole, rows, totals))


def _adjusted(scores: Sequence[Score], spec: "RewardSpec") -> Mapping[int, float]:
    """Return a reward's values, by rollout, as they count in the totals."""
    low, high = spec.clip or (-math.inf, math.inf)
    values = {
        i: min(max(score.total, low), high) for i, score in enumerate(scores) if score.error is None
    }
    if not spec.normalize:
        return values
    values = {
        i: value for i, value in values.items() if abs(value) <= LARGEST
    }  # others are errors, in `_whole`
    mean = sum(values.values()) / max(len(values), 1)
    squares = sum((value - mean) * (value - mean) for value in values.values())
    deviation = math.sqrt(squares / max(len(values) - 1, 1))
    return {i: (value - mean) / (deviation + _EPS) for i, value in values.items()}


def _whole(results: Mapping[str, Score], total: float) -> Score:
    """Return a rollout's score: its parts are what the rewards gave, its note what they said."""
    parts = dict[str, float]()
    errors = [
        f"{name}: {result.error}" for name, result in results.items() if result.error is not None
    ]
    note = _plain(
        "\n".join(f"{name}: {result.note}" for name, result in results.items() if result.note)
    )
    for name, result in results.items():
        if result.error is None:
            parts |= {
                name: result.total,
                **{f"{name}/{part}": value for part, value in result.parts.items()},
            }
    if len(parts) > MAX_PARTS:
        return no_score(
            f"its rewards have {len(parts):,} parts, more than {MAX_PARTS:,}: name fewer"
        )
    if errors:
        return Score(total=math.nan, parts=parts, error=_plain("; ".join(errors)), note=note)
    if max(map(abs, (total, *parts.values()))) <= LARGEST:
        return Score(total=total, parts=parts, note=note)
    return no_score(
        f"the weighted sum is {total}, and neither it nor a value may be beyond ±{LARGEST:g}"
    )


def _plain(value: object) -> str:
    """Return its text as files and the console take it: not too much, no half surrogate pair."""
    try:
        return redacted(str(value))[:MAX_TEXT].encode("utf-8", "replace").decode()
    except Exception:  # noqa: BLE001 - code of others, too
        return f"a {type(value).__name__} without a text"


def _number(value: Any) -> float:
    if not isinstance(value, numbers.Real):
        raise NoScoreError(f"returned {_kind(value)} instead of a number")
    if not math.isfinite(value):
        raise NoScoreError(f"returned {float(value)}, which is not a finite number")
    return float(value)


def _kind(value: Any) -> str:
    advice = " (return its .item())" if hasattr(value, "item") else ""
    return "None" if value is None else f"{type(value).__name__}{advice}"


def agreement(groups: Sequence[Sequence[tuple[Score, Score]]]) -> str:
    """Say how alike two rewards rank rollouts: Spearman's correlation, and the share of pairs in the same order.

    Pairs are those of a group that the second reward orders; one that is equal by the first counts half.
    """
    known = [
        [(a.total, b.total) for a, b in group if math.isfinite(a.total + b.total)]
        for group in groups
    ]
    pairs = itertools.chain(*(itertools.combinations(group, 2) for group in known))
    alike = [((a - c) * (b - d) > 0) + (a == c) / 2 for (a, b), (c, d) in pairs if b != d]
    if not alike:
        return "no two rollouts of a group differ"
    import pandas as pd  # would take most of a worker's start

    overall = (
        pd.DataFrame(itertools.chain(*known)).corr("spearman").iloc[0, 1]
    )  # NaN where all are equal
    return f"rank correlation {overall:.3f}; {statistics.fmean(alike):.1%} of {len(alike)} pairs in the same order"
