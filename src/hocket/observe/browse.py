"""Give the rollouts of a run folder to its page: a step's in short, a prompt's in full, one's tokens."""

import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hocket.observe.rows import TRAINED, parsed, read_lines, read_text, said

MAX_CHARACTERS = 2000  # of a text, in short
TEXTS = ("prompt", "answer", "note", "error", "failed", "completion")
SHORT = ("id", "group_id", "reward", "parts", "num_tokens", "finish_reason", "turns", "version_min")
_NAME = re.compile(r"(step|eval)_(\d+)")
_NUMBERS = re.compile(rb',\s*"(?:mask|token_ids|logprobs)":\s*\[[^\]]*\]')  # never in a text: its quotes are escaped


def steps(folder: Path) -> dict[str, list[int]]:
    """Return the steps of a run with rollouts of training ("step") and of evaluations ("eval")."""
    found: dict[str, list[int]] = {"step": [], "eval": []}
    for match in filter(None, (_NAME.fullmatch(path.stem) for path in (folder / "rollouts").glob("*.jsonl"))):
        found[match[1]].append(int(match[2]))
    return {kind: sorted(numbers) for kind, numbers in found.items()}


def _rows(folder: Path, name: str, id: str = "", *, numbers: bool = False) -> Iterator[dict[str, Any]]:
    """Yield a step's rollouts, only those that have an id in them; nothing where there is no such step."""
    path = folder / "rollouts" / f"{name}.jsonl"
    mark = json.dumps(id, ensure_ascii=False).encode() if id else b""
    if _NAME.fullmatch(name) and path.exists():
        with path.open("rb") as file:
            for line in file:
                if mark in line:
                    yield from parsed((line if numbers else _NUMBERS.sub(b"", line)).decode(errors="replace"))


def _trained(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in read_lines(folder / TRAINED / f"{name}.jsonl")}


def in_short(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the rollouts of a step, texts cut, without tokens."""
    trained = _trained(folder, name)
    return [_short(row, trained.get(row["id"], {})) for row in _rows(folder, name)]


def _short(row: Mapping[str, Any], trained: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: row.get(key) for key in SHORT} | {"advantage": trained.get("advantage")}
    for key, value in {**row, "completion": said(row)}.items():
        text = str(value or "") if key in TEXTS else ""
        more = len(text) - MAX_CHARACTERS
        if text:
            found[key] = text if more <= 0 else f"{text[:MAX_CHARACTERS]} … ({more} more characters)"
    return found


def group(folder: Path, name: str, id: str) -> list[dict[str, Any]]:
    """Return the rollouts of a prompt in full, but without tokens."""
    return [row for row in _rows(folder, name, id) if row["group_id"] == id]


def most_telling(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rollouts of the prompt whose rewards differ most."""
    groups = [list(together) for _, together in itertools.groupby(rows, key=lambda row: row["group_id"])]
    return max(groups, key=_range, default=[])


def _range(rows: Sequence[Mapping[str, Any]]) -> float:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return max(rewards) - min(rewards) if rewards else -1.0  # a group without a score comes last


def tokens(folder: Path, name: str, id: str) -> dict[str, dict[str, Any]]:
    """Return the tokens of a rollout's last sequence, or of each of a group, with what is known of them; by rollout."""
    trained = _trained(folder, name)
    found = {}
    for row in _rows(folder, name, id, numbers=True):
        if id in (row["id"], row["group_id"]):
            known = {key: row[key] for key in ("mask", "token_ids", "logprobs")}
            found[row["id"]] = known | trained.get(row["id"], {}) | {"texts": pieces(folder, row["token_ids"])}
    return found


def pieces(folder: Path, token_ids: Sequence[int]) -> list[str] | None:
    """Return the text of each token, "" where a character goes on in the next; None without a tokenizer."""
    tokenizer = _tokenizer(folder)
    if tokenizer is None:
        return None
    decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
    texts = []
    start = read = 0  # of the tokens that are decoded with the next one, and of the next text
    for end in range(1, len(token_ids) + 1):
        text = decode(token_ids[start:end])[len(decode(token_ids[start:read])) :]
        is_whole = not text.endswith("\ufffd")
        texts.append(text if is_whole else "")
        if is_whole:
            start = read
            read = end
    return texts


@functools.lru_cache(maxsize=8)
def _tokenizer(folder: Path) -> Any:
    """Return the tokenizer of the run's newest weights, or of the model that it began with; None without one."""
    from tokenizers import Tokenizer

    model = (yaml.safe_load(read_text(folder / "config.yaml")) or {}).get("model", {}).get("path", "")
    places = [*sorted(folder.glob("weights/v*/tokenizer.json")), Path(model, "tokenizer.json")]
    found = [place for place in places if place.is_file()]
    return Tokenizer.from_file(str(found[0])) if found else None
