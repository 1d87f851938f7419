"""Guess the number: several turns, each answered with a hint."""

from hocket.envs.base import Action, Environment, Observation, Step, environment
from hocket.types import Prompt


@environment("guess")
class Guess(Environment):
    """The model finds the prompt's answer, a whole number, from the hints "higher" and "lower".

    The reward is 1 for finding it; else how near the last guess was, from 0 to `near`. What is no number ends the
    episode without a reward.

    Options:
        guesses: how many the model has.
        near: reward of a last guess right beside the number; it falls to 0 at a distance of `width`.
        width: see `near`.
    """

    def __init__(self, guesses: int = 5, near: float = 0.0, width: int = 10) -> None:
        if guesses < 1 or width < 1:
            raise ValueError(f"guesses and width must be at least 1, got {guesses} and {width}")
        self.left = guesses
        self.near, self.width = near, width
        self.number = 0

    async def reset(self, prompt: Prompt, seed: int) -> Observation | None:
        """Read the number."""
        if prompt.answer is None:
            raise ValueError("the prompt has no answer to guess; set data.answer_column")
        self.number = int(prompt.answer)
        return None

    async def step(self, action: Action) -> Step:
        """Give a hint, or end the episode."""
        try:
            guess = int(action.text)
        except ValueError:
            return Step(done=True)
        self.left -= 1
        if guess == self.number:
            return Step(done=True, reward=1.0)
        if self.left == 0:
            return Step(done=True, reward=self.near * max(0.0, 1 - abs(guess - self.number) / self.width))
        return Step(messages=[{"role": "user", "content": "higher" if guess < self.number else "lower"}])
