"""Write files and folders atomically; say what is in a folder. Standard library only."""

import hashlib
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

TAIL_BYTES = 1 << 16  # read from the end of a program's output


def sha256_of(path: Path) -> str:
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
    """Replace a file's content; no reader sees a part."""
    partial = partial_of(path)
    with naming(path):
        try:
            partial.write_text(
                text, encoding="utf-8", errors="replace"
            )  # JSON may hold half a surrogate pair
            os.replace(partial, path)
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in an OSError of the body: where a write fails, Python does not."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or str(path)
        raise


def kind_of(folder: Path) -> str:
    """Return "model" or "adapter" (a version is one of them), "checkpoint", "run", or ""."""
    marks = (
        ("config.json", "model"),
        ("adapter_config.json", "adapter"),
        ("state.json", "checkpoint"),
    )
    return next(
        (kind for name, kind in (*marks, ("metrics.jsonl", "run")) if (folder / name).is_file()), ""
    )


def newest_version(path: str) -> str:
    """Return the newest version of a run folder, or what sft has made in it; another path as it is."""
    folder = Path(path)
    models = (file.parent for file in folder.glob("model/config.json"))
    made = [*models, *numbered(folder / "weights", "v*", "COMPLETE").values()]
    return str(made[-1]) if made and kind_of(folder) == "run" else path


def numbered(folder: Path, name: str, holds: str = "") -> dict[int, Path]:
    """Find what a run numbers, lowest number first: `name` is "v*" or the like. Other names there are a user's."""
    made = re.compile(name.replace("*", r"(\d{6,})"), re.ASCII)
    found = ((made.fullmatch(path.name), path) for path in folder.glob(name))
    return dict(
        sorted((int(match[1]), path) for match, path in found if match and (path / holds).exists())
    )


def unused(path: Path) -> Path:
    """Return the path, or the first of path-2, path-3, ... that does not exist."""
    others = (path.with_name(f"{path.name}-{i}") for i in itertools.count(2))
    return next(one for one in itertools.chain([path], others) if not one.exists())


def make_unused(path: Path) -> Path:
    """Make the folder `unused` returns: of two processes that ask at the same time, each gets another."""
    while True:
        folder = unused(path)
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


def partial_of(path: Path) -> Path:
    """Return the hidden name of what is not complete."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `path` after the body; a failing body leaves nothing."""
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
    mode = (
        partial.stat().st_mode & 0o666
    )  # safetensors writes for the owner alone; a server may run as another user
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
    """Remove a folder, renamed first: no reader may take half of it for complete."""
    partial = partial_of(path)
    shutil.rmtree(partial, ignore_errors=True)
    path.rename(partial)
    shutil.rmtree(partial)


def last_lines(file: IO[bytes], most: int = 1, *, begin: int = 0, between: str = " | ") -> str:
    """Return the last lines that a program wrote, from byte `begin` on, as one."""
    file.seek(max(begin, file.seek(0, os.SEEK_END) - TAIL_BYTES))
    lines = file.read().decode("utf-8", "replace").rstrip().splitlines()
    return between.join(line.strip() for line in lines[-most:])
