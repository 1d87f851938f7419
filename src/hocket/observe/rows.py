"""Write the rows of a run's files (formats.py), and read them again.

The reward `http` and users send rows of rollouts that may lack most keys; they are read here, too.
"""

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

# What the readers below raise for a file that is not as it was written.
DAMAGED = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    yaml.YAMLError,
)
# The lists of numbers per token. No text of a row can match, since its quotes are escaped.
_NUMBERS = re.compile(
    rb',\s*"(?:mask|token_ids|logprobs|advantages|trainer|entropy)":\s*\[[^\]]*\]'
)


def write_rollouts(folder: Path, name: str, groups: Iterable[Group]) -> Path:
    """Write rollouts/NAME.jsonl, and the images that it names. Returns its path."""
    for group in groups:
        for rollout in group.rollouts:
            for sequence in rollout.sequences:
                if sequence.images:
                    from hocket.observe.vision import keep  # only runs with images import it

                    keep(folder, sequence)
    path = folder / ROLLOUTS / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lines_of(groups))
    return path


def lines_of(groups: Iterable[Group]) -> str:
    """Write a line of JSON for each rollout."""
    lines = []
    for group in groups:
        for rollout, score in zip(group.rollouts, group.scores, strict=True):
            lines.append(_line(row_of(group, rollout, score)) + "\n")
    return "".join(lines)


