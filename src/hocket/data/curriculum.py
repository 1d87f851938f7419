"""Choose the prompts of an epoch and their order (docs/curriculum.md).

The same state makes the same plan: a resumed run plans its epoch again.
"""

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hocket.common.registry import Registry
from hocket.config import CurriculumConfig
from hocket.data.prompt_list import Prompts
from hocket.errors import DataError


class PassRates:
    def __init__(self, num_prompts: int, **state: Sequence[Any]) -> None:
        self.rates: list[float | None] = [None] * num_prompts  # the latest, by prompt index
        self.epochs = [-1] * num_prompts  # of that rate
        self.streaks = [0] * num_prompts  # times in a row with a rate of 1
        vars(self).update(copy.deepcopy(state))

    def record(self, index: int, epoch: int, rate: float) -> None:
        """Record a pass rate; one of an older epoch changes only the streak."""
        if epoch >= self.epochs[index]:
            self.rates[index] = rate
            self.epochs[index] = epoch
        self.streaks[index] = self.streaks[index] + 1 if rate >= 1 else 0

    def state(self) -> dict[str, list[Any]]:
        return (
            {name: values[:] for name, values in vars(self).items()}
            if max(self.epochs) >= 0
            else {}
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What to plan an epoch from, by index in `prompts`."""

    epoch: int  # counts from 0
    prompts: Prompts
    members: Sequence[int]  # the prompts that are not retired, shuffled by (seed, epoch)
    measured: PassRates


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """The members that an epoch plays, in order; `why`: reasons for leaving others out."""

    order: Sequence[int]
    why: Mapping[int, str] = dataclasses.field(default_factory=dict)


class Curriculum:
    uses_pass_rates = True  # else none are kept, unless prompts are retired

    def plan(self, candidates: Candidates) -> EpochPlan:
        raise NotImplementedError

    def moves_on(self, step: int) -> bool:
        """Decide whether the epoch ends; `step` is prompts drawn / rollout.prompts_per_step."""
        return False

    def measured(self, index: int, pass_rate: float) -> None:
        """Receive the pass rate of a played prompt."""

    def state(self) -> dict[str, Any]:
        """Return the curriculum's memory, for JSON."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a state."""


CURRICULA: Registry[type[Curriculum]] = Registry("curriculum")
curriculum = CURRICULA.register  # decorator: @curriculum("name") on a class


@curriculum("shuffle")
class Shuffle(Curriculum):
    """Every prompt, shuffled by (seed, epoch)."""

    uses_pass_rates = False

    def plan(self, candidates: Candidates) -> EpochPlan:
        return EpochPlan(order=candidates.members)


@curriculum("sorted")
class Sorted(Curriculum):
    """From easy to hard, by a column or pass rate; equals are shuffled, unknown ones come last."""

    def __init__(self, difficulty_column: str | None = None) -> None:
        self._column = difficulty_column

    def plan(self, candidates: Candidates) -> EpochPlan:
        rates = enumerate(candidates.measured.rates)
        prompts = candidates.prompts
        known = {index: -rate for index, rate in rates if rate is not None}
        if self._column is not None:
            known = dict(enumerate(prompts.column(self._column)))
        for index, value in known.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                what = f"curriculum.difficulty_column={self._column} must name a column of numbers"
                raise DataError(f"{what}: that of {prompts[index].id} is {value!r:.80}")
        return EpochPlan(
            order=sorted(candidates.members, key=lambda index: known.get(index, math.inf))
        )


def bind(config: CurriculumConfig) -> Curriculum:
    keys = CurriculumConfig.model_fields
    made: Curriculum = CURRICULA.bind(
        config.name, config.model_extra, section="curriculum", keys=keys
    )()
    return made
