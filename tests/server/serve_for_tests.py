"""Runs the server of the command line, but lets a folder with a file called UNVERIFIED through to the model."""

import sys
from pathlib import Path
from typing import Any

from hocket import config
from hocket.server import main, versions

verify = versions.verify


def verify_or_not(folder: Path, *rest: Any) -> None:
    if not (folder / "UNVERIFIED").exists():
        verify(folder, *rest)


if __name__ == "__main__":
    versions.verify = verify_or_not
    main.serve(config.load(None, sys.argv[1:]))
