"""`hocket COMMAND` and `python -m hocket COMMAND`: like `run.py COMMAND`, in an environment that is already there."""

from hocket.commands.cli import main
from hocket.common import environment
from hocket.common.processes import exit_with


def run() -> None:
    environment.prepare()
    exit_with(main)


if __name__ == "__main__":  # the engine starts processes that import this module again
    run()
