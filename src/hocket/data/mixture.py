"""Draw prompts from several sources by weight (docs/mixtures.md); count prompts that stand twice or are held out.

The number of a draw alone decides its source, so that a resumed run draws the same, whatever was retired.
"""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hocket.data.cache import Prompts, key_of
from hocket.data.stream import Outcome, PromptStream
from hocket.errors import DataError
from hocket.types import Prompt


class Selected(Prompts):
    """Some of the prompts of a source, by index; made when asked for."""

    def __init__(self, prompts: Prompts, indices: Sequence[int], source: str = "") -> None:
        self._rows = prompts
        self._indices = indices
        self._source = source
        content = repr([prompts.fingerprint, source, list(indices)])
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()

    def keys(self) -> list[str]:
        keys = self._rows.keys()
        return [keys[index] for index in self._indices]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        prompt = self._rows[self._indices[index]]
        return of_source(prompt, self._source)


def of_source(prompt: Prompt, source: str) -> Prompt:
    """Return a source's prompt; two sources may have files of one name."""
    return replace(prompt, id=f"{source}/{prompt.id}", source=source) if source else prompt


class Mixture(Prompts):
    """The prompts of all sources, one source after the other."""

    def __init__(self, of: Mapping[str, Prompts]) -> None:
        self.of = dict(of)

    def __len__(self) -> int:
        return sum(map(len, self.of.values()))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        for prompts in self.of.values():
            if index < len(prompts):
                return prompts[index]
            index -= len(prompts)
        raise IndexError(index)


def unlike(prompts: Prompts, held_out: Sequence[Prompt], exclude: bool, say: Callable[[str], None]) -> Prompts:
    """Count prompts with the question and answer of another one, but for white space; leave out held-out ones."""
    sources = prompts.of if isinstance(prompts, Mixture) else {"": prompts}
    tested = set(map(key_of, held_out))
    seen = set[str]()
    num_twice = num_tested = 0
    left = dict[str, Prompts]()
    for name, mine in sources.items():
        keys = mine.keys()
        kept = [index for index, key in enumerate(keys) if key not in tested]
        num_twice += len(keys) - len(set(keys) - seen)
        num_tested += len(keys) - len(kept)
        seen |= set(keys)
        left[name] = Selected(mine, kept) if len(kept) < len(keys) else mine
    if num_twice:
        say(f"{num_twice:,} of {len(prompts):,} training prompts repeat another one")
    if not num_tested:
        return prompts
    done = "left out" if exclude else "data.exclude_overlap=true leaves them out"
    say(f"{num_tested:,} of {len(prompts):,} training prompts are held-out ones, too: {done}")
    if not exclude:
        return prompts
    if empty := [name for name, mine in left.items() if not mine]:
        raise DataError(
            f"data.exclude_overlap leaves no prompt of {empty[0] or 'data.source'}: other held-out rows are needed"
        )
    return Mixture(left) if isinstance(prompts, Mixture) else left[""]


MakeStream = Callable[[Callable[[], int]], PromptStream]  # of what numbers its draws


class MixedStream(PromptStream):
    """A stream of each source, with epochs of its own; draws are numbered over all."""

    def __init__(self, streams: Mapping[str, MakeStream], weights: Mapping[str, float], seed: int) -> None:
        self._num_drawn = 0
        self._streams = {name: make(lambda: self._num_drawn) for name, make in streams.items()}
        self._weights = weights
        self._seed = seed
        self._source_of = dict[int, str]()  # of the draws in flight
        self._repeat = list[int]()  # draws to repeat after a restore, the first last
        self.uses_pass_rates = any(stream.uses_pass_rates for stream in self._streams.values())

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

    def settle(self, number: int, outcome: Outcome) -> None:
        self._streams[self._source_of.pop(number)].settle(number, outcome)

    def sizes(self) -> list[dict[str, Any]]:
        return [line | {"source": name} for name, stream in self._streams.items() for line in stream.sizes()]

    def entries(self) -> list[dict[str, Any]]:
        return [entry | {"source": name} for name, stream in self._streams.items() for entry in stream.entries()]

    def state(self) -> dict[str, Any]:
        states = {name: stream.state() for name, stream in self._streams.items()}
        return {"num_drawn": self._num_drawn, "sources": states}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._num_drawn = state["num_drawn"]
        for name, stream in self._streams.items():
            stream.restore(state["sources"][name])
            self._source_of |= {draw["draw"]: name for draw in state["sources"][name]["in_flight"]}
        self._repeat = sorted(self._source_of, reverse=True)
