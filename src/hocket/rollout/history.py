"""Keep the chat of an episode, which env.history shortens where it outgrows the context."""

from collections.abc import Iterable, Sequence

from hocket.types import Message


class Conversation:
    """The messages of an episode, apart from their tokens.

    They are those that it began with, and those since. A transcript's prompt is rendered from the
    messages known when it was begun, its dialogue goes on from there; the first messages of the
    dialogue may repeat the last ones of the prompt. What is known changes with each new transcript:

                    began                      since           the dialogue repeats
        at first    the data's prompt          nothing         nothing
        begin()     ... and reset's messages   nothing         reset's messages
        shorten()   as before                  what is kept    the last step's messages

    `begin` may be called once, before the model's first turn; `shorten` any time after a turn.
    """

    def __init__(self, messages: Iterable[Message]) -> None:
        self._began = [*messages]
        self._since: Sequence[Message] = ()
        self._num_repeated = 0  # of the dialogue's first messages

    @property
    def began(self) -> Sequence[Message]:
        return self._began

    def begin(self, messages: Sequence[Message]) -> None:
        """Add the messages of reset to the prompt, of which a transcript is then begun."""
        self._began += messages
        self._num_repeated = len(messages)

    def since(self, dialogue: Sequence[Message], messages: Sequence[Message]) -> list[Message]:
        """List what was said since the beginning: to the end of a dialogue, and a step's messages."""
        return [*self._since, *dialogue[self._num_repeated :], *messages]

    def shorten(self, kept: Sequence[Message], messages: Sequence[Message]) -> None:
        """Keep these of all that was said since the beginning; a transcript is begun of them.

        `messages`: of the last step, which they include.
        """
        self._since = kept
        self._num_repeated = len(messages)
