"""Turn rows into prompts: each row is checked, rendered and encoded exactly once."""

import itertools
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from hocket.common.registry import Registry
from hocket.config import DataConfig
from hocket.data import tokenizer as tokenizers
from hocket.data.columns import check_characters, columns_of
from hocket.data.renderer import RENDERERS, Renderer, ToolSchemas
from hocket.data.sources import content_key, read_rows
from hocket.data.template import DAY
from hocket.errors import DataError
from hocket.types import Prompt, Prompts

NUM_SHOWN = 5  # rows that an error names
PART = 1024  # rows that are encoded at once
NO_TOKEN = "the tokenizer makes no token of it"

T = TypeVar("T")
Prepare = Callable[[], Iterator[Prompt]]
StorePrompts = Callable[[object, int, Prepare], tuple[Prompts, list[int]]]
"""Keeps prompts for the next start. Called with all that they follow from, the most tokens of one,
and a function that prepares them; returns as `load_prompts` does."""
STORES: Registry[StorePrompts] = Registry("store", cache="hocket.extras.cache")
Rendered = tuple[list[str], Callable[[list[list[int]]], T]]
"""The texts of a row, and a function that makes a T of the token ids of each."""


def load_prompts(
    data: DataConfig,
    tokenizer: Any,
    *,
    max_prompt_tokens: int,
    tools: ToolSchemas = (),
    source: str = "",
) -> tuple[Prompts, list[int]]:
    """Load the prompts that are short enough; none is cut.

    `source` is the name of one of data.sources. Returns the prompts, and the token counts of all
    rows, also of those that are too long.
    """
    renderer = renderer_of(data, tokenizer, tools)
    _check_template(renderer, tokenizer)

    def prepare() -> Iterator[Prompt]:
        return _prompts(data, renderer, source)

    if "cache" in STORES.names:
        origin = _origin(data, renderer, tokenizer, tools, source)
        if origin is not None:
            return STORES.get("cache")(origin, max_prompt_tokens, prepare)
    return prepared(max_prompt_tokens, prepare)


def _check_template(renderer: Renderer, tokenizer: Any) -> None:
    """Raise DataError if thoughts or the beginning of a turn are not where rewards see them."""
    added_tokens = tokenizer.added_tokens_decoder.values()
    if any(token.special and token.content == "</think>" for token in added_tokens):
        raise DataError(
            "the tokenizer has </think> as a special token: no reward would see a thought end; set "
            '"special": false for <think> and </think> in tokenizer.json and tokenizer_config.json'
        )
    opening = renderer.missing_opening()
    if opening:
        advice = f"{{% if add_generation_prompt %}}{{{{ {opening!r} }}}}{{% endif %}}"
        fact = f"the chat template begins the model's turn with {opening!r}, but ends no prompt so"
        raise DataError(f"{fact}; add {advice} at the end of the template")


def _origin(
    data: DataConfig, renderer: Renderer, tokenizer: Any, tools: ToolSchemas, source: str
) -> list[Any] | None:
    """List all that the prompts follow from. None: they are not worth a cache."""
    if data.renderer is not None:  # a plugin's: its code may change
        return None
    content = content_key(data, has_images=renderer.placeholder is not None)
    if content is None:
        return None
    settings = data.model_dump_json(exclude={"max_prompt_tokens"})
    template = tokenizer.chat_template
    day = DAY.strftime("%F") if "strftime_now" in str(template) else None
    origin = [source, content, settings, template, day]
    origin += [list(tools), tokenizers.fingerprint(tokenizer)]
    rows = (columns_of(row, [data.prompt_column]) for _, row in read_rows(data))
    return origin + renderer.image_files(rows)


def prepared(longest: int, prepare: Prepare) -> tuple[Prompts, list[int]]:
    """Return the prompts of at most `longest` tokens, and the lengths of all, from memory."""
    prompts = list(prepare())
    lengths = [len(prompt.token_ids) for prompt in prompts]
    short = (prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= longest)
    return Prompts(short), lengths


