"""Load versions that were published as their changes alone (sync.backend=delta)."""

import secrets
import shutil
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Literal

from pydantic import Field

from hocket import protocol
from hocket.server import versions
from hocket.server.engine import IncomingVersion
from hocket.server.errors import ApiError, parse
from hocket.server.parts import Server, server_part
from hocket.server.state import Held


@server_part("delta")
def install(server: Server) -> None:
    engine = server.engine
    copy = PatchedCopy(engine.root)

    async def find(source: protocol.OtherSource, version: int) -> IncomingVersion:
        delta = parse(DeltaSource, source.model_dump_json().encode())
        folder, described, _ = await engine.read_files(versions.read, engine.root, delta.name)
        expected = await engine.expected(None)
        versions.check_manifest(described, version, expected)
        patched = await engine.read_files(copy.patched, folder, described, engine.held)
        call = "hocket_load_disk", str(patched)
        return IncomingVersion(call, described.checksum, discard=copy.discard)

    engine.sources["delta"] = find


class DeltaSource(protocol.Strict):
    """A folder under the server's root with the changes since an earlier version."""

    kind: Literal["delta"]
    name: str = Field(min_length=1, max_length=512)


class PatchedCopy:
    """The server's own copy of the newest version, in a temporary folder, which deltas change."""

    def __init__(self, root: Path) -> None:
        self._root = root
        name = versions.temporary_prefix() + secrets.token_hex(8)
        self._folder = Path(tempfile.gettempdir(), name)
        self._checksum = ""  # of the version that the folder holds; "": none
        self._lock = threading.RLock()  # a call may still be running after its caller has given up
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def patched(self, folder: Path, described: protocol.Manifest, held: Held | None) -> Path:
        """Return a folder with all tensors of a version.

        Raise ApiError, also if the version that the delta changes is not here.
        """
        # It imports torch, which the server imports while its engine starts.
        from hocket.extras.delta import codec as delta

        with self._lock:
            try:
                base = delta.base_of(folder)
                if self._checksum not in (base, described.checksum):
                    self._copy(held, base)
                if self._checksum != described.checksum:  # a second time would undo it
                    delta.patch(self._folder, folder)
                    versions.check_headers(self._folder, described)
                self._checksum = described.checksum
            except ApiError:
                self.discard()
                raise
            # A full disk, or a damaged delta. A version in full needs no copy, and mends it.
            except Exception as error:
                self.discard()
                raise versions.refused(
                    f"the delta can't be applied: {type(error).__name__}: {error}"
                ) from error
            return self._folder

    def _copy(self, held: Held | None, base: str) -> None:
        """Copy the files of the version that the model holds, if that is the base."""
        source = held.source if held is not None and held.answer.checksum == base else None
        if not isinstance(source, protocol.DiskSource):
            reason = (
                "this is only what has changed since a version of which this server has no files"
            )
            raise ApiError(409, "no_base", reason, "publish the version in full")
        published = versions.find(self._root, source.name)
        self.discard()
        self._folder.mkdir(mode=0o700)
        for path in published.glob("*.safetensors"):
            shutil.copyfile(path, self._folder / path.name)

    def discard(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._checksum = ""
