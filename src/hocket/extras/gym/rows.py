"""Make rows of the procedural tasks of the package reasoning-gym (docs/hubs.md).

Row i of a split has the seed options.seed + i, of `test` counted from 2³¹ on: no row of it is made
for `train`.
"""

import functools
import json
from collections.abc import Iterator
from typing import Any

from hocket.common.registry import need
from hocket.config import DataConfig
from hocket.data.sources import source
from hocket.errors import DataError

NUM_ROWS = 2048  # without data.limit
SEEDS = {"train": 0, "test": 1 << 31}
SEVERAL = "any that the task takes"  # in place of an answer, where there are many


@source("gym")
def rows(data: DataConfig) -> Iterator[dict[str, Any]]:
    """Yield question and answer, and what the reward `gym` makes the entry from again."""
    need(data.source, "reasoning_gym")
    if data.split not in SEEDS:
        raise DataError(
            f"{data.source} has the splits train and test, not {data.split!r}; set {data.section}.split"
        )
    task = data.source.removeprefix("gym:")
    size = data.limit or NUM_ROWS
    seed = data.options.get("seed", 0) + SEEDS[data.split]
    options = json.dumps({**data.options, "seed": seed, "size": size})
    try:
        dataset = made(task, options)
    except (ValueError, TypeError, AssertionError) as error:
        what = f"{data.source} with {data.section}.options={data.options}"
        raise DataError(
            f"reasoning-gym refuses {what}: {error!r}; its GALLERY.md has tasks and options"
        ) from error
    for index in range(size):
        entry = dataset[index]
        answer = SEVERAL if entry["answer"] is None else str(entry["answer"])
        row = {data.prompt_column: entry["question"], data.response_column: answer}
        if data.answer_column is not None:
            row[data.answer_column] = answer
        yield {**row, "gym": {"task": task, "options": options, "index": index}}


@functools.lru_cache(64)
def made(task: str, options: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, **json.loads(options))
