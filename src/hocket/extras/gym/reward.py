"""Score answers to tasks of reasoning-gym by their own scorer (docs/how-to/hubs.md)."""

from collections.abc import Mapping
from typing import Any

from hocket.extras.gym.rows import task_dataset
from hocket.rewards.base import reward
from hocket.rewards.builtin import after_thought, column


@reward("gym", imports=("reasoning_gym",))
def gym(completion: str, meta: Mapping[str, Any], opening: str = "", tag: str = "") -> float:
    """Score the answer after the thought, or with `tag` the text in <tag> there: 0 to 1."""
    row = column(meta, "gym")
    dataset = task_dataset(row["task"], row["options"])
    answer = after_thought(completion, opening).strip()
    if tag:
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(answer, tag) or ""
    return float(dataset.score_answer(answer, dataset[row["index"]]))
