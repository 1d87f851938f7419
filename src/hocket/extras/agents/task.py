"""Describe an episode to an agent (Task), and what can play one (Playable)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hocket.types import Message


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """An episode as an agent gets it: the prompt, and the URL of the policy."""

    messages: Sequence[Message]  # the prompt's chat; () where the source gave plain text
    text: str  # the last user message, or the plain text
    answer: str | None  # the reference answer
    meta: Mapping[str, Any]  # the row's other columns
    seed: int  # the same in every run with these settings
    base_url: str  # URL of the policy, for any OpenAI client; it ends in /v1
    api_key: str  # key to this episode's session at that URL
    model: str  # name of the policy there
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)  # rewards by call id

    @property
    def anthropic_url(self) -> str:
        """URL of the policy for Anthropic's client, which adds /v1 itself."""
        return self.base_url.removesuffix("/v1")

    def reward(self, value: float, call: str) -> None:
        """Add to the reward of one call, which is named by the `id` of its answer.

        It matters with `algorithm.credit`.
        """
        self.rewards[call] = self.rewards.get(call, 0.0) + float(value)


class Playable(Protocol):
    """Code that plays whole episodes, several at a time."""

    concurrency: int  # most episodes at a time

    async def run(self, task: Task) -> float | str | None:
        """Play an episode; return the reward, a text to score, or None: score the last turn."""
