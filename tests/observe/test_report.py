"""The report page: whole or partial runs, hostile text, nothing from outside."""

import html.parser
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hocket.observe.report import MAX_CHARACTERS, clean, read_lines, series_of, write_report

METRICS = [
    {"step": 0, "eval/accuracy": 0.25},
    {"step": 1, "reward/mean": 0.3, "reward/std": 0.4, "train/loss": 0.1, "time/generate": 1.0, "time/train": 2.0,
     "time/step": 4.0},
    {"step": 2, "reward/mean": 0.5, "reward/std": 0.4, "train/loss": None, "eval/accuracy": 0.75, "time/generate": 1.0,
     "time/train": 2.0, "time/step": 4.0},
]  # fmt: skip
SUMMARY = {"before": 0.25, "after": 0.75, "steps": 2, "train_seconds": 142.4, "seed": 3, "final_version": 4}
ROLLOUT = {
    "id": "a/0",
    "group_id": "a",
    "prompt": "sort cab",
    "completion": "abc",
    "answer": "abc",
    "reward": 1.0,
    "parts": {"exact_match": 1.0},
    "error": None,
    "finish_reason": "stop",
    "num_tokens": 4,
}


class Page(html.parser.HTMLParser):
    """Collects tags and attributes, and notes what would be fetched or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.active: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag in ("script", "link", "iframe", "img", "object", "embed", "a", "form", "base"):
            self.active.append(tag)
        self.active += [name for name, _ in attrs if name.startswith("on") or name in ("src", "href")]


def write_run(folder: Path, *, rollouts: list[dict[str, Any]] | None = None, summary: object = None) -> Path:
    (folder / "rollouts").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in METRICS))
    (folder / "config.yaml").write_text("run:\n  dir: <runs>\n")
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    for row in rollouts or []:
        with (folder / "rollouts/step_000002.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    return folder


def report(folder: Path) -> str:
    path = write_report(folder)
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8")


def test_a_finished_run_leads_with_before_and_after(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "my-run", rollouts=[ROLLOUT], summary=SUMMARY))
    assert "<h1>0.250 <em>→</em> 0.750</h1>" in page
    assert "held-out accuracy, before and after" in page
    for fact in ("steps <b>2</b>", "training <b>2:22 min</b>", "seed <b>3</b>", "weight version <b>4</b>"):
        assert fact in page
    assert "<title>my-run · hocket</title>" in page
    assert "dir: &lt;runs&gt;" in page
    assert "not finished" not in page


def test_seconds_are_shared_out_with_the_rest(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "run"))
    # of 2 × 4 seconds: 2 generating, 4 training, the other 2 unnamed
    for row in (
        "generate</td><td>2.0 s</td><td>25%",
        "train</td><td>4.0 s</td><td>50%",
        "other</td><td>2.0 s</td><td>25%",
    ):
        assert row in page
    assert "sync</td>" not in page


def test_a_run_that_was_cut_off_reports_what_it_has(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/me')
    page = report(folder)
    assert "0.250 <em>→</em> 0.750" in page
    assert "The run has not finished" in page


def test_a_run_without_evaluation_leads_with_its_reward(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    rows = [{k: v for k, v in row.items() if not k.startswith("eval")} for row in METRICS]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = report(folder)
    assert "mean reward, before and after" in page
    assert "0.300 <em>→</em> 0.500" in page


@pytest.mark.parametrize("text", ["", "\n", "not json\n", "[1]\n", '{"step": null}\n', '{"reward/mean": 1}\n'])
def test_a_run_without_metrics_still_has_a_page(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    assert "<svg" not in report(tmp_path)


def test_an_empty_folder_still_has_a_page(tmp_path: Path) -> None:
    assert "no evaluation yet" in report(tmp_path)


def test_values_that_are_no_numbers_are_gaps(tmp_path: Path) -> None:
    rows = [{"step": 1, "x": float("nan")}, {"step": 2, "x": float("inf")}, {"step": 3, "x": "1"}, {"step": 4, "x": 2}]
    rows += [{"step": 5}, {"step": float("nan"), "x": 1.0}, {"step": 6, "x": True}]
    assert series_of(rows, "x") == [(1, None), (2, None), (3, None), (4, 2.0), (6, None)]
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "train/loss": NaN, "time/step": Infinity}\n{"step": 2, "train/loss": 1e400}\n'
    )
    page = report(tmp_path)
    assert "<svg" not in page


HOSTILE = [
    "<script>alert(1)</script>",
    "</pre><img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "'; </style><link rel=stylesheet href=//evil.example>",
    "\x00\x1b[31m\u202e\ud800",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(tmp_path: Path, text: str) -> None:
    row = dict.fromkeys(ROLLOUT, text) | {"reward": 0.0, "parts": {text: 1.0, "b": 0.0}}
    row_without_error = row | {"error": None, "group_id": "b"}
    folder = write_run(tmp_path / "run", rollouts=[row, row_without_error], summary=SUMMARY | {"seed": text})
    (folder / "config.yaml").write_text(text, encoding="utf-8", errors="replace")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, f"reward/{text}": 1.0, "reward/b": 1.0}) + "\n")
    page = Page(report(folder))
    assert page.active == []
    assert page.tags.count("pre") == 1 + 2 * 2  # config; a prompt and a completion for each of two groups


def test_the_page_forbids_scripts_and_outside_resources(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "run", rollouts=[ROLLOUT], summary=SUMMARY))
    assert "default-src 'none'; style-src 'unsafe-inline'" in page
    assert Page(page).active == []
    assert "http" not in page.replace('http-equiv="Content-Security-Policy"', "")


def test_control_characters_become_visible() -> None:
    assert clean("a\x00b\x1b[31mc\td\ne") == "a\ufffdb\ufffd[31mc\td\ne"


def test_long_text_is_cut_and_says_so(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "run", rollouts=[ROLLOUT | {"completion": "x" * (MAX_CHARACTERS + 5)}]))
    assert f"{'x' * MAX_CHARACTERS} … (5 more characters)" in page
    assert "x" * (MAX_CHARACTERS + 1) not in page


def test_samples_are_best_and_worst_of_the_groups_that_differ_most(tmp_path: Path) -> None:
    def row(group: str, reward: float | None, text: str) -> dict[str, Any]:
        return ROLLOUT | {"group_id": group, "reward": reward, "completion": text, "error": reward is None and "hung"}

    rows = [row("same", 1.0, "same-1"), row("same", 1.0, "same-2")]
    rows += [row("far", 0.0, "far-low"), row("far", 0.5, "far-mid"), row("far", 1.0, "far-high")]
    rows += [row("far", None, "far-failed"), row("near", 0.5, "near-1"), row("near", 0.6, "near-2")]
    page = report(write_run(tmp_path / "run", rollouts=rows))
    assert page.index("far-high") < page.index("far-low") < page.index("near-2") < page.index("near-1")
    assert "far-mid" not in page
    assert "far-failed" not in page  # a score that failed is not the worst one
    assert page.count("same-") == 1  # one is enough
    assert page.index("<b>all alike</b>") < page.index("same-")


def test_a_group_that_failed_altogether_says_why(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "run", rollouts=[ROLLOUT | {"reward": None, "error": "timeout after 30 s"}]))
    assert "failed: timeout after 30 s" in page


def test_the_newest_rollouts_are_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rollouts=[ROLLOUT | {"completion": "old"}])
    (folder / "rollouts/step_000010.jsonl").write_text(json.dumps(ROLLOUT | {"completion": "newest"}))
    (folder / "rollouts/eval_000010.jsonl").write_text(json.dumps(ROLLOUT | {"completion": "held-out"}))
    page = report(folder)
    assert "newest" in page
    assert ">old<" not in page


def test_the_page_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(tmp_path)
    before = (tmp_path / "report.html").read_text()

    def fail(source: object, target: object) -> None:
        raise OSError("disk gone")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk gone"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_text() == before


def test_a_missing_file_has_no_lines(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "nothing.jsonl") == []
