"""The report page of a run: one HTML file without scripts or links, from what the run folder holds.

Model output is hostile text: everything is escaped, and the page forbids scripts and every outside resource by policy.
"""

import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hocket.observe.charts import Series, legend, line_chart, stacked_bars
from hocket.observe.metrics import METRICS
from hocket.observe.style import STYLE
from hocket.system import write_atomically

Record = Mapping[str, Any]

CHARTS: tuple[tuple[str, Mapping[str, str], tuple[float, float] | None], ...] = (
    # title, metric name: its name in the legend, fixed ends of the y axis
    ("Held-out accuracy", {"eval/accuracy": "accuracy"}, (0.0, 1.0)),
    ("Reward", {"reward/mean": "mean", "reward/std": "deviation"}, None),
    ("Length, tokens", {"rollout/length_mean": "all", "rollout/length_stopped": "ended itself"}, None),
    ("Truncated share", {"rollout/truncated": "truncated"}, None),
    ("Groups without signal", {"rollout/zero_variance": "all rewards alike"}, (0.0, 1.0)),
    ("Engine/trainer log-prob gap", {"train/logprob_gap": "mean |difference|"}, None),
    ("Clipped share", {"train/clip_low": "low", "train/clip_high": "high"}, None),
    ("Gradient norm", {"train/grad_norm": "norm"}, None),
    ("Entropy, nats", {"train/entropy": "entropy"}, None),
    ("Loss", {"train/loss": "loss"}, None),
)
PHASES = ("generate", "train", "sync", "checkpoint", "eval")
NUM_GROUPS = 4
MAX_CHARACTERS = 2000


def write_report(run_dir: Path) -> Path:
    """Writes report.html into a run folder and returns its path; what the folder lacks is left out of the page."""
    records = read_lines(run_dir / "metrics.jsonl")
    rollouts = sorted((run_dir / "rollouts").glob("step_*.jsonl"))
    config = _read(run_dir / "config.yaml")
    parts = [
        _headline(run_dir.resolve().name, _summary(run_dir), records),
        *_curves(records),
        *_phases(records),
        *(_samples(rollouts[-1].stem, read_lines(rollouts[-1])) if rollouts else ()),
        *([f"<details><summary>config.yaml</summary><pre>{clean(config)}</pre></details>"] if config else ()),
    ]
    page = PAGE.format(title=clean(run_dir.resolve().name), style=STYLE, body="\n".join(parts))
    path = run_dir / "report.html"
    write_atomically(path, page)
    return path


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} · hocket</title>
<style>{style}</style>
<main>
{body}
</main>
</html>
"""


def clean(text: object, limit: int | None = None) -> str:
    """Returns text that is safe between tags and in quoted attributes; control characters become visible."""
    plain = str(text)
    if limit is not None and len(plain) > limit:
        plain = f"{plain[:limit]} … ({len(plain) - limit} more characters)"
    return html.escape(re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", plain))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a JSONL file; a missing file has none, a line cut off by a crash is left out."""
    rows = []
    for line in _read(path).splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _summary(run_dir: Path) -> Record:
    text = _read(run_dir / "summary.json")
    summary = json.loads(text) if text else {}
    return summary if isinstance(summary, dict) else {}


def finite(value: object) -> float | None:
    """Returns a finite number as a float, anything else as None."""
    number_like = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number_like and math.isfinite(value) else None  # type: ignore[arg-type]


def series_of(records: Iterable[Record], name: str) -> Series:
    """Returns (step, value) of the records that have a metric; a value that is not finite is None."""
    rows = [(finite(record.get("step")), record) for record in records]
    return [(step, finite(record[name])) for step, record in rows if step is not None and name in record]


def _headline(name: str, summary: Record, records: Sequence[Record]) -> str:
    label, metric = "held-out accuracy", "eval/accuracy"
    before, after = finite(summary.get("before")), finite(summary.get("after"))
    if before is None and after is None:
        if not any(value is not None for _, value in series_of(records, metric)):
            label, metric = "mean reward", "reward/mean"
        values = [value for _, value in series_of(records, metric) if value is not None]
        before, after = (values[0], values[-1]) if values else (None, None)
    facts = {
        "steps": summary.get("steps", max((finite(r.get("step")) or 0 for r in records), default=0)),
        "training": _duration(finite(summary.get("train_seconds"))),
        "seed": summary.get("seed"),
        "weight version": summary.get("final_version"),
    }
    listed = "".join(f"<span>{k} <b>{clean(_show(v))}</b></span>" for k, v in facts.items() if v is not None)
    state = "" if summary else '<p class="note">The run has not finished: this is what it has left so far.</p>'
    big = f"{_show(before)} <em>→</em> {_show(after)}" if after is not None else "no evaluation yet"
    return (
        f'<header><p class="name">hocket · {clean(name)}</p><h1>{big}</h1>'
        f'<p class="label">{label}, before and after</p><p class="facts">{listed}</p>{state}</header>'
    )


def _show(value: object) -> str:
    if isinstance(value, float):
        return (
            "–" if not math.isfinite(value) else f"{value:g}" if value == int(value) and value > 1 else f"{value:.3f}"
        )
    return "–" if value is None else str(value)


