"""Choose the prompts of an epoch and their order (docs/curriculum.md).

The same state has to make the same plan: a resumed run plans its epoch again.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hocket.common.registry import Registry
from hocket.config import CurriculumConfig
from hocket.data.cache import KeptPrompts, Prompts


class PassRates:
    """The latest pass rates of all prompts, in lists by prompt index, from nothing or from a `state`."""

    def __init__(self, num_prompts: int, state: Mapping[str, Sequence[Any]] | None = None) -> None:
        state = state or {}
        self.rates: list[float | None] = list(state.get("rates", [None] * num_prompts))  # None: never measured
        self.epochs: list[int] = list(state.get("epochs", [-1] * num_prompts))  # of that rate; -1: never measured
        self.streaks: list[int] = list(state.get("streaks", [0] * num_prompts))  # times in a row with a rate of 1

    def record(self, index: int, epoch: int, rate: float) -> None:
        """Record a pass rate; one of an older epoch, that comes late, changes only the streak."""
        if epoch >= self.epochs[index]:
            self.rates[index], self.epochs[index] = rate, epoch
        self.streaks[index] = self.streaks[index] + 1 if rate >= 1 else 0

    def state(self) -> dict[str, list[Any]]:
        """Return a copy, ready for JSON; empty until a prompt is measured."""
        return {name: values[:] for name, values in vars(self).items()} if max(self.epochs) >= 0 else {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The prompts to plan an epoch from; a prompt is named by its index in `prompts`."""

    epoch: int  # counts from 0
    prompts: Prompts | KeptPrompts
    members: Sequence[int]  # the prompts that are not retired, shuffled by (seed, epoch)
    measured: PassRates  # of all prompts

    def difficulty(self, index: int) -> float | None:
        """Return the number of data.difficulty_column, else 1 - pass rate; None if neither is known."""
        given, rate = self.prompts.difficulties[index], self.measured.rates[index]
        return given if given is not None or rate is None else 1 - rate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """The members that an epoch plays, in this order; the others are left out, and `why` may give reasons."""

    order: Sequence[int]
    why: Mapping[int, str] = dataclasses.field(default_factory=dict)


class Curriculum:
    """Base of every curriculum."""

    uses_pass_rates = True  # if False none are kept, unless solved prompts are retired

    def plan(self, candidates: Candidates) -> EpochPlan:
        """Return the plan of the epoch that begins."""
        raise NotImplementedError

    def moves_on(self, step: int) -> bool:
        """Return whether the epoch ends before its next prompt; `step` is prompts drawn / rollout.prompts_per_step."""
        return False

    def measured(self, index: int, pass_rate: float) -> None:
        """Receive the pass rate of a prompt that was played."""

    def state(self) -> dict[str, Any]:
        """Return what it remembers besides its options, ready for JSON."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a state."""


CURRICULA: Registry[type[Curriculum]] = Registry("curriculum")
curriculum = CURRICULA.register  # decorator: @curriculum("name") on a class


def bind(config: CurriculumConfig) -> Curriculum:
    """Return the configured curriculum; raise ConfigError if its name or an option is wrong."""
    options, keys = config.model_extra or {}, CurriculumConfig.model_fields
    made: Curriculum = CURRICULA.bind(config.name, options, section="curriculum", keys=keys)()
    return made


@curriculum("shuffle")
class Shuffle(Curriculum):
    """Every prompt, shuffled by (seed, epoch)."""

    uses_pass_rates = False

    def plan(self, candidates: Candidates) -> EpochPlan:
        return EpochPlan(order=candidates.members)


@curriculum("sorted")
class Sorted(Curriculum):
    """From easy to hard; equals are shuffled, and prompts of unknown difficulty come last."""

    def plan(self, candidates: Candidates) -> EpochPlan:
        known = {i: d for i in candidates.members if (d := candidates.difficulty(i)) is not None}
        return EpochPlan(order=sorted(candidates.members, key=lambda index: known.get(index, math.inf)))
