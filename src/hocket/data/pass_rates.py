"""What was measured of each prompt: a few numbers, small also for a million of them. Knows nothing of prompts."""

import base64
import math
import zlib
from array import array
from collections.abc import Mapping
from typing import Any

SOLVED = 1.0
_LEVEL = 1
"""Of the compression: the numbers have few different values, and a checkpoint waits."""


class PassRates:
    """The latest pass rate of each of `num_prompts` prompts, the epoch of it, and how often in a row it was 1."""

    def __init__(self, num_prompts: int) -> None:
        self._rates = array("d", [math.nan]) * num_prompts
        self._epochs = array("i", [-1]) * num_prompts
        self._streaks = array("I", [0]) * num_prompts
        self._any = False

    def record(self, index: int, epoch: int, rate: float) -> None:
        """Notes what prompt `index` was measured at; one that was drawn earlier may be heard of later."""
        if epoch >= self._epochs[index]:
            self._rates[index], self._epochs[index] = rate, epoch
        self._streaks[index] = self._streaks[index] + 1 if rate >= SOLVED else 0
        self._any = True

    def rate(self, index: int) -> float | None:
        """Returns the pass rate of a prompt, None where it was never measured."""
        return self._rates[index] if self._epochs[index] >= 0 else None

    def epoch(self, index: int) -> int:
        """Returns the epoch in which it was measured, -1 where it never was."""
        return self._epochs[index]

    def streak(self, index: int) -> int:
        """Returns how often in a row all of its rollouts solved it."""
        return self._streaks[index]

    def state(self) -> dict[str, str]:
        """Returns all of it, ready for JSON; nothing while nothing was measured."""
        if not self._any:
            return {}
        arrays: dict[str, array[Any]] = {"rates": self._rates, "epochs": self._epochs, "streaks": self._streaks}
        return {k: base64.b64encode(zlib.compress(v.tobytes(), _LEVEL)).decode() for k, v in arrays.items()}

    def restore(self, state: Mapping[str, str]) -> None:
        """Goes back to a state of as many prompts."""
        fresh = PassRates(len(self._rates))
        for name, text in state.items():
            values = getattr(fresh, f"_{name}")
            values[:] = array(values.typecode, zlib.decompress(base64.b64decode(text)))
        self._rates, self._epochs, self._streaks = fresh._rates, fresh._epochs, fresh._streaks
        self._any = bool(state)
