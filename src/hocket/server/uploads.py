"""Versions that the trainer sends file by file, where it and the server see no common disk."""

import asyncio
import errno
import re
import shutil
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from hocket import manifest
from hocket.protocol import UploadResponse
from hocket.server.errors import ApiError, invalid

FOLDER = "uploaded-weights"
"""Where they are kept, under the server's root. What has other names there than ours is left alone."""
SILENCE_S = 60.0
_NAME = re.compile(r"[0-9a-f]{8}-(weights|deltas)-v\d{6,12}")
_FILE = re.compile(r"\w[\w.-]{0,99}\.safetensors")


class Uploads:
    """Sent versions under the server's root: hidden until the COMPLETE marker comes, removed when they have served.

    Args:
        root: the server's.
        silence_s: a sender that sends nothing for so long is given up.
    """

    def __init__(self, root: Path, silence_s: float = SILENCE_S) -> None:
        self._folder = root / FOLDER
        self._silence_s = silence_s
        self._writing: dict[str, asyncio.Lock] = {}  # by version

    async def receive(self, name: str, file: str, chunks: AsyncIterator[bytes], max_bytes: int) -> UploadResponse:
        """Takes one file of the version called `name`; the marker makes it a version.

        Args:
            max_bytes: of all files of a version.

        Raises:
            ApiError: a name that no version or file has, 408, 413, or 507 where the disk is full.
        """
        if not _NAME.fullmatch(name) or not (
            _FILE.fullmatch(file) or file in (manifest.ADAPTER_FILE, manifest.MANIFEST_FILE, manifest.COMPLETE_FILE)
        ):
            hint = "send *.safetensors, manifest.json and, last, COMPLETE to a name like 0123abcd-weights-v000001"
            raise invalid(f"{name!r}, {file!r}: a version has no such name or file", hint, code="bad_name")
        partial, folder = self._folder / f".{name}.partial", self._folder / name
        # One file at a time, or each of several could have all the room that there is.
        async with self._writing.setdefault(name, asyncio.Lock()):
            return await self._receive(partial, folder, file, chunks, max_bytes)

    async def _receive(
        self, partial: Path, folder: Path, file: str, chunks: AsyncIterator[bytes], max_bytes: int
    ) -> UploadResponse:
        try:
            partial.mkdir(parents=True, exist_ok=True)
            await self._write(partial / file, chunks, max_bytes - _size(partial, without=file))
            if file == manifest.COMPLETE_FILE:
                shutil.rmtree(folder, ignore_errors=True)  # the same, sent before
                partial.rename(folder)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            status, code = (507, "disk_full") if full else (500, "upload_failed")
            hint = "make room under the server's sync.root, or set another one"
            raise ApiError(status, code, f"can't write {file} to {self._folder}: {error.strerror}", hint) from error
        return UploadResponse(name=f"{FOLDER}/{folder.name}")

    async def _write(self, path: Path, chunks: AsyncIterator[bytes], max_bytes: int) -> None:
        with path.open("wb") as file:
            try:
                while True:
                    async with asyncio.timeout(self._silence_s):
                        chunk = await anext(chunks, None)
                    if chunk is None:
                        return
                    max_bytes -= len(chunk)
                    if max_bytes < 0:
                        raise ApiError(
                            413, "upload_too_large", "this is more than a version can have", "is it of the same model?"
                        )
                    await asyncio.to_thread(file.write, chunk)
            except TimeoutError as error:
                raise ApiError(
                    408, "body_timeout", f"nothing came for {self._silence_s:g} s", "send the version again"
                ) from error

    def present(self) -> set[Path]:
        """Returns the folders of all versions, whole or not."""
        if not self._folder.is_dir():
            return set()
        return {
            path for path in self._folder.iterdir() if _NAME.fullmatch(_version(path)) and not self._is_coming(path)
        }

    def _is_coming(self, folder: Path) -> bool:
        lock = self._writing.get(_version(folder))
        return lock is not None and lock.locked()

    def remove(self, folders: Iterable[Path], held: str) -> None:
        """Removes versions, but for the one that the server holds, by its name under the root."""
        for folder in folders:
            if folder != self._folder.parent / held and not self._is_coming(folder):
                self._writing.pop(_version(folder), None)
                shutil.rmtree(folder, ignore_errors=True)


def _version(folder: Path) -> str:
    return folder.name.removeprefix(".").removesuffix(".partial")


def _size(folder: Path, without: str) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.name != without)
