"""Write scored rollouts as rows of JSON, and read those of a run, the reward `http`, or a user."""

import json
import math
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import yaml
from pydantic_core import PydanticSerializationError, to_json

from hocket.common.files import naming, write_atomically
from hocket.common.redaction import redacted
from hocket.errors import DataError
from hocket.types import Group, Image, Prompt, Rollout, Score, TokenSequence, TurnReward, text_of

METRICS = "metrics.jsonl"
LEDGER = "ledger.jsonl"
TIMELINE = "timeline.jsonl"
GROWING = (METRICS, LEDGER, TIMELINE)  # of a run, line by line
TRAINED = "trained"  # folder of what training made of the rollouts
DAMAGED = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    yaml.YAMLError,
)
"""What is raised on reading what is not as it was written."""
COPIED = (
    "finish_reason",
    "turns",
    "version_min",
    "version_max",
    "opening",
)  # fields of a sequence that its row has
_NUMBERS = re.compile(
    rb',\s*"(?:mask|token_ids|logprobs|advantages|trainer|entropy)":\s*\[[^\]]*\]'
)
"""Never in a text: its quotes are escaped."""


def write_rollouts(folder: Path, name: str, groups: Iterable[Group]) -> Path:
    """Write rollouts/NAME.jsonl, and the pictures that it names; return its path."""
    for sequence in (
        one for group in groups for rollout in group.rollouts for one in rollout.sequences
    ):
        if sequence.images:
            from hocket.observe.vision import keep

            keep(folder, sequence)
    path = folder / "rollouts" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lines_of(groups))
    return path


def lines_of(groups: Iterable[Group]) -> str:
    """Return one JSON object per rollout, each on its line."""
    return "".join(
        _line(row_of(group, *pair)) + "\n"
        for group in groups
        for pair in zip(group.rollouts, group.scores, strict=True)
    )


def _line(row: Mapping[str, Any]) -> str:
    try:
        return to_json(row, fallback=_plain).decode()  # six times as fast as json with numbers
    except PydanticSerializationError:  # half a surrogate pair
        return json.dumps(row, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, array) else str(value)


def row_of(group: Group, rollout: Rollout, score: Score) -> dict[str, Any]:
    *others, last = map(_sequence_row, rollout.sequence_ids, rollout.sequences)
    row = {
        "id": rollout.id,
        "group_id": group.id,
        "prompt_id": rollout.prompt.id,
        "prompt": rollout.prompt.text,
        "messages": rollout.prompt.messages,
        "answer": rollout.prompt.answer,
        "meta": rollout.prompt.meta,
        "reward": None if score.error is not None else score.total,
        "parts": dict(score.parts),
        "error": score.error,
        "note": score.note,
        "num_tokens": rollout.num_sampled,
        **last,
    }
    if rollout.error is not None:
        row["failed"] = redacted(rollout.error)  # the episode; "error" may be a reward's
    more = {"others": others, "source": rollout.prompt.source, "metrics": dict(rollout.metrics)}
    return row | {name: value for name, value in more.items() if value}


def _sequence_row(name: str, sequence: TokenSequence) -> dict[str, Any]:
    row = {field: getattr(sequence, field) for field in (*COPIED, "token_ids", "logprobs")}
    images = [
        {"file": one.name, "start": one.start, "length": one.length, "placeholder": one.placeholder}
        for one in sequence.images
    ]
    more = {"dialogue": sequence.dialogue, "turn_rewards": sequence.turn_rewards, "images": images}
    row |= {name: value for name, value in more.items() if value}
    return {"id": name, "completion": sequence.text, "mask": list(bytes(sequence.mask)), **row}


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def said(row: Mapping[str, Any]) -> str:
    """Return the turns of a row's episode, or its only one."""
    turns = (
        f"{one.get('role')}: {text_of(one.get('content') or '')}" for one in row.get("dialogue", ())
    )
    return "\n".join(turns) or str(row["completion"])


