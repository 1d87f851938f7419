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

from hocket.common.files import sha256_of
from hocket.common.registry import Registry
from hocket.common.shell import hub_variables
from hocket.config import DataConfig
from hocket.data.columns import parsed
from hocket.errors import DataError

# (split, seed) -> endless rows with the columns prompt, answer and response
TASKS: Registry[Callable[[str, int], Iterator[dict[str, Any]]]] = Registry(
    "task", shapes="hocket.data.shapes", shapes_seen="hocket.data.shapes"
)

SOURCES: Registry[Callable[[DataConfig], Iterator[Mapping[str, Any]]]] = Registry(
    "source", gym="hocket.extras.gym.rows", verifiers="hocket.extras.verifiers.rows"
)
source = SOURCES.register
"""Decorator of a function that yields the rows of `data.source=NAME:...`: DataConfig → columns of each row.

Example: a plugin whose `data.source=numbers:7` has seven rows.

    @source("numbers")
    def numbers(data: DataConfig) -> Iterator[dict[str, str]]:
        for number in range(int(data.source.removeprefix("numbers:"))):
            yield {"prompt": f"{number} + 1", "answer": str(number + 1)}
"""
NumberedRows = Iterator[tuple[int, Any]]  # numbered

NUM_ROWS = 2048  # of a built-in task, without data.limit
SMALL = 1 << 20  # bytes: not worth a cache
BATCH = 64  # rows that are in memory at once, with their pictures
_JSON = "extension<arrow.json>"
_MISTAKES = 0.75
_TEST_SHARE = 1 / 8


def read_rows(data: DataConfig) -> Iterator[tuple[str, Any]]:
    """Yield (place, columns) of at most `data.limit` rows, unchecked; .jsonl as bytes."""
    place = f"{data.source}/{data.split}"
    if data.kind:
        rows: NumberedRows = enumerate(
            SOURCES.get(data.kind, f"{data.section}.source={data.source}: ")(data)
        )
    else:
        path = Path(data.source).expanduser()
        place = str(path)
        if path.suffix not in FILES:
            kinds = ", ".join(f"{name}:NAME" for name in sorted(SOURCES.names))
            known = f"{', '.join(f'file{suffix}' for suffix in FILES)}, {kinds}"
            advice = "convert it; a name on the hub needs hf:"
            if path.suffix in (".gz", ".zst", ".zip", ".xz", ".bz2"):
                advice = "unpack it"
            raise DataError(f"{data.section}.source={data.source} is none of {known}: {advice}")
        if not path.is_file():
            raise DataError(
                f"{data.section}.source={data.source} is not a file; paths are relative to {Path.cwd()}"
            )
        rows = FILES[path.suffix](path)
    return (
        (f"{place}:{number}", columns) for number, columns in itertools.islice(rows, data.limit)
    )


def identity(data: DataConfig, *, has_images: bool) -> str | None:
    """Make a key of a source's content for the cache; None: it is not worth one."""
    small = 0 if has_images else SMALL
    path = Path(data.source).expanduser()
    if data.limit is not None and data.limit <= NUM_ROWS:
        return None
    if data.kind == "hf":
        loaded = _hugging_face(data)
        return str(loaded._fingerprint) if loaded.data.nbytes > small else None
    return sha256_of(path) if path.is_file() and path.stat().st_size > small else None


@source("task")
def _task(data: DataConfig) -> Iterator[Any]:
    rows = TASKS.get(data.source.removeprefix("task:"))(data.split, 0)
    return itertools.islice(rows, data.limit or NUM_ROWS)


@source("hf")
def _stored(data: DataConfig) -> Iterator[Any]:
    """Yield rows as they are stored: pictures as bytes, not decoded."""
    loaded = _hugging_face(data)
    yield from _rows(data.source, lambda: loaded.with_format("arrow").iter(BATCH))


