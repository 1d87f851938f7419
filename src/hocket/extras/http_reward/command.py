"""The command serve-reward."""

import argparse

from hocket.commands.command import SETTINGS, command


@command(
    "serve-reward",
    SETTINGS,
    examples=("config/quickstart.yaml", "config/quickstart.yaml server.port=8100"),
    page="how-to/reward_service.md",
)
def serve_reward(args: argparse.Namespace) -> None:
    """Serve the rewards of a config until it is stopped."""
    from hocket.extras.http_reward.serve import serve

    serve(args.config)
