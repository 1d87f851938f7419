"""Write down one flat sequence of tokens, as the model reads and samples it."""

import dataclasses
import hashlib
from array import array
from collections.abc import Iterable, Sequence

from hocket.envs import Observation
from hocket.envs.base import left_open
from hocket.protocol import Completion
from hocket.types import FinishReason, Image, Message, TokenSequence, TurnReward


def state_of(token_ids: Sequence[int], images: Iterable[Image] = ()) -> str:
    """Return a digest of what is read: tokens of different images are alike."""
    read = [array("I", token_ids).tobytes(), *(image.name.encode() for image in images)]
    return hashlib.blake2b(b"".join(read), digest_size=8).hexdigest()


class Transcript:
    """The sequence so far, prompt first; tokens are only ever appended."""

    def __init__(
        self,
        token_ids: Sequence[int],
        opening: str = "",
        images: Sequence[Image] = (),
        number: int = 0,
    ) -> None:
        self.number = number  # of the next turn in the episode
        self.opening = self._template_opening = opening
        self.token_ids, self.mask, self.logprobs = (
            array("I"),
            list[bool](),
            array("f"),
        )  # as wide as they come
        self.images: list[Image] = []
        self.dialogue: list[Message] = []
        self.versions: set[int] = set()
        self.turns = 0
        self.turn_rewards: list[TurnReward] = []
        self._state = ""  # that the next turn begins in
        self.text = ""  # of the last turn,
        self.begun = 0  # and how many of the last tokens are those of it that the next completion goes on from
        self._before = ""  # what the turn's text has before these,
        self._after = ""  # and what the model wrote after that text: a stop string
        self.finish_reason: FinishReason = "stop"
        self.add_observation(token_ids, None, images)

    def add_observation(
        self,
        token_ids: Sequence[int],
        observation: Observation | None,
        images: Sequence[Image] = (),
    ) -> None:
        """Append tokens that were not sampled, and the images whose tokens are among them; None: the prompt."""
        start = len(self.token_ids)
        self.images += (dataclasses.replace(image, start=start + image.start) for image in images)
        self.token_ids.extend(token_ids)
        self.mask += [False] * len(token_ids)
        self.logprobs.extend(array("f", bytes(4 * len(token_ids))))
        self._goes_on = observation is not None and observation.goes_on
        if not self._goes_on or token_ids:
            self.begun = 0
        if observation is None:
            self._state = state_of(token_ids, images)
            return
        if self._goes_on and token_ids:
            self.text += self._after + observation.text
            self._before = self.text
        elif not self._goes_on:
            self._before = ""
            self._state = observation.state or (
                state_of(token_ids, images) if token_ids else self._state
            )
            if self.turns:
                said = self.opening + self.text + self._after + observation.text
                self.opening = self._template_opening if observation.messages else left_open(said)
            self.dialogue += observation.messages
            self.dialogue += (
                [{"role": "environment", "content": observation.text}] if observation.text else []
            )

    def add_completion(self, completion: Completion) -> None:
        """Append a turn of the policy, or the rest of one that goes on: then its text is that of all `begun` tokens."""
        self.token_ids.extend(completion.token_ids)
        self.mask += [True] * len(completion.token_ids)
        self.logprobs.extend(completion.logprobs)
        self.versions |= {version for version, _, _ in completion.versions}
        self.finish_reason = completion.finish_reason
        self.begun += len(completion.token_ids)
        self.text = self._before + completion.text
        self._after = completion.after_text
        if self._goes_on and self.turns:
            self.dialogue.pop()
            self.add_reward(0.0, tokens=len(completion.token_ids))
        else:
            self.turn_rewards.append(
                TurnReward(self.number, len(completion.token_ids), state=self._state)
            )
            self.turns += 1
            self.number += 1
        self.dialogue.append({"role": "assistant", "content": self.text})

    def add_reward(self, reward: float, *, tokens: int = 0) -> None:
        """Give the last turn a reward, and more tokens; without a turn nothing has it."""
        for last in self.turn_rewards[-1:]:
            self.turn_rewards[-1] = last._replace(
                tokens=last.tokens + tokens, reward=last.reward + reward
            )

    def cut_off(self) -> None:
        """Note that a limit ended the last turn."""
        self.finish_reason = "length"

    def sequence(self) -> TokenSequence:
        return TokenSequence(
            token_ids=self.token_ids[:],
            mask=tuple(self.mask),
            logprobs=self.logprobs[:],
            finish_reason=self.finish_reason,
            version_min=min(self.versions, default=0),
            version_max=max(self.versions, default=0),
            turns=self.turns,
            text=self.text,
            opening=self.opening,
            dialogue=tuple(self.dialogue) if len(self.dialogue) > 1 else (),
            turn_rewards=tuple(self.turn_rewards),
            images=tuple(self.images),
        )
