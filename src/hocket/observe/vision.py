"""Keep the pictures of a run's rollouts in its folder, each once, by its SHA-256; show them small."""

import functools
import itertools
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hocket.common.files import naming, partial_of
from hocket.common.vision import Stored, data_url, decoded, file_name, from_text, png
from hocket.formats import ImageRow
from hocket.types import Image, TokenSequence

SHOWN = 160, 160  # pixels
MAX_SHOWN = 64  # of a prompt
_NAME = re.compile(r"[0-9a-f]{64}\.(?:png|jpeg|webp)")


def keep(folder: Path, sequence: TokenSequence) -> None:
    for image in sequence.images:
        path = _path(folder, image.name)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = partial_of(path)
            with naming(path):
                partial.write_bytes(image.data)
                partial.replace(path)


def image_of(row: ImageRow | str, folder: Path | None) -> Image:
    """Return a picture of a run's row, or that of a data URL. Raise ValueError without it."""
    if isinstance(row, str):
        data = from_text(row)
        return Image(file=data, name=file_name(data), start=0, length=0, placeholder=0)
    if folder is None:
        raise ValueError(f"an image is named {row!r:.80}, but no run's folder has it: send a data URL")
    path = _path(folder, row["file"])
    if not path.is_file():
        raise ValueError(f"a picture of its rollouts is missing: {path}; bring it back from a copy")
    return Image(
        file=Stored(path.read_bytes),
        name=path.name,
        start=row["start"],
        length=row["length"],
        placeholder=row["placeholder"],
    )


def small_pictures(folder: Path, files: Iterable[str]) -> dict[str, str]:
    """Return pictures of a run as small data URLs, without those that are damaged."""
    found = dict[str, str]()
    for file in itertools.islice(files, MAX_SHOWN):
        with suppress(OSError, ValueError):
            found[file] = _small(_path(folder, file))
    return found


def _path(folder: Path, name: str) -> Path:
    if not _NAME.fullmatch(str(name)):
        raise ValueError(f"{name!r:.80} is no picture of a run")
    return folder / "images" / name


@functools.lru_cache(maxsize=512)
def _small(path: Path) -> str:
    image = decoded(path.read_bytes())
    image.thumbnail(SHOWN)
    return data_url(png(image))
