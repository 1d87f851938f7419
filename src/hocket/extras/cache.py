"""Keep prepared prompts in $XDG_CACHE_HOME/hocket/prompts (default: ~/.cache) for the next start.

Each folder is a cache of `datasets`, named by a hash of all that its prompts depend on. A hash of
the files' content shows a damaged folder, which is removed. Where the cache fails, prompts are
prepared in memory.
"""

import dataclasses
import functools
import json
import logging
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hocket import data
from hocket.common.environment import version_of
from hocket.common.files import sha256_of, write_atomically
from hocket.data.prompts import STORES, Prepare, prepared
from hocket.errors import DataError
from hocket.types import Image, Prompt, Prompts, digest_of, key_of, sha256_of_text

UNUSED_S = 30 * 86_400.0  # a folder that was not used for so long is removed
PATIENCE_S = 2.0  # seconds before a line says that another start has the lock
# The fields of a prompt that a table has together, as JSON.
OTHERS = [
    field.name for field in dataclasses.fields(Prompt) if field.name not in ("token_ids", "images")
]

log = logging.getLogger(__name__)


class KeptPrompts(Prompts):
    """The prompts of a table, each made when it is read."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self._rows = table

    @functools.cached_property
    def fingerprint(self) -> str:
        return sha256_of_text("".join(self._rows["digest"]))

    def keys(self) -> list[str]:
        return list(self._rows["key"])

    def select(self, indices: Iterable[int]) -> Prompts:
        return KeptPrompts(self._rows.select(indices))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        row = self._rows[index]
        images = tuple(Image(**image) for image in row["images"])
        return Prompt(
            token_ids=array("I", row["token_ids"]), images=images, **_others(row["others"])
        )


@STORES.register("cache")
def load(origin: object, longest: int, prepare: Prepare) -> tuple[Prompts, list[int]]:
    """Load the prompts of at most `longest` tokens, and the lengths of all.

    `origin` is all that they depend on, apart from code and packages.
    """
    from datasets.exceptions import DatasetGenerationError

    try:
        table = _table(_key(origin), lambda: map(_row, prepare()))
        lengths: list[int] = table["length"][:]
    except (OSError, RuntimeError, ValueError, DatasetGenerationError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, DataError):
            raise cause from None
        log.warning("can't keep the prepared prompts for the next start: %s", cause)
        return prepared(longest, prepare)
    short = [row for row, length in enumerate(lengths) if length <= longest]
    return KeptPrompts(table).select(short), lengths


def _key(origin: object) -> str:
    files = sorted([Path(__file__), *Path(data.__file__).parent.glob("*.py")])
    code = [file.read_bytes() for file in files]
    versions = [version_of(name) for name in ("transformers", "tokenizers", "datasets")]
    return sha256_of_text(repr([code, versions, origin]))[:32]


def _table(key: str, rows: Callable[[], Iterable[dict[str, Any]]]) -> Any:
    """Load the table of this key, made of `rows` if there is none."""
    import datasets

    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = caches / "hocket" / "prompts"
    home = folder / key
    seal = home / "SHA256"
    number = datasets.Value("int32")
    text = datasets.Value("string")
    image = {"file": datasets.Value("large_binary"), "name": text}
    image |= dict.fromkeys(("start", "length", "placeholder"), number)
    features = datasets.Features(
        token_ids=datasets.List(number),
        length=number,
        digest=text,
        key=text,
        others=text,
        images=datasets.List(image),
    )
    datasets.disable_progress_bars()  # the rows have a progress bar already
    _remove_unused(folder)
    locks = folder.with_name("locks")  # not in a folder that may be removed
    locks.mkdir(parents=True, exist_ok=True)
    with _holding(FileLock(locks / key)):  # only one of two starts at once prepares
        if seal.exists() and seal.read_text() != _contents(home):
            shutil.rmtree(home)
        table = datasets.Dataset.from_generator(
            rows, features=features, cache_dir=str(home), fingerprint=key
        )
        if not seal.exists():
            write_atomically(seal, _contents(home))
        os.utime(home)
    return table


@contextmanager
def _holding(lock: FileLock) -> Iterator[None]:
    """Hold a lock; say so if another process has it for long."""
    try:
        lock.acquire(timeout=PATIENCE_S)
    except Timeout:
        log.warning("another start is preparing these prompts: waiting for it (Ctrl-C to give up)")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _remove_unused(folder: Path) -> None:
    for old in folder.glob("*"):
        with suppress(FileNotFoundError, NotADirectoryError):  # another process was faster
            if old.stat().st_mtime < time.time() - UNUSED_S:
                shutil.rmtree(old)


def _contents(home: Path) -> str:
    files = (*home.rglob("*.arrow"), *home.rglob("*.json"))
    return "\n".join(map(sha256_of, files))


def _row(prompt: Prompt) -> dict[str, Any]:
    others = {name: getattr(prompt, name) for name in OTHERS}
    text = json.dumps(others)
    if repr(_others(text)) != repr(others):
        raise TypeError(f"{prompt.id} has a column that JSON can't hold as it is")
    ids = list(prompt.token_ids)
    images = [dataclasses.asdict(image) | {"file": image.data} for image in prompt.images]
    return {
        "token_ids": ids,
        "length": len(ids),
        "digest": digest_of(prompt),
        "key": key_of(prompt),
        "others": text,
        "images": images,
    }


def _others(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(text)
    if fields["messages"] is not None:
        fields["messages"] = tuple(fields["messages"])
    return fields
