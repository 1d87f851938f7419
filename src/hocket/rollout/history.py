"""Keep the chat of an episode, which env.history shortens where it outgrows the context."""

from collections.abc import Iterable, Sequence

from hocket.types import Message


class Conversation:
    """The messages of an episode, apart from their tokens.

    They are those that it began with, and those since. A transcript's prompt is rendered from the messages known when
    it was begun; its dialogue goes on from there, with later ones. Both change only here, and each time that a new
    transcript begins:

        at first    began: those of the data's prompt       since: none             the dialogue repeats none
        begin()     began: these, and those of reset        since: none             the dialogue repeats those of reset
        shorten()   began: as before                        since: what is kept     the dialogue repeats the last step's

    `begin` may be called once, before the model's first turn; `shorten` any time later.
    """

    def __init__(self, messages: Iterable[Message]) -> None:
        self._began = [*messages]
        self._since: Sequence[Message] = ()
        self._num_repeated = 0  # first messages of the transcript's dialogue, which are in its prompt, too

    @property
    def began(self) -> Sequence[Message]:
        return self._began

    def begin(self, messages: Sequence[Message]) -> None:
        """Add the messages of reset to the prompt, of which a transcript is then begun."""
        self._began += messages
        self._num_repeated = len(messages)

    def since(self, dialogue: Sequence[Message], messages: Sequence[Message]) -> list[Message]:
        """List what was said since the beginning: up to a transcript's dialogue, and a step's messages behind it."""
        return [*self._since, *dialogue[self._num_repeated :], *messages]

    def shorten(self, kept: Sequence[Message], messages: Sequence[Message]) -> None:
        """Keep these of all that was said since the beginning; a transcript is begun of them.

        `messages`: of the last step, which they include.
        """
        self._since = kept
        self._num_repeated = len(messages)
