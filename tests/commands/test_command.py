import re
import textwrap
from pathlib import Path

import pytest

import hocket
from hocket.commands import cli, command
from hocket.commands.command import COMMANDS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A file with the command that the documentation of `command` shows."""
    shown = re.search(
        r"        from hocket\.commands.*?config\.trainer\.seed.*?\)\)\n", command.command.__doc__ or "", re.S
    )
    assert shown is not None
    file = tmp_path / "seeds.py"
    file.write_text(textwrap.dedent(shown[0]))
    return file


def test_a_file_with_a_command_of_one_s_own_is_run_by_its_path(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert cli.main([str(own), "--count", "2", "trainer.seed=7"]) == 0
        assert capsys.readouterr().out == "7 8\n"
    finally:
        COMMANDS.forget("seeds")


TWO = "@command('a')\ndef a(args): ...\n@command('b')\ndef b(args): ...\n"


@pytest.mark.parametrize(("text", "many"), [("", "registers no command"), (TWO, "registers 2 commands")])
def test_a_file_registers_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, many: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"from hocket.commands.command import command\n{text}")
    try:
        assert cli.main([str(file)]) == 1
    finally:
        for name in COMMANDS.names & {"a", "b"}:
            COMMANDS.forget(name)
    assert f"error: {file} {many}: mark one function with @command" in capsys.readouterr().err


def test_every_command_of_the_table_is_registered() -> None:
    by_run = {"install", "test"}  # which run.py has itself
    assert set(hocket.COMMANDS) - by_run == COMMANDS.names
