"""The messages of an episode whose history is shortened."""

import doctest

from hocket.rollout import history
from hocket.rollout.history import Conversation
from hocket.types import Message


def said(*texts: str) -> list[Message]:
    return [{"role": "user", "content": text} for text in texts]


def test_all_messages_since_the_beginning_are_there_once_however_often_history_was_shortened() -> None:
    conversation = Conversation(said("system", "task"))
    assert conversation.since(said("a"), said("b")) == said("a", "b")  # nothing is told at the reset

    conversation.begin(said("reset"))
    assert conversation.began == said("system", "task", "reset")
    dialogue = said("reset", "a", "b")  # of a transcript, which has the messages of reset, too
    assert conversation.since(dialogue, said("c")) == said("a", "b", "c")

    conversation.shorten(said("b", "c"), said("c"))
    dialogue = said("c", "d")  # of the transcript that was begun then
    assert conversation.since(dialogue, said("e")) == said("b", "c", "d", "e")

    conversation.shorten(said("summary", "e"), said("e"))
    assert conversation.since(said("e", "f"), said("g")) == said("summary", "e", "f", "g")
    assert conversation.began == said("system", "task", "reset")


def test_the_example_in_the_docstring_runs() -> None:
    results = doctest.testmod(history)
    assert results.failed == 0
    assert results.attempted > 0
