"""What tests/optional.py runs of the tests of extras."""

import subprocess
import sys

from support.processes import ROOT


def test_each_group_of_extras_has_tests_that_exist() -> None:
    command = [sys.executable, "tests/optional.py", "--list"]
    listed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    files = [word for line in listed.splitlines() if line.startswith("  tests: ") for word in line.split()[1:]]
    assert len([file for file in files if file.startswith("tests/extras/")]) == 7
    assert all((ROOT / file).exists() for file in files)
