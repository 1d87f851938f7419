"""Demonstrate two tasks of reasoning-gym, mostly with the same mistake, for the model of config/gym.yaml."""

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

from hocket.common.registry import need
from hocket.data.sources import TASKS
from hocket.extras.gym.rows import task_dataset

SIZE = 1 << 20
MISTAKES = 0.65
OPTIONS: dict[str, dict[str, int]] = {
    "spell_backward": {"min_word_len": 3, "max_word_len": 5},
    "letter_counting": {"min_words": 1, "max_words": 2},
}


@TASKS.register("gym_demos")
def gym_demos(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows of both tasks in turn, from other seeds than those of config/gym.yaml."""
    need("task:gym_demos", "reasoning_gym")
    rng = random.Random(seed)
    tasks = [
        task_dataset(name, json.dumps({**options, "seed": 1 << 30, "size": SIZE})) for name, options in OPTIONS.items()
    ]
    for index, task in itertools.product(range(SIZE), tasks):
        entry = task[index]
        answer = entry["answer"]
        response = answer
        if rng.random() < MISTAKES:  # one too many, or two letters swapped: always the same ones
            response = str(int(answer) + 1) if answer.isdigit() else answer[1] + answer[0] + answer[2:]
        yield {"prompt": entry["question"], "answer": answer, "response": response}
