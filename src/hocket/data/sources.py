"""Where rows come from: files, Hugging Face data sets, built-in tasks. Each row knows the place to look at."""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hocket.config import DataConfig
from hocket.data.tasks import NUM_ROWS, TASKS
from hocket.errors import DataError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a source.

    Attributes:
        where: the place to look at, file and line.
        id: stable name within the source.
        values: its columns; None where it is no row.
        error: why it is none.
    """

    where: str
    id: str
    values: Mapping[str, Any] | None
    error: str | None = None


def read_rows(data: DataConfig, *, seed: int = 0) -> Iterator[Row]:
    """Yields the rows of `data.source`, at most `data.limit`, unchecked.

    Args:
        seed: of the rows that a built-in task makes.

    Raises:
        DataError: the source can't be read.
    """
    kind, _, name = data.source.partition(":")
    if kind == "task":
        rows: Iterable[Row] = _numbered(f"{data.source}/{data.split}", TASKS.get(name)(data.split, seed))
        return itertools.islice(rows, data.limit or NUM_ROWS)
    if kind == "hf":
        rows = _numbered(f"{data.source}/{data.split}", _hugging_face(name, data.subset, data.split))
        return itertools.islice(rows, data.limit)
    readers = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}
    path = Path(data.source).expanduser()
    if path.suffix not in readers:
        raise DataError(
            f"data.source={data.source} is none of file.jsonl, file.json, file.parquet, hf:NAME and task:NAME"
        )
    if not path.is_file():
        raise DataError(f"data.source={data.source} is not a file; paths are relative to {Path.cwd()}")
    return itertools.islice(readers[path.suffix](path), data.limit)


def _numbered(source: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    for index, values in enumerate(rows):
        yield Row(where=f"{source} row {index}", id=f"{source}:{index}", values=values)


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where, name = f"{path}:{number}", f"{path.name}:{number}"
            try:
                values = json.loads(line)
            except ValueError as error:  # malformed JSON, or bytes that are not UTF-8
                yield Row(where=where, id=name, values=None, error=f"not valid JSON: {error}")
            else:
                yield _object(where, name, values)


def _json(path: Path) -> Iterator[Row]:
    try:
        rows = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}; a file of one object per line ends in .jsonl") from error
    if not isinstance(rows, list):
        raise DataError(f"{path} must be a JSON list of objects, got {type(rows).__name__}")
    for index, values in enumerate(rows):
        yield _object(f"{path} item {index}", f"{path.name}:{index}", values)


def _object(where: str, name: str, values: Any) -> Row:
    if isinstance(values, dict):
        return Row(where=where, id=name, values=values)
    return Row(where=where, id=name, values=None, error=f"must be a JSON object, got {type(values).__name__}")


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024)
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        for index, values in enumerate(rows):
            yield Row(where=f"{path} row {index}", id=f"{path.name}:{index}", values=values)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error


def _hugging_face(name: str, subset: str | None, split: str) -> Iterable[Mapping[str, Any]]:
    import datasets

    folder = Path(name).expanduser()
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(str(folder))
        else:
            loaded = datasets.load_dataset(str(folder) if folder.is_dir() else name, subset, split=split)
    except (OSError, ValueError) as error:  # not found, no network, no such split or subset, nothing readable in it
        raise DataError(f"can't load hf:{name} (subset {subset}, split {split}): {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(f"hf:{name} has the splits {', '.join(loaded)}, not {split!r}; set data.split")
        loaded = loaded[split]
    rows: Iterable[Mapping[str, Any]] = loaded
    return rows
