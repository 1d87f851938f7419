"""The registry of commands: each has its options, and a function that runs it."""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hocket
from hocket.common.registry import Registry
from hocket.errors import ConfigError

RunCommand = Callable[[argparse.Namespace], int | None]
Option = tuple[tuple[str, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    run: RunCommand
    options: tuple[Option, ...]
    trains: bool  # its process is a rank of a trainer
    checkpoints: bool  # it makes checkpoints in the run folder, from which it can go on


_MODULES = {name: module for name, (module, _) in hocket.EXTRA_COMMANDS.items()}
COMMANDS: Registry[Command] = Registry("command", **_MODULES)


def command(
    name: str, *options: Option, trains: bool = False, checkpoints: bool = False
) -> Callable[[RunCommand], RunCommand]:
    """Register a function as a command (decorator): it gets the parsed arguments, and returns the exit status.

    With SETTINGS among the options, `args.config` is the Config of the settings, and `args.arguments` are these.

    Example: a file of your own, run by `python3 run.py seeds.py config/sort.yaml`.

        from hocket.commands.command import SETTINGS, command, option

        @command("seeds", SETTINGS, option("--count", type=int, default=3, help="how many"))
        def seeds(args):
            '''Print seeds that follow the config's.'''
            print(*(args.config.trainer.seed + number for number in range(args.count)))
    """

    def add(run: RunCommand) -> RunCommand:
        COMMANDS.register(name)(Command(run, options, trains, checkpoints or trains))
        return run

    return add


def option(*names: str, **how: Any) -> Option:
    """Describe an option, as argparse's `add_argument` takes it."""
    return names, how


SETTINGS = option("settings", nargs="*", metavar="CONFIG | section.key=value")
DRY_RUN = option(
    "--dry-run", action="store_true", help="check data, rewards, memory, server; take no step"
)


def run_of(folder: Path) -> Path:
    """Return a folder that a run has written. Raise ConfigError for another."""
    if not (folder / "config.yaml").exists():
        raise ConfigError(
            f"{folder} is no run: it has no config.yaml; give the run folder, such as runs/quickstart"
        )
    return folder
