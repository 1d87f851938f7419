#!/usr/bin/env python3
"""Run a hocket command: `python3 run.py COMMAND ...`. The first one installs what is missing into .venv.

Only the standard library is needed to start. Old Pythons can parse this file, so that they get a reason instead of a
syntax error, and importing it does nothing: vLLM's and DeepSpeed's child processes do so.
"""

from __future__ import annotations

import functools
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = os.path.dirname(os.path.realpath(__file__))  # it may be started by a link
LOOKS = ("doctor", "plan", "config", "report", "ledger")  # commands that change nothing, nor .venv


def main(argv: list[str], notes: Sequence[str] = ()) -> int:
    """Run one command and return its exit status; notes are printed once its packages are there."""
    from hocket import COMMANDS

    # not just argv[0]: DeepSpeed's launcher puts --local_rank=N before it
    command = next((word for word in argv if not word.startswith("-")), argv[0] if argv else "--help")
    if command in ("-h", "--help", "help"):
        print(_help())
        return 0
    if command == "--version":
        import hocket

        print(f"hocket {hocket.__version__}")
        return 0
    if command not in COMMANDS and not command.endswith(".py"):  # a file has a command of the user's own
        import difflib

        close = difflib.get_close_matches(command, COMMANDS, n=1)
        nearest = f"; did you mean {close[0]!r}?" if close else ""
        print(f"run.py: there is no command {command!r}{nearest}\n\n{_help()}", file=sys.stderr)
        return 2
    if sys.version_info < (3, 11):  # noqa: UP036 - an older one gets this reason
        found = f"{sys.version.split()[0]} ({sys.executable})"
        print(f"run.py: vLLM needs Python 3.11 or newer, this is {found}; use python3.11 run.py ...", file=sys.stderr)
        return 1
    asks_for_help = "-h" in argv or "--help" in argv

    from hocket.common import environment
    from hocket.errors import SetupError

    looks = asks_for_help or command in LOOKS or "--dry-run" in argv
    try:
        environment.ensure(command, install=not asks_for_help and command != "doctor", update=not looks)
    except (SetupError, OSError) as error:
        print(f"run.py: {error}", file=sys.stderr)
        if command != "doctor":
            return 1
    try:
        environment.prepare(notes)
    except SetupError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 1
    if command == "install":
        print(f"installed: {sys.prefix} has all packages")
        return 0
    if command == "doctor" and not asks_for_help:
        import importlib

        report: int = importlib.import_module("hocket.extras.doctor").run()
        return report
    if command == "test":
        sys.path.insert(0, os.path.join(ROOT, "tests"))
        import suite

        return suite.main(argv[1:])
    try:
        from hocket.commands import cli
    except ModuleNotFoundError as error:
        if not asks_for_help or (error.name or "").startswith("hocket"):
            raise
        print(f"{_help()}\n\nThe options of `{command}` can be shown once the packages are installed: run.py doctor")
        return 0
    return cli.main(argv)


def _find_source() -> None:
    """Make src/ importable here and in child processes."""
    source = os.path.join(ROOT, "src")
    if source not in sys.path:
        sys.path.insert(0, source)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([source, *(path for path in inherited if path and path != source)])


def _help() -> str:
    import hocket

    lines = "\n".join(f"  {name:<14}{text}" for name, text in hocket.COMMANDS.items())
    return (
        "usage: python3 run.py COMMAND [config.yaml] [section.key=value ...]\n\n"
        f"hocket: {hocket.__doc__}\n\n{lines}\n\n"
        "`run.py COMMAND --help` says more. The first command installs what is missing into .venv;\n"
        "HOCKET_DEVICE=cpu or cuda chooses the build."
    )


if __name__ == "__main__":
    _find_source()
    from hocket.common import shell

    notes = shell.begin()
    from hocket.common.processes import exit_with

    try:
        exit_with(functools.partial(main, notes=notes))
    except KeyboardInterrupt:
        print("\nrun.py: interrupted", file=sys.stderr)
        sys.exit(130)
