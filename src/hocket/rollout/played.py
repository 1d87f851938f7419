"""What plays the episodes of a step, and what it gives of each. Knows nothing of how they are played."""

import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from hocket.rollout.coalescer import Generator
from hocket.types import Prompt, Rollout, SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """An episode that is over: number `sample` of prompt `prompt`. `error` says what it failed of."""

    prompt: int
    sample: int
    rollout: Rollout
    error: str | None


class Player(Protocol):
    """How the episodes of a run are played: Episodes, of an environment, or Agents."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The functions that prompts show to the model."""

    def play(
        self,
        prompts: Sequence[Prompt],
        *,
        server: Generator,
        sampling: SamplingParams,
        group_size: int,
        label: str,
        timeout_s: float,
        first: int,
    ) -> AsyncGenerator[Played, None]:
        """Yields every episode as it ends; the arguments are those of `collect.play`.

        One that is not over when its time is, has failed.

        Raises:
            ServerError: the model could not be asked.
        """
