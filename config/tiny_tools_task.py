"""The task `turns` of tiny_tools_sft.yaml: demonstrations of single turns, often wrong."""

import json
import random
import string
from collections.abc import Iterator
from typing import Any

from hocket.data.sources import GUESS, HIGHEST, TASKS, arithmetic

TOOLS = "Tools: calculate(expression)"  # as the template of checkpoints/tiny-tools shows the calculator
MISTAKES = 0.5
GUESSES = 0.5
HEEDS_HINTS = 0.3


@TASKS.register("turns")
def turns(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield demonstrations, without answers, of one turn of an episode of `guess` or of `calculate`.

    They are often wrong, so that there is something left to learn: guesses mostly ignore the hints; calls of the
    calculator, and what is made of its results, are right in about every second row.
    """
    rng = random.Random(f"turns:{split}:{seed}")
    while True:
        messages, response = _guess_turn(rng) if rng.random() < GUESSES else _calculate_turn(rng)
        yield {"prompt": messages, "response": response}


def _guess_turn(rng: random.Random) -> tuple[list[dict[str, str]], str]:
    """Return the messages of an episode so far, and the next guess."""
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
    return rng.randint(low, high) if rng.random() < HEEDS_HINTS else rng.randint(1, HIGHEST)


def _calculate_turn(rng: random.Random) -> tuple[list[dict[str, str]], str]:
    """Return the messages of an episode so far, and a call of the calculator or the answer."""
    expression, answer = arithmetic(rng)
    messages = [{"role": "system", "content": TOOLS}, {"role": "user", "content": f"Compute: {expression}"}]
    right = rng.random() < 1 - MISTAKES
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


def _one_digit_off(rng: random.Random, text: str) -> str:
    index = rng.choice([i for i, character in enumerate(text) if character.isdigit()])
    return text[:index] + rng.choice(string.digits.replace(text[index], "")) + text[index + 1 :]
