"""Receive versions file by file, where trainer and server share no disk."""

import asyncio
import errno
import fcntl
import itertools
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from fastapi import Request

from hocket.common.files import complete_folder, partial_of
from hocket.protocol import DiskSource, manifest
from hocket.server import versions
from hocket.server.errors import ApiError, invalid
from hocket.server.parts import Server, router, server_part

FOLDER = "uploaded-weights"
"""The folder of versions under the server's root, to which each server adds a number; other folders
there are left alone."""
SILENCE_S = 60.0  # seconds without data after which an upload is broken off
_NAME = r"[0-9a-f]{8}-(weights|deltas)-v\d{6,12}"
_UPLOAD = re.compile(
    rf"{_NAME}/(\w[\w.-]{{0,99}}\.safetensors|adapter_config\.json|manifest\.json|COMPLETE)",
    re.ASCII,
)
_OURS = re.compile(rf"\.?{_NAME}(\.partial)?", re.ASCII)


@server_part("upload")
def install(server: Server) -> None:
    engine = server.engine
    uploads = Uploads(engine.root)
    routes = router()

    @routes.put("/upload/{name}/{file}")
    async def upload(name: str, file: str, request: Request) -> DiskSource:
        """Receive a file of a version from a trainer that shares no disk; COMPLETE comes last."""
        most = versions.max_bytes(await engine.expected(None))
        return await uploads.receive(name, file, request.stream(), most)

    server.app.include_router(routes)


class Uploads:
    """Receives versions. A version is hidden until its file COMPLETE comes."""

    def __init__(self, root: Path) -> None:
        self._folder = root / FOLDER  # replaced by the first folder that is free
        self._candidates = (root / f"{FOLDER}-{number}" for number in itertools.count(1))
        self._lock: IO[str] | None = None  # held on the folder
        # A file at a time: several together could exceed the limit that each of them keeps.
        self._receiving = asyncio.Lock()

    async def receive(
        self, name: str, file: str, chunks: AsyncIterator[bytes], max_bytes: int
    ) -> DiskSource:
        """Write a file of a version, whose files have at most `max_bytes` together."""
        if not _UPLOAD.fullmatch(f"{name}/{file}"):
            hint = (
                "send *.safetensors, manifest.json and, last, COMPLETE to a name like "
                "0123abcd-weights-v000001"
            )
            raise invalid(
                f"{name!r}, {file!r}: a version has no such name or file", hint, code="bad_name"
            )
        async with self._receiving:
            try:
                self._take_folder()
                folder = self._folder / name
                partial = partial_of(folder)
                if not partial.exists():
                    await asyncio.to_thread(self._make_room, name)
                    partial.mkdir(parents=True)
                others = sum(path.stat().st_size for path in partial.iterdir() if path.name != file)
                await self._write(partial / file, chunks, max_bytes - others)
                if file == manifest.COMPLETE_FILE:
                    # It replaces the same version, if that was sent before.
                    await asyncio.to_thread(complete_folder, folder)
            except OSError as error:
                shutil.rmtree(partial_of(self._folder / name), ignore_errors=True)
                full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
                status, code = (507, "disk_full") if full else (500, "upload_failed")
                hint = "make room under the server's sync.root, or set another one"
                message = f"can't write {file} to {self._folder}: {error.strerror}"
                raise ApiError(status, code, message, hint) from error
        return DiskSource(name=f"{self._folder.name}/{name}")

    def _take_folder(self) -> None:
        """Take a folder that no other server has; a lock marks it until this process ends."""
        while self._lock is None:
            self._folder = next(self._candidates)
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = partial_of(self._folder).open("w")
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._lock = lock

    async def _write(self, path: Path, chunks: AsyncIterator[bytes], max_bytes: int) -> None:
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(SILENCE_S) as silence:
                with path.open("wb") as file:
                    async for chunk in chunks:
                        max_bytes -= len(chunk)
                        if max_bytes < 0:
                            message = "this is more than a version can have"
                            raise ApiError(
                                413, "upload_too_large", message, "is it of the same model?"
                            )
                        silence.reschedule(None)
                        await asyncio.to_thread(file.write, chunk)
                        silence.reschedule(clock() + SILENCE_S)
        except TimeoutError as error:
            message = f"nothing came for {SILENCE_S:g} s"
            raise ApiError(408, "body_timeout", message, "send the version again") from error

    def _make_room(self, name: str) -> None:
        """Remove other versions but the newest, and the newest complete one: the server may hold
        it."""
        others = [
            path
            for path in self._folder.glob("*")
            if _OURS.fullmatch(path.name) and name not in path.name
        ]
        others.sort(key=lambda path: path.stat().st_mtime)
        complete = [path for path in others if not path.name.startswith(".")]
        for old in set(others) - set(others[-1:]) - set(complete[-1:]):
            shutil.rmtree(old, ignore_errors=True)