def _line(row: RolloutRow) -> str:
    content = with_format(row)
    try:
        return to_json(content, fallback=_plain).decode()  # six times as fast as json with numbers
    except PydanticSerializationError:  # a text has half a surrogate pair, which json can write
        return json.dumps(content, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    """Convert a value that JSON has no type for."""
    return value.tolist() if isinstance(value, array) else str(value)


def row_of(group: Group, rollout: Rollout, score: Score) -> RolloutRow:
    """Describe a rollout of a group, with its score."""
    sequences = list(map(_sequence_row, rollout.sequence_ids, rollout.sequences))
    others = sequences[:-1]
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
        episode["failed"] = redacted(rollout.error)  # "error" may come from a reward
    if others:
        episode["others"] = others
    if prompt.source:
        episode["source"] = prompt.source
    if rollout.metrics:
        episode["metrics"] = dict(rollout.metrics)
    return {**sequences[-1], **episode}


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
        row["images"] = [
            ImageRow(
                file=image.name,
                start=image.start,
                length=image.length,
                placeholder=image.placeholder,
            )
            for image in sequence.images
        ]
    return row


def with_format(content: Mapping[str, Any]) -> dict[str, Any]:
    """Add the version of the formats to a row, or to the content of a .json file."""
    return {"format": FORMAT, **content}


def without_format(content: dict[str, Any], path: object) -> dict[str, Any]:
    """Remove the version of the formats from a row of `path`, or from the content of a .json file.

    Raises DataError for a version of a newer hocket.
    """
    version = content.pop("format", 1)  # old files have none
    if version > FORMAT:
        raise DataError(
            f"{path} has format {version}, and this hocket reads formats up to {FORMAT}: a newer hocket wrote it; "
            "read it with that one, or update this one"
        )
    return content


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a JSONL file."""
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(with_format(row)) + "\n" for row in rows)


def spoken(row: RolloutRow) -> str:
    """Write what was said in an episode: all messages after the prompt, or the only completion."""
    dialogue = row.get("dialogue", ())
    lines = [
        f"{message.get('role')}: {text_of(message.get('content') or '')}" for message in dialogue
    ]
    return "\n".join(lines) or str(row["completion"])


def read_text(path: Path) -> str:
    """Read a text file; "" if it is missing."""
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def config_of(folder: Path) -> dict[str, Any]:
    """Read a run's config.yaml as it is; {} if it is missing."""
    return yaml.safe_load(read_text(folder / "config.yaml")) or {}


def read_metrics(run_dir: Path) -> list[MetricsRow]:
    """Read the metrics of a run: a dict per step, of step 0 first.

    A metric that was not finite is None. Raises DataError for a damaged file.

    Example:

        from pathlib import Path

        from hocket.observe.rows import read_metrics

        rewards = [step.get("reward/mean") for step in read_metrics(Path("runs/quickstart"))]
    """
    return read_lines(run_dir / METRICS)


def read_ledger(run_dir: Path) -> list[LedgerRow]:
    """Read ledger.jsonl. Raises DataError as `read_lines`."""
    return read_lines(run_dir / LEDGER)


def read_rollouts(path: Path) -> list[RolloutRow]:
    """Read a file of a run's folder `rollouts`: a dict per rollout.

    Raises DataError for a damaged file.

    Example: the texts of the first step.

        from pathlib import Path

        from hocket.observe.rows import read_rollouts

        path = Path("runs/quickstart/rollouts/step_000001.jsonl")
        texts = [row["completion"] for row in read_rollouts(path)]
    """
    return read_lines(path)


def read_summary(run_dir: Path) -> Summary:
    """Read summary.json, which a run writes at its end.

    Raises FileNotFoundError before the end of the run, and DataError for a damaged file.
    """
    path = run_dir / SUMMARY
    text = path.read_text(encoding="utf-8", errors="replace")
    with reading(path):
        return cast(Summary, without_format(json.loads(text), path))


def step_of(row: MetricsRow) -> int:
    """Read the step of a row of metrics.jsonl. Raises one of DAMAGED where it has none."""
    step = row["step"]
    if not isinstance(step, int):
        raise ValueError(f"the step {step!r} is no number")
    return step


def read_lines(path: Path) -> list[Any]:
    """Read all rows of a JSONL file; none if it is missing.

    A killed run may leave a broken last line, which is ignored. Raises DataError for any other
    broken line, and for a newer format.
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
    """Yield the rows of a file of rollouts as `scan_lines` does."""
    return scan_lines(path, mark, tokens=tokens)


def scan_lines(path: Path, mark: bytes = b"", *, tokens: bool = False) -> Iterator[Any]:
    """Yield the rows of a JSONL file one by one, without broken lines; none if it is missing.

    A line that lacks the bytes `mark` is skipped before it is parsed. Without `tokens`, the lists
    of numbers per token are left out, which are most of a row.
    """
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            if mark in line:
                text = line if tokens else _NUMBERS.sub(b"", line)
                row = parsed(text.decode(errors="replace"), path)
                if row is not None:
                    yield row


def parsed(line: str, path: object) -> Any:
    """Parse a line of a JSONL file; NaN and infinities become None.

    Returns None for a line that is no object, such as the broken one of a killed run. Raises
    DataError for a newer format.
    """
    try:
        row = json.loads(line, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
    return without_format(row, path) if isinstance(row, dict) else None


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Turn an error of the body that is one of DAMAGED into a DataError, which names `path`."""
    try:
        yield
    except DAMAGED as error:
        advice = "bring the file back from a copy, or choose another run folder"
        raise DataError(f"{path} is damaged: {error!r}; {advice}") from error


def groups_of(lines: Iterable[str], path: Path | None = None) -> list[Group]:
    """Parse the lines of a run's file of rollouts.

    `path` is that file: images are read from the run folder that it lies in. Raises one of DAMAGED
    for a line that is no such row, DataError for a newer format.
    """
    folder = path.parents[1] if path else None
    rows = [without_format(json.loads(line), path or "the row") for line in lines]
    groups = []
    for name, group_rows in groupby(rows, key=lambda row: str(row["group_id"])):
        rollouts = []
        scores = []
        for row in group_rows:
            rollouts.append(rollout_of(row, folder=folder))
            scores.append(_score(row))
        groups.append(Group(id=name, rollouts=tuple(rollouts), scores=tuple(scores)))
    return groups


def _score(row: Mapping[str, Any]) -> Score:
    total = math.nan if row["reward"] is None else row["reward"]
    error = row["error"]
    if error is None and not math.isfinite(total):
        error = f"the row has no reward: {total}"
    return Score(total=total, parts=row["parts"], error=error, note=row.get("note", ""))


def rollout_of(sample: Mapping[str, Any], id: str = "", folder: Path | None = None) -> Rollout:
    """Parse a row of a run, of the reward `http` or of a user; only the completion must be there.

    `id` is the rollout's if the row has none; images that the row names are in the run `folder`.
    Raises one of DAMAGED for a row that is none.
    """
    row = cast(RolloutRow, sample)  # keys may be missing: each is read by `get`
    sequences = [_sequence(other, folder) for other in row.get("others", ())]
    last = _sequence(row, folder)
    sequences.append(last)
    # The prompt ends where the first token was sampled.
    num_prompt_tokens = last.mask.index(True) if any(last.mask) else len(last.mask)

    # A sample of a user may have its chat in the column `prompt`.
    messages = row.get("messages")
    text: Any = row.get("prompt")
    if isinstance(text, list):
        messages = text
        text = ""
    answer = row.get("answer")
    prompt = Prompt(
        id=row.get("prompt_id", ""),
        token_ids=last.token_ids[:num_prompt_tokens],
        messages=None if messages is None else tuple(messages),
        text=text or _last_question(messages or ()),
        answer=None if answer is None else str(answer),
        meta=row.get("meta", {}),
        source=row.get("source", ""),
        images=tuple(image for image in last.images if image.start <= num_prompt_tokens),
    )
    return Rollout(
        id=str(row.get("id", id)),
        prompt=prompt,
        sequences=tuple(sequences),
        reward=row.get("parts", {}).get("env"),  # the reward that passes on the environment's
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
        turn_rewards=tuple(TurnReward(*turn) for turn in row.get("turn_rewards", ())),
    )


def reference() -> str:
    """Write the tables of the keys in a run's files, for docs/reference/run_folder.md."""
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
    """Yield the cells of a table's rows for the keys of a TypedDict."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        absent = ""
        if get_origin(hint) is NotRequired:
            absent = "yes"
            (hint,) = get_args(hint)
        value, meaning = get_args(hint)  # each hint is Annotated[type, meaning]
        yield f"`{name}`", _type_text(value), absent, meaning


def _type_text(hint: Any) -> str:
    """Write a type as JSON has it, without modules: `list[ImageRow]`."""
    text = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    text = re.sub(r"[\w.]+\.", "", text).replace("Sequence[", "list[").replace("Mapping[", "dict[")
    return f"`{text}`".replace("None", "null")
