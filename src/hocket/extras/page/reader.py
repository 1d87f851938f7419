"""Read a run folder, of this process or another, while it grows: metrics, alarms, servers, phases, rollouts."""

import fcntl
import functools
import json
import math
import re
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from hocket.common.files import numbered
from hocket.observe.metrics import Alarms
from hocket.observe.owner import LOCK
from hocket.observe.rows import (
    METRICS,
    TIMELINE,
    TRAINED,
    config_of,
    parsed,
    read_text,
    reading,
    rows_of,
)
from hocket.observe.run_folder import plugin_texts

NUM_PHASES = 100  # newest ones that are shown
TOTALS = {"tokens": "rollout/tokens", "seconds": "time/step"}  # what they sum up
_NAME = re.compile(r"(step|eval)_(\d+)")  # of a file of rollouts
JsonRows = list[dict[str, Any]]


class ResumedError(Exception):
    """The run went on from an earlier step: what was read of a file is there no more."""


class Tail:
    """Gives the objects of a file of JSON lines that have come since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0  # bytes that were read
        self._last = b""  # the line before them

    def rows(self) -> Iterator[dict[str, Any]]:
        with self.path.open("rb") if self.path.exists() else BytesIO() as file:
            file.seek(self._at - len(self._last))
            if file.read(len(self._last)) != self._last:
                raise ResumedError
            for line in file:
                if line.endswith(b"\n"):  # else it is being written
                    self._last = line
                    self._at += len(line)
                    yield from parsed(line.decode(errors="replace"))


class RunReader:
    """One run, as far as it has been read. Its memory grows with the number of steps alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reads = 0  # how often it was read from its beginning
        self._restart()

    def _restart(self) -> None:
        self.reads += 1
        self._metrics = Tail(self.folder / METRICS)
        self._timeline = Tail(self.folder / TIMELINE)
        self._columns = {
            name: array("d") for name in ("step", *TOTALS)
        }  # and of metrics: NaN where a step has none
        self.newest: dict[str, float] = {}  # of each metric the newest value
        self.alarms: dict[str, dict[str, Any]] = {}  # by metric
        self.unhealthy: dict[str, str] = {}  # in the newest step
        self._alarms = Alarms()
        self.servers: dict[str, dict[str, Any]] = {}  # by URL
        self._phases: deque[Mapping[str, Any]] = deque(maxlen=NUM_PHASES)

    @property
    def last_step(self) -> int:
        return int(self.newest.get("step", -1))

    def look(self) -> None:
        """Read what has come. Raise DataError for what no run writes; the next look goes on behind it."""
        try:
            for tail, take in ((self._metrics, self._add), (self._timeline, self._note)):
                with reading(tail.path):
                    for row in tail.rows():
                        take(row)
        except ResumedError:
            self._restart()
            self.look()

    def _add(self, row: Mapping[str, Any]) -> None:
        if not isinstance(row.get("step"), int):
            return
        values = {name: math.nan if value is None else float(value) for name, value in row.items()}
        for name, of_step in TOTALS.items():
            values[name] = self.newest.get(name, 0.0) + max(
                0.0, values.get(of_step, 0.0)
            )  # max: of NaN 0
        self.newest |= values
        self.unhealthy = self._alarms.step(values)
        for name, text in self.unhealthy.items():
            count = self.alarms.get(name, {"count": 0})["count"]
            self.alarms[name] = {"count": count + 1, "last": self.last_step, "text": text}
        missing = array("d", [math.nan]) * len(self._columns["step"])
        for name in self._columns.keys() | values.keys():
            self._columns.setdefault(name, missing[:]).append(values.get(name, math.nan))

    def _note(self, row: Mapping[str, Any]) -> None:
        """Keep a phase, or what is known of the servers, and when one was lost or came back."""
        if "servers" not in row:
            self._phases.append(row)
        for server in row.get("servers", ()):
            known = self.servers.setdefault(server["url"], {"changes": []})
            if known.get("up") != server["up"]:
                known["changes"].append([row["step"], server["up"]])
            known |= server

    def rollouts(self, name: str, group: str = "", *, tokens: bool = False) -> JsonRows:
        """Return those of a step, or of a prompt, with what training made of them; none if there is no such step.

        With `tokens`, also the tokens of their last sequences, their texts and numbers; the first has the pictures.
        """
        if not _NAME.fullmatch(name):
            return []
        trained = {
            row["id"]: row
            for row in rows_of(self.folder / TRAINED / f"{name}.jsonl", tokens=tokens)
        }
        mark = json.dumps(group, ensure_ascii=False).encode() if group else b""
        rows = rows_of(self.folder / "rollouts" / f"{name}.jsonl", mark, tokens=tokens)
        found = [row | trained.get(row["id"], {}) for row in rows if group in ("", row["group_id"])]
        for row in found if tokens else ():
            row["texts"] = pieces(_tokenizer(self.folder), row["token_ids"])
        if files := dict.fromkeys(
            image["file"] for row in found if tokens for image in row.get("images", ())
        ):
            from hocket.observe.vision import shown

            found[0]["pictures"] = shown(self.folder, files)
        return found

    def data(self) -> dict[str, Any]:
        """Return all that a page shows at first; of rollouts the steps that have some, of training and evaluations."""
        rollouts = self.folder / "rollouts"
        return self.news(-1) | {
            "name": self.folder.resolve().name,
            "config": read_text(self.folder / "config.yaml"),
            "plugins": plugin_texts(self.folder),
            "rollouts": {
                kind: [*numbered(rollouts, f"{kind}_*.jsonl")] for kind in ("step", "eval")
            },
        }

    def news(self, step: int) -> dict[str, Any]:
        """Return what a page shows of the run as a whole, and the curves after `step`."""
        with reading(self.folder / "summary.json"):
            summary = json.loads(read_text(self.folder / "summary.json") or "null")
        state = "running" if _has_owner(self.folder) else "stopped"
        return {
            "state": "finished" if summary else state,
            "summary": summary,
            "alarms": self.alarms,
            "servers": self.servers,
            "phases": [*self._phases],
            "curves": self.curves(step),
        }

    def curves(self, step: float) -> dict[str, Sequence[float | None]]:
        """Return each metric after a step."""
        begin = bisect_right(self._columns["step"], step)
        return {name: [*map(_rounded, column[begin:])] for name, column in self._columns.items()}


def _has_owner(run_dir: Path) -> bool:
    """Say whether a process owns a run folder, also where this one may only read it."""
    try:
        with (run_dir / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except (
        OSError
    ):  # it is locked, or there are no locks on this disk, where the file itself is the sign
        return True
    return False


def _rounded(value: float) -> float | None:
    return float(f"{value:.7g}") if math.isfinite(value) else None


def pieces(tokenizer: Any, token_ids: Sequence[int]) -> list[str] | None:
    """Return the text of each token, "" where a character goes on in the next; None without a tokenizer."""
    if tokenizer is None:
        return None
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or "" for token in token_ids]


@functools.lru_cache(maxsize=8)
def _tokenizer(folder: Path) -> Any:
    """Return the tokenizer of the run's newest weights, or of the model that it began with; None without one."""
    from tokenizers import Tokenizer

    model = config_of(folder).get("model", {}).get("path", "")
    places = [*folder.glob("weights/v*/tokenizer.json"), Path(model, "tokenizer.json")]
    return next((Tokenizer.from_file(str(place)) for place in places if place.is_file()), None)
