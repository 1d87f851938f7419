"""The report page: whole or partial runs, hostile text, nothing from outside; Chromium, if installed, draws it."""

import base64
import contextlib
import hashlib
import html.parser
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.observe.test_run_folder import ONE, settings

from hocket.config import load
from hocket.errors import ConfigError, DataError
from hocket.extras.page.page import MAX_CHARACTERS, PHASES, write_pictures, write_report
from hocket.extras.timeline import NAMES
from hocket.observe.metrics import known_metrics
from hocket.observe.rows import lines_of
from hocket.observe.run_folder import RunFolder
from hocket.types import Group, Prompt, Score
from support.browser import PATH, Browser, browser
from support.records import group, sequence, write_rows

METRICS = [
    {"step": 0, "eval/greedy": 0.25, "eval/sampled": 0.2},
    {"step": 1, "reward/mean": 0.3, "reward/std": 0.4, "train/loss": 0.1, "rollout/truncated": 0.5,
     "time/generate": 1.0, "time/train": 2.0, "time/step": 4.0},
    {"step": 2, "reward/mean": 0.5, "reward/std": 0.4, "train/loss": None, "eval/greedy": 0.75, "eval/sampled": 0.7,
     "time/generate": 1.0, "time/train": 2.0, "time/step": 4.0},
]  # fmt: skip
SUMMARY = {"steps": 2, "train_seconds": 142.4, "seed": 3, "final_version": 4}


def test_the_table_of_phases_has_all_times_of_a_step() -> None:
    times = {metric.name for metric in known_metrics() if metric.name.startswith("time/")}
    assert times - {"time/step", "time/batch"} == {f"time/{name}" for name in PHASES}
    assert times - {"time/step"} == set(NAMES)


def one_group(*totals: float | None, text: str = "abc", note: str = "", id: str = "g") -> Group:
    """Returns a group with these rewards, None: none; completions are the text and a number."""
    played = [sequence(2, 3, text=f"{text}{index}") for index in range(len(totals))]
    parts = {text: 1.0, "b": 0.0}
    failed = Score(total=math.nan, parts=parts, error=text, note=note)
    scores = [failed if one is None else Score(total=one, parts=parts, note=note) for one in totals]
    return group(Prompt(id="p", token_ids=(1,), text=text, answer=text), played, scores, id)


HOSTILE = [
    "<script>alert(1)</script>",
    "</pre><img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "'; </style></script><!--<link rel=stylesheet href=//evil.example>",
    "\x00\x1b[31m\u202e\u2028\ud800",
]
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
    write_rows(folder / "metrics.jsonl", *METRICS)
    (folder / "config.yaml").write_text("run:\n  dir: <runs>\n")
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "rollouts").mkdir()
    for step, one in enumerate(groups, 1):
        (folder / f"rollouts/step_{step:06d}.jsonl").write_text(lines_of([one]), encoding="utf-8", errors="replace")
    return folder


def report(*folders: Path) -> Page:
    path = folders[0] / "report.html"
    write_report(folders, path)
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    if PATH is None:
        pytest.skip("Chromium is not installed")
    with browser() as one:
        yield one


def drawn(tab: Browser, *folders: Path) -> Page:
    """The page as Chromium shows it."""
    report(*folders)
    tab.open((folders[0] / "report.html").as_uri())
    tab.wait("document.querySelector('header') && document.readyState == 'complete'")
    assert tab.events == []
    return Page(tab.run("document.documentElement.outerHTML"))


def test_a_finished_run_leads_with_before_and_after_and_shows_all_it_left(tab: Browser, tmp_path: Path) -> None:
    page = drawn(tab, write_run(tmp_path / "my-run", one_group(1.0), summary=SUMMARY))
    assert "my-run · hocket" in page.text
    assert "0.250 → 0.750held-out accuracy, greedy, before and after" in page.text
    assert "0.200 → 0.700held-out accuracy, sampled, before and after" in page.text
    assert "steps 2training 2:22 minseed 3weight version 4" in page.text
    assert "rollout/truncated = 0.5 (> 0.05): share of rollouts cut off" in page.text
    assert "learned to end its turn1 step, last in step 1" in page.text
    # of 2 × 4 seconds: 2 generating, 4 training, the other 2 unnamed
    for row in ("generate2.0 s25 %1.00 s", "train4.0 s50 %2.00 s", "other2.0 s25 %1.00 s"):
        assert row in page.text
    assert "sync0" not in page.text
    assert "dir: <runs>" in page.text
    assert "finished" in page.text
    assert page.tags.count("svg") == 5  # held-out, reward, truncated, loss, seconds


