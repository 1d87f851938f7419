"""Name what went wrong in a step: what was not finite, or did not fit into memory."""

import json
import math
import re
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hocket.common.files import write_atomically
from hocket.config import TrainerConfig
from hocket.errors import TrainerError
from hocket.formats import FORMAT, KeptSample
from hocket.trainer.choices import RECOMPUTATIONS
from hocket.trainer.step import Update
from hocket.types import TrainSample

MAX_SKIPPED_STEPS = 5  # in a row; then the run stops
MAX_KEPT = 8  # batches of skipped steps in a folder
LARGEST = 1e5  # number of a sample, where nothing is wrong with the rewards
MADE = ("advantages", "returns")  # of rewards and other columns, which have the cause
CAUSES = {
    "advantages": "Look for extreme rewards, and at what algorithm.advantage makes of them",
    "returns": "Look for extreme rewards, and at what algorithm.advantage makes of them",
    "rollout_logprobs": "The server should not have sent such log-probs: look at its log",
}
_NO_ROOM = r"out of memory|allocate memory|ALLOC_FAILED|MemoryError"


def first_fault(samples: Sequence[TrainSample], done: Sequence[Update]) -> str:
    """Name the first number that was extreme or not finite, and the remedy."""
    found = [
        (float(np.where(np.isnan(values), np.inf, np.abs(values)).max(initial=0.0)), index, name)
        for index, sample in enumerate(samples)
        for name, values in sample.numbers.items()
    ]
    size, index, column = max(found, key=lambda one: (one[0] > LARGEST, one[2] not in MADE, one[0]))
    if size > LARGEST:
        where = f"{column} of {samples[index].id or f'sample {index}'}"
        return f"{where}. {CAUSES.get(column, 'Look at the model that gave them')}: up to {size:g}"
    update = next(update for update in done if update.is_faulty)
    model = update.learner.name
    bad = [
        f"the {model}'s {term}" for term, value in update.totals.items() if not math.isfinite(value)
    ]
    bad += [f"the gradient of the {model}'s {parameter}" for parameter in update.bad_gradients]
    bad.append(f"the norm of the {model}'s gradient")
    return f"{bad[0]}. Lower {update.learner.rate}, and start from weights before the fault"


def keep_batch(
    path: Path, samples: Sequence[TrainSample], fault: str, decode: Callable[[list[int]], str]
) -> None:
    """Write the samples as JSON (with NaN), one per line; remove the oldest such files."""
    lines = ",\n".join(json.dumps(_row(sample, decode), ensure_ascii=False) for sample in samples)
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
    return (
        isinstance(error, RuntimeError | MemoryError)
        and re.search(_NO_ROOM, repr(error)) is not None
    )


def out_of_memory(
    error: BaseException,
    config: TrainerConfig,
    *,
    micro_batch_tokens: int,
    work: str,
    longest: int,
    on_gpu: bool,
) -> TrainerError:
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") == "hocket.trainer.engine":
            work = {"forward": "forward pass", "backward": "backward pass"}.get(
                frame.f_code.co_name, work
            )
    smaller = max(longest, micro_batch_tokens // 2)
    fixes = {
        f"trainer.micro_batch_tokens={smaller} (now {micro_batch_tokens})": longest > 0
        and 10 * smaller <= 9 * micro_batch_tokens,
        "trainer.gradient_checkpointing=true": longest > 0 and not config.gradient_checkpointing,
        **{
            f"trainer.gradient_checkpointing={name}": longest > 0
            and config.gradient_checkpointing is True
            for name in sorted(RECOMPUTATIONS.names)
        },
        "trainer.offload_optimizer=true": on_gpu and not config.offload_optimizer,
        "trainer.zero_stage=3 on more ranks": True,
        "model.lora={}": True,
        "a lower server.gpu_memory_utilization, or launch.share_gpu=true, where a server is on this GPU": on_gpu,
    }
    advice = "; or ".join(fix for fix, helps in fixes.items() if helps)
    asked = re.search(r"allocate [\d.]+ \w+", str(error))
    return TrainerError(
        f"out of memory in the {work}{f' (could not {asked[0]})' if asked else ''}; set {advice}"
    )
