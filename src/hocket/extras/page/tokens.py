"""Keep the advantages of a step's rollouts for the page and, with observe.tokens, numbers of each
token."""

import json
from collections.abc import Callable, Sequence
from itertools import compress, zip_longest
from pathlib import Path
from statistics import fmean

from hocket.common.files import write_atomically
from hocket.formats import TRAINED, TrainedRow
from hocket.observe.rows import with_format
from hocket.run_part import Joined, RunPart, run_part
from hocket.types import Columns, TrainSample

MeasureTokens = Callable[[Sequence[TrainSample]], Sequence[Columns]]
"""Returns "logprobs" and "entropy" of each sample, by the policy before the step."""


@run_part("tokens")
def tokens(run: Joined) -> RunPart:
    return TokenFiles(run.folder.path, run.trainer.numbers if run.config.observe.tokens else None)


class TokenFiles(RunPart):
    """Keeps the numbers of each step's samples."""

    def __init__(self, folder: Path, measure: MeasureTokens | None) -> None:
        self._folder = folder
        self._measure = measure

    def samples(self, step: int, samples: Sequence[TrainSample]) -> None:
        keep(self._folder, self._measure, step, samples)


def keep(
    folder: Path, measure: MeasureTokens | None, step: int, samples: Sequence[TrainSample]
) -> None:
    """Write trained/step_N.jsonl: the mean advantage of each sequence, and with `measure` the
    advantage, log-prob and entropy of each token."""
    measured = measure(samples) if measure else ()
    lines = []
    for sample, columns in zip_longest(samples, measured):
        row: TrainedRow = {
            "id": sample.id,
            "advantage": _short(fmean(compress(sample.advantages, sample.sequence.mask))),
        }
        if columns:
            row["advantages"] = [_short(number) for number in sample.advantages]
            row["trainer"] = [_short(number) for number in columns["logprobs"]]
            row["entropy"] = [_short(number) for number in columns["entropy"]]
        lines.append(json.dumps(with_format(row)) + "\n")
    path = folder / TRAINED / f"step_{step:06d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, "".join(lines))


def _short(value: float) -> float:
    return float(f"{value:.4g}")
