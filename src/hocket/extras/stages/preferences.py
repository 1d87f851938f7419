"""Encode preferences as pairs of sequences.

The columns are TRL's: prompt, chosen, rejected, and margin if there is one. Where chosen and
rejected are whole conversations, the prompt is the messages that both share at first. Behind it,
the turns of the assistant are taught.
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
    """Load the pairs of data.source whose sequences have at most `max_length` tokens.

    `whole`: a sequence ends with all that the chat template writes after a turn; without a
    template it has not even EOS.
    """
    renderer = renderer_of(data, tokenizer)
    end = renderer.end_of_turn()
    last_end = renderer.encode([renderer.after_turn])[0] if whole else [end]

    def render(_: str, columns: Mapping[str, Any]) -> Rendered[Preference]:
        columns, pictures = renderer.split_images(columns)
        samples = _samples(renderer, data, columns, end)
        for sample in samples:
            if sample[-1].end:
                sample[-1] = sample[-1]._replace(end=last_end)
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

    names = [data.prompt_column, "chosen", "rejected"]
    pairs = list(in_parts(data, names, render, renderer.encode_prompts))
    lengths = [max(len(pair.chosen.mask), len(pair.rejected.mask)) for pair in pairs]
    return demonstrations.fitting("pairs", pairs, lengths, data, max_length)


def _samples(
    renderer: Renderer, data: DataConfig, columns: Mapping[str, Any], end: int
) -> list[list[demonstrations.TaughtTurn]]:
    """Render a row as two samples, the chosen and the rejected one."""
    if not columns.keys() >= set(SIDES):
        present = ", ".join(map(repr, columns))
        raise ValueError(f"no columns 'chosen' and 'rejected', only {present}: rename two of them")
    if any(isinstance(columns[name], str) for name in SIDES):
        text, _ = renderer.prompt(columns, demonstrations.tools_of(columns))
        return [demonstrations.answered(renderer, text, columns[name], name, end) for name in SIDES]
    sides = [demonstrations.turns_of(renderer, columns[name], name) for name in SIDES]
    if isinstance(columns.get(data.prompt_column), list) or sides[0][0]["role"] == "assistant":
        prompt = list(renderer.prompt(columns)[1] or ())
        sides = [prompt + side for side in sides]
        first = len(prompt)
    else:
        sides = [renderer.with_system_prompt(side) for side in sides]
        chosen, rejected = sides
        first = 0
        shortest = min(len(chosen), len(rejected))
        while first < shortest - 1 and chosen[first] == rejected[first]:  # the last is no prompt
            first += 1
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
