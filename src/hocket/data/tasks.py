"""Built-in tasks: endless rows made from a seed, for trying things without any data."""

import hashlib
import random
import string
from collections.abc import Callable, Iterator
from typing import Any

from hocket.errors import DataError
from hocket.registry import Registry

# A task is a function (split, seed) -> endless rows with the columns prompt, answer and response.
TASKS: Registry[Callable[[str, int], Iterator[dict[str, Any]]]] = Registry("task")

NUM_ROWS = 2048  # without data.limit
GUESS = "Guess: 1 to 20"
HIGHEST = 20
_MISTAKES = 0.75
_TEST_SHARE = 1 / 8


@TASKS.register("sort")
def sort(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield 4 to 6 different letters to put in order: "Sort: dbca" asks for "abcd".

    The demonstration in `response` is wrong in three of four rows: two of its letters are swapped.
    """
    rng = _generator("sort", split, seed)
    while True:
        letters = rng.sample(string.ascii_lowercase, rng.randint(4, 6))
        answer = sorted(letters)
        response = answer.copy()
        if rng.random() < _MISTAKES:
            i, j = rng.sample(range(len(response)), 2)
            response[i], response[j] = response[j], response[i]
        if _split_of("".join(answer)) == split:  # of the answer: no order of test letters is a training prompt
            yield {"prompt": f"Sort: {''.join(letters)}", "answer": "".join(answer), "response": "".join(response)}


@TASKS.register("guess")
def guess(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield numbers from 1 to 20 to be guessed in the environment `guess`; the prompt is always the same."""
    rng = random.Random(f"guess:{split}:{seed}")
    while True:
        yield {"prompt": GUESS, "answer": str(rng.randint(1, HIGHEST))}


@TASKS.register("calculate")
def calculate(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield two numbers to add, subtract or multiply: "Compute: 34*27" asks for "918"."""
    rng = _generator("calculate", split, seed)
    while True:
        expression, answer = arithmetic(rng)
        if _split_of(expression) == split:
            yield {"prompt": f"Compute: {expression}", "answer": answer}


def arithmetic(rng: random.Random) -> tuple[str, str]:
    """Return an expression of two numbers from 10 to 99, and its value."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    sign, value = rng.choice((("+", a + b), ("-", a - b), ("*", a * b)))
    return f"{a}{sign}{b}", str(value)


def _generator(task: str, split: str, seed: int) -> random.Random:
    if split not in ("train", "test"):
        raise DataError(f"task:{task} has the splits train and test, not {split!r}; set data.split")
    return random.Random(f"{task}:{split}:{seed}")


def _split_of(text: str) -> str:
    """Return the split of a row by the hash of its text, so that no test row is ever a training row."""
    return "test" if hashlib.sha256(text.encode()).digest()[0] < 256 * _TEST_SHARE else "train"
