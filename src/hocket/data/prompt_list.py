"""The prompts of one source, as the streams draw them."""

import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, overload

from hocket.types import Prompt


class Prompts(Sequence[Prompt]):
    """A list of prompts that knows a fingerprint of itself, and which of them ask the same.

    Example: a list of one prompt.

        Prompts([Prompt(id="a.jsonl:1", text="1 + 1", token_ids=array("I", (5, 6, 5)), answer="2")])
    """

    def __init__(self, prompts: Iterable[Prompt] = ()) -> None:
        self._rows: Any = list(prompts)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of all prompts: a run is resumed only with the same ones."""
        return sha256_of_text("".join(map(digest_of, self._rows)))

    def column(self, name: str) -> list[Any]:
        """Return a further column of the data; None where a row lacks it."""
        return [prompt.meta.get(name) for prompt in self]

    def keys(self) -> list[str]:
        """Return a key of each prompt, equal where two ask the same, but for white space."""
        return [key_of(prompt) for prompt in self]

    def select(self, indices: Iterable[int]) -> "Prompts":
        return Prompts(self[index] for index in indices)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]


def digest_of(prompt: Prompt) -> str:
    """Return a hash of a prompt's place, tokens, answer and pictures."""
    images = (image.name for image in prompt.images)
    return sha256_of_text(repr([prompt.id, tuple(prompt.token_ids), prompt.answer, *images]))[:16]


def key_of(prompt: Prompt) -> str:
    """Return a hash of what is asked, without the system's words, and of the answer."""
    messages = prompt.messages or ()
    texts = [message["content"] for message in messages if message["role"] != "system"]
    words = [str(text).split() for text in texts or [prompt.text]]
    images = [image.name for image in prompt.images]
    return sha256_of_text(repr([words, prompt.answer, images]))[:16]


def sha256_of_text(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
