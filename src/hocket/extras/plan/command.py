"""The command plan."""

import argparse
from typing import Any

from hocket.commands.command import SETTINGS, command, option
from hocket.common import environment
from hocket.config import Config

NEEDS = ("torch", "accelerate")  # models are made without memory, to count their weights


@command(
    "plan",
    SETTINGS,
    option(
        "--gpus", type=int, metavar="N", help="number of GPUs, 0: the CPU (default: what is here)"
    ),
    option(
        "--gpu",
        metavar="SIZE",
        help="24GB, 48GB, 80GB or 141GB, H100 and the like (default: what is here)",
    ),
    examples=("config/quickstart.yaml", "config/one_node_8gpu_7b.yaml --gpus 8 --gpu 80GB"),
    page="how-to/out_of_memory.md",
)
def say_plan(args: argparse.Namespace) -> int:
    """Print the plan; return 1 where the run does not fit."""
    environment.require("plan", NEEDS, f'pip install "hocket[plan]" {environment.CPU_INDEX}')
    from hocket.extras.plan import plan

    status = 0
    for line in plan.report(args.arguments, args.gpus, args.gpu, objective_of(args.config)):
        print(line, flush=True)
        status |= line.startswith("does not fit")
    return status


def objective_of(config: Config) -> Any:
    """Return the objective of the stage whose section a config has; None for `train`."""
    if config.model_fields_set.isdisjoint({"sft", "rm", "dpo"}):
        return None
    from hocket.extras.stages import staged

    return staged(config)