def _hugging_face(data: DataConfig) -> Any:
    from datasets.exceptions import DatasetsError

    try:
        return _loaded(data.source, data.split)
    except (OSError, ValueError, KeyError, DatasetsError) as error:
        what = f"can't load {data.source}, {data.section}.split={data.split}"
        cause = error.__cause__ or error  # a generator's own words are "an error occurred"
        advice = f"choose another{data.otherwise}; without a network, name a file"
        raise DataError(f"{what}: {cause}{hub_variables()}; {advice}") from error


@functools.lru_cache(1)  # asked for its identity, then for its rows
def _loaded(source: str, split: str) -> Any:
    import datasets

    _, name, *subset = source.split(":", 2)
    folder = Path(name).expanduser()
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        loaded = datasets.load_from_disk(str(folder))
        return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
    return datasets.load_dataset(str(folder), *filter(None, subset), split=split)


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


def _rows(source: str, batches: Callable[[], Iterator[Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of Arrow's batches as a JSON file would have them."""
    import pyarrow

    try:
        for batch in batches():
            names = batch.schema.names
            twice = [name for name in names if names.count(name) > 1]
            if twice:
                raise DataError(f"{source} has two columns called {twice[0]!r}: rename one of them")
            kinds = {field.name: field.type for field in batch.schema}
            others = {
                name: kind for name, kind in kinds.items() if _is_short(kind) or _JSON in str(kind)
            }
            for row in batch.to_pylist(maps_as_pydicts="strict"):
                yield row | {name: _decoded(row[name], kind) for name, kind in others.items()}
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(
            f"{source} is not readable: {error}; write it again, with texts in UTF-8"
        ) from error


def _is_short(kind: Any) -> bool:
    """Check whether a type is a float whose digits a float64 does not show: 0.1 becomes 0.10000000149011612."""
    return str(kind) in ("float", "halffloat")


def _decoded(value: Any, kind: Any) -> Any:
    """Return a value of an Arrow type with its own digits, and what JSON within it says."""
    from pyarrow import types

    if value is None:
        return None
    if str(kind) == _JSON:  # `datasets` has it for columns of mixed types
        return json.loads(value)
    if _is_short(kind):
        return float(str(kind.to_pandas_dtype()(value)))
    if types.is_struct(kind):
        return {field.name: _decoded(value[field.name], field.type) for field in kind}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_decoded(part, kind.value_type) for part in value]
    if types.is_map(kind):
        return {key: _decoded(part, kind.item_type) for key, part in value.items()}
    return value


FILES = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}


@TASKS.register("sort")
def sort(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield "Sort: dbca" for "abcd", 4 to 6 letters; `response` is wrong in three of four rows."""
    rng = generator("sort", split, seed)
    while True:
        letters = rng.sample(string.ascii_lowercase, rng.randint(4, 6))
        answer = sorted(letters)
        response = answer.copy()
        if rng.random() < _MISTAKES:
            i, j = rng.sample(range(len(response)), 2)
            response[i], response[j] = response[j], response[i]
        if (
            split_of("".join(answer)) == split
        ):  # of the answer: no order of test letters is a training prompt
            yield {
                "prompt": f"Sort: {''.join(letters)}",
                "answer": "".join(answer),
                "response": "".join(response),
            }


@TASKS.register("sort_down")
def sort_down(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield "Sort: dbca" for "dcba", 4 to 6 of 16 letters."""
    rng = generator("sort_down", split, seed)
    while True:
        letters = rng.sample(string.ascii_lowercase[:16], rng.randint(4, 6))
        answer = "".join(sorted(letters, reverse=True))
        if split_of(answer) == split:
            yield {"prompt": f"Sort: {''.join(letters)}", "answer": answer, "response": answer}


def generator(task: str, split: str, seed: int) -> random.Random:
    if split not in ("train", "test"):
        raise DataError(f"task:{task} has the splits train and test, not {split!r}; set data.split")
    return random.Random(f"{task}:{split}:{seed}")


def split_of(text: str) -> str:
    """Return a row's split by the hash of its text: no test row is ever trained on."""
    return "test" if hashlib.sha256(text.encode()).digest()[0] < 256 * _TEST_SHARE else "train"
