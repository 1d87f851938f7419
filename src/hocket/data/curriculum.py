"""Choose the prompts of an epoch and their order (docs/how-to/curriculum.md).

The same state makes the same plan: a resumed run plans its epoch again.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hocket.common.registry import Registry
from hocket.config import CurriculumConfig
from hocket.errors import DataError
from hocket.types import Prompts


class PassRates:
    """The latest pass rate of each prompt, and how often in a row it was solved; by prompt index.

    A pass rate is the share of a prompt's scored rollouts that solved it, from 0 to 1.
    """

    def __init__(
        self,
        num_prompts: int,
        *,
        rates: Sequence[float | None] = (),
        epochs: Sequence[int] = (),
        streaks: Sequence[int] = (),
    ) -> None:
        self.rates: list[float | None] = list(rates) or [None] * num_prompts  # None: not played yet
        self.epochs = list(epochs) or [-1] * num_prompts  # the epoch of that rate; -1: none
        self.streaks = list(streaks) or [0] * num_prompts  # the times in a row with a rate of 1

    def record(self, index: int, epoch: int, rate: float) -> None:
        """Record a pass rate; one of an older epoch changes only the streak."""
        if epoch >= self.epochs[index]:
            self.rates[index] = rate
            self.epochs[index] = epoch
        self.streaks[index] = self.streaks[index] + 1 if rate >= 1 else 0

    def state(self) -> dict[str, list[Any]]:
        """Return copies of the lists by name, as __init__ takes them; {} before any record."""
        if max(self.epochs) < 0:
            return {}
        return {
            "rates": list(self.rates),
            "epochs": list(self.epochs),
            "streaks": list(self.streaks),
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The prompts from which an epoch is planned, by index in `prompts`."""

    epoch: int  # counts from 0
    prompts: Prompts  # all prompts of the source
    members: Sequence[int]  # the prompts that are not retired, shuffled by (seed, epoch)
    measured: PassRates  # `measured.rates` has the latest pass rate of each prompt, or None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """The members that an epoch plays, in order."""

    order: Sequence[int]  # prompt indices, each at most once
    # Reasons for leaving out members, by prompt index; the ledger shows them.
    why: Mapping[int, str] = dataclasses.field(default_factory=dict)


class Curriculum:
    """Plans each epoch. Subclasses implement `plan`, and other methods that they need.

    The arguments of its constructor are options, which the section `curriculum` sets.

    Example: short prompts first, which `curriculum.name: shortest` then chooses.

        >>> @curriculum("shortest")
        ... class Shortest(Curriculum):
        ...     uses_pass_rates = False
        ...
        ...     def plan(self, candidates):
        ...         lengths = [len(prompt.token_ids) for prompt in candidates.prompts]
        ...         return EpochPlan(order=sorted(candidates.members, key=lengths.__getitem__))
    """

    uses_pass_rates = True  # False: no pass rates are kept, unless prompts are retired

    def plan(self, candidates: Candidates) -> EpochPlan:
        """Choose the prompts of an epoch and their order, when it begins."""
        raise NotImplementedError

    def moves_on(self, step: int) -> bool:
        """Decide whether the epoch ends; `step` is prompts drawn / rollout.prompts_per_step."""
        return False

    def measured(self, index: int, pass_rate: float) -> None:
        """Receive the pass rate of a played prompt."""

    def state(self) -> dict[str, Any]:
        """Return what the curriculum remembers, as JSON; checkpoints have it."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to what `state` has returned."""


CURRICULA: Registry[type[Curriculum]] = Registry("curriculum")
curriculum = CURRICULA.register
"""Register a subclass of Curriculum (decorator), which has an example.

Args:
    name: its name in `curriculum.name`.
"""


@curriculum("shuffle")
class Shuffle(Curriculum):
    """Plays every prompt, shuffled by (seed, epoch)."""

    uses_pass_rates = False

    def plan(self, candidates: Candidates) -> EpochPlan:
        return EpochPlan(order=candidates.members)


@curriculum("sorted")
class Sorted(Curriculum):
    """Plays every prompt, from easy to hard, by a column or else by pass rate.

    Prompts of equal difficulty are shuffled, those of unknown difficulty come last.
    """

    def __init__(self, difficulty_column: str | None = None) -> None:
        self._column = difficulty_column

    def plan(self, candidates: Candidates) -> EpochPlan:
        difficulties = self._difficulties(candidates)
        for index, value in difficulties.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                prompt = candidates.prompts[index].id
                raise DataError(
                    f"curriculum.difficulty_column={self._column} must name a column of numbers: "
                    f"that of {prompt} is {value!r:.80}"
                )
        # Sorting is stable: equal prompts keep the shuffled order of the members.
        order = sorted(candidates.members, key=lambda index: difficulties.get(index, math.inf))
        return EpochPlan(order=order)

    def _difficulties(self, candidates: Candidates) -> dict[int, Any]:
        """Return the difficulty of each prompt by index, without the unknown ones."""
        if self._column is not None:
            return dict(enumerate(candidates.prompts.column(self._column)))
        rates = enumerate(candidates.measured.rates)
        return {index: -rate for index, rate in rates if rate is not None}


def bind(config: CurriculumConfig) -> Curriculum:
    """Make the curriculum that the section names, with its options."""
    keys = CurriculumConfig.model_fields
    make = CURRICULA.bind(config.name, config.model_extra, section="curriculum", keys=keys)
    bound: Curriculum = make()
    return bound
