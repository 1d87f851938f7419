"""Build the report of a run: page.html with the run's data as JSON, drawn by the page's one script.

Model output is hostile text. The JSON has no "<", the script makes only text nodes of it, and the page's policy allows
only that script, by its hash, and no resource from outside.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hocket.common.files import write_atomically
from hocket.observe import plugin_files
from hocket.observe.metrics import METRICS as TABLE
from hocket.observe.metrics import PHASES
from hocket.observe.rows import METRICS, SAMPLES, read_lines, read_text, row_of, said
from hocket.types import Group

NUM_SAMPLES = 50  # steps whose best and worst rollout are shown
MAX_CHARACTERS = 2000
SHOWN = ("parts", "error", "note", "reward", "num_tokens", "finish_reason")  # of a rollout's row
_TEMPLATE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def write_report(folder: Path) -> None:
    samples = read_lines(folder / SAMPLES)[::-1]
    run = {
        "name": folder.resolve().name,
        "records": read_lines(folder / METRICS),
        "summary": json.loads(read_text(folder / "summary.json") or "null"),
        "config": read_text(folder / "config.yaml"),
        "plugins": plugin_files.texts(folder),
        "samples": samples[:: max(1, math.ceil(len(samples) / NUM_SAMPLES))],  # evenly, from the newest one
        "metrics": [metric._asdict() for metric in TABLE],
        "phases": PHASES,
    }
    scripts = re.findall("<script>(.*?)</script>", _TEMPLATE, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256("".join(scripts).encode()).digest()).decode()
    text = json.dumps(run, allow_nan=False).replace("<", "\\u003c")
    write_atomically(folder / "report.html", _TEMPLATE.replace("SCRIPT_SHA256", digest).replace("RUN_DATA", text))


def best_and_worst(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the prompt whose rewards differ most, with its best and its worst scored rollout."""
    group = max(groups, key=_spread)
    ranked = sorted(group.scored, key=lambda pair: -pair[1].total) or [(group.rollouts[0], group.scores[0])]
    titles = {"best": ranked[0], "worst": ranked[-1]}
    if _spread(group) <= 0:
        titles = {"all alike" if ranked[1:] else "only one": ranked[0]}
    prompt = ranked[0][0].prompt
    return {
        "prompt": _cut(prompt.text, MAX_CHARACTERS),
        "answer": None if prompt.answer is None else _cut(prompt.answer, 200),
        "rollouts": [_sample(title, row_of(group, *pair)) for title, pair in titles.items()],
    }


def _spread(group: Group) -> float:
    totals = [score.total for _, score in group.scored]
    return max(totals) - min(totals) if totals else -1.0  # a group without a score comes last


def _sample(title: str, row: Mapping[str, Any]) -> dict[str, Any]:
    told = {name: row[name] for name in SHOWN}
    return {"title": title, "completion": _cut(said(row), MAX_CHARACTERS), **told}


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit} more characters)"
