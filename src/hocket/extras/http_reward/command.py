"""The command serve-reward."""

import argparse

from hocket.commands.command import SETTINGS, command


@command("serve-reward", SETTINGS)
def serve_reward(args: argparse.Namespace) -> None:
    """Serve the rewards of a config until it is stopped."""
    from hocket.extras.http_reward.serve import serve

    serve(args.config)
