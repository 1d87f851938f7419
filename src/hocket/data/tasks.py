"""Built-in tasks: endless rows made from a seed, for trying things without any data."""

import hashlib
import json
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

GUESS = "Guess: 1 to 20"
HIGHEST = 20
TOOLS = "Tools: calculate(expression)"
"""How the template of checkpoints/tiny-tools shows the calculator."""

_MISTAKES = 0.75
_MISTAKES_IN_TURNS = 0.5
_GUESSES = 0.5
_HEEDS_HINTS = 0.3
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


@TASKS.register("guess")
def guess(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yields numbers from 1 to 20 to be guessed in the environment `guess`; the prompt is always the same."""
    rng = random.Random(f"guess:{split}:{seed}")
    while True:
        yield {"prompt": GUESS, "answer": str(rng.randint(1, HIGHEST))}


@TASKS.register("calculate")
def calculate(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yields two numbers to add, subtract or multiply: "Compute: 34*27" asks for "918".

    The hash of an expression decides its split, so no test prompt is ever a training prompt.
    """
    if split not in ("train", "test"):
        raise DataError(f"task:calculate has the splits train and test, not {split!r}; set data.split")
    rng = random.Random(f"calculate:{split}:{seed}")
    while True:
        expression, answer = _arithmetic(rng)
        if _held_out(expression) == (split == "test"):
            yield {"prompt": f"Compute: {expression}", "answer": answer}


@TASKS.register("turns")
def turns(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yields demonstrations, without answers, of one turn of an episode of `guess` or of `calculate`.

    They are often wrong, so that there is something left to learn: guesses mostly ignore the hints; calls of the
    calculator, and what is made of its results, are right in about every second row.
    """
    rng = random.Random(f"turns:{split}:{seed}")
    while True:
        messages, response = _guess_turn(rng) if rng.random() < _GUESSES else _calculate_turn(rng)
        yield {"prompt": messages, "response": response}


def _guess_turn(rng: random.Random) -> tuple[list[dict[str, str]], str]:
    """Returns the messages of an episode so far, and the next guess."""
    number, low, high = rng.randint(1, HIGHEST), 1, HIGHEST
    messages = [{"role": "user", "content": GUESS}]
    for _ in range(rng.randrange(5)):
        guess = _next_guess(rng, low, high)
        if guess == number:
            break
        hint = "higher" if guess < number else "lower"
        low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
        messages += [{"role": "assistant", "content": str(guess)}, {"role": "user", "content": hint}]
    return messages, str(_next_guess(rng, low, high))


def _next_guess(rng: random.Random, low: int, high: int) -> int:
    return rng.randint(low, high) if rng.random() < _HEEDS_HINTS else rng.randint(1, HIGHEST)


def _calculate_turn(rng: random.Random) -> tuple[list[dict[str, str]], str]:
    """Returns the messages of an episode so far, and a call of the calculator or the answer."""
    expression, answer = _arithmetic(rng)
    messages = [{"role": "system", "content": TOOLS}, {"role": "user", "content": f"Compute: {expression}"}]
    right = rng.random() < 1 - _MISTAKES_IN_TURNS
    if rng.random() < 0.5:
        called = expression if right else _one_digit_off(rng, expression)
        call = {"name": "calculate", "arguments": {"expression": called}}
        wanted = f"<tool_call>{json.dumps(call)}</tool_call>"
        return messages, wanted if right or rng.random() < 0.5 else _one_digit_off(rng, answer)
    call = {"name": "calculate", "arguments": {"expression": expression}}
    messages += [
        {"role": "assistant", "content": f"<tool_call>{json.dumps(call)}</tool_call>"},
        {"role": "tool", "content": answer},
    ]
    return messages, answer if right else _one_digit_off(rng, answer)


def _arithmetic(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    sign, value = rng.choice((("+", a + b), ("-", a - b), ("*", a * b)))
    return f"{a}{sign}{b}", str(value)


def _one_digit_off(rng: random.Random, text: str) -> str:
    index = rng.choice([i for i, character in enumerate(text) if character.isdigit()])
    return text[:index] + rng.choice(string.digits.replace(text[index], "")) + text[index + 1 :]


def _held_out(answer: str) -> bool:
    return hashlib.sha256(answer.encode()).digest()[0] < 256 * _TEST_SHARE
