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

Fault = Mapping[str, Sequence[str]]
"""Kind of number → names of those that were not finite, in causal order: an earlier kind explains the later ones."""
MAX_SKIPPED_STEPS = 5  # in a row, then the run stops
MAX_KEPT = 8  # batches of skipped steps that stay in a folder: the newest
MAX_NAMED = 8  # in a sentence
NUMBERS = ("advantages", "ref_logprobs", "values", "returns")  # of a sample, one per token
_NO_ROOM = r"out of memory|can't allocate memory|ALLOC_FAILED"
_COMPUTED = ("logprobs", "values")
_BROKEN = "likely broken: lower {}.learning_rate, and start from weights before the fault"
_KINDS = {  # what a message says of each kind, and what to do about it
    "inputs": (
        "numbers that came with the samples",
        "Look for extreme rewards, or log-probs that the server should not have sent",
    ),
    "logprobs": ("the model's log-probs of", f"The weights are {_BROKEN.format('trainer')}"),
    "values": ("the critic's values of", f"The critic is {_BROKEN.format('critic')}"),
    "terms": ("loss terms", "Lower trainer.learning_rate, or look for extreme values in what was trained on"),
    "gradients": ("gradients of", "Lower trainer.learning_rate, or look for extreme values in what was trained on"),
}


def find_fault(
    samples: Sequence[TrainSample],
    *,
    computed: Mapping[int, Mapping[str, Sequence[float]]],
    totals: Mapping[str, float],
    gradients: Sequence[str],
) -> Fault:
    """Return the names of what was not finite in a step, by kind.

    Args:
        computed: by the sample's place, "logprobs" and "values" of its tokens; missing ones were fine.
        totals: loss and metrics of the whole batch.
        gradients: names of parameters whose gradient was not finite.
    """
    ids = [sample.id or f"sample {index}" for index, sample in enumerate(samples)]
    bad_fields = [[name for name, values in _numbers(s).items() if not _is_finite(values)] for s in samples]
    bad = {kind: [i for i in sorted(computed) if not _is_finite(computed[i].get(kind, ()))] for kind in _COMPUTED}
    return {
        "inputs": [f"{id_} ({', '.join(fields)})" for id_, fields in zip(ids, bad_fields, strict=True) if fields],
        **{kind: [ids[index] for index in places] for kind, places in bad.items()},
        "terms": [name for name, value in totals.items() if not math.isfinite(value)],
        "gradients": list(gradients),
    }


def describe(fault: Fault) -> str:
    """Return what was not finite, and what to do about the first kind that there is."""
    kinds = [kind for kind, names in fault.items() if names] or ["terms"]
    found = [f"{_KINDS[kind][0]} {', '.join(fault[kind][:MAX_NAMED])}" for kind in kinds]
    return f"{'; '.join(found)}. {_KINDS[kinds[0]][1]}"


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
    facts = json.dumps(fault, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f'{{"not_finite": {facts},\n"samples": [\n{lines}\n]}}\n')
    for old in sorted(path.parent.glob(f"*{path.suffix}"))[:-MAX_KEPT]:
        old.unlink()


def _numbers(sample: TrainSample) -> dict[str, tuple[float, ...]]:
    return {"rollout_logprobs": sample.sequence.logprobs, **{name: getattr(sample, name) for name in NUMBERS}}


def _is_finite(values: Sequence[float]) -> bool:
    return all(map(math.isfinite, values))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device, or the machine, had no room for a tensor."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and re.search(_NO_ROOM, str(error)) is not None


def out_of_memory(
    error: BaseException, config: TrainerConfig, *, micro_batch_tokens: int, work: str, longest: int, on_gpu: bool
) -> TrainerError:
    """Return the error that names what did not fit, and which setting to change to what.

    Args:
        work: what the trainer was doing, e.g. "step".
        longest: positions of the longest sequence in this work; 0 without one.
    """
    place = _place(error)
    what = {
        "logits": f"the logits of {config.logprob_chunk_tokens} tokens",
        "forward": "the activations of the forward pass",
        "backward": "the gradients of the backward pass",
        "step": "the optimizer's states",
    }.get(place, f"the {work}")
    chunk, smaller = config.logprob_chunk_tokens // 2, max(longest, micro_batch_tokens // 2)
    in_pass, held = place in ("forward", "backward"), place not in ("forward", "logits")
    fixes = {
        f"trainer.logprob_chunk_tokens={chunk}": place in ("logits", "backward") and chunk > 0,
        f"trainer.micro_batch_tokens={smaller} (now {micro_batch_tokens})": longest > 0
        and smaller < micro_batch_tokens
        and place != "step",
        "trainer.gradient_checkpointing=true": in_pass and not config.gradient_checkpointing,
        "trainer.offload_optimizer=true": held and on_gpu and not config.offload_optimizer,
        "trainer.zero_stage=3 on more ranks, or model.lora={}": held,
        "a lower server.gpu_memory_utilization, or launch.share_gpu=true, where a server is on this GPU": on_gpu,
    }
    advice = "; or ".join(fix for fix, helps in fixes.items() if helps) or "model.path to a smaller model"
    asked = re.search(r"allocate [\d.]+ \w+", str(error))
    return TrainerError(f"out of memory for {what}{f' (could not {asked[0]})' if asked else ''}; set {advice}")


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
