"""Read rows from files, Hugging Face data sets and built-in tasks. Each row comes with the place to look at."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hocket.config import DataConfig
from hocket.data.tasks import NUM_ROWS, TASKS
from hocket.errors import DataError


def read_rows(data: DataConfig) -> Iterator[tuple[str, Any]]:
    """Yield (place, columns) of the rows of `data.source`, at most `data.limit`, unchecked.

    A line that is no JSON yields a ValueError as its columns. Raise DataError if the source can't be read.
    """
    kind, _, name = data.source.partition(":")
    rows: Iterable[tuple[int, Any]]
    place, limit = f"{data.source}/{data.split}", data.limit
    if kind == "task":
        rows, limit = enumerate(TASKS.get(name)(data.split, 0)), data.limit or NUM_ROWS
    elif kind == "hf":
        rows = enumerate(_hugging_face(name, data.subset, data.split))
    else:
        readers = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}
        path = Path(data.source).expanduser()
        if path.suffix not in readers:
            raise DataError(
                f"data.source={data.source} is none of file.jsonl, file.json, file.parquet, hf:NAME and task:NAME"
            )
        if not path.is_file():
            raise DataError(f"data.source={data.source} is not a file; paths are relative to {Path.cwd()}")
        rows, place = readers[path.suffix](path), str(path)
    return ((f"{place}:{number}", columns) for number, columns in itertools.islice(rows, limit))


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:  # malformed JSON, or bytes that are not UTF-8
                    row = ValueError(f"not valid JSON: {error}")
                yield number, row


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        rows = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}; a file of one object per line ends in .jsonl") from error
    if not isinstance(rows, list):
        raise DataError(f"{path} must be a JSON list of objects, got {type(rows).__name__}")
    return enumerate(rows)


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024)
        yield from enumerate(itertools.chain.from_iterable(batch.to_pylist() for batch in batches))
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
