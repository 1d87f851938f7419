"""What is to be played, who plays it, and what it gives of each episode. Knows nothing of how they are played."""

import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from hocket.protocol import SamplingParams
from hocket.rollout.coalescer import Generator
from hocket.types import Prompt, Rollout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Episodes that begin together, `group_size` for each prompt.

    Attributes:
        sampling: of every turn; its seed and the episode's number decide the random numbers.
        label: makes ids unique within a run, e.g. "step 3" gives groups "step 3/0", "step 3/1", ...
        timeout_s: from now on, until all of them must have been generated.
        first: number of the first prompt, which counts in ids and in random numbers.
    """

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    group_size: int
    label: str
    timeout_s: float
    first: int = 0

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Every (prompt index, sample index)."""
        return [(i, j) for i in range(len(self.prompts)) for j in range(self.group_size)]

    def group_id(self, i: int) -> str:
        """Returns the id of the group of prompt i."""
        return f"{self.label}/{self.first + i}"

    def name(self, i: int, j: int) -> str:
        """Returns the id of an episode's rollout."""
        return f"{self.group_id(i)}/{j}"

    def number(self, i: int, j: int) -> int:
        """Returns the number of an episode among all of its step."""
        return (self.first + i) * self.group_size + j


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """An episode that is over: number `sample` of prompt `prompt`."""

    prompt: int
    sample: int
    rollout: Rollout


class Player(Protocol):
    """How the episodes of a run are played: Episodes, of an environment, or Agents."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The functions that prompts show to the model."""

    def play(self, wave: Wave, server: Generator) -> AsyncGenerator[Played, None]:
        """Yields every episode as it ends. One that is not over when its time is, has failed.

        Raises:
            ServerError: the model could not be asked.
        """
