"""Run `hocket COMMAND` and `python -m hocket COMMAND`.

They are like `run.py COMMAND`, in an environment that is already there.
"""

import os
import sys

from hocket.common import shell
from hocket.errors import SetupError


def run() -> None:
    """Prepare the environment, run the command that was typed, and exit with its status."""
    notes = shell.begin()
    from hocket.common import environment
    from hocket.common.processes import PARENT_VARIABLE, exit_with

    if PARENT_VARIABLE in os.environ:  # a launcher started this, and has printed the notes
        notes = []
    try:
        environment.prepare(notes)
    except SetupError as error:
        sys.exit(f"error: {error}")
    from hocket.commands.cli import main

    exit_with(main)


if __name__ == "__main__":  # the engine starts processes that import this module again
    run()
