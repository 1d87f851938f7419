"""`run.py test`: which tests it runs, how it shares them out, and what it says at its end."""

import sys

import pytest

import suite

SHARED = [sys.executable, "-m", "pytest", "-n", "2", "--no-loadscope-reorder"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that a suite starts, which fail."""
    commands: list[list[str]] = []
    monkeypatch.chdir(suite.ROOT)
    monkeypatch.setattr(suite, "workers", lambda: 2)
    monkeypatch.setattr(suite, "contain", lambda command: commands.append(command) or 1)
    return commands


@pytest.mark.parametrize(
    ("given", "commands"),
    [
        ([], [[*SHARED, "-m", "not long and not gpu"]]),
        (["--rest"], [[*SHARED, "-m", "long and not gpu"]]),
        (["--all"], [[*SHARED, "-m", "not gpu"]]),
        (["--rest", "-k", "resume"], [[*SHARED, "-m", "long and not gpu", "-k", "resume"]]),
        (["--seed", "7", "--shuffle"], [[*SHARED, "-m", "not long and not gpu", "--seed", "7", "--shuffle"]]),
        (["-m", "gpu"], [[*SHARED[:3], "-m", "not gpu", "-m", "gpu"]]),  # pytest takes the last one
        (["--core", "-x"], [[*SHARED, "-m", suite.UNIT, "-x"]]),
        (["tests/data", "-x"], [[*SHARED[:3], "-m", "not gpu", "tests/data", "-x"]]),
    ],
)
def test_a_part_is_shared_out_and_what_is_chosen_is_not(
    given: list[str], commands: list[list[str]], started: list[list[str]]
) -> None:
    assert suite.main(given) == 1
    assert started == commands


def test_the_last_line_says_how_long_it_took_and_how_the_others_are_run(
    started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    for given, end in (([], "`python3 run.py test --rest`"), (["--rest"], "`python3 run.py test`"), (["--all"], "s")):
        suite.main(given)
        line = capsys.readouterr().out.splitlines()[-1]
        assert line.startswith("0 s, ")
        assert line.endswith(("; the others are run by " + end) if given != ["--all"] else " s of processors")


def test_both_parts_at_once_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        suite.main(["--rest", "--all"])
    assert "not allowed with" in capsys.readouterr().err


def test_there_are_as_many_processes_as_cores_but_two_to_four(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, workers in ((1, 2), (2, 2), (3, 3), (64, 4)):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert suite.workers() == workers