def test_an_unfinished_run_without_evaluation_shows_its_reward_odd_numbers_and_hostile_text_as_text(
    tab: Browser, tmp_path: Path
) -> None:
    groups = [one_group(None, text=text) for text in HOSTILE[:2]]
    groups += [one_group(0.5, 1.0, text=text, note=text) for text in HOSTILE[2:4]]
    folder = write_run(tmp_path / "run", *groups)
    odd = {"train/loss": -1e9, "train/kl": 1e-300, "train/entropy": None}
    named = {"train/loss": 1e9, "train/entropy": 0, f"reward/{HOSTILE[0]}": 1, "reward/b": 1}
    records = [{"step": 1, "reward/mean": 0.3, **odd}, {"step": 2, "reward/mean": 0.5, **named}]
    write_rows(folder / "metrics.jsonl", *records, '{"step": 3, "reward/me', end="")
    page = drawn(tab, folder)
    assert "0.300 → 0.500mean reward, before and after" in page.text
    assert "stopped" in page.text
    assert HOSTILE[0] in page.text
    assert page.tags.count("svg") == 4
    assert "0 in every step: Entropy" in page.text
    assert "NaN" not in page.source
    for text in HOSTILE[3::-1]:
        tab.click(".prompt")
        tab.wait(f"document.querySelector('article pre')?.textContent.startsWith({json.dumps(text)})")
        page = Page(tab.run("document.documentElement.outerHTML"))
        assert (page.active, page.tags.count("script")) == ([], 2)
        tab.run("[...document.querySelectorAll('button')].find(one => one.textContent == '‹').click()")


@pytest.mark.parametrize(
    ("records", "headline"),
    [
        (
            METRICS[:1],
            "0.250held-out accuracy, greedy, before training0.200held-out accuracy, sampled, before training",
        ),
        (METRICS[1:2], "0.300mean reward, in step 1"),
        ([], "no step has ended"),
    ],
)
def test_a_run_that_was_measured_once_has_one_figure_and_one_without_a_step_says_so(
    tab: Browser, tmp_path: Path, records: list[Any], headline: str
) -> None:
    folder = write_run(tmp_path / "run")
    write_rows(folder / "metrics.jsonl", *records)
    assert headline in drawn(tab, folder).text


