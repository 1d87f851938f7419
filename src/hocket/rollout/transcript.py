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
    """Digest tokens and images. The images count, as the tokens of different images are equal."""
    parts = [array("I", token_ids).tobytes()]
    parts += [image.name.encode() for image in images]
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


class Transcript:
    """The sequence so far, prompt first; tokens are only ever appended.

    A turn may be completed in several pieces: the environment adds tokens and has the model go on
    (`Observation.goes_on`). Then `text` is that of the whole turn.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        opening: str = "",
        images: Sequence[Image] = (),
        number: int = 0,
    ) -> None:
        self.number = number  # number of the next turn in the episode
        self.opening = self._template_opening = opening  # opening of the thought before `text`
        # One entry per token in each, in types of four bytes or one.
        self.token_ids = array("I")
        self.mask = list[bool]()
        self.logprobs = array("f")
        self.images: list[Image] = []
        self.dialogue: list[Message] = []
        self.versions: set[int] = set()
        self.turn_rewards: list[TurnReward] = []  # one of each turn
        # The last turn. If the environment adds text to it, the model's part of the turn is over,
        # and its next completion begins another part.
        self.text = ""  # text of all parts
        self.begun = 0  # tokens of the last part, which the next completion continues
        self._before = ""  # text of the parts before the last one
        self._after = ""  # what the model wrote behind the text: a stop string
        self._goes_on = False  # the next completion belongs to this turn
        self.finish_reason: FinishReason = "stop"
        self._append_unsampled(token_ids, images)
        # A name of what the model reads before the next turn.
        self._state = state_of(token_ids, images)

    def _append_unsampled(self, token_ids: Sequence[int], images: Sequence[Image]) -> None:
        start = len(self.token_ids)
        for image in images:
            self.images.append(dataclasses.replace(image, start=start + image.start))
        self.token_ids.extend(token_ids)
        self.mask += [False] * len(token_ids)
        self.logprobs.extend(array("f", bytes(4 * len(token_ids))))  # zeros

    def add_observation(
        self, token_ids: Sequence[int], observation: Observation, images: Sequence[Image] = ()
    ) -> None:
        """Append an observation, rendered as `token_ids`: they were not sampled.

        images: those whose tokens are among `token_ids`, with `start` counted in these.
        """
        self._append_unsampled(token_ids, images)
        self._goes_on = observation.goes_on
        if not self._goes_on:
            self._begin_turn(token_ids, observation, images)
        elif token_ids:  # the environment's text is a part of the turn, and ends the one before
            self.begun = 0
            self.text += self._after + observation.text
            self._before = self.text

    def _begin_turn(
        self, token_ids: Sequence[int], observation: Observation, images: Sequence[Image]
    ) -> None:
        self.begun = 0
        self._before = ""
        if observation.state:
            self._state = observation.state
        elif token_ids:
            self._state = state_of(token_ids, images)
        # The first turn begins with the prompt's opening, which `opening` has from the start.
        if self.turn_rewards:
            # Rendered messages end with the template's opening, as the prompt does. In plain text a
            # thought of the turn before may still be open.
            if observation.messages:
                self.opening = self._template_opening
            else:
                text = self.opening + self.text + self._after + observation.text
                self.opening = left_open(text)
        self.dialogue += observation.messages
        if observation.text:
            self.dialogue.append({"role": "environment", "content": observation.text})

    def add_completion(self, completion: Completion) -> None:
        """Append a turn of the policy, or more of the turn that goes on.

        A completion that continues `begun` tokens has the text of these, too.
        """
        num_tokens = len(completion.token_ids)
        self.token_ids.extend(completion.token_ids)
        self.mask += [True] * num_tokens
        self.logprobs.extend(completion.logprobs)
        self.versions |= {version for version, _, _ in completion.versions}
        self.finish_reason = completion.finish_reason
        self.begun += num_tokens
        self.text = self._before + completion.text
        self._after = completion.after_text

        # What reset adds may go on, too: then there is no turn yet.
        if self._goes_on and self.turn_rewards:
            self.dialogue.pop()  # the turn's text up to now
            self.add_reward(0.0, tokens=num_tokens)
        else:
            self.turn_rewards.append(TurnReward(self.number, num_tokens, state=self._state))
            self.number += 1
        self.dialogue.append({"role": "assistant", "content": self.text})

    def add_reward(self, reward: float, *, tokens: int = 0) -> None:
        """Give the last turn a reward, and more tokens. Without a turn there is nothing to do."""
        if self.turn_rewards:
            last = self.turn_rewards[-1]
            self.turn_rewards[-1] = last._replace(
                tokens=last.tokens + tokens, reward=last.reward + reward
            )

    def cut_off(self) -> None:
        """Note that a limit ended the last turn."""
        self.finish_reason = "length"

    def sequence(self) -> TokenSequence:
        """Copy the sequence as it is now."""
        return TokenSequence(
            token_ids=self.token_ids[:],
            mask=tuple(self.mask),
            logprobs=self.logprobs[:],
            finish_reason=self.finish_reason,
            version_min=min(self.versions, default=0),
            version_max=max(self.versions, default=0),
            turns=len(self.turn_rewards),
            text=self.text,
            opening=self.opening,
            dialogue=tuple(self.dialogue) if len(self.dialogue) > 1 else (),
            turn_rewards=tuple(self.turn_rewards),
            images=tuple(self.images),
        )
