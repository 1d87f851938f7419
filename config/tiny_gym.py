"""Demonstrate two tasks of reasoning-gym, every other time with a mistake, for the model of config/gym.yaml."""

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

from hocket.data.gym import made
from hocket.data.sources import TASKS

SIZE = 1 << 20
OPTIONS: dict[str, dict[str, int]] = {
    "spell_backward": {"min_word_len": 3, "max_word_len": 5},
    "letter_counting": {"min_words": 1, "max_words": 2},
}


def swapped(word: str, rng: random.Random) -> str:
    """Return a word with two letters swapped."""
    letters = [*word]
    i, j = rng.sample(range(len(word)), 2)
    letters[i], letters[j] = letters[j], letters[i]
    return "".join(letters)


@TASKS.register("gym_demos")
def gym_demos(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows of both tasks in turn, from other seeds than those of config/gym.yaml."""
    rng = random.Random(seed)
    tasks = [made(name, json.dumps({**options, "seed": 1 << 30, "size": SIZE})) for name, options in OPTIONS.items()]
    for index, task in itertools.product(range(SIZE), tasks):
        entry = task[index]
        answer = entry["answer"]
        response = answer
        if rng.random() < 0.5:
            response = str(int(answer) + rng.choice((1, 2))) if answer.isdigit() else swapped(answer, rng)
        yield {"prompt": entry["question"], "answer": answer, "response": response}
