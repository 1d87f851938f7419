"""Pictures of rollouts on the page."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.observe.test_vision import BLUE, LARGE, RED, seen

from hocket.common.vision import decoded, file_name, from_text
from hocket.extras.page.page import write_report
from hocket.extras.page.reader import RunReader
from hocket.observe.rows import write_rollouts
from support.records import write_rows


def test_the_page_gets_each_picture_of_a_prompt_once_and_small(tmp_path: Path) -> None:
    write_rollouts(tmp_path, "step_000001", [seen(LARGE)])
    first, second = RunReader(tmp_path).rollouts("step_000001", "g", tokens=True)
    assert "pictures" not in second
    assert [*first["pictures"]] == [image["file"] for image in first["images"]] == [*map(file_name, (RED, LARGE))]
    shown = [decoded(from_text(url)) for url in first["pictures"].values()]
    assert [one.size for one in shown] == [(40, 64), (160, 53)]
    assert shown[0].tobytes() == decoded(RED).tobytes()
    assert "pictures" not in RunReader(tmp_path).rollouts("step_000001")[0]
    write_rows(tmp_path / "metrics.jsonl", {"step": 1, "reward/mean": 0.5})
    write_report([tmp_path], tmp_path / "report.html")
    assert first["pictures"][file_name(RED)] in (tmp_path / "report.html").read_text()


def test_a_damaged_or_missing_picture_is_not_shown(tmp_path: Path) -> None:
    write_rollouts(tmp_path, "step_000001", [seen(BLUE)])
    (tmp_path / "images" / file_name(RED)).write_bytes(b"<script>")
    (tmp_path / "images" / file_name(BLUE)).unlink()
    assert RunReader(tmp_path).rollouts("step_000001", "g", tokens=True)[0]["pictures"] == {}


@pytest.mark.parametrize("name", ["../secret.png", "/etc/passwd", "a" * 64 + ".svg", f"x/../{'a' * 64}.png", 7, None])
def test_a_row_that_names_no_picture_of_the_run_shows_none(name: Any, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(RED)
    run = tmp_path / "run"
    path = write_rollouts(run, "step_000001", [seen()])
    (row, *_) = map(json.loads, path.read_text().splitlines())
    row["images"][0]["file"] = name
    write_rows(path, row)
    assert RunReader(run).rollouts("step_000001", "g", tokens=True)[0]["pictures"] == {}