def _duration(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"


def _curves(records: Sequence[Record]) -> Iterable[str]:
    meanings = {metric.name: metric.meaning for metric in METRICS}
    parts = sorted({name for r in records for name in r if name.startswith("reward/")} - {"reward/mean", "reward/std"})
    charts = list(CHARTS)
    if len(parts) > 1:
        charts.insert(2, ("Reward by part", {name: name.removeprefix("reward/") for name in parts[:5]}, None))
    figures = []
    for title, metrics, bounds in charts:
        lines = {label: series_of(records, name) for name, label in metrics.items()}
        lines = {label: line for label, line in lines.items() if any(value is not None for _, value in line)}
        if not lines:
            continue
        meaning = "; ".join(f"{name}: {meanings[name]}" for name in metrics if name in meanings)
        key = legend(lines) if len(lines) > 1 else ""
        figures.append(
            f'<figure><figcaption title="{clean(meaning)}">{clean(title)}{key}</figcaption>'
            f"{line_chart(lines, bounds=bounds)}</figure>"
        )
    if figures:
        yield f'<h2>Curves <small>over steps</small></h2><section class="grid">{"".join(figures)}</section>'


def _phases(records: Sequence[Record]) -> Iterable[str]:
    timed = [record for record in records if finite(record.get("time/step")) and finite(record.get("step")) is not None]
    if not timed:
        return
    seconds = {phase: [finite(record.get(f"time/{phase}")) or 0.0 for record in timed] for phase in PHASES}
    total = [finite(record["time/step"]) or 0.0 for record in timed]
    known = [math.fsum(column) for column in zip(*seconds.values(), strict=True)]
    seconds["other"] = [max(whole - part, 0.0) for whole, part in zip(total, known, strict=True)]
    seconds = {phase: values for phase, values in seconds.items() if any(values)}
    whole = math.fsum(math.fsum(values) for values in seconds.values())
    rows = "".join(
        f'<tr><td><i class="s{index}"></i>{phase}</td><td>{math.fsum(values):.1f} s</td>'
        f"<td>{math.fsum(values) / whole:.0%}</td><td>{math.fsum(values) / len(timed):.2f} s</td></tr>"
        for index, (phase, values) in enumerate(seconds.items(), 1)
    )
    steps = [finite(record["step"]) or 0.0 for record in timed]
    layers = {phase: list(zip(steps, values, strict=True)) for phase, values in seconds.items()}
    yield (
        f'<h2>Where the time goes <small>seconds per step</small></h2><section class="time"><figure>'
        f"{stacked_bars(layers)}</figure><table><tr><th>phase<th>all<th>share<th>per step</tr>{rows}</table></section>"
    )


def _samples(name: str, rows: Sequence[Record]) -> Iterable[str]:
    """Shows best and worst of the groups that differ most: what the gradient of this step was made of."""
    groups: dict[str, list[Record]] = {}
    for row in rows:
        groups.setdefault(str(row.get("group_id")), []).append(row)

    def reward(row: Record) -> float:
        value = finite(row.get("reward"))
        return -math.inf if value is None else value

    def spread(group: list[Record]) -> float:
        rewards = [reward(row) for row in group if reward(row) > -math.inf]
        return max(rewards) - min(rewards) if rewards else -1.0  # all failed: last

    chosen = sorted(groups.values(), key=spread, reverse=True)[:NUM_GROUPS]
    cards = []
    for group in chosen:
        scored = [row for row in group if reward(row) > -math.inf] or group  # a failed score is not a bad one
        best, worst = max(scored, key=reward), min(scored, key=reward)
        alike = "all alike" if len(scored) > 1 else "only one"
        pair = [("best", best), ("worst", worst)] if worst is not best else [(alike, best)]
        shown = [_completion(title, row) for title, row in pair]
        answer = f"<p>answer <code>{clean(best['answer'], 200)}</code></p>" if best.get("answer") is not None else ""
        cards.append(
            f'<article><pre class="prompt">{clean(best.get("prompt", ""), MAX_CHARACTERS)}</pre>{answer}'
            f'<div class="pair">{"".join(shown)}</div></article>'
        )
    if cards:
        yield f"<h2>Samples <small>best and worst of a group, {clean(name)}</small></h2>{''.join(cards)}"


def _completion(title: str, row: Record) -> str:
    parts = row.get("parts")
    named = ", ".join(f"{k} {_show(v)}" for k, v in parts.items()) if isinstance(parts, dict) and len(parts) > 1 else ""
    score = f"failed: {row['error']}" if row.get("error") else f"reward {_show(row.get('reward'))}"
    facts = [score, named, f"{row.get('num_tokens', '?')} tokens", f"{row.get('finish_reason', '?')}"]
    listed = clean(" · ".join(fact for fact in facts if fact), 500)
    return (
        f'<div><p class="{title.split()[0]}"><b>{title}</b> {listed}</p>'
        f"<pre>{clean(row.get('completion', ''), MAX_CHARACTERS)}</pre></div>"
    )
