"""Read rows from files, Hugging Face data sets and built-in tasks, each with its place."""

import functools
import hashlib
import itertools
import json
import random
import string
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hocket.common.files import sha256_of, shipped
from hocket.common.registry import Registry
from hocket.common.shell import hub_variables
from hocket.config import DataConfig
from hocket.data.columns import parsed
from hocket.errors import DataError

TASKS: Registry[Callable[[str, int], Iterator[dict[str, Any]]]] = Registry(
    "task", shapes="hocket.data.shapes", shapes_seen="hocket.data.shapes"
)
"""Register a function that yields the endless rows of a task: `data.source=task:NAME`.

It is called with the split and the seed. The rows have the columns prompt and answer, and response
for `sft`.

Args:
    name: what stands behind the colon in `data.source`.

Example: a plugin file with a task of sums.

    import random

    from hocket.data.sources import TASKS


    @TASKS.register("small_sums")
    def small_sums(split: str, seed: int):
        rng = random.Random(f"{split}:{seed}")
        while True:
            a, b = rng.randint(0, 9), rng.randint(0, 9)
            yield {"prompt": f"{a} + {b} =", "answer": str(a + b)}
"""

SOURCES: Registry[Callable[[DataConfig], Iterator[Mapping[str, Any]]]] = Registry(
    "source", gym="hocket.extras.gym.rows", verifiers="hocket.extras.verifiers.rows"
)
source = SOURCES.register
"""Register a function that yields the rows of `data.source=NAME:...` (decorator).

It is called with the section `data`. Each row is a mapping of columns.

Args:
    name: what stands before the colon in `data.source`.

Example: a plugin file whose `data.source=numbers:7` has seven rows.

    @source("numbers")
    def numbers(data: DataConfig) -> Iterator[dict[str, str]]:
        for number in range(int(data.source.removeprefix("numbers:"))):
            yield {"prompt": f"{number} + 1", "answer": str(number + 1)}
"""
NumberedRows = Iterator[tuple[int, Any]]  # each row with its line, or its index from 0

NUM_ROWS = 2048  # rows of a built-in task without data.limit
SMALL = 1 << 20  # bytes: a smaller source is not worth a cache
BATCH = 64  # rows, with their images, that are in memory at once
ARCHIVES = (".gz", ".zst", ".zip", ".xz", ".bz2")
_JSON = "extension<arrow.json>"  # the type that `datasets` has for columns of mixed types
_MISTAKES = 0.75  # the share of `sort` rows whose response is wrong
_TEST_SHARE = 1 / 8  # the share of a built-in task's rows in its test split


def read_rows(data: DataConfig) -> Iterator[tuple[str, Any]]:
    """Yield (place, columns) of at most `data.limit` rows, unchecked.

    The columns of a .jsonl file are the bytes of its line. Raise DataError if the source can't
    be read.
    """
    if data.kind:
        place = f"{data.source}/{data.split}"
        rows_of = SOURCES.get(data.kind, f"{data.section}.source={data.source}: ")
        rows: NumberedRows = enumerate(rows_of(data))
    else:
        path = Path(shipped(data.source)).expanduser()
        place = str(path)
        rows = _file_rows(path, data)
    limited = itertools.islice(rows, data.limit)
    return ((f"{place}:{number}", columns) for number, columns in limited)


def _file_rows(path: Path, data: DataConfig) -> NumberedRows:
    setting = f"{data.section}.source={data.source}"
    if path.suffix not in FILES:
        # List all that a source may be.
        names = [f"file{suffix}" for suffix in FILES]
        names += [f"{name}:NAME" for name in sorted(SOURCES.names)]
        advice = "convert it; a name on the hub needs hf:"
        if path.suffix in ARCHIVES:
            advice = "unpack it"
        raise DataError(f"{setting} is none of {', '.join(names)}: {advice}")
    if not path.is_file():
        raise DataError(f"{setting} is not a file; paths are relative to {Path.cwd()}")
    return FILES[path.suffix](path)


def content_key(data: DataConfig, *, has_images: bool) -> str | None:
    """Make a cache key from a source's content. None: the source is not worth a cache."""
    if data.limit is not None and data.limit <= NUM_ROWS:
        return None
    # A row with images is slow to prepare, however small its file is.
    small = 0 if has_images else SMALL
    if data.kind == "hf":
        dataset = _hugging_face(data)
        return str(dataset._fingerprint) if dataset.data.nbytes > small else None
    path = Path(shipped(data.source)).expanduser()
    if path.is_file() and path.stat().st_size > small:
        return sha256_of(path)
    return None


# Kinds of sources


@source("task")
def _task(data: DataConfig) -> Iterator[Any]:
    rows = TASKS.get(data.source.removeprefix("task:"))(data.split, 0)
    return itertools.islice(rows, data.limit or NUM_ROWS)


@source("hf")
def _stored(data: DataConfig) -> Iterator[Any]:
    """Yield the rows of a data set as they are stored: images as bytes, not decoded."""
    dataset = _hugging_face(data)
    yield from _rows(data.source, lambda: dataset.with_format("arrow").iter(BATCH))


