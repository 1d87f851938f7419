"""Write the rows of a run's files, and read those of a run, the reward `http`, or a user (formats.py)."""

import inspect
import json
import math
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NotRequired, cast, get_args, get_origin, get_type_hints

import yaml
from pydantic_core import PydanticSerializationError, to_json

from hocket.common.files import naming, write_atomically
from hocket.common.redaction import redacted
from hocket.config.sections import markdown_table
from hocket.errors import DataError
from hocket.formats import (
    FORMAT,
    LEDGER,
    METRICS,
    ROLLOUTS,
    ROWS,
    SUMMARY,
    EpisodeRow,
    ImageRow,
    LedgerRow,
    MetricsRow,
    RolloutRow,
    SequenceRow,
    Summary,
    TrainedRow,
)
from hocket.types import (
    Group,
    Image,
    Message,
    Prompt,
    Rollout,
    Score,
    TokenSequence,
    TurnReward,
    text_of,
)

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
    path = folder / ROLLOUTS / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lines_of(groups))
    return path


def lines_of(groups: Iterable[Group]) -> str:
    """Return one JSON object per rollout, each on its line."""
    lines = []
    for group in groups:
        for rollout, score in zip(group.rollouts, group.scores, strict=True):
            lines.append(_line(row_of(group, rollout, score)) + "\n")
    return "".join(lines)


def _line(row: RolloutRow) -> str:
    content = with_format(row)
    try:
        return to_json(content, fallback=_plain).decode()  # six times as fast as json with numbers
    except PydanticSerializationError:  # half a surrogate pair
        return json.dumps(content, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, array) else str(value)


def row_of(group: Group, rollout: Rollout, score: Score) -> RolloutRow:
    *others, last = map(_sequence_row, rollout.sequence_ids, rollout.sequences)
    prompt = rollout.prompt
    episode: EpisodeRow = {
        "group_id": group.id,
        "prompt_id": prompt.id,
        "prompt": prompt.text,
        "messages": prompt.messages,
        "answer": prompt.answer,
        "meta": prompt.meta,
        "reward": None if score.error is not None else score.total,
        "parts": dict(score.parts),
        "error": score.error,
        "note": score.note,
        "num_tokens": rollout.num_sampled,
    }
    if rollout.error is not None:
        episode["failed"] = redacted(rollout.error)  # the episode; "error" may be a reward's
    if others:
        episode["others"] = others
    if prompt.source:
        episode["source"] = prompt.source
    if rollout.metrics:
        episode["metrics"] = dict(rollout.metrics)
    return {**last, **episode}


def _sequence_row(name: str, sequence: TokenSequence) -> SequenceRow:
    row: SequenceRow = {
        "id": name,
        "completion": sequence.text,
        "mask": list(bytes(sequence.mask)),
        "finish_reason": sequence.finish_reason,
        "turns": sequence.turns,
        "version_min": sequence.version_min,
        "version_max": sequence.version_max,
        "opening": sequence.opening,
        "token_ids": sequence.token_ids,
        "logprobs": sequence.logprobs,
    }
    if sequence.dialogue:
        row["dialogue"] = sequence.dialogue
    if sequence.turn_rewards:
        row["turn_rewards"] = sequence.turn_rewards
    if sequence.images:
        row["images"] = [_image_row(image) for image in sequence.images]
    return row


def _image_row(image: Image) -> ImageRow:
    return {
        "file": image.name,
        "start": image.start,
        "length": image.length,
        "placeholder": image.placeholder,
    }


def with_format(content: Mapping[str, Any]) -> dict[str, Any]:
    """Give a row, or the content of a .json file, the version of its format."""
    return {"format": FORMAT, **content}


def without_format(content: dict[str, Any], path: object) -> dict[str, Any]:
    """Take the version of its format out of a row, or the content of a .json file.

    Raise DataError for a newer one.
    """
    version = content.pop("format", 1)  # files of before have none
    if version > FORMAT:
        raise DataError(
            f"{path} has format {version}, and this hocket reads formats up to {FORMAT}: a newer hocket wrote it; "
            "read it with that one, or update this one"
        )
    return content


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(with_format(row)) + "\n" for row in rows)


