"""What the trainer says of a step that went wrong: what was not finite, in which samples; what did not fit in memory.

Takes samples, tensors and errors; gives words and one JSON file per skipped step. Knows neither DeepSpeed nor ranks.
"""

import dataclasses
import json
import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hocket.config import TrainerConfig
from hocket.errors import TrainerError
from hocket.system import write_atomically
from hocket.types import TokenSequence, TrainSample

MAX_SKIPPED_STEPS = 5  # in a row, then the run stops
MAX_KEPT = 8
"""Batches of skipped steps that stay in a folder: the newest."""
MAX_NAMED = 8
"""Names that a sentence lists."""
NUMBERS = ("advantages", "ref_logprobs", "values", "returns")
"""Fields of a sample with one number per token, beside those of its sequence."""
_NO_ROOM = r"out of memory|can't allocate memory|ALLOC_FAILED"
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What was not finite in a step; the earliest of these that there is made the others.

    Attributes:
        inputs: names of samples that came with a number that is not finite, each with the fields it is in.
        logprobs: names of samples of which the model gave log-probs that are not finite.
        values: likewise, of the critic's values.
        terms: the loss, or what is measured along with it, over the whole batch.
        gradients: names of parameters.
    """

    inputs: tuple[str, ...]
    logprobs: tuple[str, ...]
    values: tuple[str, ...]
    terms: tuple[str, ...]
    gradients: tuple[str, ...]

    def __str__(self) -> str:
        kinds = {
            "numbers that came with the samples": self.inputs,
            "the model's log-probs of": self.logprobs,
            "the critic's values of": self.values,
            "loss terms": self.terms,
            "gradients of": self.gradients,
        }
        return "; ".join(f"{kind} {_some(names)}" for kind, names in kinds.items() if names)

    @property
    def advice(self) -> str:
        """What to do about the earliest of them."""
        if self.inputs:
            return "Look for extreme rewards, or log-probs that the server should not have sent"
        if self.logprobs:
            return "The weights are likely broken: lower trainer.learning_rate, and start from weights before the fault"
        if self.values:
            return "The critic is likely broken: lower critic.learning_rate, and start from weights before the fault"
        return "Lower trainer.learning_rate, or look for extreme values in what was trained on"


def fault_of(
    samples: Sequence[TrainSample],
    *,
    numbers: Mapping[int, Mapping[str, Sequence[float]]],
    totals: Mapping[str, float],
    gradients: Sequence[str],
) -> Fault:
    """Returns what was not finite.

    Args:
        numbers: by the sample's place, "logprobs" and "values" of its tokens; what is not there was fine.
        totals: loss and metrics of the whole batch.
        gradients: names of parameters whose gradient was not finite.
    """
    names = [sample.id or f"sample {index}" for index, sample in enumerate(samples)]

    def broken(kind: str) -> tuple[str, ...]:
        return tuple(
            names[index] for index in sorted(numbers) if not all(map(math.isfinite, numbers[index].get(kind, ())))
        )

    return Fault(
        inputs=tuple(
            f"{name} ({', '.join(fields)})"
            for name, sample in zip(names, samples, strict=True)
            if (fields := _broken_fields(sample))
        ),
        logprobs=broken("logprobs"),
        values=broken("values"),
        terms=tuple(name for name, value in totals.items() if not math.isfinite(value)),
        gradients=tuple(gradients),
    )


def keep_batch(path: Path, samples: Sequence[TrainSample], fault: Fault, decode: Callable[[list[int]], str]) -> None:
    """Writes what was trained on in a skipped step, one sample per line, and removes the oldest of such files.

    Infinity and NaN stand in it as Python's json writes and reads them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(_row(sample, decode), ensure_ascii=False) for sample in samples)
    facts = json.dumps(dataclasses.asdict(fault), ensure_ascii=False)
    write_atomically(path, f'{{"not_finite": {facts},\n"samples": [\n{lines}\n]}}\n')
    for old in sorted(path.parent.glob(f"*{path.suffix}"))[:-MAX_KEPT]:
        old.unlink()


