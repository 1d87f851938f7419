"""The registry of commands: each has its options, and a function that runs it."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hocket
from hocket.common.registry import Registry
from hocket.errors import ConfigError

RunCommand = Callable[[argparse.Namespace], int | None]
"""A function that runs a command with its parsed arguments; returns the exit status, None for 0."""
Option = tuple[tuple[str, ...], dict[str, Any]]
"""The names of an option, and the keywords of argparse's `add_argument`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A registered command."""

    run: RunCommand
    options: tuple[Option, ...]
    trains: bool  # its process is a rank of a trainer
    checkpoints: bool  # it writes checkpoints into the run folder, from which it can resume
    examples: tuple[str, ...]  # the words that follow the command's name
    page: str  # of the documentation


# The commands of the extras are imported when one of them is typed.
_MODULES = {name: module for name, (module, _) in hocket.EXTRA_COMMANDS.items()}
COMMANDS: Registry[Command] = Registry("command", **_MODULES)


def command(
    name: str,
    *options: Option,
    trains: bool = False,
    checkpoints: bool = False,
    examples: Sequence[str] = (),
    page: str = "",
) -> Callable[[RunCommand], RunCommand]:
    """Register a function as a command (decorator).

    The function gets the parsed arguments, and returns the exit status. With SETTINGS among the
    options, `args.config` is the Config of the settings, and `args.arguments` are their words.

    Args:
        name: what one types.
        options: made by `option`.
        trains: each process of the command is a rank of a trainer.
        checkpoints: the command writes checkpoints, from which it can resume. Implied by `trains`.
        examples: arguments that the help shows, such as "config/sort.yaml --count 5".
        page: page of the documentation that the help names.

    Example: a file of your own, run by `python3 run.py seeds.py config/sort.yaml`.

        from hocket.commands.command import SETTINGS, command, option

        @command("seeds", SETTINGS, option("--count", type=int, default=3, help="how many"))
        def seeds(args):
            '''Print seeds that follow the config's.'''
            print(*(args.config.trainer.seed + number for number in range(args.count)))
    """

    def add(run: RunCommand) -> RunCommand:
        entry = Command(run, options, trains, checkpoints or trains, tuple(examples), page)
        COMMANDS.register(name)(entry)
        return run

    return add


def option(*names: str, **keywords: Any) -> Option:
    """Describe an option with the names and keywords of argparse's `add_argument`."""
    return names, keywords


SETTINGS = option("settings", nargs="*", metavar="CONFIG | section.key=value")
DRY_RUN = option(
    "--dry-run", action="store_true", help="check data, rewards, memory, server; take no step"
)


def run_of(folder: Path) -> Path:
    """Check that a run has written a folder, and return it. Raises ConfigError if none has."""
    if not (folder / "config.yaml").exists():
        fact = f"{folder} is no run: it has no config.yaml"
        raise ConfigError(f"{fact}; give the run folder, such as runs/quickstart")
    return folder
