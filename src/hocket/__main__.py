"""`python -m hocket COMMAND`: the same as `python run.py COMMAND` in an environment that is already there."""

import sys

from hocket.cli import main

if __name__ == "__main__":  # the engine starts processes that import this module again
    sys.exit(main(sys.argv[1:]))
