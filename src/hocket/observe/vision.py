"""Keep the images of a run's rollouts in its folder, each once, under its SHA-256."""

import re
from pathlib import Path

from hocket.common.files import naming, partial_of
from hocket.common.vision import Stored, file_name, from_text
from hocket.formats import ImageRow
from hocket.types import Image, TokenSequence

_NAME = re.compile(r"[0-9a-f]{64}\.(?:png|jpeg|webp)")


def keep(folder: Path, sequence: TokenSequence) -> None:
    """Write the images of a sequence that a run folder does not have yet."""
    for image in sequence.images:
        path = picture_path(folder, image.name)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = partial_of(path)
            with naming(path):
                partial.write_bytes(image.data)
                partial.replace(path)


def image_of(row: ImageRow | str, folder: Path | None) -> Image:
    """Read an image: a data URL, or one that a run's row describes and its `folder` has.

    Raises ValueError where it is missing or damaged.
    """
    if isinstance(row, str):
        data = from_text(row)
        return Image(file=data, name=file_name(data), start=0, length=0, placeholder=0)
    if folder is None:
        raise ValueError(
            f"an image is named {row!r:.80}, but no run's folder has it: send a data URL"
        )
    path = picture_path(folder, row["file"])
    if not path.is_file():
        raise ValueError(f"a picture of its rollouts is missing: {path}; bring it back from a copy")
    return Image(
        file=Stored(path.read_bytes),
        name=path.name,
        start=row["start"],
        length=row["length"],
        placeholder=row["placeholder"],
    )


def picture_path(folder: Path, name: str) -> Path:
    """Find the file of an image. Raises ValueError for a name that a run does not give to one."""
    if not _NAME.fullmatch(str(name)):
        raise ValueError(f"{name!r:.80} is no picture of a run")
    return folder / "images" / name
