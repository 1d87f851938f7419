"""Load versions of which only what changed was published (sync.backend=delta)."""

import shutil
import tempfile
import threading
from pathlib import Path

from hocket import protocol
from hocket.server import versions
from hocket.server.engine import Engine, Found, Held
from hocket.server.errors import ApiError


def install(engine: Engine) -> None:
    copy = PatchedCopy(engine.root)

    async def find(source: protocol.DeltaSource, version: int) -> Found:
        folder, described, _ = await engine.reading(versions.read, engine.root, source.name)

        async def prepare() -> tuple[str, ...]:
            expected = await engine.expected(None)
            await engine.reading(versions.check_manifest, described, version, expected)
            patched = await engine.reading(copy.patched, folder, described, engine.held)
            return "hocket_load_disk", str(patched), ""

        return Found(source.name, described.checksum, prepare, discard=copy.discard)

    engine.sources["delta"] = find


class PatchedCopy:
    """Keep the server's own copy of the newest version, in a temporary folder, and apply deltas to it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._checksum = ""
        self._lock = threading.RLock()  # a call may still be running after its caller has given up

    def patched(self, folder: Path, described: protocol.Manifest, held: Held | None) -> Path:
        """Return a folder with all tensors of a checked version; a delta of another one is refused with 409."""
        with self._lock:
            try:
                return self._patched(folder, described, held)
            # Whatever it is, a full disk or a delta of nonsense: the version in full needs no copy.
            except Exception as error:
                self.discard()
                if isinstance(error, ApiError):
                    raise
                raise versions.refused(f"the delta can't be applied: {type(error).__name__}: {error}") from error

    def _patched(self, folder: Path, described: protocol.Manifest, held: Held | None) -> Path:
        from hocket.protocol import delta  # with torch, which the server imports in parallel to its engine

        base = delta.base_of(folder)
        if self._folder is None or self._checksum not in (base, described.checksum):
            self.discard()
            if held is None or held.answer.checksum != base:
                reason = "this is only what has changed since a version of which this server has no files"
                raise ApiError(409, "no_base", reason, "publish the version in full")
            self._folder = tempfile.TemporaryDirectory(prefix=versions.temporary_prefix())
            for path in versions.find(self._root, held.key).glob("*.safetensors"):
                shutil.copyfile(path, Path(self._folder.name, path.name))
        copy = Path(self._folder.name)
        if self._checksum != described.checksum:  # a second time would undo it
            delta.patch(copy, folder)
        versions.check_headers(copy, described)
        self._checksum = described.checksum
        return copy

    def discard(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = None
        self._checksum = ""
