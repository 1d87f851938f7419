"""Every config of a page is valid, and every command of it passes a dry run."""

import subprocess
import sys
from pathlib import Path

import pytest

from support import pages
from support.pages import PAGES, ROOT

pytestmark = pytest.mark.long


@pytest.mark.parametrize("page", PAGES, ids=pages.name)
def test_configs_and_commands_of_a_page_work(page: Path, tmp_path: Path) -> None:
    program = [sys.executable, "-P", str(ROOT / "tests" / "support" / "try_page.py"), str(page), str(tmp_path)]
    paths = f"{ROOT}/src:{ROOT}/tests"
    env = {
        "PYTHONPATH": paths,
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(tmp_path),
    }
    result = subprocess.run(program, capture_output=True, text=True, timeout=900, env=env)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr[-2000:]}"


def test_a_page_with_a_wrong_setting_an_unknown_option_and_a_missing_file_fails(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    page = tmp_path / "page.md"
    page.write_text(
        "```yaml\ntrainer: {step: 1}\n```\n\n```sh\npython3 run.py train --quick\npython3 run.py serve config/no.yaml\n"
        "curl localhost:8000/generate -d '{prompts}'\nfrobnicate a\n"
        ".venv/bin/python benchmarks/peer.py --nothing\n```\n"
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    program = [sys.executable, "-P", str(ROOT / "tests" / "support" / "try_page.py"), str(page), str(folder)]
    env = {
        "PYTHONPATH": f"{ROOT}/src:{ROOT}/tests",
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(tmp_path),
    }
    result = subprocess.run(program, capture_output=True, text=True, timeout=900, env=env)
    assert result.stdout.count("FAULT ") == result.returncode == 6, result.stdout
