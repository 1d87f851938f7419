"""Make text of token ids, also where they begin or end within a character."""

import functools
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]  # token ids → their text
BROKEN = "\ufffd"  # what decoders write for bytes that are no character, or not a whole one yet
LONGEST = 4  # bytes of the longest character, and so tokens that it may take


def turn_text(
    decode: Callable[..., str], prompt: Sequence[int], begun: int, token_ids: Sequence[int]
) -> str:
    """Return the text of a model's turn, without special tokens.

    decode: the method of a tokenizer. begun: how many tokens at the end of the prompt belong to
    the turn already, as the model continues it; `token_ids` follow them. A character that begins
    before the turn and ends in it belongs to the turn.
    """
    start = len(prompt) - begun
    _, unfinished = last_characters(decode, prompt[:start])
    turn = list(prompt[start:]) + list(token_ids)
    return text_after(without_special(decode), unfinished, turn)


def without_special(decode: Callable[..., str]) -> Decode:
    """Wrap a tokenizer's decode, so that it leaves special tokens out and spaces as they are."""
    return functools.partial(decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def text_after(decode: Decode, before: Sequence[int], token_ids: Sequence[int]) -> str:
    """Return the text that `token_ids` add to the text of the tokens before them.

    A character that begins before them and ends among them is theirs.
    """
    text_before = decode(before)
    text = decode(list(before) + list(token_ids))
    if text.startswith(text_before):
        return text[len(text_before) :]

    # The last character before was not whole. A decoder writes it as one BROKEN or as several,
    # so compare only what comes after the whole characters.
    _, unfinished = last_characters(decode, before)
    whole = decode(before[: len(before) - len(unfinished)])
    text = text.removeprefix(whole)
    text_before = text_before.removeprefix(whole)
    shared = 0  # characters at the beginning that both texts have
    while shared < min(len(text), len(text_before)) and text[shared] == text_before[shared]:
        shared += 1
    return text[shared:]


def last_characters(decode: Decode, token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Split the last tokens into those of whole characters, and those of an unfinished one.

    Returns both lists; the second is empty if the text ends with a whole character.
    """
    # Decode a short window at the end alone: the whole text would take too long. If tokens are
    # bytes, a window decodes well only from the first byte of a character on. One of four
    # consecutive tokens is such a byte, so one of four window sizes begins there.
    for size in range(2 * LONGEST, LONGEST, -1):
        window = list(token_ids[-size:])
        for num_unfinished in range(min(LONGEST, len(window) + 1)):
            whole = window[: len(window) - num_unfinished]
            if not decode(whole).endswith(BROKEN):
                return whole, window[len(whole) :]
    return [], []


class TextStream:
    """Turns tokens into text as they come, in whole characters.

    Example: tokens that are the bytes of "né".

    >>> stream = TextStream(lambda token_ids: bytes(token_ids).decode(errors="replace"))
    >>> [stream.add(token) for token in "né".encode()]
    ['n', '', 'é']
    """

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._context = list(before)  # tokens whose text has been returned
        # The tokens after the context. The last character of their text may still change.
        self._waiting: list[int] = []
        self._num_returned = 0  # characters of their text that have been returned

    def add(self, token: int) -> str:
        """Return the text that became certain with this token."""
        self._waiting.append(token)
        text = text_after(self._decode, self._context, self._waiting)
        new = text.rstrip(BROKEN)[self._num_returned :]
        self._num_returned += len(new)
        if text and not text.endswith(BROKEN):
            # All is whole: the waiting tokens are context enough for the next ones.
            self._context = self._waiting
            self._waiting = []
            self._num_returned = 0
        return new