def read_batch(path: Path) -> list[TrainSample]:
    """Returns the samples that `keep_batch` wrote."""
    rows = json.loads(path.read_text(encoding="utf-8"))["samples"]
    return [
        TrainSample(
            id=row["id"],
            sequence=TokenSequence(
                token_ids=tuple(row["token_ids"]),
                mask=tuple(map(bool, row["mask"])),
                logprobs=tuple(row["rollout_logprobs"]),
                version_min=row["version_min"],
            ),
            **{name: tuple(row[name]) for name in NUMBERS},
        )
        for row in rows
    ]


def _row(sample: TrainSample, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    sequence = sample.sequence
    return {
        "id": sample.id,
        "text": decode(list(sequence.token_ids)),
        "token_ids": sequence.token_ids,
        "mask": [int(trained) for trained in sequence.mask],
        "rollout_logprobs": sequence.logprobs,
        **{name: getattr(sample, name) for name in NUMBERS},
        "version_min": sequence.version_min,
    }


def _broken_fields(sample: TrainSample) -> list[str]:
    numbers = {"rollout_logprobs": sample.sequence.logprobs, **{name: getattr(sample, name) for name in NUMBERS}}
    return [name for name, values in numbers.items() if not all(map(math.isfinite, values))]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the machine, had no room for a tensor."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and re.search(_NO_ROOM, str(error)) is not None


def out_of_memory(
    error: BaseException,
    config: TrainerConfig,
    *,
    micro_batch_tokens: int,
    work: str,
    longest: int,
    vocab_size: int,
    on_gpu: bool,
) -> TrainerError:
    """Returns the error that says what there was no room for, and which setting to change to what.

    Args:
        micro_batch_tokens: what it is now.
        work: what the trainer was doing, e.g. "step".
        longest: positions of the longest sequence in this work; 0 where there is none.
        vocab_size: logits of one token.
    """
    size = _requested_bytes(error)
    logits_bytes = 4 * config.logprob_chunk_tokens * vocab_size
    place = _place(error)
    if place == "logits" or (place == "backward" and size is not None and 2 * size >= logits_bytes):
        what = f"the logits of {config.logprob_chunk_tokens} tokens ({_bytes(logits_bytes)} in float32)"
    else:
        what = {
            "forward": "the activations of the forward pass",
            "backward": "the gradients of the backward pass",
            "step": "the optimizer's states",
        }.get(place, f"the {work}")

    smaller = max(longest, micro_batch_tokens // 2)
    fixes = []
    if what.startswith("the logits") and config.logprob_chunk_tokens > 1:
        fixes.append(f"trainer.logprob_chunk_tokens={config.logprob_chunk_tokens // 2}")
    if longest and smaller < micro_batch_tokens and place != "step":
        fixes.append(f"trainer.micro_batch_tokens={smaller} (now {micro_batch_tokens})")
    if place in ("forward", "backward") and not config.gradient_checkpointing:
        fixes.append("trainer.gradient_checkpointing=true")
    if place not in ("forward", "logits"):
        if on_gpu and not config.offload_optimizer:
            fixes.append("trainer.offload_optimizer=true")
        fixes.append("trainer.zero_stage=3 on more ranks, or model.lora={}")
    if on_gpu:
        fixes.append("a lower server.gpu_memory_utilization, or launch.share_gpu=true, where a server is on this GPU")
    asked = f" (asked for {_bytes(size)})" if size is not None else ""
    return TrainerError(
        f"out of memory for {what}{asked}; set {'; or '.join(fixes) or 'model.path to a smaller model'}"
    )


def _place(error: BaseException) -> str:
    """Returns where in the step it happened: logits, forward, backward, step, or nothing of these."""
    place = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__")
        if module == "hocket.trainer.engine":
            place = frame.f_code.co_name
        elif module == "hocket.trainer.logprobs":
            place = "logits"
    return place


def _requested_bytes(error: BaseException) -> int | None:
    found = re.search(r"allocate ([\d.]+) (bytes|[KMGT]iB)", str(error))
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


def _bytes(count: float) -> str:
    unit = next((unit for unit in reversed(_UNITS) if count >= _UNITS[unit]), "bytes")
    return f"{count / _UNITS[unit]:.3g} {unit}"
