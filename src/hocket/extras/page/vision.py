"""Show the pictures of a run's rollouts small, on its page."""

import functools
import itertools
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hocket.common.vision import data_url, decoded, png
from hocket.observe.vision import picture_path

SHOWN = 160, 160  # pixels
MAX_SHOWN = 64  # of a prompt


def small_pictures(folder: Path, files: Iterable[str]) -> dict[str, str]:
    """Return pictures of a run as small data URLs, without those that are damaged."""
    urls: dict[str, str] = {}
    for file in itertools.islice(files, MAX_SHOWN):
        with suppress(OSError, ValueError):
            urls[file] = _small(picture_path(folder, file))
    return urls


@functools.lru_cache(maxsize=512)
def _small(path: Path) -> str:
    image = decoded(path.read_bytes())
    image.thumbnail(SHOWN)
    return data_url(png(image))