def spoken(row: RolloutRow) -> str:
    """Return the turns of a row's episode as text, or its only one."""
    dialogue = row.get("dialogue", ())
    turns = [
        f"{message.get('role')}: {text_of(message.get('content') or '')}" for message in dialogue
    ]
    return "\n".join(turns) or str(row["completion"])


def read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def config_of(folder: Path) -> dict[str, Any]:
    return yaml.safe_load(read_text(folder / "config.yaml")) or {}


def read_metrics(run_dir: Path) -> list[MetricsRow]:
    """Read metrics.jsonl; raise DataError as `read_lines`."""
    return read_lines(run_dir / METRICS)


def read_ledger(run_dir: Path) -> list[LedgerRow]:
    """Read ledger.jsonl; raise DataError as `read_lines`."""
    return read_lines(run_dir / LEDGER)


def read_rollouts(path: Path) -> list[RolloutRow]:
    """Read a file of rollouts; raise DataError as `read_lines`."""
    return read_lines(path)


def read_summary(run_dir: Path) -> Summary:
    """Read summary.json. Raise DataError where it is damaged, FileNotFoundError before the run has ended."""
    path = run_dir / SUMMARY
    text = path.read_text(encoding="utf-8", errors="replace")
    with reading(path):
        return cast(Summary, without_format(json.loads(text), path))


def step_of(row: MetricsRow) -> int:
    """Return the step of a row of metrics.jsonl. Raise one of DAMAGED without."""
    step = row["step"]
    if not isinstance(step, int):
        raise ValueError(f"the step {step!r} is no number")
    return step


def read_lines(path: Path) -> list[Any]:
    """Read the objects of a JSONL file; none if it is missing.

    Raise DataError for a newer format, or for a broken line but the last.
    """
    rows = []
    lines = read_text(path).split("\n")  # a text may hold other line separators
    with reading(path):
        for number, line in enumerate(lines, 1):
            row = parsed(line, path)
            if row is not None:
                rows.append(row)
            elif number < len(lines):
                raise ValueError(f"line {number} is no object")
    return rows


def scan_rollouts(path: Path, mark: bytes = b"", *, tokens: bool = False) -> Iterator[RolloutRow]:
    """Yield the rows of a file of rollouts as `_scan` does; without `tokens` they lack the lists of numbers."""
    yield from _scan(path, mark, tokens=tokens)


def scan_trained(path: Path, *, tokens: bool = False) -> Iterator[TrainedRow]:
    """Yield the rows of trained/step_N.jsonl as `_scan` does."""
    yield from _scan(path, b"", tokens=tokens)


def _scan(path: Path, mark: bytes, *, tokens: bool) -> Iterator[Any]:
    """Yield the objects of a JSONL file one by one, of lines with `mark` alone; none if it is missing.

    Numbers of tokens are left out of them, without `tokens`; so is a broken line.
    """
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            if mark in line:
                text = line if tokens else _NUMBERS.sub(b"", line)
                row = parsed(text.decode(errors="replace"), path)
                if row is not None:
                    yield row