def read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def config_of(folder: Path) -> dict[str, Any]:
    return yaml.safe_load(read_text(folder / "config.yaml")) or {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file; none if it is missing. Raise DataError for a broken line but the last."""
    lines = read_text(path).split("\n")  # a text may hold other line separators
    found = [parsed(line) for line in lines]
    with reading(path):
        if [] in found[:-1]:
            raise ValueError(f"line {found.index([]) + 1} is no object")
    return [*chain.from_iterable(found)]


def rows_of(path: Path, mark: bytes = b"", *, tokens: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file one by one, of lines with `mark` alone; none if it is missing.

    Numbers of tokens are left out of them, without `tokens`.
    """
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            if mark in line:
                yield from parsed(
                    (line if tokens else _NUMBERS.sub(b"", line)).decode(errors="replace")
                )


def parsed(text: str) -> list[dict[str, Any]]:
    """Return the objects in lines of JSON, without the broken line of a killed run."""
    rows = []
    for line in text.split("\n"):
        with suppress(ValueError, RecursionError):
            rows.append(json.loads(line, parse_constant=lambda name: None))  # NaN and infinities
    return [row for row in rows if isinstance(row, dict)]


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Raise DataError where the body finds in files what no run writes."""
    try:
        yield
    except DAMAGED as error:
        advice = "bring the file back from a copy, or choose another run folder"
        raise DataError(f"{path} is damaged: {error!r}; {advice}") from error


def groups_of(lines: Iterable[str], folder: Path | None = None) -> list[Group]:
    """Parse the lines of a run's rollouts. Raise one of DAMAGED where one is no such row."""
    groups = []
    for name, together in groupby(map(json.loads, lines), key=lambda row: str(row["group_id"])):
        rows = list(together)
        rollouts = tuple(rollout_of(row, folder=folder) for row in rows)
        groups.append(Group(id=name, rollouts=rollouts, scores=tuple(map(_score, rows))))
    return groups


def _score(row: Mapping[str, Any]) -> Score:
    total = math.nan if row["reward"] is None else row["reward"]
    error = row["error"]
    if error is None and not math.isfinite(total):
        error = f"the row has no reward: {total}"
    return Score(total=total, parts=row["parts"], error=error, note=row.get("note", ""))


def rollout_of(row: Mapping[str, Any], id: str = "", folder: Path | None = None) -> Rollout:
    """Parse a row of a run, of the reward `http`, or a sample; only the completion must be there.

    Raise one of DAMAGED.
    """
    sequences = tuple(_sequence(one, folder) for one in (*row.get("others", ()), row))
    messages = row.get("messages")
    said = row.get("prompt")
    if isinstance(said, list):
        said, messages = None, said
    num_read = (*sequences[-1].mask, True).index(True)  # all, if no token was sampled
    answer = row.get("answer")
    prompt = Prompt(
        id=row.get("prompt_id", ""),
        token_ids=sequences[-1].token_ids[:num_read],
        messages=messages and tuple(messages),
        text=said
        or text_of(
            next((m["content"] for m in reversed(messages or ()) if m["role"] == "user"), "")
        ),
        answer=None if answer is None else str(answer),
        meta=row.get("meta", {}),
        source=row.get("source", ""),
        images=tuple(image for image in sequences[-1].images if image.start <= num_read),
    )
    return Rollout(
        id=str(row.get("id", id)),
        prompt=prompt,
        sequences=sequences,
        reward=row.get("parts", {}).get("env"),  # of the environment alone
        error=row.get("failed"),
        metrics=row.get("metrics", {}),
    )


def _sequence(row: Mapping[str, Any], folder: Path | None) -> TokenSequence:
    completion = row.get("completion")
    if not isinstance(completion, str):
        raise ValueError(f"the column 'completion' must be a text, got {completion!r:.80}")
    token_ids = array("I", row.get("token_ids", ()))
    images: tuple[Image, ...] = ()
    if row.get("images"):
        from hocket.observe.vision import image_of

        images = tuple(image_of(image, folder) for image in row["images"])
    return TokenSequence(
        token_ids=token_ids,
        mask=tuple(map(bool, row.get("mask", [True] * len(token_ids)))),
        logprobs=tuple(row.get("logprobs", [0.0] * len(token_ids))),
        dialogue=tuple(row.get("dialogue", ())),
        turn_rewards=tuple(TurnReward(*one) for one in row.get("turn_rewards", ())),
        text=completion,
        images=images,
        **{field: row[field] for field in COPIED if field in row},
    )
