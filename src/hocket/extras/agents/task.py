"""What an agent is given, and what plays it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hocket.types import Message


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What an agent is given."""

    messages: Sequence[Message]  # () where the source gave plain text
    text: str  # the last user message, or the plain text
    answer: str | None  # the reference
    meta: Mapping[str, Any]  # the row's other columns
    seed: int  # the same in every run with these settings
    base_url: str  # of the policy, for any OpenAI client, as the next two
    api_key: str
    model: str
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)  # by call

    def reward(self, value: float, call: str) -> None:
        """Add to the reward of a call, by the `id` of its answer (algorithm.credit)."""
        self.rewards[call] = self.rewards.get(call, 0.0) + float(value)


class Playable(Protocol):
    """What runs as an episode of its own, beside others."""

    concurrency: int  # of its episodes

    async def run(self, task: Task) -> float | str | None:
        """Play one; return the reward, a text to score, or None: score the last turn."""
