"""The commands sft, rm and dpo."""

import argparse

from hocket.commands.command import DRY_RUN, SETTINGS, command

PAGE = "how-to/sft_dpo.md"


@command(
    "sft",
    SETTINGS,
    DRY_RUN,
    trains=True,
    examples=("--dry-run config/tiny_sft.yaml", "config/tiny_sft.yaml run.dir=runs/mine"),
    page=PAGE,
)
@command(
    "rm",
    SETTINGS,
    DRY_RUN,
    trains=True,
    examples=("--dry-run config/stages/rm.yaml", "config/stages/rm.yaml run.dir=runs/mine"),
    page=PAGE,
)
@command(
    "dpo",
    SETTINGS,
    DRY_RUN,
    trains=True,
    examples=("--dry-run config/stages/dpo.yaml", "config/stages/dpo.yaml dpo.beta=0.3"),
    page=PAGE,
)
def stage(args: argparse.Namespace) -> None:
    """Train a stage, or with --dry-run say what it would train."""
    from hocket.extras.stages import driver

    driver.run(args.config, args.command, dry_run=args.dry_run)
