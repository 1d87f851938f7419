"""Keep prepared prompts in $XDG_CACHE_HOME/hocket/prompts (default: ~/.cache): a second start maps them into memory.

A file is an Arrow table, KEY-NUMBER-FINGERPRINT-SHA256.arrow: the key of all that its prompts follow from, how many
were short enough, their fingerprint, and the hash of its content, so that a damaged one is never used. The cache only
saves time: where it fails, the prompts are prepared in memory.
"""

import hashlib
import importlib.metadata
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hocket.types import Prompt

PARTIAL = ".partial-"  # begins the names of files that are being written
UNUSED_S, ABANDONED_S = 30 * 86_400.0, 3600.0  # after which a file is removed, and one of a start that was killed

log = logging.getLogger(__name__)


class Prompts(Sequence[Prompt]):
    """The prompts of an Arrow table that have at most `longest` tokens; each is made when it is asked for."""

    def __init__(self, table: Any, longest: int, known: tuple[str, str]) -> None:
        import pyarrow.compute as pc

        self._table = table
        lengths = pc.list_value_length(table["token_ids"])
        self._rows = pc.indices_nonzero(pc.less_equal(lengths, longest)).to_numpy()
        self.lengths: list[int] = lengths.to_numpy().tolist()  # of all
        self.difficulties: list[float | None] = table["difficulty"].take(self._rows).to_pylist()
        self.fingerprint = known[1] if int(known[0]) == len(self) else None  # as many are short enough: the same ones

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        (row,) = self._table.slice(int(self._rows[index]), 1).to_pylist()
        fields = json.loads(row["fields"])
        if fields["messages"] is not None:
            fields["messages"] = tuple(fields["messages"])
        return Prompt(token_ids=tuple(row["token_ids"]), difficulty=row["difficulty"], **fields)


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return a hash of what training takes from the prompts."""
    known = prompts.fingerprint if isinstance(prompts, Prompts) else None
    return known or _add(hashlib.sha256(), prompts)


def difficulty(prompts: Sequence[Prompt], index: int) -> float | None:
    """Return the difficulty of a prompt, without making it."""
    return prompts.difficulties[index] if isinstance(prompts, Prompts) else prompts[index].difficulty


def sha256_of(path: Path) -> str:
    """Return the hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def key(*parts: object) -> str:
    """Return the key of prompts that follow from these parts, from the code of this folder and from its libraries."""
    code = [file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))]
    versions = [importlib.metadata.version(name) for name in ("transformers", "tokenizers")]
    return hashlib.sha256(repr([code, versions, *parts]).encode(errors="surrogatepass")).hexdigest()[:32]


def load(key: str, longest: int, prepare: Callable[[], Iterator[list[Prompt]]]) -> Prompts | None:
    """Return the prompts of a key; `prepare` and write them first if there are none. None if that fails."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hocket" / "prompts"
        if (found := _read(folder, key, longest)) is None:
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder, key, longest, prepare())
            found = _read(folder, key, longest)
        return found
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        log.warning("can't keep the prepared prompts, so that the next start prepares them again: %s", error)
        return None


def _read(folder: Path, key: str, longest: int) -> Prompts | None:
    import pyarrow

    for path in folder.glob(f"{key}-*.arrow"):
        _, num_prompts, fingerprint, content = path.stem.split("-")
        with suppress(FileNotFoundError):  # another process removes unused ones
            if content == sha256_of(path):
                with suppress(OSError):  # another user's
                    os.utime(path)
                table = pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()
                return Prompts(table, longest, (num_prompts, fingerprint))
    return None


def _write(folder: Path, key: str, longest: int, parts: Iterator[list[Prompt]]) -> None:
    import pyarrow

    for file in folder.iterdir():
        limit_s = ABANDONED_S if file.name.startswith(PARTIAL) else UNUSED_S
        with suppress(FileNotFoundError):  # another process was faster
            if file.stat().st_mtime < time.time() - limit_s:
                file.unlink()
    columns = {"token_ids": pyarrow.list_(pyarrow.int32()), "difficulty": pyarrow.float64(), "fields": pyarrow.string()}
    schema, digest, num_prompts = pyarrow.schema(columns), hashlib.sha256(), 0
    descriptor, name = tempfile.mkstemp(prefix=PARTIAL, dir=folder)  # of its own: others may prepare the same
    try:
        with open(descriptor, "wb") as sink, pyarrow.ipc.new_file(sink, schema) as writer:
            for part in parts:
                short = [prompt for prompt in part if len(prompt.token_ids) <= longest]
                fingerprint, num_prompts = _add(digest, short), num_prompts + len(short)
                rows = [{"token_ids": p.token_ids, "difficulty": p.difficulty, "fields": _fields(p)} for p in part]
                writer.write_batch(pyarrow.RecordBatch.from_pylist(rows, schema))
        os.replace(name, folder / f"{key}-{num_prompts}-{fingerprint}-{sha256_of(Path(name))}.arrow")
    finally:
        Path(name).unlink(missing_ok=True)


def _fields(prompt: Prompt) -> str:
    """Return the other fields as JSON. Raise TypeError if they would not come back as they are."""
    fields = {name: getattr(prompt, name) for name in ("id", "text", "opening", "options", "answer", "meta")}
    fields["messages"] = None if prompt.messages is None else list(prompt.messages)
    text = json.dumps(fields)
    if repr(json.loads(text)) != repr(fields):
        raise TypeError(f"{prompt.id} has a column that JSON can't hold as it is")
    return text


def _add(digest: "hashlib._Hash", prompts: Iterable[Prompt]) -> str:
    for prompt in prompts:
        difficulty = "" if prompt.difficulty is None else f"{prompt.difficulty}\n"
        text = f"{prompt.id}\n{prompt.token_ids}\n{prompt.answer}\n{difficulty}"
        digest.update(text.encode(errors="surrogatepass"))
    return digest.hexdigest()[:16]
