"""The report page: whole or partial runs, hostile text, nothing from outside; Chromium, if installed, draws it."""

import base64
import dataclasses
import hashlib
import html.parser
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hocket.observe.metrics import METRICS as TABLE
from hocket.observe.page import MAX_CHARACTERS, best_and_worst, write_report
from hocket.types import Group, Prompt, Rollout, Score, TokenSequence

METRICS = [
    {"step": 0, "eval/greedy": 0.25, "eval/sampled": 0.2},
    {"step": 1, "reward/mean": 0.3, "reward/std": 0.4, "train/loss": 0.1, "rollout/truncated": 0.5,
     "time/generate": 1.0, "time/train": 2.0, "time/step": 4.0},
    {"step": 2, "reward/mean": 0.5, "reward/std": 0.4, "train/loss": None, "eval/greedy": 0.75, "eval/sampled": 0.7,
     "time/generate": 1.0, "time/train": 2.0, "time/step": 4.0},
]  # fmt: skip
SUMMARY = {"steps": 2, "train_seconds": 142.4, "seed": 3, "final_version": 4}


def group(*totals: float | None, text: str = "abc", note: str = "") -> Group:
    """Return a group with these rewards, None: none; completions are the text and a number."""
    prompt = Prompt(id="p", token_ids=(1,), text=text, answer=text)
    tokens = {"token_ids": (1, 2, 3), "mask": (False, True, True), "logprobs": (0.0,) * 3}
    played = [TokenSequence(**tokens, text=f"{text}{index}") for index in range(len(totals))]
    parts = {text: 1.0, "b": 0.0}
    failed = Score(total=math.nan, parts=parts, error=text, note=note)
    return Group(
        id="g",
        rollouts=tuple(Rollout(id=f"g/{i}", prompt=prompt, sequences=(one,)) for i, one in enumerate(played)),
        scores=tuple(failed if one is None else Score(total=one, parts=parts, note=note) for one in totals),
    )


HOSTILE = [
    "<script>alert(1)</script>",
    "</pre><img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "'; </style></script><!--<link rel=stylesheet href=//evil.example>",
    "\x00\x1b[31m\u202e\u2028\ud800",
]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ACTIVE = ("link", "iframe", "img", "object", "embed", "a", "form", "base", "src", "href")


class Page(html.parser.HTMLParser):
    """Collects tags, text, scripts by type, and tags and attributes that load or run something."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source, self.text = source, ""
        self.tags: list[str] = []
        self.active: list[str] = []
        self.scripts: dict[str, str] = {}
        self.inside: str | None = None
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.active += [name for name in (tag, *dict(attrs)) if name in ACTIVE or name.startswith("on")]
        self.inside = (dict(attrs).get("type") or "") if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        self.inside = None

    def handle_data(self, data: str) -> None:
        if self.inside is None:
            self.text += data
        else:
            self.scripts[self.inside] = data

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.scripts["application/json"])


def write_run(folder: Path, *groups: Group, summary: object = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in METRICS))
    (folder / "config.yaml").write_text("run:\n  dir: <runs>\n")
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    lines = [json.dumps({"step": f"step {i}", **best_and_worst([one])}) + "\n" for i, one in enumerate(groups, 1)]
    (folder / "samples.jsonl").write_text("".join(lines))
    return folder


def report(folder: Path) -> Page:
    write_report(folder)
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def drawn(folder: Path) -> Page:
    """The page as Chromium shows it."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    report(folder)
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
             "--disable-background-networking", "--disable-component-update", "--virtual-time-budget=2000")  # fmt: skip
    command = [CHROMIUM, *flags, f"--user-data-dir={folder}/browser", "--dump-dom", f"file://{folder}/report.html"]
    return Page(subprocess.run(command, capture_output=True, timeout=60, check=True, encoding="utf-8").stdout)


def test_a_finished_run_leads_with_before_and_after_and_shows_all_it_left(tmp_path: Path) -> None:
    page = drawn(write_run(tmp_path / "my-run", group(1.0), summary=SUMMARY))
    assert "my-run · hocket" in page.text
    assert "0.250 → 0.750held-out accuracy, greedy, before and after" in page.text
    assert "0.200 → 0.700held-out accuracy, sampled, before and after" in page.text
    assert "steps 2training 2:22 minseed 3weight version 4" in page.text
    assert "rollout/truncated > 0.05 in 1 step, last in step 1: 0.5" in page.text
    # of 2 × 4 seconds: 2 generating, 4 training, the other 2 unnamed
    for row in ("generate2.0 s25 %1.00 s", "train4.0 s50 %2.00 s", "other2.0 s25 %1.00 s"):
        assert row in page.text
    assert "sync0" not in page.text
    assert "only one reward 1 · abc 1, b 0 · 2 tokens · stop" in page.text
    assert "dir: <runs>" in page.text
    assert "not finished" not in page.text
    assert page.tags.count("svg") == 5  # held-out, reward, truncated, loss, seconds
    assert page.tags.count("rect") == 2 * 9


