"""`hocket COMMAND` and `python -m hocket COMMAND`: like `run.py COMMAND`, in an environment that is already there."""

import signal
import sys

from hocket import environment
from hocket.cli import main


def run() -> None:
    """Run the command of the command line and exit with its status."""
    environment.prepare()
    status = main(sys.argv[1:])
    # Quickstart may interrupt a command that is ending by itself; libraries' exit handlers would print tracebacks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(status)


if __name__ == "__main__":  # the engine starts processes that import this module again
    run()
