"""Keep the pictures of a run's rollouts in its folder, each once, by its SHA-256; show them small."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hocket.common.files import naming, partial_of
from hocket.common.images import data_url, decoded, file_name, from_text, png
from hocket.types import Image, TokenSequence

SHOWN = 160, 160  # pixels
MAX_SHOWN = 64  # of a prompt
_NAME = re.compile(r"[0-9a-f]{64}\.(?:png|jpeg|webp)")


def told(sequence: TokenSequence) -> list[dict[str, Any]]:
    """Return the pictures of a sequence as its row names them."""
    return [{**dataclasses.asdict(one), "file": file_name(one.data)} for one in sequence.images]


def keep(folder: Path, sequence: TokenSequence) -> None:
    for image in sequence.images:
        path = _path(folder, file_name(image.data))
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = partial_of(path)
            with naming(path):
                partial.write_bytes(image.data)
                partial.replace(path)


def image_of(row: Any, folder: Path | None) -> Image:
    """Return a picture of a run's row, or that of a data URL. Raise ValueError without it."""
    if isinstance(row, str):
        return Image(file=from_text(row), start=0, length=0, placeholder=0)
    if folder is None:
        raise ValueError(f"an image is named {row!r:.80}, but no run's folder has it: send a data URL")
    path = _path(folder, row["file"])
    if not path.is_file():
        raise ValueError(f"a picture of its rollouts is missing: {path}; bring it back from a copy")
    return Image(**{**row, "file": path})


def shown(folder: Path, row: Mapping[str, Any], known: dict[str, str]) -> dict[str, str]:
    """Return the pictures of a row that are not known yet, as small data URLs by file."""
    new = dict[str, str]()
    for image in row.get("images", ()):
        if image["file"] not in known and len(known) < MAX_SHOWN:
            with suppress(OSError, ValueError):
                known[image["file"]] = new[image["file"]] = _small(_path(folder, image["file"]))
    return new


def _path(folder: Path, name: str) -> Path:
    if not _NAME.fullmatch(str(name)):
        raise ValueError(f"{name!r:.80} is no picture of a run")
    return folder / "images" / name


@functools.lru_cache(maxsize=512)
def _small(path: Path) -> str:
    image = decoded(path.read_bytes())
    image.thumbnail(SHOWN)
    return data_url(png(image))
