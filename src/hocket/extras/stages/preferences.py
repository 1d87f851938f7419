"""Turn preferences, TRL's columns prompt, chosen, rejected and maybe margin, into pairs of
sequences.

Where chosen and rejected are whole conversations, the prompt is the messages with which both begin.
Behind it, the turns of the assistant are taught.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from hocket.config import DataConfig
from hocket.data.prompts import Rendered, in_parts, renderer_of
from hocket.data.renderer import Renderer
from hocket.extras.stages import demonstrations
from hocket.types import TokenSequence

SIDES = ("chosen", "rejected")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two completions behind the same token ids."""

    chosen: TokenSequence
    rejected: TokenSequence
    margin: float | None = None  # by which the chosen one is better


def load_preferences(
    data: DataConfig, tokenizer: Any, max_length: int, *, whole: bool = False
) -> list[Preference]:
    """Return the pairs that are short enough.

    `whole`: behind the last token is all that a chat template writes there, without a template not
    even EOS.
    """
    renderer = renderer_of(data, tokenizer)
    end = renderer.end_of_turn()
    (behind,) = renderer.encode([renderer.after_turn]) if whole else ([end],)

    def render(_: str, columns: Mapping[str, Any]) -> Rendered[Preference]:
        columns, pictures = renderer.split_images(columns)
        samples = _samples(renderer, data, columns, end)
        for sample in samples:
            read, said, ends = sample[-1]
            sample[-1] = (read, said, behind if ends else ends)
        margin = columns.get("margin")
        if margin is not None and not (type(margin) in (int, float) and math.isfinite(margin)):
            raise ValueError(f"column 'margin' must be a finite number, got {margin!r:.80}")

        def pair(token_ids: list[list[int]]) -> Preference:
            chosen, rejected = demonstrations.sequences(renderer, samples, token_ids, pictures)
            if chosen.token_ids == rejected.token_ids:
                raise ValueError(
                    "columns 'chosen' and 'rejected' are equal: no one prefers either; remove the row"
                )
            return Preference(chosen=chosen, rejected=rejected, margin=margin)

        return demonstrations.texts_of(samples), pair

    pairs = list(in_parts(data, [data.prompt_column, *SIDES], render, renderer.encode_prompts))
    lengths = [max(len(pair.chosen.mask), len(pair.rejected.mask)) for pair in pairs]
    return demonstrations.fitting("pairs", pairs, lengths, data, max_length)


def _samples(
    renderer: Renderer, data: DataConfig, columns: Mapping[str, Any], end: int
) -> list[list[demonstrations.Passage]]:
    if not columns.keys() >= set(SIDES):
        there = ", ".join(map(repr, columns))
        raise ValueError(f"no columns 'chosen' and 'rejected', only {there}: rename two of them")
    if any(isinstance(columns[name], str) for name in SIDES):
        asked, _ = renderer.prompt(columns, demonstrations.tools_of(columns))
        return [
            demonstrations.answered(renderer, asked, columns[name], name, end) for name in SIDES
        ]
    sides = [demonstrations.turns_of(renderer, columns[name], name) for name in SIDES]
    if isinstance(columns.get(data.prompt_column), list) or sides[0][0]["role"] == "assistant":
        prompt = renderer.prompt(columns)[1] or ()
        sides = [[*prompt, *side] for side in sides]
        first = len(prompt)
    else:
        sides = [renderer.with_system_prompt(side) for side in sides]
        alike = [one == other for one, other in zip(*sides, strict=False)]
        first = [*alike[:-1], False].index(False)  # the last turn is no prompt
    tools = demonstrations.tools_of(columns)
    samples = []
    for name, side in zip(SIDES, sides, strict=True):
        role = side[first]["role"]
        if role != "assistant":
            advice = "chosen and rejected must be alike up to an answer of the assistant"
            raise ValueError(
                f"column {name!r} has a message of {role!r} behind the prompt: {advice}"
            )
        samples += demonstrations.conversation(renderer, side, tools, end, first=first)
    if len(samples) > len(sides):
        raise ValueError(
            "the chat template rewrites earlier turns: leave the last ones alone behind the prompt"
        )
    return samples
