"""Read a run folder while a run of this process or another writes it: metrics, alarms, servers,
phases, rollouts."""

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

NUM_PHASES = 100  # the newest ones, which are shown
TOTALS = {"tokens": "rollout/tokens", "seconds": "time/step"}  # a total, and the metric it sums
_NAME = re.compile(r"(step|eval)_(\d+)")  # the name of a file of rollouts


class PageRow(RolloutRow):
    """A rollout as the page gets it, with the advantages that training computed.

    The lists are there only if the page has requested the rollout's tokens.
    """

    advantage: NotRequired[float]
    advantages: NotRequired[Sequence[float]]
    trainer: NotRequired[list[float]]
    entropy: NotRequired[list[float]]
    texts: NotRequired[list[str] | None]  # of the tokens
    pictures: NotRequired[dict[str, str]]  # in the first row, those of all rows: file → data URL


class Alarm(TypedDict):
    """The alarms of a metric so far."""

    count: int  # steps
    last: int  # the last of these steps
    text: str


class PageServer(ServerRow):
    """A server as the page gets it."""

    changes: list[list[int | bool]]  # steps in which it went up or down


class PluginText(PluginRow):
    """A plugin with the text of its copy."""

    text: str


class ResumedError(Exception):
    """The run was resumed from an earlier step: lines that were read are gone from the file."""


class Tail:
    """Reads the objects that were appended to a file of JSON lines since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0  # the bytes that were read
        self._last = b""  # the last line of them

    def rows(self) -> Iterator[Any]:
        """Yield the objects of new lines. Raise ResumedError if the last line has changed."""
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
    """A run, as far as it has been read. Its memory grows with the number of steps alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reads = 0  # how often it was read from the first line
        self._restart()

    def _restart(self) -> None:
        self.reads += 1
        self._metrics = Tail(self.folder / METRICS)
        self._timeline = Tail(self.folder / TIMELINE)
        # The values of each metric, one a step; NaN where a step has none.
        self._columns = {name: array("d") for name in ("step", *TOTALS)}
        self.newest: dict[str, float] = {}  # the newest value of each metric
        self.alarms: dict[str, Alarm] = {}  # by metric
        self.unhealthy: dict[str, str] = {}  # in the newest step
        self._alarms = Alarms()
        self.servers: dict[str, PageServer] = {}  # by URL
        self._phases: deque[SpanRow] = deque(maxlen=NUM_PHASES)

    @property
    def last_step(self) -> int:
        return int(self.newest.get("step", -1))

    def look(self) -> None:
        """Read what was appended.

        Raise DataError for a line that no run writes; the next look goes on behind it.
        """
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
            added = max(0.0, values.get(of_step, 0.0))  # 0 for NaN
            values[name] = self.newest.get(name, 0.0) + added
        self.newest |= values
        self.unhealthy = self._alarms.step(values)
        for name, text in self.unhealthy.items():
            count = self.alarms[name]["count"] if name in self.alarms else 0
            self.alarms[name] = {"count": count + 1, "last": self.last_step, "text": text}
        missing = array("d", [math.nan]) * len(self._columns["step"])
        for name in self._columns.keys() | values.keys():
            self._columns.setdefault(name, missing[:]).append(values.get(name, math.nan))

    def _note(self, row: TimelineRow) -> None:
        """Keep a phase, or the state of the servers with the steps in which that changed."""
        if "servers" not in row:
            self._phases.append(row)
            return
        for server in row["servers"]:
            before = self.servers.get(server["url"])
            known: PageServer = {"changes": [], **server}
            if before:
                known = {**before, **server}  # a server that is lost keeps its last load
            if before is None or before["up"] != server["up"]:
                known["changes"].append([row["step"], server["up"]])
            self.servers[server["url"]] = known

    def rollouts(self, name: str, group: str = "", *, tokens: bool = False) -> list[PageRow]:
        """Read the rollouts of a step or an evaluation; none if there is no such one.

        `group`: only those of a prompt. `tokens`: with the tokens of their last sequences, the texts
        and numbers of these, and in the first row the pictures of all.
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
        """Return all that a page shows at first; instead of rollouts, the steps that have some."""
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
                "step": list(numbered(rollouts, "step_*.jsonl")),
                "eval": list(numbered(rollouts, "eval_*.jsonl")),
            },
        }

    def news(self, step: int) -> dict[str, Any]:
        """Return the state of the run as a page shows it, and the curves after `step`."""
        summary = read_summary(self.folder) if (self.folder / SUMMARY).exists() else None
        state = "running" if _has_owner(self.folder) else "stopped"
        return {
            "state": "finished" if summary else state,
            "summary": summary,
            "alarms": self.alarms,
            "servers": self.servers,
            "phases": list(self._phases),
            "curves": self.curves(step),
        }

    def curves(self, step: float) -> dict[str, Sequence[float | None]]:
        """Return the values of each metric after a step."""
        begin = bisect_right(self._columns["step"], step)
        return {name: list(map(_rounded, column[begin:])) for name, column in self._columns.items()}


def _has_owner(run_dir: Path) -> bool:
    """Check whether a process owns a run folder, also if this one may only read it."""
    try:
        with (run_dir / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # it is locked, or this disk has no locks: then the file itself is the sign
        return True
    return False


def _rounded(value: float) -> float | None:
    return float(f"{value:.7g}") if math.isfinite(value) else None


def pieces(tokenizer: Any, token_ids: Sequence[int]) -> list[str] | None:
    """Decode each token by itself; None without a tokenizer.

    A token that ends within a character has "", and the next has the character.
    """
    if tokenizer is None:
        return None
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or "" for token in token_ids]


@functools.lru_cache(maxsize=8)
def _tokenizer(folder: Path) -> Any:
    """Load the tokenizer of the run's weights, or of the model that it began with; None without."""
    from tokenizers import Tokenizer

    model = config_of(folder).get("model", {}).get("path", "")
    places = [*folder.glob("weights/v*/tokenizer.json"), Path(model, "tokenizer.json")]
    return next((Tokenizer.from_file(str(place)) for place in places if place.is_file()), None)
