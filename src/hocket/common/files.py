"""Write files and folders atomically; tell the kinds of hocket's folders apart.

Standard library only.
"""

import hashlib
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

SHARED_MEMORY = Path("/dev/shm")  # Linux keeps these files in memory
VERSIONS_PREFIX = "hocket-versions-"  # begins the names of folders of weight versions there
_PACKAGE = Path(__file__).parents[1]
_SHIPPED = ("config", "checkpoints", "examples")  # top folders of what `shipped` finds
TAIL_BYTES = 1 << 16  # bytes from the end of a program's output in which lines are looked for


def sha256_of(path: Path) -> str:
    """Hash a file's content, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Sync a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content; no reader sees a part of it."""
    partial = partial_of(path)
    with naming(path):
        try:
            # JSON may hold half a surrogate pair, which has no encoding: a ? takes its place.
            partial.write_text(text, encoding="utf-8", errors="replace")
            os.replace(partial, path)
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError of the body: Python leaves it out where a write fails."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or str(path)
        raise


def kind_of(folder: Path) -> str:
    """Tell what a folder holds: "model", "adapter", "checkpoint" or "run"; "" for anything else.

    A version of the weights is a model or an adapter.
    """
    marks = {
        "config.json": "model",
        "adapter_config.json": "adapter",
        "state.json": "checkpoint",
        "metrics.jsonl": "run",
    }
    for name, kind in marks.items():
        if (folder / name).is_file():
            return kind
    return ""


def shipped(path: str) -> str:
    """Find a file or folder of hocket's own where the working folder has none of that name.

    hocket has config/, checkpoints/ and examples/own_everything: a wheel brings them, a checkout is
    their place. Any other path is returned as it is.
    """
    parts = Path(path).parts
    if not parts or parts[0] not in _SHIPPED or Path(path).exists():
        return path
    return str(_own(path) or path)


def docs(page: str = "") -> str:
    """Find a page of hocket's docs, or their folder; below the working folder it is relative."""
    file = _own(f"docs/{page}") or Path("docs", page)
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)


def _own(path: str) -> Path | None:
    """Find a file or folder in the wheel or, in a checkout, in its root."""
    places = (_PACKAGE / "shipped" / path, _PACKAGE.parents[1] / path)
    return next(filter(Path.exists, places), None)


def unshipped(path: str) -> str:
    """Write a path in the wheel as `shipped` takes it: a run may go on with another installation.

    Any other path is returned as it is.
    """
    root = _PACKAGE / "shipped"
    return str(Path(path).relative_to(root)) if Path(path).is_relative_to(root) else path


def newest_version(path: str) -> str:
    """Find the newest version of the weights in a run folder, or the model that sft has made there.

    A path that is no run folder, or has neither, is returned as it is.
    """
    folder = Path(path)
    if kind_of(folder) != "run":
        return path
    versions = list(numbered(folder / "weights", "v*", "COMPLETE").values())
    if versions:
        return str(versions[-1])
    model = folder / "model"
    return str(model) if (model / "config.json").exists() else path


def numbered(folder: Path, name: str, holds: str = "") -> dict[int, Path]:
    """Find the files or folders that a run numbers, lowest number first.

    `name` has a * for the number, such as "v*". With `holds`, only folders that have a file of that
    name. Other names in the folder are the user's.
    """
    pattern = re.compile(name.replace("*", r"(\d{6,})"), re.ASCII)
    pairs = []
    for path in folder.glob(name):
        match = pattern.fullmatch(path.name)
        if match and (path / holds).exists():  # with "" this is the path itself
            pairs.append((int(match[1]), path))
    return dict(sorted(pairs))


def unused(path: Path) -> Path:
    """Choose the path, or the first of path-2, path-3, ... if it exists.

    After path-2, which was chosen so itself, comes path-3.
    """
    candidate = path
    first, _, number = path.name.rpartition("-")
    if number.isdecimal() and first and path.with_name(first).exists():
        path = path.with_name(first)
    numbers = itertools.count(2)
    while candidate.exists():
        candidate = path.with_name(f"{path.name}-{next(numbers)}")
    return candidate


def make_unused(path: Path) -> Path:
    """Make the folder that `unused` chooses. No two processes get the same one."""
    while True:
        folder = unused(path)
        with suppress(FileExistsError):  # another process has made it meanwhile
            folder.mkdir(parents=True)
            return folder


def partial_of(path: Path) -> Path:
    """Make the hidden name that a file or folder has until it is complete."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `path` after the body; if that raises, it is removed."""
    partial = partial_of(path)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        complete_folder(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def complete_folder(path: Path) -> None:
    """Sync the partial folder of `path` to the disk and put it in the place of `path`."""
    partial = partial_of(path)
    old = path.with_name(f".{path.name}.old")
    # safetensors writes files that only the owner can read, and a server may run as another user:
    # the files get the permissions of the folder.
    mode = partial.stat().st_mode & 0o666
    for file in filter(Path.is_file, partial.iterdir()):
        file.chmod(mode)
        flush(file)
    flush(partial)
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    partial.rename(path)
    flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Remove a folder. It is renamed first, so that no reader takes half of it for complete."""
    partial = partial_of(path)
    shutil.rmtree(partial, ignore_errors=True)
    path.rename(partial)
    shutil.rmtree(partial)


def is_in_memory(folder: Path) -> bool:
    """Check whether a folder is a weight version in shared memory; links are to be resolved."""
    run = folder.parent
    return run.parent == SHARED_MEMORY and run.name.startswith(VERSIONS_PREFIX)


def last_lines(file: IO[bytes], most: int = 1, *, begin: int = 0, between: str = " | ") -> str:
    """Read the last `most` lines of a program's output from byte `begin` on.

    Returns them as one text, with `between` between them.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(begin, size - TAIL_BYTES))
    lines = file.read().decode("utf-8", "replace").rstrip().splitlines()
    return between.join(line.strip() for line in lines[-most:])
