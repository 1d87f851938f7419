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
from typing import Any, NotRequired, TypedDict, cast

from hocket.common.files import numbered
from hocket.formats import (
    METRICS,
    ROLLOUTS,
    SUMMARY,
    TIMELINE,
    TRAINED,
    MetricsRow,
    PluginRow,
    RolloutRow,
    ServerRow,
    SpanRow,
    TimelineRow,
)
from hocket.observe.metrics import Alarms
from hocket.observe.owner import LOCK
from hocket.observe.rows import (
    config_of,
    parsed,
    read_summary,
    read_text,
    reading,
    scan_lines,
    scan_rollouts,
)
from hocket.observe.run_folder import kept_plugins

NUM_PHASES = 100  # newest ones that are shown
TOTALS = {"tokens": "rollout/tokens", "seconds": "time/step"}  # what they sum up
_NAME = re.compile(r"(step|eval)_(\d+)")  # of a file of rollouts


class PageRow(RolloutRow):
    """A rollout as the page gets it: with what training made of it. Without tokens it lacks the lists of numbers."""

    advantage: NotRequired[float]
    advantages: NotRequired[Sequence[float]]
    trainer: NotRequired[list[float]]
    entropy: NotRequired[list[float]]
    texts: NotRequired[list[str] | None]  # of each token
    pictures: NotRequired[dict[str, str]]  # of all rows, in the first: file → data URL


class Alarm(TypedDict):
    count: int  # steps with it
    last: int  # step
    text: str


class PageServer(ServerRow):
    """A server as the page gets it."""

    changes: list[list[int | bool]]  # steps in which it went up or down


class PluginText(PluginRow):
    text: str  # of its copy


class ResumedError(Exception):
    """The run went on from an earlier step: what was read of a file is there no more."""


class Tail:
    """Gives the objects of a file of JSON lines that have come since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0  # bytes that were read
        self._last = b""  # the line before them

    def rows(self) -> Iterator[Any]:
        with self.path.open("rb") if self.path.exists() else BytesIO() as file:
            file.seek(self._at - len(self._last))
            if file.read(len(self._last)) != self._last:
                raise ResumedError
            for line in file:
                if line.endswith(b"\n"):  # else it is being written
                    self._last = line
                    self._at += len(line)
                    row = parsed(line.decode(errors="replace"), self.path)
                    if row is not None:
                        yield row


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
        self.alarms: dict[str, Alarm] = {}  # by metric
        self.unhealthy: dict[str, str] = {}  # in the newest step
        self._alarms = Alarms()
        self.servers: dict[str, PageServer] = {}  # by URL
        self._phases: deque[SpanRow] = deque(maxlen=NUM_PHASES)

    @property
    def last_step(self) -> int:
        return int(self.newest.get("step", -1))

    def look(self) -> None:
        """Read what has come. Raise DataError for what no run writes; the next look goes on behind it."""
        try:
            with reading(self._metrics.path):
                for row in self._metrics.rows():
                    self._add(row)
            with reading(self._timeline.path):
                for row in self._timeline.rows():
                    self._note(row)
        except ResumedError:
            self._restart()
            self.look()

    def _add(self, row: MetricsRow) -> None:
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
            count = self.alarms[name]["count"] if name in self.alarms else 0
            self.alarms[name] = {"count": count + 1, "last": self.last_step, "text": text}
        missing = array("d", [math.nan]) * len(self._columns["step"])
        for name in self._columns.keys() | values.keys():
            self._columns.setdefault(name, missing[:]).append(values.get(name, math.nan))

    def _note(self, row: TimelineRow) -> None:
        """Keep a phase, or what is known of the servers, and when one was lost or came back."""
        if "servers" not in row:
            self._phases.append(row)
            return
        for server in row["servers"]:
            known: PageServer = {"changes": [], **server}
            before = self.servers.get(server["url"])
            if before:
                known = {**before, **server}  # its load stays that of its last answer
            if before is None or before["up"] != server["up"]:
                known["changes"].append([row["step"], server["up"]])
            self.servers[server["url"]] = known

    def rollouts(self, name: str, group: str = "", *, tokens: bool = False) -> list[PageRow]:
        """Return those of a step, or of a prompt, with what training made of them; none if there is no such step.

        With `tokens`, also the tokens of their last sequences, their texts and numbers; the first has the pictures.
        """
        if not _NAME.fullmatch(name):
            return []
        path = self.folder / TRAINED / f"{name}.jsonl"
        trained = {row["id"]: row for row in scan_lines(path, tokens=tokens)}
        mark = json.dumps(group, ensure_ascii=False).encode() if group else b""
        rows: list[PageRow] = []
        for row in scan_rollouts(self.folder / ROLLOUTS / f"{name}.jsonl", mark, tokens=tokens):
            if group in ("", row["group_id"]):
                made: Mapping[str, object] = trained.get(row["id"], {})
                rows.append(cast(PageRow, {**row, **made}))
        if not tokens:
            return rows

        # The texts of tokens, and the pictures of all rows.
        files: dict[str, None] = {}
        for shown in rows:
            shown["texts"] = pieces(_tokenizer(self.folder), shown["token_ids"])
            files |= dict.fromkeys(image["file"] for image in shown.get("images", ()))
        if files:
            from hocket.extras.page.vision import small_pictures

            rows[0]["pictures"] = small_pictures(self.folder, files)
        return rows

    def data(self) -> dict[str, Any]:
        """Return all that a page shows at first; of rollouts the steps that have some, of training and evaluations."""
        rollouts = self.folder / ROLLOUTS
        plugins: list[PluginText] = []
        for row in kept_plugins(self.folder):
            text = (self.folder / row["copy"]).read_text(encoding="utf-8")
            plugins.append({**row, "text": text})
        return self.news(-1) | {
            "name": self.folder.resolve().name,
            "config": read_text(self.folder / "config.yaml"),
            "plugins": plugins,
            "rollouts": {
                kind: [*numbered(rollouts, f"{kind}_*.jsonl")] for kind in ("step", "eval")
            },
        }

    def news(self, step: int) -> dict[str, Any]:
        """Return what a page shows of the run as a whole, and the curves after `step`."""
        summary = read_summary(self.folder) if (self.folder / SUMMARY).exists() else None
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
