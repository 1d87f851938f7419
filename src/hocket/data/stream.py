"""Draw prompts in epochs, and track each draw until its step is trained.

Every prompt of an epoch is drawn once. A resumed run first repeats the draws that were in flight.
"""

import collections
import copy
import dataclasses
import math
import random
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from hocket.data.curriculum import Candidates, Curriculum, PassRates
from hocket.errors import DataError
from hocket.formats import LeftOut, OutcomeRow, SizeRow
from hocket.types import Prompt, Prompts

# The message of a run that ends because `PromptStream.take` returned no prompt.
EXHAUSTED = (
    "every prompt is retired (curriculum.retire_after): start a new run from the newest weights "
    "(model.path) on harder prompts or with a higher curriculum.retire_after"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptOutcome:
    """How a draw ended."""

    state: Literal["trained", "filtered", "failed"]  # "filtered": its group has no training signal
    why: str = ""  # the reason why its group was not trained
    pass_rate: float | None = None  # the share of its scored rollouts that solved the prompt


class Exclusion(NamedTuple):
    """Why an epoch does not play a prompt, as the ledger writes it."""

    state: LeftOut
    why: str


class PromptStream:
    """Draws the prompts of one source, epoch after epoch.

    The draws of a run are numbered 0, 1, 2, ... A draw is in flight from `take` until `settle`.
    A checkpoint holds the draws in flight, so each prompt of an epoch is settled exactly once,
    however often the run is killed.

    Example: an epoch of three prompts, and a run that is killed within it.

    >>> from hocket.data.curriculum import Shuffle
    >>> prompts = Prompts(Prompt(id=name, token_ids=(1,)) for name in ("a", "b", "c"))
    >>> def draw(stream, num_prompts):
    ...     return {number: prompt.id for number, prompt in stream.take(num_prompts).items()}

    Two prompts are drawn. The second is settled: it was trained, and the ledger gets its line.

    >>> stream = PromptStream(prompts, Shuffle(), seed=0)
    >>> draw(stream, 2)
    {0: 'b', 1: 'a'}
    >>> stream.settle(1, PromptOutcome(state="trained"))
    >>> stream.entries()
    [{'draw': 1, 'epoch': 0, 'prompt': 'a', 'state': 'trained'}]

    The run saves a checkpoint and is killed. Draw 0 was in flight, so the resumed run draws it
    again with its old number. Then it finishes epoch 0 with 'c', and begins epoch 1.

    >>> checkpoint = stream.state()
    >>> resumed = PromptStream(prompts, Shuffle(), seed=0)
    >>> resumed.restore(checkpoint)
    >>> draw(resumed, 2)
    {0: 'b', 2: 'c'}
    >>> draw(resumed, 3)
    {3: 'b', 4: 'c', 5: 'a'}
    """

    def __init__(
        self,
        prompts: Prompts,
        curriculum: Curriculum,
        *,
        seed: int,
        retire_after: int = 0,  # a prompt solved this often in a row is left out; 0: none is
        prompts_per_step: float = 1,
    ) -> None:
        if not prompts:
            raise DataError(
                "there is no prompt to train on; "
                "check data.source, data.limit and data.max_prompt_tokens"
            )
        self.uses_pass_rates = curriculum.uses_pass_rates or retire_after > 0
        self._prompts = prompts
        self._curriculum = curriculum
        # A checkpoint can be restored only into a stream with the same values here.
        self._identity = {
            "seed": seed,
            "num_prompts": len(prompts),
            "fingerprint": prompts.fingerprint,
        }
        self._measured = PassRates(len(prompts))
        self._retire_after = retire_after or math.inf
        self._prompts_per_step = prompts_per_step
        self._num_drawn = 0
        self._in_flight: dict[int, dict[str, Any]] = {}  # the draws in flight, by number
        self._repeats = collections.deque[int]()  # numbers to draw again after a restore
        self._entries: list[OutcomeRow] = []  # ledger lines that nobody has taken yet
        self._excluded: dict[int, Exclusion] = {}  # prompts that this epoch does not play, by index
        order, excluded = self._plan(0)
        self._begin(0, order, excluded)

    def take(self, num_prompts: int) -> dict[int, Prompt]:
        """Draw the next prompts, across epochs. Returns them by draw number.

        There are fewer than `num_prompts` once all prompts are retired.
        """
        prompts: dict[int, Prompt] = {}
        while len(prompts) < num_prompts:
            draw = self.draw(self._num_drawn)
            if not draw:
                break
            prompts.update(draw)
        return prompts

    def draw(self, next_number: int) -> dict[int, Prompt]:
        """Draw one prompt. Returns it by its draw number; {} once all are retired.

        next_number: the number of a new draw. A draw that repeats one keeps the old number.
        """
        if self._repeats:
            number = self._repeats.popleft()
            return {number: self._prompts[self._in_flight[number]["index"]]}

        # Begin the next epoch if this one is over, or if the curriculum ends it.
        step = int(self._num_drawn // self._prompts_per_step)
        if self._curriculum.moves_on(step) or self._position == len(self._order):
            order, excluded = self._plan(self._epoch + 1)
            if not order:
                return {}
            # The prompts of this epoch that were not drawn.
            skipped = Exclusion("skipped", "the curriculum moved on before its turn")
            for index in self._order[self._position :]:
                self._exclude(index, skipped)
            self._begin(self._epoch + 1, order, excluded)

        index = self._order[self._position]
        prompt = self._prompts[index]
        self._in_flight[next_number] = {
            "draw": next_number,
            "epoch": self._epoch,
            "index": index,
            "prompt": prompt.id,
        }
        self._num_drawn += 1
        self._position += 1
        return {next_number: prompt}

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
        entries = self._entries
        self._entries = []
        return entries

    def state(self) -> dict[str, Any]:
        """Return the stream's part of a checkpoint, for JSON."""
        return self._identity | {
            "epoch": self._epoch,
            "position": self._position,
            "num_drawn": self._num_drawn,
            "in_flight": list(self._in_flight.values()),
            "entries": list(self._entries),
            "at_start": self._at_start,
            "learnt": self._learnt(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken: the draws in flight come first.

        Raise DataError if the prompts or the seed are not those of `state`.
        """
        for key, value in self._identity.items():
            if state[key] != value:
                raise DataError(
                    f"can't resume: {key} of the prompts was {state[key]} and is {value} now; "
                    "use the same data and trainer.seed, or start a new run"
                )
        self._epoch = state["epoch"]
        self._position = state["position"]
        self._num_drawn = state["num_drawn"]
        self._in_flight = {draw["draw"]: draw for draw in state["in_flight"]}
        self._repeats = collections.deque(self._in_flight)
        self._entries = list(state["entries"])

        # The order of an epoch is not in the checkpoint: it is planned again, from the pass rates
        # that were measured when the epoch began. Only then the newer ones are put back.
        self._at_start = state["at_start"]
        self._recall(self._at_start)
        self._order, self._excluded = self._plan(self._epoch)
        self._recall(state["learnt"])

    def _learnt(self) -> dict[str, Any]:
        """Return a copy of the pass rates and of the curriculum's state."""
        return {
            "pass_rates": self._measured.state(),
            "curriculum": copy.deepcopy(self._curriculum.state()),
        }

    def _recall(self, learnt: Mapping[str, Any]) -> None:
        self._measured = PassRates(len(self._prompts), **learnt["pass_rates"])
        self._curriculum.restore(learnt["curriculum"])

    def _plan(self, epoch: int) -> tuple[list[int], dict[int, Exclusion]]:
        """Plan an epoch: the prompt indices to play in order, and the exclusions of all others.

        The order is empty if every prompt is retired.
        """
        shuffled = list(range(len(self._prompts)))
        random.Random(f"{self._identity['seed']}:{epoch}").shuffle(shuffled)
        streaks = self._measured.streaks
        members = [index for index in shuffled if streaks[index] < self._retire_after]
        retired = Exclusion("retired", f"solved {self._retire_after} times in a row")
        if not members:
            return [], dict.fromkeys(range(len(self._prompts)), retired)

        plan = self._curriculum.plan(
            Candidates(epoch=epoch, prompts=self._prompts, members=members, measured=self._measured)
        )
        name = type(self._curriculum).__name__
        order = [int(index) for index in plan.order]  # a plugin may plan with numpy's integers
        played = set(order)
        if len(played) < len(order) or not played.issubset(members):
            raise DataError(
                f"the curriculum {name} plans a prompt twice, or one that is no member; "
                "repair its plan()"
            )
        if not played:
            raise DataError(
                f"the curriculum {name} leaves out every prompt of epoch {epoch}; "
                "change its options"
            )

        excluded = {}
        can_play = set(members)
        for index in range(len(self._prompts)):
            if index not in can_play:
                excluded[index] = retired
            elif index not in played:
                excluded[index] = Exclusion("skipped", plan.why.get(index, f"left out by {name}"))
        return order, excluded

    def _begin(self, epoch: int, order: list[int], excluded: dict[int, Exclusion]) -> None:
        """Begin an epoch. The ledger gets a line for each prompt that leaves or comes back now."""
        before = self._excluded
        self._epoch = epoch
        self._position = 0
        self._order = order
        self._excluded = excluded
        self._at_start = self._learnt()
        for index, exclusion in excluded.items():
            if before.get(index) != exclusion:
                self._exclude(index, exclusion)
        for index in sorted(before.keys() - excluded.keys()):
            prompt = self._prompts[index].id
            self._entries.append({"epoch": epoch, "prompt": prompt, "state": "back"})

    def _exclude(self, index: int, exclusion: Exclusion) -> None:
        self._excluded[index] = exclusion
        self._entries.append(
            {
                "epoch": self._epoch,
                "prompt": self._prompts[index].id,
                "state": exclusion.state,
                "why": exclusion.why,
            }
        )
