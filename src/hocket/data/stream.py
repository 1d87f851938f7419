"""Draw prompts in epochs of every prompt once, and track each draw until its step is trained.

The ledger states the reason for each exception; a resumed run first repeats the draws in flight.
"""

import collections
import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, Literal

from hocket.data.curriculum import Planner
from hocket.errors import DataError
from hocket.types import Prompt

EXHAUSTED = (  # the meaning of a `PromptStream.take` without prompts
    "every prompt is retired (curriculum.retire_after): start a new run from the newest weights (model.path) on "
    "harder prompts or with a higher curriculum.retire_after"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The fate of a prompt that was drawn."""

    state: Literal["trained", "filtered", "failed"]  # filtered: its group has no signal
    why: str = ""  # it was not trained
    pass_rate: float | None = None  # share of its scored rollouts that solved it


class PromptStream:
    """Prompts in epochs, until all are retired. `take` numbers the draws of a run 0, 1, 2, ..."""

    def __init__(self, planner: Planner, *, prompts_per_step: int = 1) -> None:
        prompts = planner.prompts
        if not prompts:
            raise DataError("there is no prompt to train on; check data.source, data.limit and data.max_prompt_tokens")
        self.planner = planner
        self._prompts = prompts
        self._identity = {"seed": planner.seed, "num_prompts": len(prompts), "fingerprint": prompts.fingerprint}
        self._prompts_per_step = prompts_per_step
        self._num_drawn = 0
        self._in_flight: dict[int, dict[str, Any]] = {}  # by number
        self._again: collections.deque[int] = collections.deque()  # numbers to draw once more after a restore
        self._entries: list[dict[str, Any]] = []
        self._left_out: dict[int, tuple[str, str]] = {}  # index: (state, why)
        self._begin(0, *planner.plan(0))

    def take(self, num_prompts: int) -> dict[int, Prompt]:
        """Return the next prompts by draw number, across epochs; fewer once all are retired."""
        numbers = itertools.islice(iter(self._next, None), num_prompts)
        return {number: self._prompts[self._in_flight[number]["index"]] for number in numbers}

    def settle(self, number: int, outcome: Outcome) -> None:
        """Record the outcome of a draw, once. Raise KeyError if it is not in flight."""
        draw = self._in_flight.pop(number)
        entry = {"draw": number, "epoch": draw["epoch"], "prompt": draw["prompt"], "state": outcome.state}
        if outcome.why:
            entry["why"] = outcome.why
        if outcome.pass_rate is not None:
            entry["pass_rate"] = outcome.pass_rate
            self.planner.settled(draw["index"], draw["epoch"], outcome.pass_rate)
        self._entries.append(entry)

    def entries(self) -> list[dict[str, Any]]:
        """Return the new lines for the ledger (hocket.data.ledger) since the last call."""
        entries, self._entries = self._entries, []
        return entries

    def state(self) -> dict[str, Any]:
        """Return its position, for JSON."""
        return {
            **self._identity,
            "epoch": self._epoch,
            "position": self._position,
            "num_drawn": self._num_drawn,
            "in_flight": list(self._in_flight.values()),
            "entries": list(self._entries),
            "at_start": self._at_start,
            "learnt": self.planner.state(),
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
        self.planner.restore(self._at_start)  # the epoch's plan follows from what was known when it began
        self._order, self._left_out = self.planner.plan(self._epoch)
        self.planner.restore(state["learnt"])

    def _next(self) -> int | None:
        if self._again:
            return self._again.popleft()
        moves_on = self.planner.moves_on(self._num_drawn // self._prompts_per_step)
        if moves_on or self._position == len(self._order):
            order, left_out = self.planner.plan(self._epoch + 1)
            if not order:
                return None
            for index in self._order[self._position :]:
                self._leave_out(index, "skipped", "the curriculum moved on before its turn")
            self._begin(self._epoch + 1, order, left_out)
        number = self._num_drawn
        index = self._order[self._position]
        prompt = self._prompts[index].id
        self._in_flight[number] = {"draw": number, "epoch": self._epoch, "index": index, "prompt": prompt}
        self._num_drawn += 1
        self._position += 1
        return number

    def _begin(self, epoch: int, order: list[int], left_out: dict[int, tuple[str, str]]) -> None:
        before = self._left_out
        self._epoch = epoch
        self._position = 0
        self._order = order
        self._left_out = left_out
        self._at_start = self.planner.state()
        for index, (state, why) in left_out.items():
            if before.get(index) != (state, why):
                self._leave_out(index, state, why)
        for index in sorted(before.keys() - left_out.keys()):
            self._entries.append({"epoch": epoch, "prompt": self._prompts[index].id, "state": "back"})

    def _leave_out(self, index: int, state: str, why: str) -> None:
        self._left_out[index] = (state, why)
        self._entries.append({"epoch": self._epoch, "prompt": self._prompts[index].id, "state": state, "why": why})
