"""Keep the chat of an episode, which env.history shortens where it outgrows the context."""

from collections.abc import Iterable, Sequence

from hocket.types import Message


class Conversation:
    """The messages of an episode, apart from their tokens: those it began with, and those since.

    A transcript has the dialogue since it was begun. Where reset or a shorter history begins a new
    one, the newest messages are rendered in its prompt, and are the first of its dialogue, too, as
    the run records them there. `since` must not count them twice:

                    began                      since           the dialogue repeats
        at first    the data's prompt          nothing         nothing
        begin()     ... and reset's messages   nothing         reset's messages
        shorten()   as before                  the kept ones   the last step's messages

    Call `begin` at most once, before the model's first turn, and `shorten` any time after a turn.

    Example:
        >>> question, search, result = {"role": "user"}, {"role": "assistant"}, {"role": "tool"}
        >>> conversation = Conversation([question])
        >>> len(conversation.since([search], [result]))
        2
        >>> conversation.shorten([result], [result])
        >>> conversation.since([result, search], []) == [result, search]
        True
    """

    def __init__(self, messages: Iterable[Message]) -> None:
        self.began = list(messages)  # the messages that the episode began with
        self._since: Sequence[Message] = ()
        self._num_repeated = 0  # number of the dialogue's first messages that are known already

    def begin(self, messages: Sequence[Message]) -> None:
        """Add the messages of reset to the prompt, from which a transcript is then begun."""
        self.began += messages
        self._num_repeated = len(messages)

    def since(self, dialogue: Sequence[Message], messages: Sequence[Message]) -> list[Message]:
        """List all messages since the beginning.

        dialogue: the dialogue of the transcript. messages: those of the last step, which follow it.
        """
        all_messages = list(self._since)
        all_messages += dialogue[self._num_repeated :]
        all_messages += messages
        return all_messages

    def shorten(self, kept: Sequence[Message], messages: Sequence[Message]) -> None:
        """Replace all messages since the beginning, from which a transcript is then begun.

        kept: the messages that replace them. messages: those of the last step, which are among
        `kept`.
        """
        self._since = kept
        self._num_repeated = len(messages)