def _hugging_face(data: DataConfig) -> Any:
    from datasets.exceptions import DatasetsError

    try:
        return _loaded(data.source, data.split)
    except (OSError, ValueError, KeyError, DatasetsError) as error:
        cause = error.__cause__ or error  # a generator's own words are "an error occurred"
        raise DataError(
            f"can't load {data.source}, {data.section}.split={data.split}: "
            f"{cause}{hub_variables()}; "
            f"choose another{data.otherwise}; without a network, name a file"
        ) from error


@functools.lru_cache(1)  # a start reads it twice: for its key, then for its rows
def _loaded(source: str, split: str) -> Any:
    """Load a data set from a folder or the hub: "hf:NAME" or "hf:NAME:SUBSET"."""
    import datasets

    _, _, name = source.partition(":")
    name, _, subset = name.partition(":")
    # A folder that `save_to_disk` wrote is loaded otherwise than one of data files.
    folder = Path(name).expanduser()
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        loaded = datasets.load_from_disk(str(folder))
        return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
    return datasets.load_dataset(str(folder), subset or None, split=split)


# Files


def _jsonl(path: Path) -> NumberedRows:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line


def _json(path: Path) -> NumberedRows:
    try:
        rows = parsed(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not valid JSON: {error}; a file of one object per line ends in .jsonl"
        ) from error
    if not isinstance(rows, list):
        raise DataError(f"{path} must be a JSON list of objects, got {type(rows).__name__}")
    yield from enumerate(rows)


def _parquet(path: Path) -> NumberedRows:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error
    yield from enumerate(_rows(str(path), lambda: file.iter_batches(batch_size=BATCH)))


FILES = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}


# Arrow


def _rows(source: str, batches: Callable[[], Iterator[Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of Arrow's batches as a JSON file would have them."""
    import pyarrow

    try:
        for batch in batches():
            names = batch.schema.names
            for name in names:
                if names.count(name) > 1:
                    raise DataError(f"{source} has two columns called {name!r}: rename one of them")

            # Arrow's own conversion is right for all columns but those that have short floats
            # ("float", "halffloat") or JSON, also within lists and objects: "list<item: float>".
            rewritten = {}
            for field in batch.schema:
                if "float" in str(field.type) or _JSON in str(field.type):
                    rewritten[field.name] = field.type

            for row in batch.to_pylist(maps_as_pydicts="strict"):
                for name, kind in rewritten.items():
                    row[name] = _decoded(row[name], kind)
                yield row
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(
            f"{source} is not readable: {error}; write it again, with texts in UTF-8"
        ) from error


def _decoded(value: Any, kind: Any) -> Any:
    """Convert a value of an Arrow type: short floats keep their digits, JSON is parsed.

    Arrow converts the 0.1 of a float of 32 bits to 0.10000000149011612.
    """
    from pyarrow import types

    if value is None:
        return None
    if str(kind) == _JSON:
        return json.loads(value)
    if types.is_float32(kind) or types.is_float16(kind):
        return float(str(kind.to_pandas_dtype()(value)))
    if types.is_struct(kind):
        return {field.name: _decoded(value[field.name], field.type) for field in kind}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_decoded(part, kind.value_type) for part in value]
    if types.is_map(kind):
        return {key: _decoded(part, kind.item_type) for key, part in value.items()}
    return value


# Built-in tasks


@TASKS.register("sort")
def sort(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows like "Sort: dbca" with the answer "abcd", of 4 to 6 letters.

    In three of four rows two letters of `response` have changed places.
    """
    rng = generator("sort", split, seed)
    while True:
        letters = rng.sample(string.ascii_lowercase, rng.randint(4, 6))
        answer = sorted(letters)
        response = answer.copy()
        if rng.random() < _MISTAKES:
            i, j = rng.sample(range(len(response)), 2)
            response[i], response[j] = response[j], response[i]
        # The split follows from the answer, so training has no test letters in another order.
        if split_of("".join(answer)) == split:
            yield {
                "prompt": f"Sort: {''.join(letters)}",
                "answer": "".join(answer),
                "response": "".join(response),
            }


@TASKS.register("sort_down")
def sort_down(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows like "Sort: dbca" with the answer "dcba", of 4 to 6 letters out of 16."""
    rng = generator("sort_down", split, seed)
    while True:
        letters = rng.sample(string.ascii_lowercase[:16], rng.randint(4, 6))
        answer = "".join(sorted(letters, reverse=True))
        if split_of(answer) == split:
            yield {"prompt": f"Sort: {''.join(letters)}", "answer": answer, "response": answer}


def generator(task: str, split: str, seed: int) -> random.Random:
    """Return the random generator of a built-in task's split. Raise DataError for other splits."""
    if split not in ("train", "test"):
        raise DataError(f"task:{task} has the splits train and test, not {split!r}; set data.split")
    return random.Random(f"{task}:{split}:{seed}")


def split_of(text: str) -> str:
    """Return the split of a row by the hash of its text, so no test row is ever trained on."""
    first_byte = hashlib.sha256(text.encode()).digest()[0]
    return "test" if first_byte < 256 * _TEST_SHARE else "train"
