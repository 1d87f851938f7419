"""Choose the prompts of an epoch and their order: a curriculum is a class registered under a name.

docs/curriculum.md has an example. The same state has to make the same plan: a resumed run plans its epoch again.
"""

import bisect
import collections
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hocket.config import CurriculumConfig
from hocket.registry import Registry
from hocket.types import Prompt

NUM_RECENT = 64  # pass rates in the mean of `staged`


class PassRates:
    """The latest pass rates of all prompts, in lists by prompt index, from nothing or from a `state`."""

    def __init__(self, num_prompts: int, state: Mapping[str, Sequence[Any]] | None = None) -> None:
        state = state or {}
        self.rates: list[float | None] = list(state.get("rates", [None] * num_prompts))  # None: never measured
        self.epochs: list[int] = list(state.get("epochs", [-1] * num_prompts))  # of that rate; -1: never measured
        self.streaks: list[int] = list(state.get("streaks", [0] * num_prompts))  # times in a row with a rate of 1

    def record(self, index: int, epoch: int, rate: float) -> None:
        """Record the pass rate of a prompt; a late one of an older epoch changes only the streak."""
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
    prompts: Sequence[Prompt]
    members: Sequence[int]  # the prompts that are not retired, shuffled by (seed, epoch)
    measured: PassRates  # of all prompts

    def difficulty(self, index: int) -> float | None:
        """Return the number of data.difficulty_column, else 1 - pass rate; None if neither is known."""
        given, rate = self.prompts[index].difficulty, self.measured.rates[index]
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
        def rank(index: int) -> float:
            difficulty = candidates.difficulty(index)
            return math.inf if difficulty is None else difficulty

        return EpochPlan(order=sorted(candidates.members, key=rank))


@curriculum("window")
class Window(Curriculum):
    """Prompts that are neither too hard nor too easy now: pass rate from low to high, or not measured yet.

    The others sit out `rest` epochs and are then measured again. If all sit out, those that wait longest are played.
    """

    def __init__(self, low: float = 0.2, high: float = 0.8, rest: int = 2) -> None:
        if not 0 <= low < high <= 1:
            raise ValueError(f"low={low:g} and high={high:g} must be pass rates, the first one lower")
        if rest < 0:
            raise ValueError(f"rest={rest} must be a number of epochs, at least 0")
        self._low, self._high, self._rest = low, high, rest

    def plan(self, candidates: Candidates) -> EpochPlan:
        why, measured = {}, candidates.measured
        for index in candidates.members:
            rate = measured.rates[index]
            if rate is None or candidates.epoch - measured.epochs[index] > self._rest:
                continue
            if rate < self._low:
                why[index] = f"too hard: pass rate below {self._low:g}"
            elif rate > self._high:
                why[index] = f"too easy: pass rate above {self._high:g}"
        if len(why) == len(candidates.members):
            oldest = min(measured.epochs[index] for index in why)
            why = {index: reason for index, reason in why.items() if measured.epochs[index] > oldest}
        return EpochPlan(order=[index for index in candidates.members if index not in why], why=why)


@curriculum("staged")
class Staged(Curriculum):
    """From simple to complex: begin with the prompts of the first stage and add one stage after another.

    `bounds` are the highest difficulties of all stages but the last. A stage ends after `steps` steps, or when the mean
    of its prompts' latest 64 pass rates (fewer if it has fewer prompts) reaches `pass_rate`. Prompts of unknown
    difficulty belong to every stage, until they have been measured.
    """

    def __init__(self, bounds: Sequence[float], steps: int | None = None, pass_rate: float | None = None) -> None:
        if not all(isinstance(bound, int | float) for bound in bounds):
            raise ValueError(f"bounds={bounds} must be numbers")
        if not bounds or list(bounds) != sorted(set(bounds)):
            raise ValueError(f"bounds={bounds} must be a list of difficulties, each higher than the one before")
        if steps is None and pass_rate is None:
            raise ValueError("nothing would ever end a stage: set steps, pass_rate, or both")
        if (steps is not None and steps < 1) or (pass_rate is not None and not 0 < pass_rate <= 1):
            raise ValueError("steps must be at least 1, and pass_rate above 0 and at most 1")
        self._bounds, self._steps, self._pass_rate = bounds, steps, pass_rate
        self._newest: frozenset[int] = frozenset()
        self._stage, self._since = 0, 0
        self._recent: collections.deque[float] = collections.deque(maxlen=NUM_RECENT)

    def plan(self, candidates: Candidates) -> EpochPlan:
        known = {i: d for i in candidates.members if (d := candidates.difficulty(i)) is not None}
        stages = {index: bisect.bisect_left(self._bounds, difficulty) for index, difficulty in known.items()}
        if stages and self._stage not in stages.values():  # it is empty, or all of its prompts are retired
            self._stage = min((stage for stage in stages.values() if stage > self._stage), default=self._stage)
            self._recent.clear()
        self._newest = frozenset(index for index, stage in stages.items() if stage == self._stage)
        why = {i: f"stage {stage + 1} has not begun" for i, stage in stages.items() if stage > self._stage}
        return EpochPlan(order=[index for index in candidates.members if index not in why], why=why)

    def moves_on(self, step: int) -> bool:
        if self._stage == len(self._bounds):
            return False
        size = min(NUM_RECENT, max(len(self._newest), 1))
        latest = list(self._recent)[-size:]
        learnt = self._pass_rate is not None and len(latest) == size and statistics.fmean(latest) >= self._pass_rate
        if not learnt and (self._steps is None or step - self._since < self._steps):
            return False
        self._stage, self._since = self._stage + 1, step
        self._recent.clear()
        return True

    def measured(self, index: int, pass_rate: float) -> None:
        if index in self._newest:
            self._recent.append(pass_rate)

    def state(self) -> dict[str, Any]:
        return {"stage": self._stage, "since": self._since, "recent": list(self._recent)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._stage, self._since = state["stage"], state["since"]
        self._recent = collections.deque(state["recent"], maxlen=NUM_RECENT)
