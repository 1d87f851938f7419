"""Write versions as their changes since the version before (sync.backend=delta)."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from hocket.extras.delta import codec as delta
from hocket.protocol import TensorSpec, manifest, nccl
from hocket.sync.transports import Sending, Transport, transport
from hocket.sync.versions import Versions, WrittenVersion


@transport("delta")
def by_delta(sending: Sending, *, full_every: Annotated[int, Field(ge=1)] = 50) -> Transport:
    """Send the changes of a version. Each `full_every`-th version is sent in full, as is each that
    a server can't patch."""
    return sending.disk(write=DeltaWriter(sending.versions, full_every).write)


class DeltaWriter:
    """Writes changes; keeps the last version's tensors on the CPU to compare with."""

    def __init__(self, versions: Versions, full_every: int = 50) -> None:
        self._versions = versions
        self._full_every = full_every
        self._base: WrittenVersion | None = None  # the version that the next delta changes
        self._last: dict[str, torch.Tensor] = {}  # its tensors

    def write(self, version: int) -> WrittenVersion:
        """Write a version as a delta, or in full. Raise SyncError."""
        base = self._base
        if base is not None and base.version == version:
            return base
        self._base = None  # a failure from here on leaves tensors of both versions
        if base is None or version % self._full_every == 0:
            self._base = self._full(version)
        else:
            self._base = self._delta(version, base)
        return self._base

    def _full(self, version: int) -> WrittenVersion:
        self._last = {}
        written = self._versions.full(version)
        # Copied, as a tensor that was read may still be mapped to the file.
        self._last = {name: tensor.clone() for name, tensor in manifest.tensors(written.folder)}
        return written

    def _delta(self, version: int, base: WrittenVersion) -> WrittenVersion:
        changes: dict[str, delta.Change] = {}

        def sink(named: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in named:
                new = tensor.to("cpu", copy=True).contiguous()  # the bucket is used again
                changes[name] = delta.encode(self._last[name], new)
                self._last[name] = new

        def fill(folder: Path) -> Mapping[str, TensorSpec]:
            self._versions.trainer.stream(nccl.BUCKET_BYTES, sink)
            delta.save(changes, folder, base.checksum)
            return manifest.specs(self._last.items())

        written = self._versions.write("deltas", version, fill)
        changed = sum(change.num_changed for change in changes.values())
        share = changed / sum(map(torch.numel, self._last.values()))
        return written._replace(kind="delta", metrics={"sync/changed": share})