def test_the_evaluation_before_the_first_step_is_no_share_of_the_steps_time(tab: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_rows(folder / "metrics.jsonl", {"step": 0, "time/eval": 40.0}, {"step": 1, "time/train": 3, "time/step": 4})
    text = drawn(tab, folder).text
    assert "train3.0 s75 %3.00 s" in text
    assert "eval40" not in text


@pytest.mark.parametrize("width", [390, 1280])
def test_plots_of_a_row_align_and_nothing_is_cut_or_beside_the_screen(tab: Browser, tmp_path: Path, width: int) -> None:
    folder = write_run(tmp_path / "run", one_group(0.5, 1.0, text="a word and " * 12, id="step 1/0"))
    server = {"url": "http://10.20.30.40:8000", "up": True, "version": 3, "in_flight": 12, "waiting": 0, "kv_tokens": 9}
    write_rows(folder / "timeline.jsonl", {"step": 1, "time": 1.0, "servers": [server]})
    report(folder)
    tab.open((folder / "report.html").as_uri(), width=width)
    tab.wait("document.querySelector('.prompt').tagName")
    boxes = (
        "[...document.querySelectorAll('.cards figure')].map(one => [one, one.querySelector('svg')].map("
        "part => Math.round(part.getBoundingClientRect().top)))"
    )
    tops: dict[int, set[int]] = {}
    for card, plot in tab.run(boxes):
        tops.setdefault(card, set()).add(plot)
    assert all(len(plots) == 1 for plots in tops.values())
    assert len(tops) < 5 if width == 1280 else len(tops) == 5
    beside = (
        "[...document.querySelectorAll('td, .prompt, figure')].filter("
        "one => one.getBoundingClientRect().right > innerWidth || one.scrollWidth > one.clientWidth + 1).length"
    )
    assert tab.run(beside) == 0
    shown = (
        "(span => width => width == 390 ? span.scrollWidth <= span.clientWidth : true)"
        f"(document.querySelector('.prompt span'))({width})"
    )
    assert tab.run(shown)
    tab.click(".prompt")
    tab.wait("document.querySelector('article').tagName")
    text = tab.text()
    assert "step 1, prompt 0" in text
    assert "ended by itself" in text


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_data(tmp_path: Path, text: str) -> None:
    folder = write_run(tmp_path / "run", one_group(None, text=text, note=text), summary=SUMMARY | {"seed": text})
    (folder / "config.yaml").write_text(json.dumps({"run": {"dir": text}}))
    write_rows(folder / "metrics.jsonl", {"step": 3, f"reward/{text}": 1.0, "reward/b": 1.0})
    page, harmless = report(folder), report(write_run(tmp_path / "other", summary=SUMMARY))
    assert (page.tags, page.active, page.scripts[""]) == (harmless.tags, [], harmless.scripts[""])
    assert "<" not in page.scripts["application/json"]
    (run,) = page.data["runs"]
    assert run["rows"]["step_000001"][0]["completion"] == f"{text}0".replace("\ud800", "?")
    assert run["summary"]["seed"] == text


def test_the_page_allows_its_one_script_and_no_outside_resource_and_charts_metrics_of_the_table(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "run", one_group(1.0), summary=SUMMARY))
    digest = base64.b64encode(hashlib.sha256(page.scripts[""].encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
    policy += "img-src data:; connect-src 'none'; "
    assert f"content=\"{policy}base-uri 'none'; form-action 'none'\"" in page.source
    assert page.tags.count("script") == len(page.scripts) == 2
    # text reaches the page as text nodes alone
    assert not re.findall(r"HTML|document\.write|\b(?:eval|Function|import)\(", page.scripts[""])
    assert page.scripts[""].count("src") == 1  # of a picture that the run's server has drawn anew
    assert page.scripts[""].count("href") == 2  # of a picture that is saved
    assert page.scripts[""].count("fetch(") == 1
    assert "http" not in page.scripts[""].replace("http://www.w3.org/2000/svg", "")
    names = re.findall('"([a-z]+/[a-z_]+)":', page.scripts[""])
    assert len(names) > 12
    assert set(names) <= {metric.name for metric in known_metrics()}


def test_metrics_that_are_no_records_or_numbers_are_gaps(tmp_path: Path) -> None:
    assert report(tmp_path).data["runs"][0]["curves"]["step"] == []
    lines = '\nnot json\n[1]\n{"step": null, "x": 1}\n{"step": 4, "x": NaN, "y": -Infinity, "z": 1}\n{"st'
    (tmp_path / "metrics.jsonl").write_text(lines)
    curves = report(tmp_path).data["runs"][0]["curves"]
    assert {name: curves[name] for name in ("step", "x", "y", "z")} == {"step": [4], "x": [None], "y": [None], "z": [1]}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metrics.jsonl", '{"step": 1, "x": [1]}\n'),
        ("rollouts/step_000001.jsonl", "{}\n"),
        ("trained/step_000001.jsonl", "{}\n"),
        ("config.yaml", "{"),
        ("summary.json", "{"),
        ("plugins.json", "[{}]"),
    ],
)
def test_what_no_run_has_written_is_an_error_with_its_place(tmp_path: Path, file: str, content: str) -> None:
    run = write_run(tmp_path / "run", one_group(1.0))
    (run / file).parent.mkdir(exist_ok=True)
    (run / file).write_text(content)
    with pytest.raises(DataError, match=f"{run}.* is damaged: .*bring the file back"):
        report(run)


