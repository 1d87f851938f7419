"""Build the report of a run: page.html with the run's data as JSON, drawn by the page's one script.

Model output is hostile text. The JSON has no "<", the script makes only text nodes of it, and the page's policy allows
that script alone, by its hash, and no resource from outside.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from hocket.observe.metrics import METRICS, PHASES

NUM_GROUPS, NUM_STEPS = 4, 20  # shown of the newest step; steps of which one or more are shown
MAX_CHARACTERS = 2000
_TEMPLATE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")

Record = Mapping[str, Any]


def render(run: Record) -> str:
    """Return the page of one run; empty parts are left out of it."""
    data = {**run, "metrics": [metric._asdict() for metric in METRICS], "phases": PHASES}
    scripts = re.findall("<script>(.*?)</script>", _TEMPLATE, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256("".join(scripts).encode()).digest()).decode()
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return _TEMPLATE.replace("SCRIPT_SHA256", digest).replace("RUN_DATA", text)


def sample_groups(rows: Sequence[Record], count: int = NUM_GROUPS) -> list[dict[str, Any]]:
    """Return prompt, best and worst rollout of the groups whose rewards differ most."""
    groups = [_ranked(list(group)) for _, group in groupby(rows, key=lambda row: row["group_id"])]
    return [_sample(ranked) for ranked in sorted(groups, key=_spread, reverse=True)[:count]]


def _ranked(group: list[Record]) -> list[Record]:
    """Return the rollouts that have a score, best first: a failed score is not a bad one."""
    return sorted((row for row in group if row["reward"] is not None), key=lambda row: -row["reward"]) or group


def _spread(ranked: Sequence[Record]) -> float:
    best, worst = ranked[0]["reward"], ranked[-1]["reward"]
    return -1.0 if best is None else best - worst  # a group without a score comes last


def _sample(ranked: Sequence[Record]) -> dict[str, Any]:
    best, worst = ranked[0], ranked[-1]
    titles = {"best": best, "worst": worst}
    if best["reward"] == worst["reward"]:
        titles = {"all alike" if ranked[1:] else "only one": best}
    return {
        "prompt": _cut(best["prompt"], MAX_CHARACTERS),
        "answer": None if best["answer"] is None else _cut(best["answer"], 200),
        "rollouts": [
            {
                "title": title,
                "completion": _cut(row["completion"], MAX_CHARACTERS),
                **{key: row.get(key) for key in ("parts", "error", "note", "reward", "num_tokens", "finish_reason")},
            }
            for title, row in titles.items()
        ],
    }


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit} more characters)"
