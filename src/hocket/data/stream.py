"""Draw prompts in shuffled epochs and track each draw until its step is trained.

An epoch contains every prompt once; the ledger states the reason for each exception. The state includes the draws in
flight, so that a resumed run repeats those first.
"""

import collections
import copy
import dataclasses
import random
from collections.abc import Mapping
from typing import Any, Literal

from hocket.data.cache import KeptPrompts, Prompts
from hocket.data.curriculum import Candidates, Curriculum, PassRates, Shuffle
from hocket.errors import DataError
from hocket.types import Prompt

EXHAUSTED = (  # the meaning of a `PromptStream.take` without prompts
    "every prompt is retired (curriculum.retire_after): nothing is left to learn from them; train on harder ones, in a "
    "new run with the newest weights as model.path, or set curriculum.retire_after higher there"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The fate of a prompt that was drawn."""

    state: Literal["trained", "filtered", "failed"]  # filtered: its group has no signal; failed: nothing to learn from
    why: str = ""  # the reason if it was not trained
    pass_rate: float | None = None  # share of its scored rollouts that solved it; None without a score


class PromptStream:
    """Prompts in epochs, endless until all of them are retired. `take` numbers the draws of a run 0, 1, 2, ..."""

    def __init__(
        self,
        prompts: Prompts | KeptPrompts,
        seed: int,
        curriculum: Curriculum | None = None,  # default: all prompts, shuffled by (seed, epoch)
        *,
        retire_after: int = 0,  # leave a prompt out once it was solved this many times in a row; 0 disables it
        prompts_per_step: int = 1,  # the length of a step, for the curriculum
    ) -> None:
        if not prompts:
            raise DataError("there is no prompt to train on; check data.source, data.limit and data.max_prompt_tokens")
        self._prompts = prompts
        self._identity = {"seed": seed, "num_prompts": len(prompts), "fingerprint": prompts.fingerprint}
        self._curriculum = curriculum or Shuffle()
        self._retire_after, self._prompts_per_step = retire_after, prompts_per_step
        self._measured = PassRates(len(prompts))
        self._num_drawn = 0
        self._in_flight: dict[int, dict[str, Any]] = {}  # by number
        self._again: collections.deque[int] = collections.deque()  # numbers to draw once more after a restore
        self._entries: list[dict[str, Any]] = []
        self._left_out: dict[int, tuple[str, str]] = {}  # index: (state, why)
        self._begin(epoch=0)

    def take(self, num_prompts: int) -> dict[int, Prompt]:
        """Return the next prompts by draw number, across epochs; fewer once all are retired."""
        numbers = (self._next() for _ in range(num_prompts))
        return {number: self._prompts[self._in_flight[number]["index"]] for number in numbers if number is not None}

    def settle(self, number: int, outcome: Outcome) -> None:
        """Record the outcome of a draw, once. Raise KeyError if it is not in flight."""
        draw = self._in_flight.pop(number)
        entry = {key: draw[key] for key in ("draw", "epoch", "prompt")} | {"state": outcome.state}
        if outcome.why:
            entry["why"] = outcome.why
        if outcome.pass_rate is not None:
            entry["pass_rate"] = outcome.pass_rate
            if self._curriculum.uses_pass_rates or self._retire_after:
                self._measured.record(draw["index"], draw["epoch"], outcome.pass_rate)
                self._curriculum.measured(draw["index"], outcome.pass_rate)
        self._entries.append(entry)

    def entries(self) -> list[dict[str, Any]]:
        """Return the new lines for the ledger since the last call (hocket.data.ledger describes the fields)."""
        entries, self._entries = self._entries, []
        return entries

    def state(self) -> dict[str, Any]:
        """Return its position, ready for JSON; `restore` of a stream over the same prompts continues from there."""
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
        """Continue with the draws in flight, in the order of their numbers. Raise DataError for other prompts."""
        for key, value in self._identity.items():
            if state[key] != value:
                raise DataError(
                    f"can't resume: {key} of the prompts was {state[key]} and is {value} now; use the same data "
                    f"section and trainer.seed, or start a new run"
                )
        self._epoch, self._position, self._num_drawn = state["epoch"], state["position"], state["num_drawn"]
        self._in_flight = {draw["draw"]: draw for draw in state["in_flight"]}
        self._again = collections.deque(self._in_flight)
        self._entries = list(state["entries"])
        self._at_start = state["at_start"]
        self._recall(self._at_start)  # the epoch's plan follows from what was known when it began
        self._left_out = self._plan()
        self._recall(state["learnt"])

    def _next(self) -> int | None:
        if self._again:
            return self._again.popleft()
        moves_on = self._curriculum.moves_on(self._num_drawn // self._prompts_per_step)
        if moves_on or self._position == len(self._order):
            if all(map(self._is_retired, range(len(self._prompts)))):
                return None
            for index in self._order[self._position :]:
                self._leave_out(index, "skipped", "the curriculum moved on before its turn")
            self._begin(self._epoch + 1)
        number, index = self._num_drawn, self._order[self._position]
        prompt = self._prompts[index].id
        self._in_flight[number] = {"draw": number, "epoch": self._epoch, "index": index, "prompt": prompt}
        self._num_drawn += 1
        self._position += 1
        return number

    def _begin(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        self._at_start = self._learnt()
        before, self._left_out = self._left_out, self._plan()
        for index, (state, why) in self._left_out.items():
            if before.get(index) != (state, why):
                self._leave_out(index, state, why)
        for index in [index for index in before if index not in self._left_out]:
            self._entries.append({"epoch": epoch, "prompt": self._prompts[index].id, "state": "back"})

    def _leave_out(self, index: int, state: str, why: str) -> None:
        self._left_out[index] = (state, why)
        self._entries.append({"epoch": self._epoch, "prompt": self._prompts[index].id, "state": state, "why": why})

    def _plan(self) -> dict[int, tuple[str, str]]:
        """Set the order of the epoch; return the prompts that it leaves out, with state and reason."""
        shuffled = list(range(len(self._prompts)))
        random.Random(f"{self._identity['seed']}:{self._epoch}").shuffle(shuffled)
        members = [index for index in shuffled if not self._is_retired(index)]
        plan = self._curriculum.plan(
            Candidates(epoch=self._epoch, prompts=self._prompts, members=members, measured=self._measured)
        )
        name, played = type(self._curriculum).__name__, set(plan.order)
        if len(played) < len(plan.order) or not played.issubset(members):
            raise DataError(f"the curriculum {name} plans a prompt twice, or one that is no member; repair its plan()")
        if not played:
            raise DataError(f"the curriculum {name} leaves out every prompt of epoch {self._epoch}; change its options")
        self._order = [int(index) for index in plan.order]  # a plugin may plan with numpy's
        out = {i: ("skipped", plan.why.get(i, f"left out by {name}")) for i in members if i not in played}
        retired = sorted(set(shuffled) - set(members))
        return out | dict.fromkeys(retired, ("retired", f"solved {self._retire_after} times in a row"))

    def _is_retired(self, index: int) -> bool:
        return 0 < self._retire_after <= self._measured.streaks[index]

    def _learnt(self) -> dict[str, Any]:
        return {"pass_rates": self._measured.state(), "curriculum": copy.deepcopy(self._curriculum.state())}

    def _recall(self, learnt: Mapping[str, Any]) -> None:
        self._measured = PassRates(len(self._prompts), learnt["pass_rates"])
        self._curriculum.restore(learnt["curriculum"])
