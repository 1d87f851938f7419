"""What is skipped for lack of a package passes with it; and the script that installs packages and runs such tests."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hocket.common import environment
from support.processes import Process

ROOT = Path(__file__).resolve().parents[1]
REPORT = """<testsuites><testsuite>
<testcase name="one"/>
<testcase name="two"><failure message="no"/></testcase>
<testcase name="three"><skipped message="mcp is not installed"/></testcase>
<testcase name="four"><skipped message="means vLLM's CPU build"/></testcase>
</testsuite></testsuites>"""


GROUPS = re.findall(r"(?m)^# (\w+)$", (ROOT / "requirements" / "optional.txt").read_text("utf-8"))


@pytest.mark.long
@pytest.mark.parametrize("group", GROUPS)
def test_what_needs_packages_passes_with_them(group: str, tmp_path: Path) -> None:
    with Process([group], tmp_path / "log", program=["tests/optional.py"]) as process:
        status = process.wait_end(900)
    line = process.output().splitlines()[-1]
    if "can't be had" in line:
        pytest.skip(line)
    assert status == 0, process.output()
    assert re.search(r"[1-9]\d* passed, 0 failed", line), line


@pytest.fixture
def optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a folder, a file of pins and an installer of its own."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.syspath_prepend(str(ROOT / "requirements"))
    spec = importlib.util.spec_from_file_location("optional", ROOT / "tests" / "optional.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "optional", module)
    spec.loader.exec_module(module)
    (tmp_path / "pins.txt").write_text("# mcp\nmcp==2.3.0\nnumpy==0.1\n\n# gym\nreasoning-gym==0.1\n")
    monkeypatch.setattr(module, "FOLDER", tmp_path / "optional")
    monkeypatch.setattr(module, "PINS", tmp_path / "pins.txt")
    return module


def test_each_group_has_tests_that_exist_and_exact_versions_of_what_it_wants() -> None:
    listed = subprocess.run(
        [sys.executable, "tests/optional.py", "--list"], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout
    pins = (ROOT / "requirements" / "optional.txt").read_text("utf-8")
    for package in ("mcp", "wandb", "tensorboard", "trackio", "mlflow", "reasoning-gym", "openenv", "verifiers"):
        assert f"\n{package}==" in pins
        assert f"{package}==" in listed
    files = [word for line in listed.splitlines() if line.startswith("  tests: ") for word in line.split()[1:]]
    assert len(files) == 9
    assert all((ROOT / file).exists() for file in files if not file.startswith("tests/extras/"))  # may be deleted


def test_a_group_is_installed_once_and_again_when_its_pins_change(
    optional: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: list[list[str]] = []
    monkeypatch.setattr(optional, "fill", lambda folder, pins: filled.append(list(pins)))
    for _ in range(2):
        optional.install("mcp")
    assert filled == [["mcp==2.3.0", "numpy==0.1"]]
    optional.PINS.write_text("# mcp\nmcp==2.4.0\n")
    optional.install("mcp")
    assert filled[1:] == [["mcp==2.4.0"]]


def test_what_the_environment_has_in_any_build_is_not_installed(
    optional: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "version_of", {"a": "1.0+cu130", "b": "2"}.get)
    assert optional.missing(["a==1.0+cpu", "b==3 ; python_version < '4'", "c==1"]) == [
        "b==3 ; python_version < '4'",
        "c==1",
    ]


def test_an_interrupted_installation_leaves_nothing(optional: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(folder: Path, pins: list[str]) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(optional, "fill", fill)
    with pytest.raises(KeyboardInterrupt):
        optional.install("mcp")
    assert [path.name for path in optional.FOLDER.iterdir()] == ["lock"]


@pytest.mark.parametrize("reason", ["no route to the index", "read-only"])
def test_what_can_not_be_had_is_a_line_and_with_strict_a_failure(
    reason: str, optional: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(folder: Path, pins: list[str]) -> None:
        raise OSError(reason) if reason == "read-only" else optional.SetupError(reason)

    monkeypatch.setattr(optional, "fill", fill)
    assert optional.main(["mcp"]) == 0
    assert optional.main(["mcp", "--strict"]) == 1
    line = f"mcp: mcp 2.3.0 can't be had: {reason}; unproven: tests/extras/tools/test_mcp.py"
    assert capsys.readouterr().out.splitlines() == ["", line] * 2


@pytest.mark.parametrize(("status", "report"), [(0, REPORT), (1, REPORT), (0, "<testsuites/>"), (4, "")])
def test_a_failed_test_and_one_skipped_though_its_package_is_installed_are_failures(
    status: int,
    report: str,
    optional: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = []

    def run(command: list[str], *_: object) -> int:
        given.append(command)
        (path,) = [word.partition("=")[2] for word in command if word.startswith("--junitxml=")]
        if report:
            Path(path).write_text(report)
        return status

    monkeypatch.setattr(optional, "fill", lambda folder, pins: None)
    monkeypatch.setattr(optional, "run", run)
    assert optional.main(["mcp", "-x"]) == int(status != 0 or report == REPORT)
    assert given[0][-2:] == ["tests/extras/tools/test_mcp.py", "-x"]
    said = capsys.readouterr().out
    if report == REPORT:
        assert "mcp: mcp 2.3.0: 1 passed, 1 failed, 2 skipped in " in said
        assert said.splitlines()[-1] == "  skipped though installed: three: mcp is not installed"


def test_a_group_that_does_not_exist_is_refused(optional: ModuleType) -> None:
    assert optional.main(["mpc"]) == 2