def parsed(line: str, path: object) -> Any:
    """Parse a line of JSON. Returns None if it is no object, as the broken line of a killed run.

    Raise DataError for a newer format.
    """
    try:
        row = json.loads(line, parse_constant=lambda name: None)  # NaN and infinities
    except (ValueError, RecursionError):
        return None
    return without_format(row, path) if isinstance(row, dict) else None


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Raise DataError where the body finds in files what no run writes."""
    try:
        yield
    except DAMAGED as error:
        advice = "bring the file back from a copy, or choose another run folder"
        raise DataError(f"{path} is damaged: {error!r}; {advice}") from error


def groups_of(lines: Iterable[str], path: Path | None = None) -> list[Group]:
    """Parse the lines of a run's file of rollouts. `path`: that file, beside whose folder are the pictures.

    Raise one of DAMAGED where one is no such row, DataError for a newer format.
    """
    folder = path.parents[1] if path else None
    rows = [without_format(json.loads(line), path or "the row") for line in lines]
    groups = []
    for name, together in groupby(rows, key=lambda row: str(row["group_id"])):
        of_group = list(together)
        rollouts = tuple(rollout_of(row, folder=folder) for row in of_group)
        groups.append(Group(id=name, rollouts=rollouts, scores=tuple(map(_score, of_group))))
    return groups


def _score(row: Mapping[str, Any]) -> Score:
    total = math.nan if row["reward"] is None else row["reward"]
    error = row["error"]
    if error is None and not math.isfinite(total):
        error = f"the row has no reward: {total}"
    return Score(total=total, parts=row["parts"], error=error, note=row.get("note", ""))


def rollout_of(sample: Mapping[str, Any], id: str = "", folder: Path | None = None) -> Rollout:
    """Parse a row of a run, of the reward `http`, or a sample; only the completion must be there.

    Raise one of DAMAGED.
    """
    row = cast(RolloutRow, sample)  # of which it may lack keys: each is read by `get`
    sequences = tuple(_sequence(one, folder) for one in (*row.get("others", ()), row))
    last = sequences[-1]
    num_read = (*last.mask, True).index(True)  # all, if no token was sampled

    # A sample of a user may have its chat in the column `prompt`.
    messages = row.get("messages")
    text = row.get("prompt")
    chat: Any = text
    if isinstance(chat, list):
        messages = chat
        text = ""

    answer = row.get("answer")
    prompt = Prompt(
        id=row.get("prompt_id", ""),
        token_ids=last.token_ids[:num_read],
        messages=None if messages is None else tuple(messages),
        text=text or _last_question(messages or ()),
        answer=None if answer is None else str(answer),
        meta=row.get("meta", {}),
        source=row.get("source", ""),
        images=tuple(image for image in last.images if image.start <= num_read),
    )
    return Rollout(
        id=str(row.get("id", id)),
        prompt=prompt,
        sequences=sequences,
        reward=row.get("parts", {}).get("env"),  # of the environment alone
        error=row.get("failed"),
        metrics=row.get("metrics", {}),
    )


def _last_question(messages: Sequence[Message]) -> str:
    for message in reversed(messages):
        if message["role"] == "user":
            return text_of(message["content"])
    return ""


def _sequence(row: SequenceRow, folder: Path | None) -> TokenSequence:
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
        finish_reason=row.get("finish_reason", "stop"),
        version_min=row.get("version_min", 0),
        version_max=row.get("version_max", 0),
        turns=row.get("turns", 1),
        text=completion,
        opening=row.get("opening", ""),
        dialogue=tuple(row.get("dialogue", ())),
        images=images,
        turn_rewards=tuple(TurnReward(*one) for one in row.get("turn_rewards", ())),
    )


def reference() -> str:
    """Return the tables of every key of a run's files."""
    parts = []
    for files, kinds in ROWS.items():
        parts.append(f"## {files}")
        for kind in kinds:
            parts.append(f"`{kind.__name__}`: {inspect.cleandoc(kind.__doc__ or '')}")
            parts.append(
                markdown_table(("key", "type", "may be absent", "meaning"), _keys_of(kind))
            )
    return "\n\n".join(parts)


def _keys_of(kind: type) -> Iterator[tuple[str, str, str, str]]:
    for name, hint in get_type_hints(kind, include_extras=True).items():
        absent = ""
        if get_origin(hint) is NotRequired:
            absent = "yes"
            (hint,) = get_args(hint)
        value, meaning = get_args(hint)  # of Annotated
        yield f"`{name}`", _type_text(value), absent, meaning


def _type_text(hint: Any) -> str:
    """Write a type as JSON has it, without modules: `list[ImageRow]`."""
    text = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    text = re.sub(r"[\w.]+\.", "", text).replace("Sequence[", "list[").replace("Mapping[", "dict[")
    return f"`{text}`".replace("|", "\\|").replace("None", "null")
