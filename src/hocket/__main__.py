"""`python -m hocket COMMAND`: the same as `python run.py COMMAND` in an environment that is already there."""

import signal
import sys

from hocket.cli import main

if __name__ == "__main__":  # the engine starts processes that import this module again
    status = main(sys.argv[1:])
    # Quickstart may interrupt a command that is ending by itself; libraries' exit handlers would print tracebacks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(status)
