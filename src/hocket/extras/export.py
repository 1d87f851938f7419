"""The command export."""

import argparse
from pathlib import Path

from hocket.commands.command import SETTINGS, command, option
from hocket.errors import program


@command(
    "export",
    option(
        "FOLDER",
        type=Path,
        help="a checkpoint or adapter; where its first model has moved, add model.path=NEW",
    ),
    option("OUTPUT", type=Path),
    SETTINGS,
)
def export_model(args: argparse.Namespace) -> None:
    from hocket.trainer.state import export

    export(args.FOLDER, args.OUTPUT, base=args.config.model.path if args.settings else None)
    print(f"wrote {args.OUTPUT}; serve it with: {program()} serve model.path={args.OUTPUT}")
