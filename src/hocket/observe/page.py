"""Build the report of a run: page.html with the run's data as JSON, drawn by the page's one script.

Model output is hostile text. The JSON has no "<", the script makes only text nodes of it, and the page's policy allows
that script alone, by its hash, and no resource from outside.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hocket.observe.metrics import METRICS, PHASES
from hocket.types import Group, Rollout, Score

NUM_SAMPLES = 50  # steps whose best and worst rollout are shown
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


def best_and_worst(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the prompt whose rewards differ most, with its best and its worst rollout."""
    ranked = max(map(_ranked, groups), key=_spread)
    best = ranked[0]
    worst = ranked[-1]
    titles = {"best": best, "worst": worst}
    if best[1].total == worst[1].total or len(ranked) == 1:
        titles = {"all alike" if ranked[1:] else "only one": best}
    prompt = best[0].prompt
    return {
        "prompt": _cut(prompt.text, MAX_CHARACTERS),
        "answer": None if prompt.answer is None else _cut(prompt.answer, 200),
        "rollouts": [_sample(title, *pair) for title, pair in titles.items()],
    }


def _ranked(group: Group) -> list[tuple[Rollout, Score]]:
    """Return the rollouts that have a score, best first: a failed score is not a bad one."""
    pairs = list(zip(group.rollouts, group.scores, strict=True))
    return sorted((pair for pair in pairs if pair[1].error is None), key=lambda pair: -pair[1].total) or pairs[:1]


def _spread(ranked: Sequence[tuple[Rollout, Score]]) -> float:
    (_, best) = ranked[0]
    (_, worst) = ranked[-1]
    return -1.0 if best.error is not None else best.total - worst.total  # a group without a score comes last


def _sample(title: str, rollout: Rollout, score: Score) -> dict[str, Any]:
    reward = None if score.error is not None else score.total
    told = {"parts": dict(score.parts), "error": score.error, "note": score.note, "reward": reward}
    end = {"num_tokens": rollout.num_sampled, "finish_reason": rollout.finish_reason}
    return {"title": title, "completion": _cut(rollout.text, MAX_CHARACTERS), **told, **end}


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit} more characters)"
