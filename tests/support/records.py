"""What runs draw, sample and leave: prompts, conversations, groups, and files of JSON lines."""

import itertools
import json
import math
import operator
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hocket.data.mixture import Stream
from hocket.types import Group, Prompt, Prompts, Rollout, Score, TokenSequence


def prompts(num: int, **fields: Any) -> Prompts:
    """Returns the prompts rows:0, rows:1, ..., each of one token."""
    return Prompts(Prompt(id=f"rows:{i}", token_ids=array("I", (i + 1,)), text=f"{i}", **fields) for i in range(num))


def saved(stream: Stream) -> dict[str, Any]:
    """Returns a stream's state as a checkpoint gives it back."""
    state: dict[str, Any] = json.loads(json.dumps(stream.state()))
    return state


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def says(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def read_and_taught(row: TokenSequence) -> tuple[list[int], list[int]]:
    """Returns the tokens that are read and those that are taught."""
    read = itertools.compress(row.token_ids, map(operator.not_, row.mask))
    return [*read], [*itertools.compress(row.token_ids, row.mask)]


def sequence(*sampled: int, told: Sequence[int] = (1,), **fields: Any) -> TokenSequence:
    """Returns what is sampled behind what is told, each token with a log-probability of -1."""
    plain = {
        "token_ids": (*told, *sampled),
        "mask": (False,) * len(told) + (True,) * len(sampled),
        "logprobs": (0.0,) * len(told) + (-1.0,) * len(sampled),
    }
    return TokenSequence(**(plain | fields))


def group(
    prompt: Prompt, sequences: Iterable[TokenSequence], scores: Iterable[Score | float | None], id: str = "g"
) -> Group:
    """Returns a rollout of each sequence with its score, or total reward; None is one that failed."""
    totals = [Score(total=math.nan, error="x") if one is None else one for one in scores]
    return Group(
        id=id,
        rollouts=tuple(Rollout(id=f"{id}/{i}", prompt=prompt, sequences=(one,)) for i, one in enumerate(sequences)),
        scores=tuple(one if isinstance(one, Score) else Score(total=one) for one in totals),
    )


def write_rows(path: Path, *rows: Any, mode: str = "w", end: str = "\n") -> Path:
    """Writes JSON lines into a file, whose folder need not be there; a text is a line as it stands."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    with path.open(mode, encoding="utf-8") as file:
        file.write("\n".join(lines) + end)
    return path
