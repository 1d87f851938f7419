"""Built-in tasks: endless rows made from a seed, for trying things without any data."""

import hashlib
import random
import string
from collections.abc import Callable, Iterator
from typing import Any

from hocket.errors import DataError
from hocket.registry import Registry

Task = Callable[[str, int], Iterator[dict[str, Any]]]
"""(split, seed) -> rows with the columns prompt, answer, response, without end."""

TASKS: Registry[Task] = Registry("task")

NUM_ROWS = 2048
"""Rows of a task where data.limit asks for no other number."""

_MISTAKES = 0.75
_TEST_SHARE = 1 / 8


@TASKS.register("sort")
def sort(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yields 4 to 6 different letters to put in order: "Sort: dbca" asks for "abcd".

    The demonstration in `response` is wrong in three of four rows: two of its letters are swapped. The hash of an
    answer decides its split, so no test prompt, nor another order of its letters, is ever a training prompt.
    """
    if split not in ("train", "test"):
        raise DataError(f"task:sort has the splits train and test, not {split!r}; set data.split")
    rng = random.Random(f"sort:{split}:{seed}")
    while True:
        letters = rng.sample(string.ascii_lowercase, rng.randint(4, 6))
        answer = sorted(letters)
        response = answer.copy()
        if rng.random() < _MISTAKES:
            i, j = rng.sample(range(len(response)), 2)
            response[i], response[j] = response[j], response[i]
        if _held_out("".join(answer)) == (split == "test"):
            yield {
                "prompt": f"Sort: {''.join(letters)}",
                "answer": "".join(answer),
                "response": "".join(response),
            }


def _held_out(answer: str) -> bool:
    return hashlib.sha256(answer.encode()).digest()[0] < 256 * _TEST_SHARE
