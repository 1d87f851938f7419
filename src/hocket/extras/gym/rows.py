"""Make rows of the procedural tasks of the package reasoning-gym (docs/how-to/hubs.md).

Row i of the split `train` has the seed options.seed + i. Rows of `test` count from 2³¹ on, so that
no row of it is made for `train`.
"""

import functools
import json
from collections.abc import Iterator
from typing import Any

from hocket.common.registry import need
from hocket.config import DataConfig
from hocket.data.sources import source
from hocket.errors import DataError

NUM_ROWS = 2048  # rows of a split without data.limit
SEEDS = {"train": 0, "test": 1 << 31}  # added to options.seed, by split
SEVERAL = "any that the task takes"  # stands in place of an answer where there are many


@source("gym")
def rows(data: DataConfig) -> Iterator[dict[str, Any]]:
    """Yield question and answer, and what the reward `gym` needs to make the entry again.

    Raise DataError for an unknown split, or options that the task refuses.
    """
    need(data.source, "reasoning_gym")
    if data.split not in SEEDS:
        advice = f"set {data.section}.split"
        raise DataError(
            f"{data.source} has the splits train and test, not {data.split!r}; {advice}"
        )
    task = data.source.removeprefix("gym:")
    size = data.limit or NUM_ROWS
    seed = data.options.get("seed", 0) + SEEDS[data.split]
    options = json.dumps(dict(data.options) | {"seed": seed, "size": size})
    try:
        dataset = task_dataset(task, options)
    except (ValueError, TypeError, AssertionError) as error:
        settings = f"{data.source} with {data.section}.options={data.options}"
        raise DataError(
            f"reasoning-gym refuses {settings}: {error!r}; its GALLERY.md has tasks and options"
        ) from error
    for index in range(size):
        entry = dataset[index]
        answer = SEVERAL if entry["answer"] is None else str(entry["answer"])
        row: dict[str, Any] = {
            data.prompt_column: entry["question"],
            data.response_column: answer,
        }
        if data.answer_column is not None:
            row[data.answer_column] = answer
        row["gym"] = {"task": task, "options": options, "index": index}
        yield row


@functools.lru_cache(64)
def task_dataset(task: str, options: str) -> Any:
    """Make the data set of a task; `options` are JSON, so that the cache can compare them."""
    import reasoning_gym

    return reasoning_gym.create_dataset(task, **json.loads(options))
