"""Name the cause of a failed step: a number that was not finite, or a full memory."""

import json
import math
import re
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hocket.common.files import write_atomically
from hocket.config import TrainerConfig
from hocket.errors import TrainerError
from hocket.formats import FORMAT, KeptSample
from hocket.trainer.choices import RECOMPUTATIONS
from hocket.trainer.step import Update
from hocket.types import TrainSample

MAX_SKIPPED_STEPS = 5  # steps in a row without an update, after which the run stops
MAX_KEPT = 8  # batches of skipped steps that a folder keeps
LARGEST = 1e5  # a larger number of a sample is extreme

# Columns that are computed from rewards and other columns. If these are extreme, too, the cause
# is there.
DERIVED = ("advantages", "returns")

# What to do about an extreme number, by its column.
REMEDIES = dict.fromkeys(
    DERIVED, "Look for extreme rewards, and at what algorithm.advantage makes of them"
)
REMEDIES["rollout_logprobs"] = "The server should not have sent such log-probs: look at its log"
_NO_ROOM = r"out of memory|allocate memory|ALLOC_FAILED|MemoryError"
_PASSES = {"forward": "forward pass", "backward": "backward pass"}  # by the engine's methods


class _Extreme(NamedTuple):
    """An extreme number of a sample, the largest of its column."""

    is_cause: bool  # whether the column is not computed from other columns
    size: float  # absolute; infinite for NaN, too
    column: str
    name: str  # of the sample


def first_fault(samples: Sequence[TrainSample], updates: Sequence[Update]) -> str:
    """Name the first number that was extreme or not finite, and the remedy.

    Args:
        samples: the batch.
        updates: its updates, of which at least one is faulty.
    """
    # Numbers that came with the samples are the first in time.
    extremes = []
    for number, sample in enumerate(samples):
        name = sample.id or f"sample {number}"
        for column, values in sample.numbers.items():
            sizes = np.where(np.isnan(values), np.inf, np.abs(values))
            size = float(sizes.max(initial=0.0))
            if size > LARGEST:
                extremes.append(_Extreme(column not in DERIVED, size, column, name))
    if extremes:
        worst = max(extremes, key=lambda extreme: (extreme.is_cause, extreme.size))
        advice = REMEDIES.get(worst.column, "Look at the model that gave them")
        return f"{worst.column} of {worst.name}. {advice}: up to {worst.size:g}"

    # Then come the loss and its terms, each parameter's gradient, and the norm of all.
    update = next(update for update in updates if update.is_faulty)
    model = update.learner.name
    broken = []
    for term, value in update.totals.items():
        if not math.isfinite(value):
            broken.append(f"the {model}'s {term}")
    broken += [f"the gradient of the {model}'s {name}" for name in update.bad_gradients]
    broken.append(f"the norm of the {model}'s gradient")
    return f"{broken[0]}. Lower {update.learner.rate}, and start from weights before the fault"


def keep_batch(
    path: Path, samples: Sequence[TrainSample], fault: str, decode: Callable[[list[int]], str]
) -> None:
    """Write samples as JSON (with NaN), one per line, and remove the oldest files of this kind.

    Args:
        path: the new file. Its folder keeps MAX_KEPT files.
        samples: the batch of a skipped update.
        fault: the sentence of `first_fault`.
        decode: makes text of token ids.
    """
    rows = [json.dumps(_row(sample, decode), ensure_ascii=False) for sample in samples]
    lines = ",\n".join(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    head = f'"format": {FORMAT},\n"not_finite": {json.dumps(fault)}'
    write_atomically(path, f'{{{head},\n"samples": [\n{lines}\n]}}\n')
    for old in sorted(path.parent.glob(f"*{path.suffix}"))[:-MAX_KEPT]:
        old.unlink()


def _row(sample: TrainSample, decode: Callable[[list[int]], str]) -> dict[str, object]:
    sequence = sample.sequence
    token_ids = list(sequence.token_ids)
    row: KeptSample = {
        "id": sample.id,
        "text": decode(token_ids),
        "token_ids": token_ids,
        "mask": list(map(int, sequence.mask)),
        "rollout_logprobs": list(sequence.logprobs),
        "advantages": list(sample.advantages),
        "version_min": sequence.version_min,
    }
    columns = {name: list(values) for name, values in sample.columns.items()}
    return {**row, **columns}


def is_out_of_memory(error: BaseException) -> bool:
    """Check whether an error of Python, CUDA or torch means that memory is full."""
    matches = re.search(_NO_ROOM, repr(error)) is not None
    return matches and isinstance(error, RuntimeError | MemoryError)


def out_of_memory(
    error: BaseException,
    config: TrainerConfig,
    *,
    micro_batch_tokens: int,
    work: str,
    longest: int,
    on_gpu: bool,
) -> TrainerError:
    """Make a TrainerError that names the settings with which the work needs less memory.

    Args:
        error: the error for which `is_out_of_memory` holds.
        config: the trainer's settings.
        micro_batch_tokens: the size of a micro-batch now.
        work: what the trainer was doing.
        longest: positions of the longest sequence in it; 0 if it had no sequences.
        on_gpu: whether the model is on a GPU.
    """
    # A pass of the engine says more than the method of the trainer.
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") == "hocket.trainer.engine":
            work = _PASSES.get(frame.f_code.co_name, work)

    # First the settings that cost least.
    fixes = []
    if longest > 0:
        smaller = max(longest, micro_batch_tokens // 2)  # the longest sequence must still fit
        if 10 * smaller <= 9 * micro_batch_tokens:
            fixes.append(f"trainer.micro_batch_tokens={smaller} (now {micro_batch_tokens})")
        if not config.gradient_checkpointing:
            fixes.append("trainer.gradient_checkpointing=true")
        if config.gradient_checkpointing is True:
            names = sorted(RECOMPUTATIONS.names)
            fixes += [f"trainer.gradient_checkpointing={name}" for name in names]
    if on_gpu and not config.offload_optimizer:
        fixes.append("trainer.offload_optimizer=true")
    fixes.append("trainer.zero_stage=3 on more ranks")
    fixes.append("model.lora={}")
    if on_gpu:
        fixes.append(
            "a lower server.gpu_memory_utilization, or launch.share_gpu=true, "
            "where a server is on this GPU"
        )
    advice = "; or ".join(fixes)

    request = re.search(r"allocate [\d.]+ \w+", str(error))
    size = f" (could not {request[0]})" if request else ""
    return TrainerError(f"out of memory in the {work}{size}; set {advice}")