def test_a_report_has_the_newest_step_and_evenly_of_earlier_ones_the_prompt_whose_rewards_differ_most(
    tmp_path: Path,
) -> None:
    folder = write_run(tmp_path / "run", *[one_group(1.0)] * 47)
    rewards = ([None], [1.0, 1.0], [0.2, 0.7, 0.9], [0.5, 1.0])
    several = [one_group(*some, id=str(number)) for number, some in enumerate(rewards)]
    for step in (46, 48):
        (folder / f"rollouts/step_{step:06d}.jsonl").write_text(lines_of(several))
    (run,) = report(folder).data["runs"]
    assert run["rollouts"] == {"step": [*range(2, 49, 2)], "eval": []}
    assert [row["group_id"] for row in run["rows"]["step_000048"]] == ["2", "2", "2", "0", "1", "1", "3", "3"]
    assert [row["reward"] for row in run["rows"]["step_000046"]] == [0.2, 0.7, 0.9]


def test_long_texts_are_cut(tmp_path: Path) -> None:
    (run,) = report(write_run(tmp_path / "run", one_group(1.0, text="n" * 5000))).data["runs"]
    (one,) = run["rows"]["step_000001"]
    assert one["completion"] == f"{'n' * MAX_CHARACTERS} … (3001 more characters)"


def test_runs_are_drawn_over_one_another_with_the_settings_in_which_they_differ(tab: Browser, tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "a", summary=SUMMARY), write_run(tmp_path / "b", summary=SUMMARY)
    (second / "config.yaml").write_text("run:\n  dir: <runs>\ntrainer: {learning_rate: 2.0, share_prefixes: true}\n")
    page = drawn(tab, first, second)
    differing = [["trainer.learning_rate", ["null", "2.0"]], ["trainer.share_prefixes", ["null", "true"]]]
    assert page.data["differing"] == differing
    assert "settingabtrainer.learning_ratenull2.0trainer.share_prefixesnulltrue" in page.text
    assert "step 2: a: mean 0.5, a: standard deviation 0.4, b: mean 0.5, b: standard deviation 0.4" in page.source
    assert page.tags.count("svg") == 5


def test_parts_have_curves_of_their_own_without_what_a_judge_costs(tab: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", one_group(0.5))
    parts = {"judge": 0.5, "length": -0.1, "judge/tokens": 120, "judge/calls": 1, "http/judge/tokens": 7}
    write_rows(folder / "metrics.jsonl", {"step": 1, **{f"reward/{name}": v for name, v in parts.items()}})
    page = drawn(tab, folder)
    assert "Reward by part" in page.text
    assert "step 1: judge 0.5, length -0.1" in page.source
    assert "What judges costtokens per rollout" in page.text
    assert "step 1: http/judge 7, judge 120" in page.source


def test_curves_are_written_as_pictures_and_without_a_browser_it_is_said_how(
    tab: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report(write_run(tmp_path / "run"))
    write_pictures(tmp_path / "run/report.html", tmp_path / "png")
    files = sorted((tmp_path / "png").iterdir())
    assert [file.stem for file in files] == ["held_out", "loss", "reward", "seconds_per_step", "truncated_rollouts"]
    assert {file.read_bytes()[:4] for file in files} == {b"\x89PNG"}
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="needs Chromium: apt install chromium"):
        write_pictures(tmp_path / "run/report.html", tmp_path / "png")


def test_an_interrupted_run_leaves_a_report_of_what_it_had(tmp_path: Path) -> None:
    with contextlib.suppress(KeyboardInterrupt), RunFolder(settings(tmp_path)) as folder:
        folder.finish(1, {"reward/mean": 0.5})
        raise KeyboardInterrupt
    assert '"summary": null' in (tmp_path / "runs/a/report.html").read_text()


def test_a_report_says_what_plugins_have_registered(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ONE.format("kept_for_report"))
    with RunFolder(load(None, [f"plugins=[{tmp_path}/mine.py]", f"run.dir={tmp_path}/run"])) as folder:
        folder.finish(0, {"eval/greedy": 0.5})
        folder.summary(final_version=1)
    assert "reward kept_for_report" in (tmp_path / "run" / "report.html").read_text()
