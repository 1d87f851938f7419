"""Scored rollouts as rows of a file, one JSON object each, and back. Knows neither where files lie nor for whom."""

import json
import math
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from hocket.types import Group, Prompt, Rollout, Score


def rows_of(group: Group) -> Iterable[dict[str, Any]]:
    """Yields one row per rollout."""
    for rollout, score in zip(group.rollouts, group.scores, strict=True):
        others = {"others": [_sequence(other) for other in rollout.others]} if rollout.others else {}
        yield {
            "id": rollout.id,
            "group_id": rollout.group_id,
            "prompt_id": rollout.prompt.id,
            "prompt": rollout.prompt.text,
            "answer": rollout.prompt.answer,
            "reward": None if score.error is not None else score.total,
            "parts": dict(score.parts),
            "error": score.error,
            "num_tokens": rollout.num_sampled,
            **_sequence(rollout),
            **others,
        }


def _sequence(rollout: Rollout) -> dict[str, Any]:
    dialogue = {"dialogue": rollout.dialogue} if rollout.dialogue else {}
    return dialogue | {
        "id": rollout.id,
        "completion": rollout.text,
        "finish_reason": rollout.finish_reason,
        "turns": rollout.turns,
        "version_min": rollout.version_min,
        "version_max": rollout.version_max,
        "token_ids": rollout.token_ids,
        "logprobs": rollout.logprobs,
        "mask": [int(sampled) for sampled in rollout.mask],
    }


def lines_of(groups: Iterable[Group]) -> str:
    """Returns the rows of all groups as the lines of a file."""
    rows = (row for group in groups for row in rows_of(group))
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)


def groups_of(lines: Iterable[str]) -> list[Group]:
    """Returns the groups whose rows follow each other in these lines; the prompts come without messages and columns.

    Raises:
        ValueError, KeyError, TypeError: a line is no such row.
    """
    rows = [json.loads(line) for line in lines]
    groups = []
    for group_id, together in groupby(rows, key=lambda row: str(row["group_id"])):
        mine = list(together)
        rollouts = tuple(_rollout(row) for row in mine)
        groups.append(Group(id=group_id, rollouts=rollouts, scores=tuple(_score(row) for row in mine)))
    return groups


def _rollout(row: Mapping[str, Any]) -> Rollout:
    mask = tuple(bool(sampled) for sampled in row["mask"])
    token_ids = tuple(row["token_ids"])
    before = mask.index(True) if True in mask else len(mask)
    shared = {key: row[key] for key in ("group_id", "prompt_id", "prompt", "answer")}
    return Rollout(
        id=row["id"],
        group_id=row["group_id"],
        prompt=Prompt(id=row["prompt_id"], token_ids=token_ids[:before], text=row["prompt"], answer=row["answer"]),
        token_ids=token_ids,
        mask=mask,
        logprobs=tuple(row["logprobs"]),
        finish_reason=row["finish_reason"],
        version_min=row["version_min"],
        version_max=row["version_max"],
        text=row["completion"],
        turns=row.get("turns", 1),
        dialogue=tuple(row.get("dialogue", ())),
        others=tuple(_rollout(shared | other) for other in row.get("others", ())),
    )


def _score(row: Mapping[str, Any]) -> Score:
    total = math.nan if row["reward"] is None else row["reward"]
    return Score(total=total, parts=row["parts"], error=row["error"])
