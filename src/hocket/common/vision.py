"""Check and decode images.

The server and the trainer both use `decoded`, so that the same bytes are the same image for both.
"""

import base64
import functools
import hashlib
import http.client
import math
import urllib.request
from collections.abc import Collection
from contextlib import suppress
from io import BytesIO
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from PIL.Image import Image

# Limits of an image.
MAX_BYTES = 20 << 20
MAX_PIXELS = 1 << 25
# Limits of all images of a prompt. A request may have 64 MiB, and base64 is a third longer than the
# files. A server holds the pixels in memory: 400 MB.
MAX_IMAGES = 32
MAX_BYTES_TOGETHER = 40 << 20
MAX_PIXELS_TOGETHER = 1 << 27
# By kind of file: the bytes that mark it, somewhere in the first twelve.
MARKS = {
    "png": b"\x89PNG\r\n",
    "jpeg": b"\xff\xd8\xff",
    "webp": b"WEBP",
}
FETCH_S = 30.0  # seconds for a host to answer


class Stored(functools.partial[bytes]):
    """Reads the bytes of an image from its file when called.

    Its pickle is the bytes themselves: another process may not have the file.
    """

    def __reduce__(self) -> Any:
        return bytes, (self(),)


def kind_of(data: bytes) -> str:
    """Tell a file's kind: "png", "jpeg" or "webp". Raises ValueError for other files."""
    for name, mark in MARKS.items():
        if mark in data[:12]:
            return name
    raise ValueError(
        f"an image is no PNG, JPEG or WebP: it begins with {data[:12]!r}; convert it to one of "
        "these"
    )


def decoded(data: bytes) -> "Image":
    """Decode an image: in RGB, upright as its EXIF data says, on a white background.

    Raises ValueError for a file that is broken, animated, or has too many pixels. A file says its
    size at its beginning: one that would unpack to gigabytes is not decoded.
    """
    from PIL import Image, ImageOps

    if len(data) > MAX_BYTES:
        raise ValueError(
            f"an image has {len(data):,} bytes, more than {MAX_BYTES:,}: make it smaller"
        )
    too_large = f"an image has more than {MAX_PIXELS:,} pixels: make it smaller"
    try:
        image: Image.Image = Image.open(BytesIO(data), formats=[kind_of(data).upper()])
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(too_large)
        # A phone's JPEG (MPO) may have further images behind the first one: they are ignored.
        if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
            raise ValueError("an image is animated: save one of its frames")
        image.load()
        with suppress(Exception):  # odd EXIF data is ignored, as vLLM does
            image = ImageOps.exif_transpose(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(too_large) from error
    # Pillow raises all these for broken files.
    except (OSError, SyntaxError, EOFError, LookupError, TypeError, ArithmeticError) as error:
        raise ValueError(f"an image is damaged: {error}; save it again, or leave it out") from error
    # An RGB file may declare one colour transparent. vLLM shows that colour, and so does this.
    if image.mode != "RGB" and image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def check_all(files: Collection[bytes]) -> None:
    """Raise ValueError for images that are good, but together too much for a prompt."""
    from PIL import Image

    num_bytes = sum(map(len, files))
    num_pixels = 0
    for data in files:
        num_pixels += math.prod(Image.open(BytesIO(data)).size)
    if (
        len(files) > MAX_IMAGES
        or num_bytes > MAX_BYTES_TOGETHER
        or num_pixels > MAX_PIXELS_TOGETHER
    ):
        raise ValueError(
            f"{len(files)} images have {num_bytes:,} bytes and {num_pixels:,} pixels together, a "
            f"prompt takes {MAX_IMAGES} of {MAX_BYTES_TOGETHER:,} bytes and "
            f"{MAX_PIXELS_TOGETHER:,} pixels: leave some out, or make them smaller"
        )


def png(image: "Image") -> bytes:
    """Encode an image as a PNG file."""
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def file_name(data: bytes) -> str:
    """Name a file after its content, so that equal images are stored once: "SHA256.png"."""
    return f"{hashlib.sha256(data).hexdigest()}.{kind_of(data)}"


def data_url(data: bytes) -> str:
    """Write a file as a data URL: "data:image/png;base64,..."."""
    return f"data:image/{kind_of(data)};base64,{base64.b64encode(data).decode()}"


def from_text(text: str) -> bytes:
    """Decode base64 or a data URL. Raises ValueError for anything else."""
    if text.startswith("data:"):
        _, _, text = text.partition(",")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(
            f"an image is no base64: {error}; write data:image/png;base64,..."
        ) from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it may lead to a host that is not allowed."""

    def redirect_request(self, *args: Any) -> None:
        return None


def fetched(url: str, hosts: Collection[str], setting: str) -> bytes:
    """Download a file from one of the hosts.

    `setting` is the one that lists them. Raises ValueError for another host, or if the download
    fails. The result may be one byte longer than MAX_BYTES: `decoded` refuses it.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.hostname not in hosts:
        advice = f"allow it by {setting}: [{parts.hostname}], or put the file beside the data"
        raise ValueError(f"an image is at {url:.80}, whose host is not allowed: {advice}")
    try:
        with urllib.request.build_opener(_NoRedirects).open(url, timeout=FETCH_S) as response:
            return bytes(response.read(MAX_BYTES + 1))
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(
            f"an image can't be had from {url:.80}: {error}; put the file beside the data"
        ) from error


def part_of(data: bytes) -> dict[str, Any]:
    """Write an image as a part of a message in OpenAI's API."""
    return {"type": "image_url", "image_url": {"url": data_url(data)}}
