"""Draw prompts in epochs of every prompt once, and track each draw until its step is trained.

A resumed run first repeats the draws in flight.
"""

import collections
import copy
import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Mapping
from typing import Any, Literal

from hocket.data.curriculum import Candidates, Curriculum, PassRates
from hocket.data.prompt_list import Prompts
from hocket.errors import DataError
from hocket.formats import LeftOut, OutcomeRow, SizeRow
from hocket.types import Prompt

EXHAUSTED = (  # the meaning of a `PromptStream.take` without prompts
    "every prompt is retired (curriculum.retire_after): start a new run from the newest weights (model.path) on "
    "harder prompts or with a higher curriculum.retire_after"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptOutcome:
    state: Literal["trained", "filtered", "failed"]  # filtered: its group has no signal
    why: str = ""  # it was not trained
    pass_rate: float | None = None  # share of its scored rollouts that solved it


class PromptStream:
    """Prompts in epochs; the draws of a run are numbered 0, 1, 2, ..."""

    def __init__(
        self,
        prompts: Prompts,
        curriculum: Curriculum,
        *,
        seed: int,
        retire_after: int = 0,  # times solved in a row, after which a prompt is left out; 0 disables it
        prompts_per_step: float = 1,
    ) -> None:
        if not prompts:
            raise DataError("there is no prompt to train on; check data.source, data.limit and data.max_prompt_tokens")
        self.uses_pass_rates = curriculum.uses_pass_rates or retire_after > 0
        self._prompts = prompts
        self._curriculum = curriculum
        self._identity = {"seed": seed, "num_prompts": len(prompts), "fingerprint": prompts.fingerprint}
        self._measured = PassRates(len(prompts))
        self._retire_after = retire_after or math.inf
        self._prompts_per_step = prompts_per_step
        self._num_drawn = 0
        self.number: Callable[[], int] = lambda: self._num_drawn  # of the next draw; a mixture counts all sources'
        self._in_flight: dict[int, dict[str, Any]] = {}  # by number
        self._again: collections.deque[int] = collections.deque()  # numbers to draw once more after a restore
        self._entries: list[OutcomeRow] = []
        self._left_out: dict[int, tuple[LeftOut, str]] = {}  # index: (state, why)
        self._begin(0, *self._plan(0))

    def take(self, num_prompts: int) -> dict[int, Prompt]:
        """Return the next prompts by draw number, across epochs; fewer once all are retired."""
        numbers = itertools.islice(iter(self._next, None), num_prompts)
        return {number: self._prompts[self._in_flight[number]["index"]] for number in numbers}

    def settle(self, number: int, outcome: PromptOutcome) -> None:
        """Record the outcome of a draw, once. Raise KeyError if it is not in flight."""
        draw = self._in_flight.pop(number)
        entry: OutcomeRow = {
            "draw": number,
            "epoch": draw["epoch"],
            "prompt": draw["prompt"],
            "state": outcome.state,
        }
        if outcome.why:
            entry["why"] = outcome.why
        if outcome.pass_rate is not None:
            entry["pass_rate"] = outcome.pass_rate
            if self.uses_pass_rates:
                self._measured.record(draw["index"], draw["epoch"], outcome.pass_rate)
                self._curriculum.measured(draw["index"], outcome.pass_rate)
        self._entries.append(entry)

    def sizes(self) -> list[SizeRow]:
        """Return the first lines of the ledger."""
        return [{"num_prompts": len(self._prompts)}]

    def entries(self) -> list[OutcomeRow]:
        """Return the ledger's lines since the last call."""
        entries, self._entries = self._entries, []
        return entries

    def state(self) -> dict[str, Any]:
        return {
            **self._identity,
            "epoch": self._epoch,
            "position": self._position,
            "num_drawn": self._num_drawn,
            "in_flight": list(self._in_flight.values()),
            "entries": list(self._entries),
            "at_start": self._at_start,
            "learnt": self._learnt(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the draws in flight. Raise DataError for other prompts."""
        for key, value in self._identity.items():
            if state[key] != value:
                changed = f"{key} of the prompts was {state[key]} and is {value} now"
                raise DataError(f"can't resume: {changed}; use the same data and trainer.seed, or start a new run")
        self._epoch = state["epoch"]
        self._position = state["position"]
        self._num_drawn = state["num_drawn"]
        self._in_flight = {draw["draw"]: draw for draw in state["in_flight"]}
        self._again = collections.deque(self._in_flight)
        self._entries = list(state["entries"])
        self._at_start = state["at_start"]
        self._recall(self._at_start)  # the epoch's plan follows from what was known when it began
        self._order, self._left_out = self._plan(self._epoch)
        self._recall(state["learnt"])

    def _learnt(self) -> dict[str, Any]:
        return {"pass_rates": self._measured.state(), "curriculum": copy.deepcopy(self._curriculum.state())}

    def _recall(self, learnt: Mapping[str, Any]) -> None:
        self._measured = PassRates(len(self._prompts), **learnt["pass_rates"])
        self._curriculum.restore(learnt["curriculum"])

    def _next(self) -> int | None:
        if self._again:
            return self._again.popleft()
        moves_on = self._curriculum.moves_on(int(self._num_drawn // self._prompts_per_step))
        if moves_on or self._position == len(self._order):
            order, left_out = self._plan(self._epoch + 1)
            if not order:
                return None
            for index in self._order[self._position :]:
                self._leave_out(index, "skipped", "the curriculum moved on before its turn")
            self._begin(self._epoch + 1, order, left_out)
        number = self.number()
        index = self._order[self._position]
        prompt = self._prompts[index].id
        self._in_flight[number] = {"draw": number, "epoch": self._epoch, "index": index, "prompt": prompt}
        self._num_drawn += 1
        self._position += 1
        return number

    def _plan(self, epoch: int) -> tuple[list[int], dict[int, tuple[LeftOut, str]]]:
        """Return the indices to play, none if all are retired; and those left out: (state, reason)."""
        shuffled = list(range(len(self._prompts)))
        random.Random(f"{self._identity['seed']}:{epoch}").shuffle(shuffled)
        members = [index for index in shuffled if self._measured.streaks[index] < self._retire_after]
        out: dict[int, tuple[LeftOut, str]] = {}
        for index in range(len(shuffled)):
            out[index] = ("retired", f"solved {self._retire_after} times in a row")
        if not members:
            return [], out
        plan = self._curriculum.plan(
            Candidates(epoch=epoch, prompts=self._prompts, members=members, measured=self._measured)
        )
        name = type(self._curriculum).__name__
        order = [int(index) for index in plan.order]  # a plugin may plan with numpy's
        played = set(order)
        if len(played) < len(order) or not played.issubset(members):
            raise DataError(f"the curriculum {name} plans a prompt twice, or one that is no member; repair its plan()")
        if not played:
            raise DataError(f"the curriculum {name} leaves out every prompt of epoch {epoch}; change its options")
        for index in members:
            out[index] = ("skipped", plan.why.get(index, f"left out by {name}"))
        return order, {index: why for index, why in out.items() if index not in played}

    def _begin(self, epoch: int, order: list[int], left_out: dict[int, tuple[LeftOut, str]]) -> None:
        before = self._left_out
        self._epoch = epoch
        self._position = 0
        self._order = order
        self._left_out = left_out
        self._at_start = self._learnt()
        for index, (state, why) in left_out.items():
            if before.get(index) != (state, why):
                self._leave_out(index, state, why)
        for index in sorted(before.keys() - left_out.keys()):
            self._entries.append({"epoch": epoch, "prompt": self._prompts[index].id, "state": "back"})

    def _leave_out(self, index: int, state: LeftOut, why: str) -> None:
        self._left_out[index] = (state, why)
        self._entries.append({"epoch": self._epoch, "prompt": self._prompts[index].id, "state": state, "why": why})
