"""From rows to prompts and demonstrations: every row checked, every prompt rendered to token ids exactly once."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from hocket.config import DataConfig
from hocket.data.problems import Problems
from hocket.data.rendering import Draft, Renderer
from hocket.data.sources import read_rows
from hocket.errors import DataError
from hocket.types import Prompt

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The usable prompts of a source.

    Attributes:
        num_dropped: prompts left out because they are too long; none is ever cut.
    """

    prompts: tuple[Prompt, ...]
    num_dropped: int


def load_prompts(
    data: DataConfig,
    tokenizer: Any,
    *,
    max_prompt_tokens: int,
    seed: int = 0,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Prompts:
    """Reads, checks and renders every row of `data.source`.

    Args:
        tokenizer: a Hugging Face tokenizer.
        max_prompt_tokens: longer prompts are dropped and counted; data.max_prompt_tokens counts where it is lower.
        seed: of the rows that a built-in task makes.
        tools: functions that the chat template shows to the model.

    Raises:
        DataError: the source can't be read, or has rows that can't be used; names file, line and what is missing.
    """
    longest = min(max_prompt_tokens, data.max_prompt_tokens or max_prompt_tokens)
    prompts = _load(data, Renderer(data, tokenizer, tools), seed=seed)
    kept = tuple(prompt for prompt in prompts if len(prompt.token_ids) <= longest)
    return Prompts(prompts=kept, num_dropped=len(prompts) - len(kept))


def load_demonstrations(data: DataConfig, tokenizer: Any, max_length: int) -> list[tuple[list[int], list[int]]]:
    """Returns (prompt ids, response ids) of every row; the response ends with the token that ends the model's turn.

    The prompt is rendered as for sampling, and the response follows it as the model would write it. Rows of more than
    max_length tokens are left out, with a warning that counts them.

    Raises:
        DataError: as in load_prompts, and where no row is short enough.
    """
    renderer = Renderer(data, tokenizer)
    end = renderer.end_of_turn()
    prompts = _load(data, renderer, with_response=True)
    responses = renderer.encode([prompt.meta[data.response_column] for prompt in prompts])
    rows = [([*prompt.token_ids], [*response, end]) for prompt, response in zip(prompts, responses, strict=True)]
    kept = [(prompt, response) for prompt, response in rows if len(prompt) + len(response) <= max_length]
    if not kept:
        raise DataError(f"no row of {data.source} has at most {max_length} tokens; raise model.max_length")
    if len(kept) < len(rows):
        log.warning(
            "left out %d of %d demonstrations: more than %d tokens", len(rows) - len(kept), len(rows), max_length
        )
    return kept


def _load(
    data: DataConfig,
    renderer: Renderer,
    *,
    seed: int = 0,
    with_response: bool = False,
) -> list[Prompt]:
    problems = Problems(data.source)
    drafts = _drafts(data, renderer, problems, seed=seed, with_response=with_response)
    token_ids = renderer.encode_prompts([draft.rendered for draft in drafts])
    for draft, ids in zip(drafts, token_ids, strict=True):
        if not ids:
            problems.add(draft.where, "the tokenizer makes no token of the prompt")
    problems.refuse(len(drafts))
    return [draft.prompt(ids) for draft, ids in zip(drafts, token_ids, strict=True)]


def _drafts(
    data: DataConfig, renderer: Renderer, problems: Problems, *, seed: int, with_response: bool
) -> Sequence[Draft]:
    """Returns every row as text, or raises DataError for all that are no good."""
    drafts: list[Draft] = []
    num_rows = 0
    for row in read_rows(data, seed=seed):
        num_rows += 1
        try:
            drafts.append(renderer.draft(row, with_response=with_response))
        except ValueError as error:
            problems.add(row.where, str(error))
    if num_rows == 0:
        raise DataError(f"{data.source} has no rows")
    problems.refuse(num_rows)
    return drafts
