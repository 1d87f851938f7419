"""The command plan."""

import argparse

from hocket.commands.command import SETTINGS, command, option
from hocket.extras.stages import staged


@command(
    "plan",
    SETTINGS,
    option("--gpus", type=int, metavar="N", help="number of GPUs, 0: the CPU (default: what is here)"),
    option("--gpu", metavar="SIZE", help="24GB, 48GB, 80GB or 141GB, H100 and the like (default: what is here)"),
)
def say_plan(args: argparse.Namespace) -> int:
    from hocket.extras.plan import plan

    status = 0
    for line in plan.report(args.arguments, args.gpus, args.gpu, staged(args.config)):
        print(line, flush=True)
        status |= line.startswith("does not fit")
    return status
