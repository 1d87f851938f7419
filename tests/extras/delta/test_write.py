"""Deltas on disk, against a fake server that reads the folders as a real one does."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.sync.test_disk import cut, flip, hurt_once, no_room, remove

from hocket.errors import ConfigError, ServerError
from hocket.extras.delta import codec as delta
from hocket.extras.delta.load import PatchedCopy
from hocket.protocol import ReloadRequest, manifest
from support import fakes
from support.disk import Disk, FileServer


class DeltaServer(FileServer):
    """Makes whole versions of deltas, in a copy, as an engine does."""

    def __init__(self, url: str, root: Path) -> None:
        super().__init__(url, root)
        self.copy = PatchedCopy(root.resolve())

    def whole(self, folder: Path, request: ReloadRequest, described: manifest.Manifest) -> Path:
        return self.copy.patched(folder, described, self.held) if request.source.kind == "delta" else folder


class Deltas(Disk):
    """The folders of a run that writes what has changed."""

    def __init__(self, tmp_path: Path, backend: str = "delta") -> None:
        super().__init__(tmp_path, f"sync.backend={backend}")


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], FileServer]:
    (tmp_path / "copies").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "copies"))
    monkeypatch.setattr("hocket.sync.disk.REST_S", 0.0)
    numbers = itertools.count()
    return lambda: DeltaServer(f"http://{next(numbers)}", tmp_path / "runs")


async def test_a_change_that_the_disk_has_no_room_for_is_tried_as_a_whole_version(tmp_path: Path, servers: Any) -> None:
    await no_room(Deltas(tmp_path), servers())


@pytest.mark.parametrize("harm", [flip, cut, remove])
async def test_a_version_whose_files_were_hurt_is_published_once_more_and_changes_go_on_from_it(
    harm: Callable[[Path], None], tmp_path: Path, servers: Any
) -> None:
    await hurt_once(Deltas(tmp_path), servers(), servers(), harm)


async def test_after_the_first_version_only_what_changed_is_written(tmp_path: Path, servers: Any) -> None:
    disk, server = Deltas(tmp_path), servers()
    _, metrics = await disk.deliver(1, server)
    assert ("sync/changed" in metrics, disk.names()) == (False, ["weights/v000001"])
    disk.step(3, 700)
    _, metrics = await disk.deliver(2, server)
    folder = disk.run / "deltas" / "v000002"
    assert sorted(path.name for path in folder.iterdir()) == ["COMPLETE", "delta.safetensors", "manifest.json"]
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # whoever may read one may read all
    made, base = fakes.manifest_of(folder), fakes.manifest_of(disk.run / "weights" / "v000001")
    assert (made.version, delta.base_of(folder)) == (2, base.checksum)
    assert made.tensors == manifest.specs(disk.trainer.weights.items())
    assert metrics["sync/changed"] == 2 / (40 * 50 + 9)
    assert sorted(load_file(folder / "delta.safetensors")) == ["a"]
    assert metrics["sync/mebibytes"] == disk.size("deltas/v000002")


@pytest.mark.parametrize(
    ("full_every", "keep", "full", "left"),
    [
        (50, 1, [1], ["deltas/v000007", "weights/v000001"]),
        (3, 2, [1, 3, 6], ["deltas/v000005", "deltas/v000007", "weights/v000003", "weights/v000006"]),
    ],
)
async def test_a_chain_of_deltas_and_full_versions_ends_bit_by_bit_where_a_full_version_would(
    tmp_path: Path, servers: Any, monkeypatch: pytest.MonkeyPatch, full_every: int, keep: int, full: Any, left: Any
) -> None:
    monkeypatch.setattr("hocket.sync.versions.KEEP", keep)
    disk, server = Deltas(tmp_path, f"{{name: delta, full_every: {full_every}}}"), servers()
    for version in range(1, 8):
        disk.step(version, 100 * version)
        await disk.deliver(version, server)
    kinds = ["weights" if version in full else "deltas" for version in range(1, 8)]
    assert server.names == [f"{kind}/v00000{version}" for version, kind in enumerate(kinds, 1)]
    assert (disk.trainer.exports, disk.names()) == (len(full), left)  # the newest of both kinds are kept


async def test_a_server_that_lacks_the_base_is_sent_the_same_version_in_full(tmp_path: Path, servers: Any) -> None:
    disk, server, late = Deltas(tmp_path), servers(), servers()
    await disk.deliver(1, server)
    disk.step(5)
    _, metrics = await disk.deliver(2, server, late)
    assert (server.names, late.names) == (["weights/v000001", "deltas/v000002"], ["deltas/v000002", "weights/v000002"])
    mebibytes = disk.size("deltas/v000002") + disk.size("weights/v000002") / 2
    assert metrics["sync/mebibytes"] == pytest.approx(mebibytes)
    assert len(disk.said) == 1
    assert f"version 2 goes to {late.url} in full: this is only what has changed since" in disk.said[0]
    disk.step(6)
    await disk.deliver(3, server, late)
    assert (server.names[-1], late.names[-1], len(disk.said)) == ("deltas/v000003", "deltas/v000003", 1)


async def test_a_comparison_sends_the_same_files_again_and_its_finding_is_no_reason_to_send_more(
    tmp_path: Path, servers: Any
) -> None:
    disk, server = Deltas(tmp_path), servers()
    for version in (1, 2):
        await disk.deliver(version, server)
        await disk.deliver(version, server, compare=True)
        disk.step(5)
    assert server.names == ["weights/v000001"] * 2 + ["deltas/v000002"] * 2
    assert [request.compare for request in server.requests] == [False, True] * 2
    server.errors["reload"] = ServerError("the model differs in a", code="not_held", status=409)
    assert (await disk.deliver(2, server, compare=True))[0] == [server.errors["reload"]]
    assert (disk.trainer.exports, disk.said) == (1, [])


async def test_a_version_is_saved_as_a_complete_model_whatever_was_sent(tmp_path: Path, servers: Any) -> None:
    disk, server = Deltas(tmp_path), servers()
    for _ in range(2):
        disk.versions.current += 1
        disk.step(disk.versions.current)
        await disk.deliver(disk.versions.current, server)
    folder = disk.versions.save()
    assert folder == disk.versions.save() == disk.run / "weights" / "v000002"
    assert (fakes.manifest_of(folder).version, disk.trainer.exports) == (2, 2)
    assert torch.equal(load_file(folder / "model.safetensors")["a"], disk.trainer.weights["a"])
    disk.step(9)
    await disk.deliver(3, server)
    assert server.names[-1] == "deltas/v000003"  # of version 2, whichever of its folders the server has


def test_an_unknown_transport_lists_that_of_deltas_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sync.backend: there is no transport 'timed'; known: delta, disk, nccl;"):
        Disk(tmp_path, "sync.backend=timed")