def _prompts(data: DataConfig, renderer: Renderer, source: str) -> Iterator[Prompt]:
    def render(place: str, columns: Mapping[str, Any]) -> Rendered[Prompt]:
        columns, raw_images = renderer.split_images(columns)
        text, fields = renderer.row(columns)
        name = place if data.kind else Path(place).name
        if source:
            name = f"{source}/{name}"  # two sources may have files of one name

        def make(token_ids: list[list[int]]) -> Prompt:
            if not token_ids[0]:
                raise ValueError(NO_TOKEN)
            ids, images = renderer.insert_images(token_ids[0], raw_images)
            return Prompt(
                id=name, source=source, token_ids=array("I", ids), images=images, **fields
            )

        return [text], make

    return in_parts(data, [data.prompt_column], render, renderer.encode_prompts)


def in_parts(
    data: DataConfig,
    names: Collection[str],
    render: Callable[[str, Mapping[str, Any]], Rendered[T]],
    encode: Callable[[list[str]], list[list[int]]],
) -> Iterator[T]:
    """Yield what is made of each row. Encodes PART rows at once: all would take gigabytes.

    names: the columns that are texts or chats. render: renders a row, from its place and columns.
    encode: returns the token ids of each text. `render` and what it returns may refuse a row by
    ValueError: once all rows are read, DataError names the refused ones.
    """
    num_rows = 0
    problems: dict[str, str] = {}  # by the place of the row
    title = f"encoding {data.source}"
    rows = iter(tqdm(read_rows(data), title, unit=" rows", delay=2, mininterval=5))
    while part := list(itertools.islice(rows, PART)):
        num_rows += len(part)
        rendered = []
        for place, row in part:
            try:
                texts, make = render(place, columns_of(row, names))
                for text in texts:
                    check_characters(text, "the rendered text")
                rendered.append((place, texts, make))
            except ValueError as error:
                problems[place] = str(error)
        if problems:
            continue  # the error is certain: the other rows are read only to name those to repair

        all_texts: list[str] = []
        for _, texts, _ in rendered:
            all_texts += texts
        encoded = iter(encode(all_texts))
        for place, texts, make in rendered:
            token_ids = list(itertools.islice(encoded, len(texts)))
            try:
                yield make(token_ids)
            except ValueError as error:
                problems[place] = str(error)

    if problems:
        raise _unusable(data, problems, num_rows)
    if not num_rows:
        raise DataError(f"{data.source} has no rows")


def _unusable(data: DataConfig, problems: Mapping[str, str], num_rows: int) -> DataError:
    """Make the error that names the first rows that can't be used."""
    unit = "line" if data.source.endswith(".jsonl") else "row, from 0"
    advice = "; repair or remove them" if len(problems) < num_rows else ""
    fact = f"{len(problems)} of {num_rows} rows of {data.source} can't be used{advice}"
    lines = [f"{fact} ({unit}):"]
    for place, problem in itertools.islice(problems.items(), NUM_SHOWN):
        lines.append(f"  {place}: {problem}")
    if len(problems) > NUM_SHOWN:
        lines.append(f"  ... and {len(problems) - NUM_SHOWN} more")
    return DataError("\n".join(lines))


def renderer_of(data: DataConfig, tokenizer: Any, tools: ToolSchemas = ()) -> Renderer:
    """Make the renderer that data.renderer names; without a name that of chats, images or text."""
    chosen = data.renderer
    if chosen is None:
        takes_images = getattr(tokenizer, "placeholder", None) is not None
        by_template = "vision" if takes_images else "chat"
        chosen = by_template if data.chat_template else "plain"
    make = RENDERERS.choose(chosen, f"{data.section}.renderer", keys=("data", "tokenizer", "tools"))
    return make(data, tokenizer, tools)
