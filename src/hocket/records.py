"""Scored rollouts as rows of a file, one JSON object each, and back. Knows neither where files lie nor for whom."""

import json
import math
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from hocket.types import Group, Prompt, Rollout, Score, TokenSequence


def rows_of(group: Group) -> Iterable[dict[str, Any]]:
    """Yields one row per rollout."""
    for rollout, score in zip(group.rollouts, group.scores, strict=True):
        *others, last = (
            _sequence(sequence, name) for sequence, name in zip(rollout.sequences, rollout.sequence_ids, strict=True)
        )
        yield {
            "id": rollout.id,
            "group_id": group.id,
            "prompt_id": rollout.prompt.id,
            "prompt": rollout.prompt.text,
            "answer": rollout.prompt.answer,
            "reward": None if score.error is not None else score.total,
            "parts": dict(score.parts),
            "error": score.error,
            "num_tokens": rollout.num_sampled,
            **last,
            **({"others": others} if others else {}),
        }


def _sequence(sequence: TokenSequence, name: str) -> dict[str, Any]:
    dialogue = {"dialogue": sequence.dialogue} if sequence.dialogue else {}
    return dialogue | {
        "id": name,
        "completion": sequence.text,
        "finish_reason": sequence.finish_reason,
        "turns": sequence.turns,
        "version_min": sequence.version_min,
        "version_max": sequence.version_max,
        "token_ids": sequence.token_ids,
        "logprobs": sequence.logprobs,
        "mask": [int(sampled) for sampled in sequence.mask],
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
    sequences = tuple(_read_sequence(one) for one in (*row.get("others", ()), row))
    last = sequences[-1]
    before = last.mask.index(True) if True in last.mask else len(last.mask)
    prompt = Prompt(id=row["prompt_id"], token_ids=last.token_ids[:before], text=row["prompt"], answer=row["answer"])
    return Rollout(id=row["id"], prompt=prompt, sequences=sequences)


def _read_sequence(row: Mapping[str, Any]) -> TokenSequence:
    return TokenSequence(
        token_ids=tuple(row["token_ids"]),
        mask=tuple(bool(sampled) for sampled in row["mask"]),
        logprobs=tuple(row["logprobs"]),
        finish_reason=row["finish_reason"],
        version_min=row["version_min"],
        version_max=row["version_max"],
        turns=row.get("turns", 1),
        text=row["completion"],
        dialogue=tuple(row.get("dialogue", ())),
    )


def _score(row: Mapping[str, Any]) -> Score:
    total = math.nan if row["reward"] is None else row["reward"]
    return Score(total=total, parts=row["parts"], error=row["error"])
