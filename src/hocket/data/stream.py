"""Which prompts come next: one endless stream in epochs, which knows what is drawn and not settled yet.

Each epoch has every prompt exactly once, or says why it is left out; over any number of kills, too: `state` has what is
in flight, and that comes first after `restore`. Takes prompts and their outcomes, gives draws and what the ledger
records of them. Knows nothing of rollouts, losses or files.
"""

import collections
import copy
import dataclasses
import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

from hocket.data.curriculum import Curriculum, Pool, Shuffle
from hocket.data.pass_rates import PassRates
from hocket.errors import DataError
from hocket.types import Outcome, Prompt

EXHAUSTED = (
    "every prompt is retired (curriculum.retire_after): nothing is left to learn from them; train on harder ones, in a "
    "new run with the newest weights as model.path, or set curriculum.retire_after higher there"
)
"""What it means that `PromptStream.take` gives no prompt."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One prompt that was taken. `number` counts all draws of the run: 0, 1, 2, ..."""

    number: int
    epoch: int
    prompt: Prompt


class PromptStream:
    """Prompts in epochs, without end as long as one of them is not retired.

    Args:
        prompts: at least one.
        seed: of the order.
        curriculum: which prompts an epoch has, and in which order; default: all, shuffled by (seed, epoch) alone.
        retire_after: a prompt that was solved so many times in a row is left out from then on; 0: none is.
        prompts_per_step: for the curriculum, which counts in steps.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        curriculum: Curriculum | None = None,
        *,
        retire_after: int = 0,
        prompts_per_step: int = 1,
    ) -> None:
        if not prompts:
            raise DataError("there is no prompt to train on; check data.source, data.limit and data.max_prompt_tokens")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._curriculum = curriculum or Shuffle()
        self._retire_after = retire_after
        self._prompts_per_step = prompts_per_step
        self._fingerprint = _fingerprint(self._prompts)
        self._measured = PassRates(len(self._prompts))
        self._num_drawn = 0
        self._in_flight: dict[int, tuple[int, int]] = {}  # number: (epoch, index)
        self._again: collections.deque[int] = collections.deque()
        self._entries: list[dict[str, Any]] = []
        self._left_out: dict[int, tuple[str, str]] = {}  # index: (state, why)
        self._begin(epoch=0)

    def take(self, num_prompts: int) -> list[Draw]:
        """Returns the next prompts, in flight from now on; a new epoch begins where one ends, also in the middle.

        There are fewer of them, or none, once every prompt is retired.

        Raises:
            DataError: the curriculum leaves out every prompt, or its plan makes no sense.
        """
        draws = (self._next() for _ in range(num_prompts))
        return [draw for draw in draws if draw is not None]

    def settle(self, number: int, outcome: Outcome) -> None:
        """Settle the draw of this number. Raises ValueError where it is not in flight."""
        if number not in self._in_flight:
            raise ValueError(f"draw {number} is not in flight: each is settled once")
        epoch, index = self._in_flight.pop(number)
        entry = {"draw": number, "epoch": epoch, "prompt": self._prompts[index].id, "state": outcome.state}
        if outcome.why:
            entry["why"] = outcome.why
        if outcome.pass_rate is not None:
            entry["pass_rate"] = outcome.pass_rate
            if self._curriculum.uses_pass_rates or self._retire_after:
                self._measured.record(index, epoch, outcome.pass_rate)
                self._curriculum.measured(index, outcome.pass_rate)
        self._entries.append(entry)

    def entries(self) -> list[dict[str, Any]]:
        """Returns what the ledger has to record since it was last asked (hocket.data.ledger tells the fields)."""
        entries, self._entries = self._entries, []
        return entries

    def state(self) -> dict[str, Any]:
        """Returns where it is, ready for JSON; `restore` of a stream over the same prompts goes on from there."""
        in_flight = [
            {"draw": number, "epoch": epoch, "index": index, "prompt": self._prompts[index].id}
            for number, (epoch, index) in sorted(self._in_flight.items())
        ]
        return {
            "seed": self._seed,
            "num_prompts": len(self._prompts),
            "fingerprint": self._fingerprint,
            "epoch": self._epoch,
            "position": self._position,
            "num_drawn": self._num_drawn,
            "in_flight": in_flight,
            "entries": list(self._entries),
            "at_start": self._at_start,
            "now": self._learnt(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to where `state` is; what was in flight then comes first, in the order of its numbers.

        Raises:
            DataError: the prompts or the seed are not the same.
        """
        own = {"seed": self._seed, "num_prompts": len(self._prompts), "fingerprint": self._fingerprint}
        for key, value in own.items():
            if state[key] != value:
                raise DataError(
                    f"can't resume: {key} of the prompts was {state[key]} and is {value} now; use the same data "
                    f"section and trainer.seed, or start a new run"
                )
        self._epoch, self._position, self._num_drawn = state["epoch"], state["position"], state["num_drawn"]
        self._in_flight = {draw["draw"]: (draw["epoch"], draw["index"]) for draw in state["in_flight"]}
        self._again = collections.deque(sorted(self._in_flight))
        self._entries = list(state["entries"])
        self._at_start = state["at_start"]
        self._recall(self._at_start)  # the epoch's plan follows from what was known when it began
        self._left_out = self._plan()
        self._recall(state["now"])

    def _next(self) -> Draw | None:
        if self._again:
            number = self._again.popleft()
        else:
            moves_on = self._curriculum.moves_on(self._num_drawn // self._prompts_per_step)
            if moves_on or self._position == len(self._order):
                if all(map(self._is_retired, range(len(self._prompts)))):
                    return None
                for index in self._order[self._position :]:
                    self._leave_out(index, "skipped", "the curriculum moved on before its turn")
                self._begin(self._epoch + 1)
            number = self._num_drawn
            self._in_flight[number] = (self._epoch, self._order[self._position])
            self._num_drawn += 1
            self._position += 1
        epoch, index = self._in_flight[number]
        return Draw(number=number, epoch=epoch, prompt=self._prompts[index])

    def _begin(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        self._at_start = self._learnt()
        left_out = self._plan()
        for index, (state, why) in left_out.items():
            if self._left_out.get(index) != (state, why):
                self._leave_out(index, state, why)
        for index in [index for index in self._left_out if index not in left_out]:
            self._entries.append({"epoch": epoch, "prompt": self._prompts[index].id, "state": "back"})
        self._left_out = left_out

    def _leave_out(self, index: int, state: str, why: str) -> None:
        self._left_out[index] = (state, why)
        self._entries.append({"epoch": self._epoch, "prompt": self._prompts[index].id, "state": state, "why": why})

    def _plan(self) -> dict[int, tuple[str, str]]:
        """Sets the order of the epoch; returns which prompts are left out of it, and why."""
        shuffled = list(range(len(self._prompts)))
        random.Random(f"{self._seed}:{self._epoch}").shuffle(shuffled)
        retired = {index for index in shuffled if self._is_retired(index)}
        members = [index for index in shuffled if index not in retired]
        pool = Pool(epoch=self._epoch, prompts=self._prompts, members=members, measured=self._measured)
        plan = self._curriculum.plan(pool)
        name, played = type(self._curriculum).__name__, set(plan.order)
        if len(played) < len(plan.order) or not played.issubset(members):
            raise DataError(f"the curriculum {name} plans a prompt twice, or one that is no member; repair its plan()")
        if not played:
            raise DataError(f"the curriculum {name} leaves out every prompt of epoch {self._epoch}; change its options")
        self._order = [int(index) for index in plan.order]  # a plugin may plan with numpy's
        out = {i: ("skipped", plan.why.get(i, f"left out by {name}")) for i in members if i not in played}
        return out | dict.fromkeys(sorted(retired), ("retired", f"solved {self._retire_after} times in a row"))

    def _is_retired(self, index: int) -> bool:
        return 0 < self._retire_after <= self._measured.streak(index)

    def _learnt(self) -> dict[str, Any]:
        return copy.deepcopy({"measured": self._measured.state(), "curriculum": self._curriculum.state()})

    def _recall(self, learnt: Mapping[str, Any]) -> None:
        self._measured.restore(learnt["measured"])
        self._curriculum.restore(learnt["curriculum"])


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.id}\n{prompt.token_ids}\n{prompt.answer}\n".encode())
        if prompt.difficulty is not None:
            digest.update(f"{prompt.difficulty}\n".encode())
    return digest.hexdigest()[:16]
