"""Sums of two numbers of two digits, and their reward: what config/smollm2_sums.yaml trains on."""

import re
from collections.abc import Iterator
from typing import Any

from hocket.data.sources import TASKS, generator, split_of
from hocket.rewards import reward


@TASKS.register("sums")
def sums(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows like "What is 64 + 75? Answer with the number only." with the answer "139"."""
    rng = generator("sums", split, seed)
    while True:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        # Both orders of two numbers are in the same split: none of them is a hint for the other.
        if split_of(f"{min(a, b)} + {max(a, b)}") == split:
            yield {"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)}


@reward("last_number", inline=True)
def last_number(completion: str, answer: str) -> float:
    """Give 1 if the last number of the completion is the answer, else 0."""
    numbers = re.findall(r"-?\d+", completion)
    return float(bool(numbers) and numbers[-1] == answer)
