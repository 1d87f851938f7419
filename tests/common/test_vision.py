"""Pictures are checked before they are decoded; a bomb is known by its header."""

import struct
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO
from typing import Any

import pytest
from PIL import Image

from hocket.common import vision


def file_of(
    mode: str = "RGB", color: Any = "red", kind: str = "PNG", size: tuple[int, int] = (4, 2), **how: Any
) -> bytes:
    file = BytesIO()
    Image.new(mode, size, color).save(file, kind, **how)
    return file.getvalue()


def bomb(width: int, height: int) -> bytes:
    """Returns the beginning of a PNG that says it has this size."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rest = b"IDAT" + zlib.compress(b"\0" * 100)
    chunks = [struct.pack(">I", len(one) - 4) + one + struct.pack(">I", zlib.crc32(one)) for one in (header, rest)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_file_has_the_name_of_its_bytes_and_its_kind(kind: str) -> None:
    data = file_of(kind=kind)
    name = vision.file_name(data)
    assert name.endswith(f".{kind.lower()}")
    assert len(name.partition(".")[0]) == 64
    assert vision.from_text(vision.data_url(data)) == data
    assert vision.decoded(data).size == (4, 2)


@pytest.mark.filterwarnings("ignore:Truncated File Read")
def test_what_is_transparent_is_on_white_and_what_a_camera_turned_is_upright() -> None:
    assert vision.decoded(file_of("RGBA", (255, 0, 0, 0))).getpixel((0, 0)) == (255, 255, 255)
    assert vision.decoded(file_of("LA", (7, 255))).getpixel((0, 0)) == (7, 7, 7)
    assert vision.decoded(file_of("P", 0)).mode == vision.decoded(file_of("CMYK", (0, 0, 0, 0), "JPEG")).mode == "RGB"
    turned = Image.Exif()
    turned[0x0112] = 6
    assert vision.decoded(file_of(kind="JPEG", exif=turned)).size == (2, 4)
    odd = struct.pack(">6sHHIHHHIII", b"Exif\0\0", 0x4D4D, 42, 8, 1, 0x0131, 5, 1, 26, 0)  # a rational for a text
    assert vision.decoded(file_of(exif=odd)).size == (4, 2)


def test_a_phones_photo_is_its_first_picture() -> None:
    photo = file_of(kind="MPO", save_all=True, append_images=[Image.new("RGB", (2, 2))])
    assert vision.decoded(photo).size == (4, 2)


BROKEN = {
    "nothing": (b"", "no PNG, JPEG or WebP: it begins with b''"),
    "text": (b"see the picture", "no PNG, JPEG or WebP"),
    "gif": (file_of(kind="GIF"), "begins with b'GIF"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "convert it"),
    "truncated": (file_of(size=(64, 64), color="blue")[:-30], "damaged"),
    "truncated jpeg": (file_of(kind="JPEG", size=(64, 64))[:-200], "damaged"),
    "header alone": (file_of()[:20], "damaged"),
    "wrong checksum": (file_of()[:29] + b"\0\0\0\0" + file_of()[33:], "damaged"),
    "bomb": (bomb(60_000, 60_000), "more than 33,554,432 pixels"),
    "smaller bomb": (bomb(8_000, 12_000), "more than 33,554,432 pixels"),
    "small bomb": (bomb(8_000, 8_000), "more than 33,554,432 pixels"),
    "too many bytes": (file_of() + bytes(vision.MAX_BYTES), "more than 20,971,520: make it smaller"),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_or_huge_file_is_refused_by_name(name: str) -> None:
    data, message = BROKEN[name]
    with pytest.raises(ValueError, match=message):
        vision.decoded(data)


def test_a_prompt_has_so_many_images_of_so_many_bytes_and_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    one = file_of()
    vision.check_all([one] * vision.MAX_IMAGES)
    for files, limit, value in (
        ([one] * (vision.MAX_IMAGES + 1), "MAX_IMAGES", vision.MAX_IMAGES),
        ([one] * 2, "MAX_BYTES_TOGETHER", 2 * len(one) - 1),
        ([one] * 2, "MAX_PIXELS_TOGETHER", 15),
    ):
        monkeypatch.setattr(vision, limit, value)
        with pytest.raises(ValueError, match="leave some out"):
            vision.check_all(files)
        monkeypatch.undo()


def test_what_is_no_base64_is_refused() -> None:
    for text in ("data:image/png;base64,?", "not base64!"):
        with pytest.raises(ValueError, match="no base64"):
            vision.from_text(text)


@pytest.fixture
def host() -> Iterator[str]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302 if self.path == "/moved" else 200)
            self.send_header("Location", "http://localhost/secret")
            self.end_headers()
            self.wfile.write(b"a file")

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_only_hosts_that_are_named_are_asked_and_no_redirect_is_followed(host: str) -> None:
    assert vision.fetched(f"{host}/file", {"127.0.0.1"}, "hosts") == b"a file"
    with pytest.raises(ValueError, match="302"):
        vision.fetched(f"{host}/moved", {"127.0.0.1"}, "hosts")
    for url in (f"{host}/file", "file:///etc/passwd", "http://127.0.0.1@elsewhere/", "ftp://elsewhere/a.png"):
        with pytest.raises(ValueError, match=r"not allowed: allow it by data\.image_hosts"):
            vision.fetched(url, {"elsewhere.org"}, "data.image_hosts")
