"""What checkpoints/tiny-tools learns: to guess a number, to calculate, and before that from demonstrations of both."""

import json
import random
import string
from collections.abc import Iterator
from typing import Any

from hocket.data.sources import TASKS, generator, split_of
from hocket.envs import Action, Environment, Observation, Step, environment
from hocket.types import Prompt

GUESS = "Guess: 1 to 20"
HIGHEST = 20
TOOLS = "Tools: calculate(expression)"  # as the template of checkpoints/tiny-tools shows the calculator
MISTAKES = 0.5
GUESSES = 0.5
HEEDS_HINTS = 0.3


@TASKS.register("guess")
def guess(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield numbers from 1 to 20 to be guessed in the environment `guess`; the prompt is always the same."""
    rng = random.Random(f"guess:{split}:{seed}")
    while True:
        yield {"prompt": GUESS, "answer": str(rng.randint(1, HIGHEST))}


@TASKS.register("calculate")
def calculate(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield two numbers to add, subtract or multiply: "Compute: 34*27" asks for "918"."""
    rng = generator("calculate", split, seed)
    while True:
        expression, answer = arithmetic(rng)
        if split_of(expression) == split:
            yield {"prompt": f"Compute: {expression}", "answer": answer}


def arithmetic(rng: random.Random) -> tuple[str, str]:
    """Return an expression of two numbers from 10 to 99, and its value."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    sign, value = rng.choice((("+", a + b), ("-", a - b), ("*", a * b)))
    return f"{a}{sign}{b}", str(value)


@environment("guess")
class Guess(Environment):
    """The model finds the prompt's answer, a whole number, from the hints "higher" and "lower".

    The reward is 1 for finding it; else `near` for a last guess right beside it, falling to 0 at a distance of `width`.
    What is no number ends the episode without a reward.
    """

    def __init__(self, guesses: int = 5, near: float = 0.0, width: int = 10) -> None:
        if guesses < 1 or width < 1:
            raise ValueError(f"guesses and width must be at least 1, got {guesses} and {width}")
        self.left, self.near, self.width, self.number = guesses, near, width, 0

    async def reset(self, prompt: Prompt, seed: int) -> Observation | None:
        if prompt.answer is None:
            raise ValueError("the prompt has no answer to guess; set data.answer_column")
        self.number = int(prompt.answer)
        return None

    async def step(self, action: Action) -> Step:
        try:
            guess = int(action.text)
        except ValueError:
            return Step(done=True)
        self.left -= 1
        if guess == self.number:
            return Step(done=True, reward=1.0)
        if self.left == 0:
            return Step(done=True, reward=self.near * max(0.0, 1 - abs(guess - self.number) / self.width))
        return Step(messages=[{"role": "user", "content": "higher" if guess < self.number else "lower"}])


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
