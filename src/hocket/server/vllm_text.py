"""Have vLLM make text of tokens, and find stop strings in it, as hocket does: once this module is imported.

vLLM's own class repeats a prompt that ends within a character as the model's text, and sees no special token of a stop
string.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from vllm.v1.engine import detokenizer

from hocket.data.text import TextStream, last_characters

BEGUN = "hocket_begun"
"""In vLLM's `extra_args`: how many of the prompt's last tokens belong to the model's turn."""


class TurnText(detokenizer.FastIncrementalDetokenizer):  # type: ignore[misc]  # vLLM is not typed
    """The text of a turn, until a stop string ends it.

    With BEGUN it is the whole turn's, and a stop string may begin in what the prompt has of it.
    """

    output_text: str

    def __init__(self, tokenizer: Any, request: Any) -> None:
        super().__init__(tokenizer, request)
        prompt = request.prompt_token_ids or []
        begun = (request.sampling_params.extra_args or {}).get(BEGUN)
        if not isinstance(begun, int) or not 0 <= begun <= len(prompt):
            begun = None  # a client's own: vLLM's routes take any such arguments
        start = len(prompt) - (begun or 0)
        whole, unfinished = last_characters(self._with_special, prompt[:start])
        # The text of a turn alone lacks the space that some tokenizers put before each text.
        before = unfinished if begun is not None else whole + unfinished
        self._shown = TextStream(self._as_shown, before)
        self._unseen = self._stops_with_special_tokens() if self.skip_special_tokens else []
        self._all = TextStream(self._with_special, before)
        self._all_text = ""  # with special tokens
        self._ends = [(0, 0)]  # of each token, in that text and in the one that is shown
        for token in prompt[start:]:
            self.output_text += self.decode_next(token)
            self._add_to_all(token)

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """Add tokens, of which the last may be one that ends the turn. Return the stop string that ends it, or None."""
        if not self._unseen:
            return super().update(new_token_ids, stop_terminated)  # type: ignore[no-any-return]
        for number, token in enumerate(new_token_ids, start=1):
            is_end = stop_terminated and number == len(new_token_ids)
            stop: str | None = super().update([token], is_end)
            if stop is None and not is_end:
                self._add_to_all(token)
                stop = self._find_unseen()
            if stop is not None:
                return stop
        return None

    def _stops_with_special_tokens(self) -> list[str]:
        if not self.stop:
            return []
        special = [
            token.content
            for token in self.tokenizer.get_added_tokens_decoder().values()
            if token.special
        ]
        return [stop for stop in self.stop if any(token in stop for token in special)]

    def _add_to_all(self, token: int) -> None:
        self._all_text += self._all.add(token)
        self._ends.append((len(self._all_text), len(self.output_text)))

    def _find_unseen(self) -> str | None:
        """Return the stop string with a special token that the last token completes; end the text before it."""
        if self.num_output_tokens() <= self.min_tokens:
            return None
        new = self._ends[-1][0] - self._ends[-2][0]
        match = detokenizer.check_stop_strings(self._all_text, new, self._unseen, False)
        if match is None:
            return None
        stop, at = match
        if not self.include_stop_str_in_output:
            token = bisect_right(
                self._ends, at, key=lambda ends: ends[0]
            )  # in which the string begins
            all_end, shown_end = self._ends[token - 1]
            # A special token shows nothing.
            self.output_text = self.output_text[
                : min(shown_end + at - all_end, self._ends[token][1])
            ]
        return str(stop)

    def _protected_step(self, next_token_id: int) -> str:
        return self._shown.add(next_token_id)

    def _as_shown(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=self.skip_special_tokens))

    def _with_special(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))


detokenizer.FastIncrementalDetokenizer = TurnText
