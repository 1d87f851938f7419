"""Replace vLLM's incremental detokenizer: importing this module has every route use hocket's text.

vLLM's own class has two faults. It repeats a prompt that ends within a character as the model's
text, and it misses stop strings that contain a special token.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from vllm.v1.engine import detokenizer

from hocket.data.text import TextStream, last_characters

BEGUN = "hocket_begun"
"""Key in vLLM's `extra_args`: how many of the prompt's last tokens are of the model's turn."""


class TurnText(detokenizer.FastIncrementalDetokenizer):  # type: ignore[misc]  # vLLM is not typed
    """The text of a turn, until a stop string ends it.

    With BEGUN it is the text of the whole turn. A stop string may then begin in the part of the
    turn that is in the prompt.
    """

    output_text: str  # the text as vLLM shows it, without special tokens by default

    def __init__(self, tokenizer: Any, request: Any) -> None:
        super().__init__(tokenizer, request)
        prompt = request.prompt_token_ids or []
        # None for vLLM's routes. They pass on any such argument of a client, so ignore nonsense.
        begun = (request.sampling_params.extra_args or {}).get(BEGUN)
        if not isinstance(begun, int) or not 0 <= begun <= len(prompt):
            begun = None

        # The tokens that the turn's first ones are decoded with. Some tokenizers leave out a space
        # at the beginning of a text. A turn is a text; what vLLM's routes send is part of one.
        start = len(prompt) - (begun or 0)
        whole, unfinished = last_characters(self._decode_with_special, prompt[:start])
        before = whole + unfinished if begun is None else unfinished
        self._shown_stream = TextStream(self._decode_as_shown, before)
        # vLLM does not see stop strings with special tokens where it leaves these out of the text.
        # For these, keep the text with special tokens beside the text that is shown.
        self._special_stops = self._stops_with_special_tokens() if self.skip_special_tokens else []
        self._stream_with_special = TextStream(self._decode_with_special, before)
        self._text_with_special = ""
        # Where each token ends: in _text_with_special, and in output_text. The first entry is where
        # the first token begins.
        self._token_ends = [(0, 0)]
        for token in prompt[start:]:
            self.output_text += self.decode_next(token)
            self._add_with_special(token)

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """Add tokens to the text. Returns the stop string that ends the turn, or None.

        With `stop_terminated` the last token ends the turn, and is no part of its text.
        """
        if not self._special_stops:
            return super().update(new_token_ids, stop_terminated)  # type: ignore[no-any-return]
        for number, token in enumerate(new_token_ids, start=1):
            is_end = stop_terminated and number == len(new_token_ids)
            stop: str | None = super().update([token], is_end)
            if stop is None and not is_end:
                self._add_with_special(token)
                stop = self._find_special_stop()
            if stop is not None:
                return stop
        return None

    def _stops_with_special_tokens(self) -> list[str]:
        if not self.stop:
            return []
        added = self.tokenizer.get_added_tokens_decoder().values()
        special = [token.content for token in added if token.special]

        def has_special(stop: str) -> bool:
            return any(token in stop for token in special)

        return list(filter(has_special, self.stop))

    def _add_with_special(self, token: int) -> None:
        self._text_with_special += self._stream_with_special.add(token)
        self._token_ends.append((len(self._text_with_special), len(self.output_text)))

    def _find_special_stop(self) -> str | None:
        """Look for a stop string with a special token that the last token completes.

        Returns it, or None. The text then ends before the stop string, unless the request wants it.
        """
        if self.num_output_tokens() <= self.min_tokens:
            return None
        text = self._text_with_special
        num_new = len(text) - self._token_ends[-2][0]  # characters of the last token
        match = detokenizer.check_stop_strings(text, num_new, self._special_stops, False)
        if match is None:
            return None
        stop, at = match
        if not self.include_stop_str_in_output:
            # Find the token within which the stop string begins. The text that is shown has the
            # same characters of it, or none if it is a special token.
            number = bisect_right(self._token_ends, at, key=lambda ends: ends[0])
            begin, shown_begin = self._token_ends[number - 1]
            _, shown_end = self._token_ends[number]
            self.output_text = self.output_text[: min(shown_begin + at - begin, shown_end)]
        return str(stop)

    def _protected_step(self, next_token_id: int) -> str:
        return self._shown_stream.add(next_token_id)

    def _decode_as_shown(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=self.skip_special_tokens))

    def _decode_with_special(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))


detokenizer.FastIncrementalDetokenizer = TurnText
