"""Turn rows into prompts: each row is checked, rendered and encoded exactly once."""

import contextlib
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
from hocket.data.prompt_list import Prompts
from hocket.data.renderer import RENDERERS, Renderer, ToolSchemas
from hocket.data.sources import identity, read_rows
from hocket.data.template import DAY
from hocket.errors import DataError
from hocket.types import Prompt

NUM_SHOWN = 5  # rows that an error names
PART = 1024  # rows
NO_TOKEN = "the tokenizer makes no token of it"

T = TypeVar("T")
Prepare = Callable[[], Iterator[Prompt]]
StorePrompts = Callable[[object, int, Prepare], tuple[Prompts, list[int]]]
"""(what the prompts follow from, most tokens of one, how to prepare them) → the prompts that are short enough, and the
lengths of all. It prepares them at the first start, and may keep them for the next one."""
STORES: Registry[StorePrompts] = Registry("store", cache="hocket.extras.cache")
Rendered = tuple[
    list[str], Callable[[list[list[int]]], T]
]  # a row's texts, and what makes a T of their token ids


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
    added_tokens = tokenizer.added_tokens_decoder.values()
    if any(token.special and token.content == "</think>" for token in added_tokens):
        raise DataError(
            "the tokenizer has </think> as a special token: no reward would see a thought end; set "
            '"special": false for <think> and </think> in tokenizer.json and tokenizer_config.json'
        )
    if opening := renderer.missing_opening():
        advice = f"{{% if add_generation_prompt %}}{{{{ {opening!r} }}}}{{% endif %}}"
        fact = f"the chat template begins the model's turn with {opening!r}, but ends no prompt so"
        raise DataError(f"{fact}; add {advice} at the end of the template")

    origin: tuple[object, ...] | None = None
    content = None  # the code of a renderer that is not hocket's may change
    if data.renderer is None:
        content = identity(data, has_images=renderer.placeholder is not None)
    if content is not None:
        template = tokenizer.chat_template
        settings = data.model_dump_json(exclude={"max_prompt_tokens"})
        day = DAY.strftime("%F") if "strftime_now" in str(template) else None
        decided_by = (
            source,
            content,
            settings,
            template,
            day,
            list(tools),
            tokenizers.fingerprint(tokenizer),
        )
        origin = (
            *decided_by,
            *renderer.origin(columns_of(row, [data.prompt_column]) for _, row in read_rows(data)),
        )

    def prepare() -> Iterator[Prompt]:
        return _prompts(data, renderer, source)

    if origin is not None and "cache" in STORES.names:
        return STORES.get("cache")(origin, max_prompt_tokens, prepare)
    return prepared(max_prompt_tokens, prepare)


def prepared(longest: int, prepare: Prepare) -> tuple[Prompts, list[int]]:
    """Return the prompts of at most `longest` tokens, and the lengths of all, from memory."""
    prompts = list(prepare())
    lengths = [len(prompt.token_ids) for prompt in prompts]
    short = (prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= longest)
    return Prompts(short), lengths


def _prompts(data: DataConfig, renderer: Renderer, source: str) -> Iterator[Prompt]:
    def render(place: str, columns: Mapping[str, Any]) -> Rendered[Prompt]:
        columns, pictures = renderer.seen(columns)
        text, fields = renderer.row(columns)
        name = place if data.kind else Path(place).name
        name = f"{source}/{name}" if source else name  # two sources may have files of one name

        def prompt(token_ids: list[list[int]]) -> Prompt:
            if not token_ids[0]:
                raise ValueError(NO_TOKEN)
            ids, images = renderer.expanded(token_ids[0], pictures)
            return Prompt(
                id=name, source=source, token_ids=array("I", ids), images=images, **fields
            )

        return [text], prompt

    return in_parts(data, [data.prompt_column], render, renderer.encode_prompts)


def in_parts(
    data: DataConfig,
    names: Collection[str],  # of the columns that it reads: texts or chats
    render: Callable[[str, Mapping[str, Any]], Rendered[T]],  # of a row's place and columns
    encode: Callable[[list[str]], list[list[int]]],
) -> Iterator[T]:
    """Yield what is made of each row; in parts, as encoding all at once takes gigabytes.

    Raise DataError at the end for rows that are refused by a ValueError.
    """
    num_rows = 0
    problems = dict[str, str]()

    @contextlib.contextmanager
    def naming(place: str) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            problems[place] = str(error)

    rows = iter(
        tqdm(read_rows(data), f"encoding {data.source}", unit=" rows", delay=2, mininterval=5)
    )
    while part := list(itertools.islice(rows, PART)):
        rendered = []
        num_rows += len(part)
        for place, row in part:
            with naming(place):
                texts, make = render(place, columns_of(row, names))
                for text in texts:
                    check_characters(text, "the rendered text")
                rendered.append((place, texts, make))
        if problems:
            continue  # only to name the others
        encoded = iter(encode([text for _, texts, _ in rendered for text in texts]))
        for place, texts, make in rendered:
            with naming(place):
                yield make(list(itertools.islice(encoded, len(texts))))
    if problems:
        unit = "line" if data.source.endswith(".jsonl") else "row, from 0"
        lines = [
            f"  {place}: {problem}"
            for place, problem in itertools.islice(problems.items(), NUM_SHOWN)
        ]
        if len(problems) > NUM_SHOWN:
            lines.append(f"  ... and {len(problems) - NUM_SHOWN} more")
        advice = "; repair or remove them" if len(problems) < num_rows else ""
        fact = f"{len(problems)} of {num_rows} rows of {data.source} can't be used{advice}"
        raise DataError("\n".join([f"{fact} ({unit}):", *lines]))
    if not num_rows:
        raise DataError(f"{data.source} has no rows")


def renderer_of(data: DataConfig, tokenizer: Any, tools: ToolSchemas = ()) -> Renderer:
    """Make the renderer that data.renderer names: without it that of chats, of images, or of plain text."""
    chosen = data.renderer
    if chosen is None:
        takes_images = getattr(tokenizer, "placeholder", None) is not None
        by_template = "vision" if takes_images else "chat"
        chosen = by_template if data.chat_template else "plain"
    make = RENDERERS.choose(chosen, f"{data.section}.renderer", keys=("data", "tokenizer", "tools"))
    return make(data, tokenizer, tools)
