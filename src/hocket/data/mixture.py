"""Draw prompts from several sources by weight (docs/how-to/mixtures.md); find prompts that repeat.

The number of a draw alone decides its source, so that a resumed run draws the same, whatever was
retired.
"""

import collections
import random
from collections.abc import Callable, Collection, Mapping
from typing import Any

from hocket.data.stream import PromptOutcome, PromptStream
from hocket.errors import DataError
from hocket.formats import OutcomeRow, SizeRow
from hocket.types import Prompt, Prompts


def drop_held_out(
    sources: Mapping[str, Prompts],
    held_out: Collection[str],
    exclude: bool,
    say: Callable[[str], None],
) -> dict[str, Prompts]:
    """Report training prompts that repeat another one or are held out; drop the held-out ones.

    Two prompts are alike if they have the same question and answer, but for white space.

    held_out: the keys (`Prompts.keys`) of the held-out prompts. exclude: whether these are dropped
    from the training prompts. Raise DataError if a source has no others.
    """
    # Compare over all sources: two of them may have the same prompt.
    keys_of = {name: prompts.keys() for name, prompts in sources.items()}
    all_keys: list[str] = []
    for keys in keys_of.values():
        all_keys += keys

    num_repeated = len(all_keys) - len(set(all_keys))
    if num_repeated:
        say(f"{num_repeated:,} of {len(all_keys):,} training prompts repeat another one")
    num_held_out = sum(key in held_out for key in all_keys)
    if num_held_out:
        action = "left out" if exclude else "data.exclude_overlap=true leaves them out"
        say(
            f"{num_held_out:,} of {len(all_keys):,} training prompts are held-out ones, too: "
            f"{action}"
        )
    if not exclude:
        return dict(sources)

    # A source without held-out prompts stays as it is, and with it the fingerprint that a resumed
    # run compares.
    remaining = dict(sources)
    for name, prompts in sources.items():
        kept = [index for index, key in enumerate(keys_of[name]) if key not in held_out]
        if not kept:
            raise DataError(
                f"data.exclude_overlap leaves no prompt of {name or 'data.source'}: "
                "other held-out rows are needed"
            )
        if len(kept) < len(prompts):
            remaining[name] = prompts.select(kept)
    return remaining


class MixedStream:
    """Draws from several streams by weight.

    Each stream has epochs of its own; the draws are numbered over all streams. Its public methods
    are those of a PromptStream.

    Example: source "b" has twice the weight of "a".

    >>> from hocket.data.curriculum import Shuffle
    >>> streams = {}
    >>> for name in ("a", "b"):
    ...     prompts = Prompts([Prompt(id=f"{name}/rows:0", source=name, token_ids=(1,))])
    ...     streams[name] = PromptStream(prompts, Shuffle(), seed=0)
    >>> mixture = MixedStream(streams, {"a": 1.0, "b": 2.0}, seed=2)
    >>> "".join(prompt.source for prompt in mixture.take(9).values())
    'baababbbb'
    """

    def __init__(
        self, streams: Mapping[str, PromptStream], weights: Mapping[str, float], seed: int
    ) -> None:
        self._num_drawn = 0
        self._streams = streams
        self._weights = weights
        self._seed = seed
        self._source_of: dict[int, str] = {}  # the source of each draw in flight, by number
        self._repeats = collections.deque[int]()  # numbers to draw again after a restore
        self.uses_pass_rates = any(stream.uses_pass_rates for stream in streams.values())

    def take(self, num_prompts: int) -> dict[int, Prompt]:
        prompts: dict[int, Prompt] = {}
        while len(prompts) < num_prompts:
            draw = self._draw()
            if not draw:
                break
            prompts.update(draw)
        return prompts

    def _draw(self) -> dict[int, Prompt]:
        """Draw the next prompt. Returns it by its number; {} once all sources are exhausted."""
        if self._repeats:
            source = self._source_of[self._repeats.popleft()]
            return self._streams[source].draw(self._num_drawn)

        # The generator is seeded by the number of the draw, so checkpoints need not have it.
        rng = random.Random(f"{self._seed}:source:{self._num_drawn}")
        weights = dict(self._weights)
        while weights:
            (source,) = rng.choices(list(weights), list(weights.values()))
            draw = self._streams[source].draw(self._num_drawn)
            if draw:
                self._source_of[self._num_drawn] = source
                self._num_drawn += 1
                return draw
            del weights[source]  # exhausted: it leaves its draw to the others
        return {}

    def settle(self, number: int, outcome: PromptOutcome) -> None:
        source = self._source_of.pop(number)
        self._streams[source].settle(number, outcome)

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
        states = {source: stream.state() for source, stream in self._streams.items()}
        return {"num_drawn": self._num_drawn, "sources": states}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._num_drawn = state["num_drawn"]
        for source, stream in self._streams.items():
            stream.restore(state["sources"][source])
            # Each stream repeats its own draws in flight; here they are put in order over all.
            for draw in state["sources"][source]["in_flight"]:
                self._source_of[draw["draw"]] = source
        self._repeats = collections.deque(sorted(self._source_of))


Stream = PromptStream | MixedStream
"""The draws of a run, from one source or from several."""
