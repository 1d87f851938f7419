"""The commands sft, rm and dpo."""

import argparse

from hocket.commands.command import DRY_RUN, SETTINGS, command


@command("sft", SETTINGS, DRY_RUN, trains=True)
@command("rm", SETTINGS, DRY_RUN, trains=True)
@command("dpo", SETTINGS, DRY_RUN, trains=True)
def stage(args: argparse.Namespace) -> None:
    """Train a stage, or with --dry-run say what it would train."""
    from hocket.extras.stages import driver

    driver.run(args.config, args.command, dry_run=args.dry_run)
