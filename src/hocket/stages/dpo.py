"""Direct preference optimisation: what is chosen gets likelier than what is rejected, compared with a reference."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from hocket.algorithm.losses import LossOutput
from hocket.common.files import write_atomically
from hocket.common.tasks import seed_of
from hocket.config import Config
from hocket.config.sections import UserPath
from hocket.data.preferences import Preference
from hocket.observe.rows import reading
from hocket.stages import STAGES, pairs
from hocket.stages.driver import Row, Stage, flat, options_of_stage
from hocket.trainer.batching import TrainBatch
from hocket.trainer.models import Extra, Objective
from hocket.trainer.reference import frozen
from hocket.trainer.trainer import Trainer

REFERENCE = "ref_logprobs"  # column: at a sequence's end its log-prob by the reference
FILE = "reference.json"
CHUNK = 256  # sequences whose log-probs are measured at a time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DpoOptions:
    """Keys of the section dpo (docs/stages.md)."""

    loss: Literal["dpo", "ipo", "cdpo", "robust", "simpo"] = "dpo"
    beta: Annotated[float, Field(gt=0)] = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0  # share of pairs that are the wrong way round
    length_normalized: bool = False  # means over tokens in place of sums
    gamma: Annotated[float, Field(ge=0)] = 0.0  # margin of simpo
    reference: UserPath | None = None  # default: the model that training begins with

    def __post_init__(self) -> None:
        for option, given, losses in (
            ("label_smoothing", self.label_smoothing, ("cdpo", "robust")),
            ("gamma", self.gamma, ("simpo",)),
            ("reference", self.reference, ("dpo", "ipo", "cdpo", "robust")),
        ):
            if given and self.loss not in losses:
                raise ValueError(f"{option} has no effect with loss={self.loss}, only with {' or '.join(losses)}")


@STAGES.register("dpo")
def dpo(config: Config) -> Stage:
    options = options_of_stage(DpoOptions, config.dpo, "dpo")
    extras = [Extra(column=REFERENCE, load=lambda models: models.columns["logprobs"])]
    if options.reference is not None:
        extras = [frozen(options.reference, "dpo.reference", config.model)]
    if options.loss == "simpo":
        extras = []
    return Stage(
        settings=config.dpo,
        rows="preferences",
        first="the first one, with what is compared in [[ ]]",
        rate="preferences mostly take 5e-7 to 5e-6, 10x as much with model.lora",
        objective=Objective(loss=functools.partial(pair_loss, options=options), extras=extras, unit=2),
        load=functools.partial(pairs.load, config.model, _row),
        prepare=functools.partial(_referenced, config.run_dir / FILE, options.reference) if extras else None,
        held_out=pairs.held_out,
    )


def _row(pair: Preference) -> Row:
    return pairs.sample(pair.chosen), pairs.sample(pair.rejected)


def _referenced(
    path: Path, reference: str | None, trainer: Trainer, rows: Sequence[Row], resumes: bool, say: Callable[[str], None]
) -> list[Row]:
    """Return the rows with the reference's log-probs, measured at the start of a run and kept at `path`.

    Those of an earlier run do not count: the model's files may have changed since.
    """
    samples = flat(rows)
    sequences = [sample.sequence for sample in samples]
    origin = seed_of(reference, *((one.token_ids, one.mask) for one in sequences))
    kept: dict[str, Any] = {}
    if resumes and path.exists():
        with reading(path):
            kept = json.loads(path.read_text(encoding="utf-8"))
    if kept.get("hash") != origin:
        say(f"the reference's log-probs of {len(rows)} preferences are measured once, and kept in {path}")
        measured: list[float] = []
        for first in range(0, len(samples), CHUNK):
            found = trainer.numbers(samples[first : first + CHUNK], (REFERENCE,))
            measured += [math.fsum(columns[REFERENCE]) for columns in found]
        kept = {"hash": origin, "logps": measured}
        write_atomically(path, json.dumps(kept))
    by_sequence = zip(sequences, kept["logps"], strict=True)
    with_column = [pairs.sample(one, ref_logprobs=logp) for one, logp in by_sequence]
    return list(zip(with_column[::2], with_column[1::2], strict=True))


def pair_loss(logprobs_bt: Tensor, entropy_bt: Tensor, batch: TrainBatch, options: DpoOptions) -> LossOutput:
    """Return the batch's share of the mean of `losses` over pairs.

    h = log π(chosen) / ref(chosen) − log π(rejected) / ref(rejected), of sums or means over tokens; simpo: without ref.
    """
    del entropy_bt
    logps_p2 = pairs.sums(logprobs_bt, batch)
    ratios_p2 = logps_p2
    if REFERENCE in batch.columns:
        ratios_p2 = logps_p2 - pairs.sums(batch.columns[REFERENCE], batch)
    compared_p2 = ratios_p2
    if options.length_normalized or options.loss in ("ipo", "simpo"):
        compared_p2 = ratios_p2 / pairs.sums(batch.mask_bt, batch)
    chosen_p, rejected_p = compared_p2.unbind(dim=1)
    loss = pairs.mean(losses(chosen_p - rejected_p, options), batch)
    rewards_p2 = compared_p2 if options.loss == "simpo" else ratios_p2
    metrics = pairs.metrics(options.beta * rewards_p2, batch)
    for name, of_side_p in zip(("chosen", "rejected"), logps_p2.detach().unbind(dim=1), strict=True):
        metrics[f"logps/{name}"] = pairs.mean(of_side_p, batch)
    return LossOutput(loss=loss, metrics=metrics)


def losses(h_p: Tensor, options: DpoOptions) -> Tensor:
    """Return the loss of each pair, with x = beta h − gamma and e = label_smoothing.

    dpo: −log σ(x) (arXiv 2305.18290), simpo likewise (2405.14734). cdpo: −(1 − e) log σ(x) − e log σ(−x)
    (Mitchell's note of 2023). robust: [−(1 − e) log σ(x) + e log σ(−x)] / (1 − 2e) (2403.00409). ipo:
    (h − 1 / (2 beta))² (2310.12036), of means over tokens as in TRL.
    """
    if options.loss == "ipo":
        return (h_p - 1 / (2 * options.beta)).square()
    x_p = options.beta * h_p - options.gamma
    share = options.label_smoothing
    right_p = -(1 - share) * logsigmoid(x_p)
    wrong_p = -share * logsigmoid(-x_p)
    if options.loss == "robust":
        return (right_p - wrong_p) / (1 - 2 * share)
    return right_p + wrong_p
