"""The commands watch and report."""

import argparse
import os
import select
import socket
from pathlib import Path

from hocket import config as config_module
from hocket import launch
from hocket.commands.command import command, option, run_of


@command(
    "watch",
    option("RUN", type=Path, nargs="+", help="folder of a run; several are compared"),
    option(
        "--host",
        default="127.0.0.1",
        help="address of the page; any but loopback needs $HOCKET_TOKEN",
    ),
    option("--port", type=int, default=8090, help="default 8090, or another that is free"),
    # A socket on which a launcher listens already; it has printed the page's address.
    option("--socket", type=int, help=argparse.SUPPRESS),
    examples=("runs/quickstart", "runs/quickstart runs/quickstart-2 --port 8091"),
    page="how-to/observe.md",
)
def serve_page(args: argparse.Namespace) -> None:
    """Serve the page of runs."""
    os.nice(10)  # a run comes first
    sock = None
    if args.socket:
        sock = socket.socket(fileno=args.socket)
        # Until a browser connects, a run keeps the second and the memory of the import.
        select.select([sock], [], [])
    from hocket.extras.page.watch import watch

    # A folder with logs is a launch's, whose run may begin later.
    runs = [run if (run / "logs").exists() else run_of(run) for run in args.RUN]
    token = config_module.Config().token
    watch(runs, sock or launch.listening(args.host, args.port, token), token)


@command(
    "report",
    option("RUN", type=Path, nargs="+", help="folder of a run; several are compared"),
    option(
        "--output",
        type=Path,
        metavar="FILE",
        help="default: RUN/report.html, of several runs comparison.html",
    ),
    option(
        "--png", type=Path, metavar="FOLDER", help="also write each curve there as PNG, by Chromium"
    ),
    examples=("runs/quickstart", "runs/quickstart runs/quickstart-2 --output both.html"),
    page="how-to/observe.md",
)
def report(args: argparse.Namespace) -> None:
    """Write a report of runs to a file."""
    from hocket.extras.page import page

    runs = [run_of(run) for run in args.RUN]
    default = runs[0] / "report.html" if len(runs) == 1 else Path("comparison.html")
    output = args.output or default
    page.write_report(runs, output)
    print(f"wrote {output}")
    if args.png:
        page.write_pictures(output, args.png)
        print(f"wrote the curves to {args.png}")
