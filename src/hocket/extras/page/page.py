"""Build the page of runs: page.html, whose script draws their data, in a report's file or from a
server.

Model output is hostile text. The JSON has no "<", the script makes only text nodes of it, and the
page's policy allows only that script, by its hash, and no resource from outside.
"""

import base64
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hocket.common.files import write_atomically
from hocket.config.sections import leaves
from hocket.errors import ConfigError
from hocket.extras.page.reader import PageRow, RunReader
from hocket.observe.metrics import known_metrics
from hocket.observe.rows import config_of, reading, spoken
from hocket.observe.run_folder import report

NUM_SAMPLES = 24  # the most steps whose rollouts a report has
MAX_TOKENS = 20_000  # tokens of rollouts that a report has with their numbers
MAX_ROWS = 128  # rollouts of a step
MAX_CHARACTERS = 2000  # of a text
LONG = ("messages", "dialogue", "others", "meta")  # columns that a report leaves out
# Phases of time/step, in order; the rest of it is `other`.
PHASES = (
    "generate",
    "reward",
    "record",
    "turn",
    "check",
    "measure",
    "samples",
    "train",
    "checkpoint",
    "sync",
    "eval",
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER_S = 120.0
_TEMPLATE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def policy(connect: str = "'none'") -> str:
    """Return the content security policy; `connect`: where the script may send requests."""
    script = _TEMPLATE.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        f"img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def html(data: Mapping[str, Any] | None, connect: str = "'none'") -> str:
    """Return the page of some data; without data, it requests them from its server."""
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return _TEMPLATE.replace("POLICY", policy(connect)).replace("PAGE_DATA", text)


def data_of(runs: Sequence[RunReader]) -> dict[str, Any]:
    """Return all that a page shows of runs at first."""
    return {
        "runs": [run.data() for run in runs],
        "differing": _differing([run.folder for run in runs]),
        "meanings": {metric.name: metric.meaning for metric in known_metrics()},
        "phases": PHASES,
    }


def write_report(folders: Sequence[Path], path: Path) -> None:
    """Write the page of runs, compared with each other, as a file with all of its data."""
    runs = [RunReader(folder) for folder in folders]
    with reading(", ".join(map(str, folders))):
        for run in runs:
            run.look()
        data = data_of(runs)
        for run, values in zip(runs, data["runs"], strict=True):
            values |= _embedded(run, values["rollouts"]["step"])
    write_atomically(path, html(data))


@report("page")
def write_own_report(folder: Path) -> None:
    """Write report.html of one run into its folder."""
    write_report([folder], folder / "report.html")


def write_pictures(report: Path, folder: Path) -> None:
    """Write the curves of a report as PNG files, as Chromium draws them.

    Raise ConfigError without Chromium, or if it draws none.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise ConfigError(
            "--png needs Chromium: apt install chromium; or save curves by the PNG buttons of the "
            "report"
        )
    with TemporaryDirectory() as profile:
        flags = ["--headless", "--disable-gpu", f"--user-data-dir={profile}"]
        if os.geteuid() == 0:  # it has no sandbox for root
            flags.append("--no-sandbox")
        command = [browser, *flags, "--dump-dom", f"{report.resolve().as_uri()}#png"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=BROWSER_S)
    pictures = re.findall('<data value="data:image/png;base64,(.*?)">(.*?)</data>', done.stdout)
    if not pictures:
        raise ConfigError(f"{browser} drew no curve of {report}: {done.stderr[-500:]}")
    folder.mkdir(parents=True, exist_ok=True)
    for data, title in pictures:
        name = re.sub("[^a-z]+", "_", title.lower())
        (folder / f"{name}.png").write_bytes(base64.b64decode(data))


def _differing(folders: Sequence[Path]) -> list[tuple[str, list[str]]]:
    """Return the settings in which runs differ, each with its value in every run."""
    settings = [leaves(config_of(folder)) for folder in folders]
    rows = []
    for key in dict.fromkeys(itertools.chain.from_iterable(settings)):
        values = [_as_yaml(of_run.get(key)) for of_run in settings]
        if len(set(values)) > 1:
            rows.append((key, values))
    return rows


def _as_yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)  # null, true


def _embedded(run: RunReader, steps: Sequence[int]) -> dict[str, Any]:
    """Return the rollouts of a page without a server.

    They are the newest step's, and evenly of earlier steps those of the prompt whose rewards differ
    most.
    """
    rows: dict[str, list[dict[str, object]]] = {}
    num_tokens = 0
    every = max(1, math.ceil(len(steps) / NUM_SAMPLES))
    for step in steps[::-every]:
        name = f"step_{step:06d}"
        of_step = run.rollouts(name)
        group = _most_varied(of_step)
        num_tokens += sum(row["num_tokens"] for row in of_step if row["group_id"] == group)
        chosen = run.rollouts(name, group, tokens=num_tokens < MAX_TOKENS)
        if not rows:
            chosen += [row for row in of_step if row["group_id"] != group]
        rows[name] = [_short(row) for row in chosen[:MAX_ROWS]]
    numbers = sorted(int(name.removeprefix("step_")) for name in rows)
    return {"rows": rows, "rollouts": {"step": numbers, "eval": []}}


def _most_varied(rows: Sequence[PageRow]) -> str:
    """Return the group with the most different rewards; "" without rows."""
    rewards: dict[str, set[float | None]] = {}
    for row in rows:
        rewards.setdefault(row["group_id"], set()).add(row["reward"])
    return max(rewards, key=lambda group: len(rewards[group]), default="")


def _short(row: PageRow) -> dict[str, object]:
    """Shorten a row for a report: the completion is the whole episode, long columns are out."""
    columns: dict[str, object] = dict(row) | {"completion": spoken(row)}
    return {name: _cut(value) for name, value in columns.items() if name not in LONG}


def _cut(value: object) -> object:
    if not isinstance(value, str) or len(value) <= MAX_CHARACTERS:
        return value
    return f"{value[:MAX_CHARACTERS]} … ({len(value) - MAX_CHARACTERS} more characters)"
