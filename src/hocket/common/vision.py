"""Check and decode pictures. Whoever sees one, on either side, sees what `decoded` makes of its bytes."""

import base64
import functools
import hashlib
import http.client
import math
import urllib.request
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from io import BytesIO
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 20 << 20  # of a file
MAX_PIXELS = 1 << 25
MAX_IMAGES = 32  # of a prompt
MAX_BYTES_TOGETHER = (
    40 << 20
)  # of a prompt's files: a request has 64 MiB, and base64 is a third longer
MAX_PIXELS_TOGETHER = 1 << 27  # of a prompt, which a server has in memory: 400 MB
MARKS = {
    "png": b"\x89PNG\r\n",
    "jpeg": b"\xff\xd8\xff",
    "webp": b"WEBP",
}  # within the first twelve bytes
FETCH_S = 30.0


class Stored(functools.partial[bytes]):
    """Reads a picture from its file. Sent to another process, which may not have that, it is the bytes."""

    def __reduce__(self) -> Any:
        return bytes, (self(),)


def kind_of(data: bytes) -> str:
    """Return "png", "jpeg" or "webp". Raise ValueError for other files."""
    kind = next((name for name, mark in MARKS.items() if mark in data[:12]), None)
    if kind is None:
        raise ValueError(
            f"an image is no PNG, JPEG or WebP: it begins with {data[:12]!r}; convert it to one of these"
        )
    return kind


def decoded(data: bytes) -> "Image":
    """Return a picture in RGB, upright, on white. Raise ValueError for one that is broken, or has too many pixels.

    A file says its size first: what would unpack to gigabytes is not decoded.
    """
    from PIL import Image, ImageOps

    if len(data) > MAX_BYTES:
        raise ValueError(
            f"an image has {len(data):,} bytes, more than {MAX_BYTES:,}: make it smaller"
        )
    bomb = f"an image has more than {MAX_PIXELS:,} pixels: make it smaller"
    try:
        image: Image.Image = Image.open(BytesIO(data), formats=[kind_of(data).upper()])
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(bomb)
        if (
            image.format != "MPO" and getattr(image, "n_frames", 1) > 1
        ):  # a phone's JPEG may have more behind it
            raise ValueError("an image is animated: save one of its frames")
        image.load()
        with suppress(Exception):  # of odd EXIF, as vLLM does
            image = ImageOps.exif_transpose(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(bomb) from error
    except (
        OSError,
        SyntaxError,
        EOFError,
        LookupError,
        TypeError,
        ArithmeticError,
    ) as error:  # as Pillow raises them
        raise ValueError(f"an image is damaged: {error}; save it again, or leave it out") from error
    if (
        image.mode != "RGB" and image.has_transparency_data
    ):  # vLLM shows the colour that an RGB file leaves out
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def check_all(files: Collection[bytes]) -> None:
    """Raise ValueError for good images that are too much for a prompt."""
    from PIL import Image

    size = sum(map(len, files))
    pixels = sum(math.prod(Image.open(BytesIO(data)).size) for data in files)
    if len(files) > MAX_IMAGES or size > MAX_BYTES_TOGETHER or pixels > MAX_PIXELS_TOGETHER:
        most = f"a prompt takes {MAX_IMAGES} of {MAX_BYTES_TOGETHER:,} bytes and {MAX_PIXELS_TOGETHER:,} pixels"
        what = f"{len(files)} images have {size:,} bytes and {pixels:,} pixels together"
        raise ValueError(f"{what}, {most}: leave some out, or make them smaller")


def png(image: "Image") -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def file_name(data: bytes) -> str:
    return f"{hashlib.sha256(data).hexdigest()}.{kind_of(data)}"


def data_url(data: bytes) -> str:
    return f"data:image/{kind_of(data)};base64,{base64.b64encode(data).decode()}"


def from_text(text: str) -> bytes:
    """Return the bytes of base64 or a data URL. Raise ValueError where they are neither."""
    try:
        return base64.b64decode(
            text.partition(",")[2] if text.startswith("data:") else text, validate=True
        )
    except ValueError as error:
        raise ValueError(
            f"an image is no base64: {error}; write data:image/png;base64,..."
        ) from error


class _Stays(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it may lead to a host that is not allowed."""

    def redirect_request(self, *args: Any) -> None:
        return None


def fetched(url: str, hosts: Collection[str], setting: str) -> bytes:
    """Return the file at a URL of one of the hosts. Raise ValueError for another, or where none comes."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.hostname not in hosts:
        advice = f"allow it by {setting}: [{parts.hostname}], or put the file beside the data"
        raise ValueError(f"an image is at {url:.80}, whose host is not allowed: {advice}")
    try:
        with urllib.request.build_opener(_Stays).open(url, timeout=FETCH_S) as answer:
            return bytes(answer.read(MAX_BYTES + 1))
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(
            f"an image can't be had from {url:.80}: {error}; put the file beside the data"
        ) from error


def part_of(data: bytes) -> dict[str, Any]:
    """Return a picture as a part of a message of OpenAI's API."""
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def shown(
    messages: Iterable[Mapping[str, Any]], images: Iterable[bytes]
) -> Iterator[dict[str, Any]]:
    """Yield messages as OpenAI's API has them, each part {"type": "image"} with the next picture."""
    parts = map(part_of, images)
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            content = [next(parts) if part["type"] == "image" else part for part in content]
        yield {**message, "content": content}
