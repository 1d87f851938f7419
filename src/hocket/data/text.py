"""Make text of token ids, also where they begin or end within a character."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
BROKEN = "\ufffd"
"""What decoders write for bytes that are no character, or not a whole one yet."""
LONGEST = 4  # bytes of a character, and so tokens


def turn_text(
    decode: Callable[..., str], prompt: Sequence[int], begun: int, token_ids: Sequence[int]
) -> str:
    """Return the text of a model's turn, without special tokens.

    `decode` is a tokenizer's. The turn has the last `begun` tokens of the prompt, and `token_ids`. A character that
    begins before the turn and ends in it belongs to it.
    """
    start = len(prompt) - begun
    _, unfinished = last_characters(decode, prompt[:start])
    return text_after(without_special(decode), unfinished, [*prompt[start:], *token_ids])


def without_special(decode: Callable[..., str]) -> Decode:
    """Return a tokenizer's decode that leaves special tokens out and spaces as they are."""
    return lambda token_ids: decode(
        token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def text_after(decode: Decode, before: Sequence[int], token_ids: Sequence[int]) -> str:
    """Return the text that tokens add to that of the tokens before them.

    A character that begins before them and ends among them is theirs.
    """
    known = decode(before)
    text = decode([*before, *token_ids])
    if text.startswith(known):
        return text[len(known) :]
    # The last character before was not whole, and was written as one BROKEN or as several.
    _, unfinished = last_characters(decode, before)
    whole = decode(before[: len(before) - len(unfinished)])
    text = text.removeprefix(whole)
    known = known.removeprefix(whole)
    same = 0  # characters of the unfinished one's first token that stand before it
    while same < min(len(text), len(known)) and text[same] == known[same]:
        same += 1
    return text[same:]


def last_characters(decode: Decode, token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the last tokens with whole characters, and the tokens after these, of a character that is not whole."""
    # Where tokens are bytes, text is readable only from the beginning of a character: one of four places is such.
    for size in range(2 * LONGEST, LONGEST, -1):
        last = list(token_ids[-size:])
        for count in range(min(LONGEST, len(last) + 1)):
            whole = last[: len(last) - count]
            if not decode(whole).endswith(BROKEN):
                return whole, last[len(whole) :]
    return [], []


class TextStream:
    """The text of tokens as they come, in whole characters."""

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._context = list(before)  # tokens whose text is known
        self._waiting: list[
            int
        ] = []  # tokens after these; the last character of their text may still change
        self._given = 0  # characters of that text

    def add(self, token: int) -> str:
        """Return the text that is known with this token and was not before."""
        self._waiting.append(token)
        text = text_after(self._decode, self._context, self._waiting)
        new = text.rstrip(BROKEN)[self._given :]
        self._given += len(new)
        if text and not text.endswith(BROKEN):
            self._context = self._waiting
            self._waiting = []
            self._given = 0
        return new
