"""Name what went wrong in a step: what was not finite, in which samples; what did not fit into memory."""

import json
import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from hocket.config import TrainerConfig
from hocket.errors import TrainerError
from hocket.system import write_atomically
from hocket.types import TrainSample

MAX_SKIPPED_STEPS = 5  # in a row, then the run stops
MAX_KEPT = 8
"""Batches of skipped steps that stay in a folder: the newest."""
MAX_NAMED = 8
"""Names that a sentence lists."""
NUMBERS = ("advantages", "ref_logprobs", "values", "returns")
"""Fields of a sample with one number per token, beside those of its sequence."""
_NO_ROOM = r"out of memory|can't allocate memory|ALLOC_FAILED"
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


_BROKEN = "likely broken: lower {}.learning_rate, and start from weights before the fault"
_KINDS = {  # in causal order: an earlier kind explains the later ones; what a message says of it, what to do about it
    "inputs": (
        "numbers that came with the samples",
        "Look for extreme rewards, or log-probs that the server should not have sent",
    ),
    "logprobs": ("the model's log-probs of", f"The weights are {_BROKEN.format('trainer')}"),
    "values": ("the critic's values of", f"The critic is {_BROKEN.format('critic')}"),
    "terms": ("loss terms", "Lower trainer.learning_rate, or look for extreme values in what was trained on"),
    "gradients": ("gradients of", "Lower trainer.learning_rate, or look for extreme values in what was trained on"),
}


class Fault:
    """Names of what was not finite in a step, by kind.

    Args:
        computed: by the sample's place, "logprobs" and "values" of its tokens; missing ones were fine.
        totals: loss and metrics of the whole batch.
        gradients: names of parameters whose gradient was not finite.
    """

    def __init__(
        self,
        samples: Sequence[TrainSample],
        *,
        computed: Mapping[int, Mapping[str, Sequence[float]]],
        totals: Mapping[str, float],
        gradients: Sequence[str],
    ) -> None:
        ids = [sample.id or f"sample {index}" for index, sample in enumerate(samples)]
        bad_fields = [[name for name, values in _numbers(s).items() if not _is_finite(values)] for s in samples]
        self.names: dict[str, list[str]] = {
            "inputs": [f"{id_} ({', '.join(fields)})" for id_, fields in zip(ids, bad_fields, strict=True) if fields],
            **{
                kind: [ids[index] for index in sorted(computed) if not _is_finite(computed[index].get(kind, ()))]
                for kind in ("logprobs", "values")
            },
            "terms": [name for name, value in totals.items() if not math.isfinite(value)],
            "gradients": list(gradients),
        }

    def __str__(self) -> str:
        return "; ".join(f"{_KINDS[kind][0]} {_some(names)}" for kind, names in self.names.items() if names)

    @property
    def advice(self) -> str:
        """What to do about the first kind that there is."""
        return _KINDS[next((kind for kind, names in self.names.items() if names), "terms")][1]


def keep_batch(path: Path, samples: Sequence[TrainSample], fault: Fault, decode: Callable[[list[int]], str]) -> None:
    """Write the samples of a skipped step, one per line, and remove the oldest of such files.

    Infinity and NaN are written as Python's json does.
    """
    rows = [
        {
            "id": sample.id,
            "text": decode(list(sample.sequence.token_ids)),
            "token_ids": sample.sequence.token_ids,
            "mask": [int(trained) for trained in sample.sequence.mask],
            **_numbers(sample),
            "version_min": sample.sequence.version_min,
        }
        for sample in samples
    ]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    facts = json.dumps(fault.names, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f'{{"not_finite": {facts},\n"samples": [\n{lines}\n]}}\n')
    for old in sorted(path.parent.glob(f"*{path.suffix}"))[:-MAX_KEPT]:
        old.unlink()


def _numbers(sample: TrainSample) -> dict[str, tuple[float, ...]]:
    return {"rollout_logprobs": sample.sequence.logprobs, **{name: getattr(sample, name) for name in NUMBERS}}


def _is_finite(values: Sequence[float]) -> bool:
    return all(map(math.isfinite, values))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device, or the machine, had no room for a tensor."""
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
    """Return the error that names what did not fit, and which setting to change to what.

    Args:
        work: what the trainer was doing, e.g. "step".
        longest: positions of the longest sequence in this work; 0 without one.
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
    """Return where in the step it happened: logits, forward, backward, step, or ""."""
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
