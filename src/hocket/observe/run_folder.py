"""Write and read the files of a run: config, metrics, ledger, rollouts, summary, TensorBoard, report.

A killed run leaves every line it wrote; whole files are replaced atomically.
"""

import contextlib
import importlib.util
import json
import math
import os
import re
import secrets
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from hocket import config as config_module
from hocket.common.files import flush, naming, write_atomically
from hocket.common.registry import load_plugins
from hocket.config import Config, DataConfig
from hocket.errors import ConfigError
from hocket.observe import page, plugin_files
from hocket.types import Group, Prompt, Rollout, Score, TokenSequence

GROWING = METRICS, LEDGER, SAMPLES = "metrics.jsonl", "ledger.jsonl", "samples.jsonl"  # line by line
COPIED = ("finish_reason", "turns", "version_min", "version_max", "token_ids", "logprobs", "dialogue", "opening")
"""Fields of a sequence that its row has, too."""


class RunFolder(contextlib.AbstractContextManager["RunFolder"]):
    """Keep the files of one run, in a folder that is its own (observe/owner.py)."""

    def __init__(self, config: Config) -> None:
        self.path = config.run_dir
        self._tensorboard = config.observe.tensorboard
        if self._tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise ConfigError("observe.tensorboard=true needs a package: pip install tensorboard; or leave it out")
        (self.path / "rollouts").mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / "config.yaml", config_module.dump(config))
        for name in GROWING:
            (self.path / name).touch()
        self.history = read_lines(self.path / METRICS)  # one record per finished step
        self.changed_plugins = plugin_files.keep(self.path, load_plugins(config.plugins))  # since the run before
        self._board: Any = None

    def __exit__(self, *exc_info: object) -> None:
        """Write the report of a run that fails, too."""
        if exc_info[0] is None and self._board is not None:
            self._board.close()
        if exc_info[0] is not None:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                write_report(self.path)

    @property
    def last_step(self) -> int:
        return int(self.history[-1]["step"]) if self.history else -1

    def finish(self, step: int, metrics: Mapping[str, float], entries: Iterable[Mapping[str, Any]] = ()) -> None:
        """Append one step to metrics.jsonl (null: not finite), TensorBoard and, entry by entry, ledger.jsonl."""
        self.ledger(step, entries)
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self.history.append({"step": step, **finite})
        self._append(METRICS, self.history[-1:])
        if self._tensorboard:
            if self._board is None:
                with contextlib.redirect_stderr(None):  # its import warns of a missing TensorFlow
                    from torch.utils.tensorboard import SummaryWriter
                self._board = SummaryWriter(log_dir=str(self.path / "tensorboard"), purge_step=step)
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()

    def ledger(self, step: int, entries: Iterable[Mapping[str, Any]]) -> None:
        self._append(LEDGER, ({"step": step, **entry} for entry in entries))

    def rollouts(self, name: str, groups: Sequence[Group]) -> None:
        """Write rollouts/NAME.jsonl, a line per rollout, and of a step one to samples.jsonl; nothing without groups."""
        if groups:
            write_atomically(self.path / "rollouts" / f"{name}.jsonl", lines_of(groups))
        if groups and name.startswith("step"):
            self._append(SAMPLES, [{"step": name, **page.best_and_worst(groups)}])

    def skipped(self, step: int) -> Path:
        return self.path / "skipped" / f"step_{step:06d}.json"

    def summary(self, *, seed: int, final_version: int, best: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Write summary.json and report.html and return the summary: evaluations and seconds come from the history."""
        first, *others = [_evaluation(record) for record in self.history]
        values = {
            "before": first,
            "after": next(filter(None, reversed(others)), {}),
            "steps": self.last_step,
            "updated": sum(map(_updated, self.history)),  # steps
            "train_seconds": math.fsum(record.get("time/step") or 0.0 for record in self.history),
            "seed": seed,
            "final_version": final_version,
            "best": best,
            "plugins": plugin_files.kept(self.path),
        }
        write_atomically(self.path / "summary.json", json.dumps(values, indent=1) + "\n")
        write_report(self.path)
        return values

    def state(self) -> dict[str, Any]:
        """Flush the growing files to disk; return their lengths in bytes and the last step."""
        paths = [self.path / name for name in GROWING]
        for path in paths:
            flush(path)
        return {"step": self.last_step, "bytes": {path.name: path.stat().st_size for path in paths}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Remove the records written after `state`. Raises ConfigError if older ones are missing."""
        for name, size in state["bytes"].items():
            path = self.path / name
            if path.stat().st_size < size:
                advice = "bring the file back, or start a new run.dir"
                raise ConfigError(f"{path} has lost records from before step {state['step']}; {advice}")
            os.truncate(path, size)
        self.history[:] = read_lines(self.path / METRICS)
        (self.path / "summary.json").unlink(missing_ok=True)  # the run continues past that end
        for file in (self.path / "rollouts").iterdir():
            made = re.fullmatch(r"(?:step|eval)_(\d+)\.jsonl", file.name)  # another file is the user's
            if made and int(made[1]) > state["step"]:
                file.unlink()

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        path = self.path / name
        with naming(path), path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def trainer_id(run_dir: Path) -> str:
    """Return the id by which servers know a run: it stays in the folder, so that a resumed run is the same."""
    path = run_dir / "trainer_id"
    if not path.exists():
        run_dir.mkdir(parents=True, exist_ok=True)
        made = path.with_name(f".{secrets.token_hex(8)}")
        made.write_text(f"{run_dir.name[:64]}-{secrets.token_hex(4)}", encoding="utf-8")
        with contextlib.suppress(FileExistsError):  # another rank was faster
            os.link(made, path)
        made.unlink()
    return path.read_text(encoding="utf-8")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file; none if it is missing, and without the broken line of a killed run."""
    rows = []
    for line in _read(path).split("\n"):  # a text may hold other line separators
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line, parse_constant=lambda name: None))  # NaN and infinities
    return [row for row in rows if isinstance(row, dict)]


def write_report(folder: Path) -> None:
    samples = read_lines(folder / SAMPLES)[::-1]
    run = {
        "name": folder.resolve().name,
        "records": read_lines(folder / METRICS),
        "summary": json.loads(_read(folder / "summary.json") or "null"),
        "config": _read(folder / "config.yaml"),
        "plugins": plugin_files.texts(folder),
        "samples": samples[:: math.ceil(len(samples) / page.NUM_SAMPLES) or 1],  # evenly, from the newest one
    }
    write_atomically(folder / "report.html", page.render(run))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def lines_of(groups: Iterable[Group]) -> str:
    """Format scored rollouts as the lines of a file, one JSON object per rollout."""
    rows = (_row(group, *pair) for group in groups for pair in zip(group.rollouts, group.scores, strict=True))
    return "".join(_line(row) + "\n" for row in rows)


def _line(row: Mapping[str, Any]) -> str:
    try:
        return to_json(row, fallback=str).decode()  # six times as fast as json with numbers
    except PydanticSerializationError:  # half a surrogate pair
        return json.dumps(row, ensure_ascii=False, default=str)


def _row(group: Group, rollout: Rollout, score: Score) -> dict[str, Any]:
    *others, last = map(_sequence_row, rollout.sequence_ids, rollout.sequences)
    return {
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
        **({"others": others} if others else {}),
        **({"failed": rollout.error} if rollout.error is not None else {}),  # the episode; "error" may be a reward's
    }


def _sequence_row(name: str, sequence: TokenSequence) -> dict[str, Any]:
    values = ((field, getattr(sequence, field)) for field in COPIED)
    copied = {field: value.tolist() if isinstance(value, array) else value for field, value in values if value != ()}
    return {"id": name, "completion": sequence.text, "mask": list(bytes(sequence.mask)), **copied}


def groups_of(lines: Iterable[str]) -> list[Group]:
    """Parse the lines of a rollouts file. Raises ValueError, KeyError or TypeError where one is not such a row."""
    groups = []
    for group_id, together in groupby(map(json.loads, lines), key=lambda row: str(row["group_id"])):
        rows = list(together)
        totals = (math.nan if row["reward"] is None else row["reward"] for row in rows)
        told = ({"parts": row["parts"], "error": row["error"], "note": row.get("note", "")} for row in rows)
        scores = tuple(Score(total=total, **one) for total, one in zip(totals, told, strict=True))
        groups.append(Group(id=group_id, rollouts=tuple(map(rollout_of, rows)), scores=scores))
    return groups


def rollout_of(row: Mapping[str, Any], id: str = "", data: DataConfig | None = None) -> Rollout:
    """Parse a row: of a rollouts file, of a request of the reward `http` or, with `data`, of a file with its columns.

    Only the completion must be there. Raises ValueError, KeyError or TypeError where it is no such row.
    """
    prompt, answer = (data.prompt_column, data.answer_column) if data else ("prompt", "answer")
    said = row.get(prompt)
    messages = row.get("messages")
    told = row.get(answer or "")
    if isinstance(said, list):
        said, messages = None, said
    used = (prompt, answer, "messages", "completion")
    sequences = tuple(map(_sequence, (*row.get("others", ()), row)))
    mask = sequences[-1].mask
    asked = Prompt(
        id=row.get("prompt_id", ""),
        token_ids=tuple(sequences[-1].token_ids[: mask.index(True) if any(mask) else len(mask)]),
        messages=messages and tuple(messages),
        text=said or next((m["content"] for m in reversed(messages or ()) if m["role"] == "user"), ""),
        answer=None if told is None else str(told),
        meta={key: value for key, value in row.items() if key not in used} if data else row.get("meta", {}),
    )
    reward = row.get("reward") if data else row.get("parts", {}).get("env")  # of the environment alone
    name, failed = (id, None) if data else (str(row.get("id", id)), row.get("failed"))
    return Rollout(id=name, prompt=asked, sequences=sequences, reward=reward, error=failed)


def _sequence(row: Mapping[str, Any]) -> TokenSequence:
    if not isinstance(completion := row.get("completion"), str):
        raise ValueError(f"the column 'completion' must be a text, got {completion!r:.80}")
    copied: dict[str, Any] = {f: tuple(row[f]) if isinstance(row[f], list) else row[f] for f in COPIED if f in row}
    count = len(copied.setdefault("token_ids", ()))
    copied.setdefault("logprobs", (0.0,) * count)
    return TokenSequence(**copied, mask=tuple(map(bool, row.get("mask", [True] * count))), text=completion)


def _evaluation(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the eval/* metrics of a step, {"greedy": 0.5, ...}; empty where nothing was evaluated."""
    return {name.removeprefix("eval/"): value for name, value in record.items() if name.startswith("eval/")}


def _updated(step: Mapping[str, float]) -> bool:
    return "time/train" in step and step.get("train/updates") != 0 and step.get("train/skipped") != 1
