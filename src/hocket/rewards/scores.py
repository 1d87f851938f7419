"""Make scores from what rewards return. An error is never a number."""

import math
import numbers
import traceback
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from hocket.common.redaction import redacted
from hocket.types import Score

if TYPE_CHECKING:
    from hocket.config import RewardSpec  # its import would take most of a worker's start

MAX_TEXT = 2000  # characters of an error, a note or a part's name
MAX_PARTS = 1000  # parts of a rollout's score: each becomes a metric
# The largest reward. The loss, a float32, overflows at 3e38, and means of float64 at 1e308.
LARGEST = 1e30
_EPS = 1e-6


class NoScoreError(Exception):
    """Explains why a call gives no score, where the line that raised it does not matter."""


class LateError(NoScoreError):
    """Says that a call gave no result within its deadline."""


def as_scores(returned: Any, size: int, of_group: bool) -> list[Score]:
    """Read what a call returned: one result, or `size` of them if it scored a group.

    Raises NoScoreError for a group whose results are no list of this size.
    """
    if not of_group:
        return [as_score(returned)]
    if isinstance(returned, str | bytes | Mapping | Set) or not hasattr(returned, "__len__"):
        raise NoScoreError(
            f"returned {_kind(returned)} instead of a list of {size} results, one per completion"
        )
    if len(returned) != size:
        raise NoScoreError(f"returned {len(returned)} results for {size} completions")
    return [as_score(result) for result in returned]


def as_score(returned: Any) -> Score:
    """Read one result: a number, a mapping of parts (their sum is the total), or a Score.

    The score has an error where the result is something else, or not finite.
    """
    try:
        total: Any = returned
        parts: Mapping[str, Any] = {}
        note = ""
        if isinstance(returned, Score):
            if returned.error is not None:
                return no_score(returned.error, returned.note)
            total, parts, note = returned.total, returned.parts, returned.note
        elif isinstance(returned, Mapping):
            if not returned:
                raise NoScoreError("returned no parts")
            total = math.fsum(_number(value) for value in returned.values())
            parts = returned
        parts = {_plain(name): _number(value) for name, value in parts.items()}
        return Score(total=_number(total), parts=parts, note=_plain(note))
    except Exception as error:  # noqa: BLE001 - the other rollouts of the group have scores
        return failure(error)


def no_score(error: object, note: object = "") -> Score:
    """Make a score with an error: its total is NaN."""
    return Score(total=math.nan, error=_plain(error), note=_plain(note))


def failure(error: BaseException) -> Score:
    """Make the score of a call that raised; its error names the line of code."""
    if isinstance(error, NoScoreError):
        return no_score(str(error))
    frame, line = list(traceback.walk_tb(error.__traceback__))[-1]  # where it was raised
    text = _plain(error)[: MAX_TEXT // 2]
    return no_score(f"{type(error).__name__}: {text} ({frame.f_code.co_filename}:{line})")


def compose(
    specs: Mapping[str, "RewardSpec"], results: Mapping[str, Sequence[Score]]
) -> list[Score]:
    """Combine the rewards of a group: each rollout's total is the sum of weight · value.

    `results` has the scores of each reward, one per rollout. A value is first clipped. Then, with
    `normalize`, it becomes (value − mean) / (deviation + 1e-6), with the mean and the unbiased
    deviation of the group's values. In a rollout where the value of a gate is not above 0, the
    other rewards can only lower the total.
    """
    num_rollouts = len(next(iter(results.values()), ()))
    totals = [0.0] * num_rollouts
    is_open = [True] * num_rollouts
    for name, spec in specs.items():
        if spec.gate:
            for i, score in enumerate(results[name]):
                is_open[i] = is_open[i] and score.total > 0  # NaN, an error, closes the gate
    for name, spec in specs.items():
        for i, value in _adjusted(results[name], spec).items():
            term = spec.weight * value
            if not spec.gate and not is_open[i]:
                term = min(term, 0.0)
            totals[i] += term
    combined = []
    for i, total in enumerate(totals):
        rollout_results = {name: scores[i] for name, scores in results.items()}
        combined.append(_combined(rollout_results, total))
    return combined


def _adjusted(scores: Sequence[Score], spec: "RewardSpec") -> Mapping[int, float]:
    """Clip and normalize a reward's values. Returns them by rollout, without those that failed."""
    low, high = spec.clip or (-math.inf, math.inf)
    values = {}
    for i, score in enumerate(scores):
        if score.error is None:
            values[i] = min(max(score.total, low), high)
    if not spec.normalize:
        return values
    # Values beyond ±LARGEST would spoil the group's mean; `_combined` makes them errors.
    values = {i: value for i, value in values.items() if abs(value) <= LARGEST}
    mean = sum(values.values()) / max(len(values), 1)
    squares = sum((value - mean) * (value - mean) for value in values.values())
    deviation = math.sqrt(squares / max(len(values) - 1, 1))
    return {i: (value - mean) / (deviation + _EPS) for i, value in values.items()}


def _combined(results: Mapping[str, Score], total: float) -> Score:
    """Make a rollout's score. Its parts and its note are those of its rewards, by their names."""
    parts = dict[str, float]()
    errors = []
    notes = []
    for name, result in results.items():
        if result.note:
            notes.append(f"{name}: {result.note}")
        if result.error is not None:
            errors.append(f"{name}: {result.error}")
            continue
        parts[name] = result.total
        for part, value in result.parts.items():
            parts[f"{name}/{part}"] = value
    note = _plain("\n".join(notes))
    if len(parts) > MAX_PARTS:
        return no_score(
            f"its rewards have {len(parts):,} parts, more than {MAX_PARTS:,}: name fewer"
        )
    if errors:
        return Score(total=math.nan, parts=parts, error=_plain("; ".join(errors)), note=note)
    magnitudes = [abs(total)]
    magnitudes += map(abs, parts.values())
    if max(magnitudes) <= LARGEST:
        return Score(total=total, parts=parts, note=note)
    return no_score(
        f"the weighted sum is {total}, and neither it nor a value may be beyond ±{LARGEST:g}"
    )


def _plain(value: object) -> str:
    """Write a value as text for files and the console: redacted, short, without half surrogates."""
    try:
        return redacted(str(value))[:MAX_TEXT].encode("utf-8", "replace").decode()
    except Exception:  # noqa: BLE001 - __str__ may be a user's code
        return f"a {type(value).__name__} without a text"


def _number(value: Any) -> float:
    if not isinstance(value, numbers.Real):
        raise NoScoreError(f"returned {_kind(value)} instead of a number")
    if not math.isfinite(value):
        raise NoScoreError(f"returned {float(value)}, which is not a finite number")
    return float(value)


def _kind(value: Any) -> str:
    """Name the type of a result in an error."""
    if value is None:
        return "None"
    advice = " (return its .item())" if hasattr(value, "item") else ""
    return f"{type(value).__name__}{advice}"
