"""Several tasks in one conversation: what config/series.yaml trains on."""

import random
from collections.abc import Iterator
from typing import Any

from hocket.data.sources import TASKS
from hocket.envs import Action, Environment, Observation, Step, environment
from hocket.rewards.builtin import position_match
from hocket.types import Prompt


@environment("series")
class Series(Environment):
    """After the prompt come more rows of the task, the same in each episode of a group; each answer has a reward."""

    def __init__(self, task: str = "sort_down", turns: int = 8) -> None:
        self.task = TASKS.get(task)
        self.turns = turns
        self.rows: Iterator[dict[str, Any]] = iter(())
        self.answer = ""

    async def reset(self, prompt: Prompt, seed: int) -> Observation | None:
        self.answer = prompt.answer or ""
        self.rows = self.task("train", random.Random(prompt.text).randrange(1 << 30))
        return None

    async def step(self, action: Action) -> Step:
        right = float(action.text == self.answer) + position_match(action.text, self.answer)
        self.turns -= 1
        row = next(self.rows)
        self.answer = row["answer"]
        return Step(reward=right, done=not self.turns, messages=[{"role": "user", "content": row["prompt"]}])
