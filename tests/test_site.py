"""The site of docs/: every link and heading that is linked to is there, and the search knows every page."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.pages import ROOT

pytest.importorskip("mkdocs")
pytest.importorskip("material")


def build(folder: Path, output: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(output)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    return tmp_path


def test_the_site_is_built_without_a_warning_and_can_be_searched(copy: Path) -> None:
    result = build(copy, copy / "site")
    assert result.returncode == 0, result.stderr
    found = json.loads((copy / "site" / "search" / "search_index.json").read_text("utf-8"))["docs"]
    pages = {entry["location"].partition("#")[0] for entry in found}
    assert len(pages) == len([*(ROOT / "docs").rglob("*.md")])
    assert any("max_staleness" in entry["text"] for entry in found)
    page = (copy / "site" / "explanation" / "performance" / "index.html").read_text("utf-8")
    assert "../../benchmarks/README.md" not in page  # it is outside of docs/


@pytest.mark.parametrize("link", ["how-to/none.md", "how-to/install.md#no-such-heading"])
def test_a_link_that_leads_nowhere_fails_the_build(link: str, copy: Path) -> None:
    with (copy / "docs" / "index.md").open("a") as index:
        index.write(f"\n[a]({link})\n")
    assert build(copy, copy / "site").returncode == 1
