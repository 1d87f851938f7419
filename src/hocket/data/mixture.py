"""Draw prompts from several sources by weight (docs/mixtures.md); count prompts that stand twice or are held out.

The number of a draw alone decides its source, so that a resumed run draws the same, whatever was retired.
"""

import itertools
import random
from collections.abc import Callable, Collection, Mapping
from typing import Any

from hocket.data.prompt_list import Prompts
from hocket.data.stream import PromptOutcome, PromptStream
from hocket.errors import DataError
from hocket.formats import OutcomeRow, SizeRow
from hocket.types import Prompt


def unlike(
    sources: Mapping[str, Prompts], tested: Collection[str], exclude: bool, say: Callable[[str], None]
) -> dict[str, Prompts]:
    """Count prompts with the question and answer of another one, but for white space; leave out held-out ones.

    `tested`: the keys of these.
    """
    keys = {name: prompts.keys() for name, prompts in sources.items()}
    every = [*itertools.chain(*keys.values())]
    num_tested = sum(key in tested for key in every)
    if num_twice := len(every) - len({*every}):
        say(f"{num_twice:,} of {len(every):,} training prompts repeat another one")
    if num_tested:
        done = "left out" if exclude else "data.exclude_overlap=true leaves them out"
        say(f"{num_tested:,} of {len(every):,} training prompts are held-out ones, too: {done}")
    left = dict(sources)
    for name, prompts in sources.items():
        kept = [index for index, key in enumerate(keys[name]) if not exclude or key not in tested]
        if not kept:
            what = f"data.exclude_overlap leaves no prompt of {name or 'data.source'}"
            raise DataError(f"{what}: other held-out rows are needed")
        if len(kept) < len(prompts):
            left[name] = prompts.select(kept)
    return left


class MixedStream(PromptStream):
    """A stream of each source, with epochs of its own; draws are numbered over all."""

    def __init__(self, streams: Mapping[str, PromptStream], weights: Mapping[str, float], seed: int) -> None:
        self._num_drawn = 0
        self._streams = streams
        for stream in streams.values():
            stream.number = lambda: self._num_drawn
        self._weights = weights
        self._seed = seed
        self._source_of = dict[int, str]()  # of the draws in flight
        self._repeat = list[int]()  # draws to repeat after a restore, the first last
        self.uses_pass_rates = any(stream.uses_pass_rates for stream in streams.values())

    def take(self, num_prompts: int) -> dict[int, Prompt]:
        taken = dict[int, Prompt]()
        while len(taken) < num_prompts:
            drawn = self._draw()
            if not drawn:
                break
            taken |= drawn
        return taken

    def _draw(self) -> dict[int, Prompt]:
        """Return the next prompt by its number, {} without one; an exhausted source leaves its draw to the others."""
        if self._repeat:
            return self._streams[self._source_of[self._repeat.pop()]].take(1)
        chance = random.Random(f"{self._seed}:source:{self._num_drawn}")
        left = dict(self._weights)
        while left:
            (name,) = chance.choices([*left], [*left.values()])
            if drawn := self._streams[name].take(1):
                self._source_of[self._num_drawn] = name
                self._num_drawn += 1
                return drawn
            del left[name]
        return {}

    def settle(self, number: int, outcome: PromptOutcome) -> None:
        self._streams[self._source_of.pop(number)].settle(number, outcome)

    def sizes(self) -> list[SizeRow]:
        rows: list[SizeRow] = []
        for name, stream in self._streams.items():
            rows += [{**row, "source": name} for row in stream.sizes()]
        return rows

    def entries(self) -> list[OutcomeRow]:
        rows: list[OutcomeRow] = []
        for name, stream in self._streams.items():
            rows += [{**row, "source": name} for row in stream.entries()]
        return rows

    def state(self) -> dict[str, Any]:
        states = {name: stream.state() for name, stream in self._streams.items()}
        return {"num_drawn": self._num_drawn, "sources": states}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._num_drawn = state["num_drawn"]
        for name, stream in self._streams.items():
            stream.restore(state["sources"][name])
            self._source_of |= {draw["draw"]: name for draw in state["sources"][name]["in_flight"]}
        self._repeat = sorted(self._source_of, reverse=True)