def test_an_unfinished_run_without_evaluation_shows_its_reward_odd_numbers_and_hostile_text_as_text(
    tmp_path: Path,
) -> None:
    groups = [group(None, text=text) for text in HOSTILE[:2]]
    groups += [group(0.5, 1.0, text=text, note=text) for text in HOSTILE[2:4]]
    folder = write_run(tmp_path / "run", *groups)
    odd = {"train/loss": -1e9, "train/kl": 1e-300, "train/entropy": None}
    named = {"train/loss": 1e9, "train/entropy": 0, f"reward/{HOSTILE[0]}": 1, "reward/b": 1}
    records = [{"step": 1, "reward/mean": 0.3, **odd}, {"step": 2, "reward/mean": 0.5, **named}]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + '\n{"step": 3, "reward/me')
    page = drawn(folder)
    assert "0.300 → 0.500mean reward, before and after" in page.text
    assert "The run has not finished" in page.text
    assert all(text in page.text for text in HOSTILE[:4])
    assert page.tags.count("svg") == 5
    assert "NaN" not in page.source
    assert (page.active, page.tags.count("script")) == ([], 2)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_data(tmp_path: Path, text: str) -> None:
    folder = write_run(tmp_path / "run", group(None, text=text, note=text), summary=SUMMARY | {"seed": text})
    (folder / "config.yaml").write_text(text, encoding="utf-8", errors="replace")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 3, f"reward/{text}": 1.0, "reward/b": 1.0}))
    page, harmless = report(folder), report(write_run(tmp_path / "other", summary=SUMMARY))
    assert (page.tags, page.active, page.scripts[""]) == (harmless.tags, [], harmless.scripts[""])
    assert "<" not in page.scripts["application/json"]
    assert page.data["samples"][0]["rollouts"][0]["completion"] == f"{text}0"
    assert page.data["summary"]["seed"] == text


def test_the_page_allows_its_one_script_and_no_outside_resource_and_charts_metrics_of_the_table(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "run", group(1.0), summary=SUMMARY))
    digest = base64.b64encode(hashlib.sha256(page.scripts[""].encode()).digest()).decode()
    assert f"content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'\"" in page.source
    assert page.tags.count("script") == len(page.scripts) == 2
    # text reaches the page as text nodes alone
    assert not re.findall(r"HTML|document\.write|\b(?:eval|Function|fetch|import)\(|href|src", page.scripts[""])
    assert "http" not in page.scripts[""].replace("http://www.w3.org/2000/svg", "")
    names = re.findall('"([a-z]+/[a-z_]+)":', page.scripts[""])
    assert len(names) > 12
    assert set(names) <= {metric.name for metric in TABLE}


def test_metrics_that_are_no_records_or_numbers_are_gaps(tmp_path: Path) -> None:
    assert report(tmp_path).data["records"] == []
    (tmp_path / "metrics.jsonl").write_text('\nnot json\n[1]\n{"step": null, "x": NaN, "y": -Infinity}\n{"st')
    assert report(tmp_path).data["records"] == [{"step": None, "x": None, "y": None}]


@pytest.mark.parametrize(
    ("totals", "shown"),
    [
        ([[0.0, 0.5, 1.0, None]], [("best", "abc2"), ("worst", "abc0")]),  # a score that failed is not the worst one
        ([[1.0, 1.0]], [("all alike", "abc0")]),
        ([[None, 0.5]], [("only one", "abc1")]),
        ([[None, None]], [("only one", "abc0")]),
        ([[None], [1.0, 1.0], [0.2, 0.7, 0.9], [0.5, 1.0]], [("best", "abc2"), ("worst", "abc0")]),
    ],
)
def test_a_sample_is_best_and_worst_of_the_prompt_whose_rewards_differ_most(
    totals: list[list[float | None]], shown: list[tuple[str, str]]
) -> None:
    sample = best_and_worst([group(*some) for some in totals])
    assert [(one["title"], one["completion"]) for one in sample["rollouts"]] == shown
    assert sample["rollouts"][0]["error"] == (None if any(totals[0]) or totals[1:] else "abc")


def test_a_sample_of_an_episode_shows_all_its_turns() -> None:
    one = group(1.0)
    spoken = ({"role": "assistant", "content": "f(1)"}, {"role": "tool", "content": "error: there is no tool 'f'"})
    rollout = one.rollouts[0]
    several = dataclasses.replace(rollout, sequences=(dataclasses.replace(rollout.sequences[0], dialogue=spoken),))
    (sample,) = best_and_worst([dataclasses.replace(one, rollouts=(several,))])["rollouts"]
    assert sample["completion"] == "assistant: f(1)\ntool: error: there is no tool 'f'"


def test_long_texts_are_cut() -> None:
    (one,) = best_and_worst([group(1.0, text="n" * 5000)])["rollouts"]
    assert one["completion"] == f"{'n' * MAX_CHARACTERS} … (3001 more characters)"


def test_the_newest_step_and_those_that_lie_evenly_before_it_are_shown(tmp_path: Path) -> None:
    data = report(write_run(tmp_path / "run", *[group(1.0)] * 120)).data
    assert [sample["step"] for sample in data["samples"]] == [f"step {step}" for step in range(120, 0, -3)]


def test_parts_have_curves_of_their_own_without_what_a_judge_costs(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", group(0.5))
    parts = {"judge": 0.5, "length": -0.1, "judge/tokens": 120, "judge/calls": 1, "http/judge/tokens": 7}
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, **{f"reward/{name}": v for name, v in parts.items()}}))
    page = drawn(folder)
    assert "Reward by part" in page.text
    assert "step 1: judge 0.5, length -0.1" in page.source
    assert "What judges costtokens per rollout" in page.text
    assert "step 1: http/judge 7, judge 120" in page.source
    assert "abc 1, b 0" in page.text
