"""Which prompts an epoch has and in which order: a class registered under a name decides.

    from hocket.data import Curriculum, Plan, Pool, curriculum

    @curriculum("short_first")
    class ShortFirst(Curriculum):
        def __init__(self, longest=100):
            self.longest = longest

        def plan(self, pool: Pool) -> Plan:
            def length(i):
                return len(pool.prompts[i].token_ids)

            short = [i for i in pool.members if length(i) <= self.longest]
            return Plan(order=sorted(short, key=length))

Arguments of the constructor are options, set in the config beside the name: `curriculum: {name: short_first}`. The same
state has to make the same plan: a resumed run plans its epoch again. Knows nothing of draws, rollouts or files.
"""

import bisect
import collections
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hocket.config import CurriculumConfig
from hocket.data.pass_rates import PassRates
from hocket.registry import Registry
from hocket.types import Prompt

NUM_RECENT = 64
"""Pass rates over which `staged` takes the mean."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What a curriculum decides from when an epoch begins. A prompt is told by its index in `prompts`.

    Attributes:
        epoch: counts from 0.
        members: the prompts that are not retired, in an order that seed and epoch decide.
        measured: pass rates of all prompts.
    """

    epoch: int
    prompts: Sequence[Prompt]
    members: Sequence[int]
    measured: PassRates

    def difficulty(self, index: int) -> float | None:
        """Returns the number of data.difficulty_column, else 1 - pass rate; None where neither is known."""
        given, rate = self.prompts[index].difficulty, self.measured.rate(index)
        return given if given is not None or rate is None else 1 - rate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An epoch: the members that are played, in this order; the others are left out, and `why` may say the reason."""

    order: Sequence[int]
    why: Mapping[int, str] = dataclasses.field(default_factory=dict)


class Curriculum:
    """Base of every curriculum."""

    uses_pass_rates = True
    """Without it none is kept, unless solved prompts are retired."""

    def plan(self, pool: Pool) -> Plan:
        """Returns the epoch that begins."""
        raise NotImplementedError

    def moves_on(self, step: int) -> bool:
        """Returns whether the epoch ends before its next prompt; asked before each one.

        Args:
            step: prompts drawn so far, divided by rollout.prompts_per_step.
        """
        return False

    def measured(self, index: int, pass_rate: float) -> None:
        """Hears of a prompt that was played."""

    def state(self) -> dict[str, Any]:
        """Returns what it remembers besides its options, ready for JSON."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes back to it."""


CURRICULA: Registry[type[Curriculum]] = Registry("curriculum")
curriculum = CURRICULA.register  # decorator: @curriculum("name") on a class


def bind(config: CurriculumConfig) -> Curriculum:
    """Returns the configured curriculum. Raises ConfigError where there is no such one, or its options are wrong."""
    options, keys = config.model_extra or {}, CurriculumConfig.model_fields
    made: Curriculum = CURRICULA.bind(config.name, options, section="curriculum", keys=keys)()
    return made


@curriculum("shuffle")
class Shuffle(Curriculum):
    """Every prompt, in an order that seed and epoch decide."""

    uses_pass_rates = False

    def plan(self, pool: Pool) -> Plan:
        return Plan(order=pool.members)


@curriculum("sorted")
class Sorted(Curriculum):
    """From easy to hard; equals are shuffled, and prompts of unknown difficulty come last."""

    def plan(self, pool: Pool) -> Plan:
        def rank(index: int) -> float:
            difficulty = pool.difficulty(index)
            return math.inf if difficulty is None else difficulty

        return Plan(order=sorted(pool.members, key=rank))


@curriculum("window")
class Window(Curriculum):
    """Prompts that are neither too hard nor too easy now: with a pass rate of low to high, or not measured yet.

    Another one sits out `rest` epochs, then is played to be measured again. Where all sit out, those that have done so
    for longest are played.
    """

    def __init__(self, low: float = 0.2, high: float = 0.8, rest: int = 2) -> None:
        if not 0 <= low < high <= 1:
            raise ValueError(f"low={low:g} and high={high:g} must be pass rates, the first one lower")
        if rest < 0:
            raise ValueError(f"rest={rest} must be a number of epochs, at least 0")
        self._low, self._high, self._rest = low, high, rest

    def plan(self, pool: Pool) -> Plan:
        why = {}
        for index in pool.members:
            rate = pool.measured.rate(index)
            if rate is None or pool.epoch - pool.measured.epoch(index) > self._rest:
                continue
            if rate < self._low:
                why[index] = f"too hard: pass rate below {self._low:g}"
            elif rate > self._high:
                why[index] = f"too easy: pass rate above {self._high:g}"
        if len(why) == len(pool.members):
            oldest = min(map(pool.measured.epoch, why))
            why = {index: reason for index, reason in why.items() if pool.measured.epoch(index) > oldest}
        return Plan(order=[index for index in pool.members if index not in why], why=why)


@curriculum("staged")
class Staged(Curriculum):
    """From simple to complex: the pool begins with the first stage's prompts and grows by one stage after another.

    Prompts of unknown difficulty belong to every stage, until they have been measured.

    Args:
        bounds: highest difficulty of each stage but the last, which has all others.
        steps: a stage lasts at most so long.
        pass_rate: it is over once the mean of its prompts' latest 64 pass rates (fewer where it has fewer) is this.
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

    def plan(self, pool: Pool) -> Plan:
        known = {i: d for i in pool.members if (d := pool.difficulty(i)) is not None}
        stages = {index: bisect.bisect_left(self._bounds, difficulty) for index, difficulty in known.items()}
        if stages and self._stage not in stages.values():  # it is empty, or all of its prompts are retired
            self._stage = min((stage for stage in stages.values() if stage > self._stage), default=self._stage)
            self._recent.clear()
        self._newest = frozenset(index for index, stage in stages.items() if stage == self._stage)
        why = {i: f"stage {stage + 1} has not begun" for i, stage in stages.items() if stage > self._stage}
        return Plan(order=[index for index in pool.members if index not in why], why=why)

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
