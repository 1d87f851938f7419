"""The order in which prompts are trained on: seeded, in epochs, with a position that can be restored."""

import dataclasses
import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

from hocket.errors import DataError
from hocket.types import Prompt


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One use of a prompt; `number` counts all draws of a run."""

    number: int
    epoch: int
    prompt: Prompt


class PromptStream:
    """Endless prompts: each one exactly once per epoch, every epoch in an order that (seed, epoch) alone decide.

    Args:
        prompts: at least one.
        seed: of the order.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            raise DataError("there is no prompt to train on; check data.source, data.limit and data.max_prompt_tokens")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._fingerprint = _fingerprint(self._prompts)
        self._start(epoch=0, position=0)

    def take(self, num_prompts: int) -> list[Draw]:
        """Returns the next prompts; a new epoch begins where one ends, also in the middle."""
        taken = []
        for _ in range(num_prompts):
            if self._position == len(self._order):
                self._start(epoch=self._epoch + 1, position=0)
            prompt = self._prompts[self._order[self._position]]
            number = self._epoch * len(self._prompts) + self._position
            taken.append(Draw(number=number, epoch=self._epoch, prompt=prompt))
            self._position += 1
        return taken

    def state(self) -> dict[str, Any]:
        """Returns the position, ready for JSON; `restore` of a stream over the same prompts goes on from there."""
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "num_prompts": len(self._prompts),
            "fingerprint": self._fingerprint,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to the position of `state`. Raises DataError where the prompts or the seed are not the same."""
        own = self.state()
        for key in ("seed", "num_prompts", "fingerprint"):
            if state[key] != own[key]:
                raise DataError(
                    f"can't resume: {key} of the prompts was {state[key]} and is {own[key]} now; use the same data "
                    f"section and trainer.seed, or start a new run"
                )
        self._start(epoch=state["epoch"], position=state["position"])

    def _start(self, *, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = list(range(len(self._prompts)))
        random.Random(f"{self._seed}:{epoch}").shuffle(self._order)


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.id}\n{prompt.token_ids}\n{prompt.answer}\n".encode())
    return digest.hexdigest()[:16]
