"""The default environment: the model answers once."""

from hocket.envs.base import Action, Environment, Step, environment


@environment("single_turn")
class SingleTurn(Environment):
    """The episode is over with the model's first turn; rewards are those of rewards.functions."""

    async def step(self, action: Action) -> Step:
        """Ends the episode."""
        return Step(done=True)
