"""Pieces of Python's documentation, and a reward for their last word: what config/smollm2_last_word.yaml trains on."""

import re
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

from hocket.data.sources import TASKS, generator, split_of
from hocket.rewards import reward

WORD = re.compile(r"[a-z]+(?:['-][a-z]+)*")
LEAST, MOST = 12, 18  # words of a piece: most are too long to be repeated whole in one completion


@TASKS.register("last_word")
def last_word(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows like 'Repeat the last word of this text: "in both cases ... found to"' with the answer "to"."""
    rng = generator("last_word", split, seed)
    # Some paragraphs stand on several pages. Code is indented: its first character is no letter.
    paragraphs = {part.lower() for page in topics.values() for part in re.split(r"\n\s*\n", page) if part[:1].isalpha()}
    prose = [WORD.findall(paragraph) for paragraph in sorted(paragraphs) if split_of(paragraph) == split]
    prose = [words for words in prose if len(words) >= MOST]
    while True:
        words = rng.choice(prose)
        length = rng.randint(LEAST, MOST)
        first = rng.randrange(len(words) - length + 1)
        piece = words[first : first + length]
        yield {"prompt": f'Repeat the last word of this text: "{" ".join(piece)}"', "answer": piece[-1]}


@reward("last_word", inline=True)
def ends_with_it(completion: str, answer: str) -> float:
    """Give 1 if the last word of the completion is the answer, else 0."""
    words = WORD.findall(completion.lower())
    return float(bool(words) and words[-1] == answer)
