"""Versions in memory, in a folder of the test in place of /dev/shm."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from hocket.config import load
from hocket.errors import ServerError, SyncError
from hocket.protocol import ReloadRequest, ReloadResponse
from hocket.server import versions as server_versions
from hocket.server.errors import ApiError
from hocket.sync import memory
from hocket.sync.disk import DiskTransport
from hocket.sync.memory import MemoryFolder
from hocket.sync.versions import Versions
from support import fakes
from support.disk import Disk, FileServer

MIB = 1 << 20


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    for module in ("hocket.sync.memory", "hocket.common.files"):
        monkeypatch.setattr(f"{module}.SHARED_MEMORY", folder)
    monkeypatch.setattr(memory, "LEAST_BYTES", 1)
    monkeypatch.setattr("hocket.sync.disk.REST_S", 0.0)
    return folder


@pytest.fixture
def disk(tmp_path: Path, shm: Path) -> Disk:
    disk = Disk(tmp_path)
    config = load(None, [f"run.dir={tmp_path}/runs/a"])
    disk.versions = Versions(disk.run, disk.trainer, MemoryFolder(disk.said.append))  # type: ignore[arg-type]
    disk._transport = DiskTransport(disk.versions, config.sync_root, config.sync, disk.said.append)
    return disk


@pytest.fixture
def server(tmp_path: Path) -> FileServer:
    return FileServer("http://a:1", tmp_path / "runs")


class ContainedServer(FileServer):
    """A server in a container, whose /dev/shm is another one."""

    async def reload(self, request: ReloadRequest, timeout_s: float) -> ReloadResponse:
        if (self.root / request.source.name).is_symlink():  # type: ignore[union-attr]
            raise ServerError("there is no such version", code="no_such_version", status=404)
        return await super().reload(request, timeout_s)


def held(shm: Path) -> list[str]:
    """Lists the versions in memory."""
    return sorted(path.name for path in shm.glob("hocket-versions-*/v*"))


async def test_versions_after_the_first_lie_in_memory_and_the_run_folder_links_to_them(
    disk: Disk, server: FileServer, shm: Path
) -> None:
    for version in (1, 2, 3, 4):
        disk.step(version)
        disk.versions.current = version
        (answer,), _ = await disk.deliver(version, server)
        assert isinstance(answer, ReloadResponse)
    assert (held(shm), disk.names()) == (["v000003", "v000004"], ["weights/v000003", "weights/v000004"])
    assert all((disk.run / name).is_symlink() for name in disk.names())
    assert disk.said == []

    # The end of a run has its last version on the disk.
    assert disk.versions.save() == disk.run / "weights" / "v000004"
    disk.versions.close()
    assert (list(shm.iterdir()), disk.names()) == ([], ["weights/v000004"])
    assert not (disk.run / "weights" / "v000004").is_symlink()
    assert fakes.manifest_of(disk.run / "weights" / "v000004").version == 4
    assert not list((disk.run / "weights").glob(".*"))


async def test_a_run_that_fails_leaves_what_was_published_last_on_the_disk(
    disk: Disk, server: FileServer, shm: Path
) -> None:
    for version in (1, 2):
        disk.step(version)
        await disk.deliver(version, server)
    disk.versions.close()
    folders = [disk.run / name for name in disk.names()]
    assert [folder.name for folder in folders] == ["v000001", "v000002"]
    assert not any(folder.is_symlink() for folder in folders)
    assert list(shm.iterdir()) == []


async def test_the_newest_version_stays_in_memory_where_the_disk_is_full_at_the_end(
    disk: Disk, server: FileServer, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (1, 2):
        disk.step(version)
        disk.versions.current = version
        await disk.deliver(version, server)

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("hocket.sync.versions.flush", full)  # which tells it later than the copy
        with pytest.raises(SyncError, match=r"weights are in memory only, in .*v000002: .*No space.*free space"):
            disk.versions.save()
        disk.versions.close()
    assert disk.said[-1].startswith("the newest weights are in memory only")
    (place,) = shm.glob("*/v000002")
    assert (disk.run / "weights" / "v000002").resolve() == place
    assert fakes.manifest_of(place).version == 2
    assert not list((disk.run / "weights").glob(".*"))
    disk.versions.close()  # with room again
    assert (list(shm.iterdir()), (disk.run / "weights" / "v000002").is_symlink()) == ([], False)


async def test_a_version_that_memory_has_no_room_for_after_all_goes_to_the_disk(
    disk: Disk, server: FileServer, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await disk.deliver(1, server)
    export = disk.trainer.export

    def no_room_in_memory(folder: Path) -> Any:
        if shm in folder.parents:
            raise OSError(28, "No space left on device")
        return export(folder)

    monkeypatch.setattr(disk.trainer, "export", no_room_in_memory)
    disk.step(2)
    (answer,), _ = await disk.deliver(2, server)
    assert isinstance(answer, ReloadResponse)
    assert disk.said == ["weights go through the disk, not through memory: [Errno 28] No space left on device"]
    assert (held(shm), (disk.run / "weights" / "v000002").is_symlink()) == ([], False)


async def test_a_server_that_does_not_see_the_memory_gets_the_version_by_the_disk_from_then_on(
    disk: Disk, tmp_path: Path, shm: Path
) -> None:
    server = ContainedServer("http://a:1", tmp_path / "runs")
    await disk.deliver(1, server)
    disk.step(2)
    (answer,), _ = await disk.deliver(2, server)
    assert isinstance(answer, ReloadResponse)
    assert [line for line in disk.said if "memory" in line] == [
        "weights go through the disk, not through memory: a server could not load a version from there"
    ]
    disk.step(3)
    await disk.deliver(3, server)
    assert (held(shm), len(disk.said)) == ([], 2)
    assert not any((disk.run / name).is_symlink() for name in disk.names())


@pytest.mark.parametrize(
    ("free_mib", "disk_mib", "num_bytes", "goes_to_memory"),
    [(4000, 4000, 1000 * MIB, True), (3999, 4000, 1000 * MIB, False), (4000, 3999, 1000 * MIB, False)],
)
def test_a_version_takes_at_most_a_quarter_of_what_is_free(
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
    free_mib: int,
    disk_mib: int,
    num_bytes: int,
    goes_to_memory: bool,
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: free_mib * MIB)
    usage = shutil.disk_usage(shm)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=disk_mib * MIB))
    said: list[str] = []
    folder = MemoryFolder(said.append)
    assert (folder.place("v000002", num_bytes) is not None) is goes_to_memory
    if goes_to_memory:
        assert said == []
    else:
        assert folder.place("v000003", 1 * MIB) is None  # it stays with the disk
        (line,) = said
        assert "a version of 1,000 MiB takes more than a quarter of the 3,999 MiB" in line
    folder.close()


def test_a_small_version_goes_to_the_disk_without_a_word(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LEAST_BYTES", 64 * MIB)
    said: list[str] = []
    folder = MemoryFolder(said.append)
    assert folder.place("v000002", 64 * MIB - 1) is None
    assert (said, list(shm.iterdir())) == ([], [])


def test_the_memory_of_a_killed_run_is_given_back_and_that_of_a_living_one_stays(shm: Path) -> None:
    for name in ("hocket-versions-killed", "hocket-versions-alive"):
        (shm / name / "v000007").mkdir(parents=True)
    with FileLock(shm / "hocket-versions-alive" / "lock"):
        folder = MemoryFolder(print)
        assert folder.place("v000002", 1) is not None
        assert not (shm / "hocket-versions-killed").exists()
        assert (shm / "hocket-versions-alive" / "v000007").exists()
        folder.close()
    assert [path.name for path in shm.iterdir()] == ["hocket-versions-alive"]


async def test_a_link_whose_memory_is_gone_stands_in_nobody_s_way(disk: Disk, server: FileServer, shm: Path) -> None:
    (disk.run / "weights").mkdir(parents=True)
    for name in ("v000001", "v000009"):
        (disk.run / "weights" / name).symlink_to(shm / "hocket-versions-gone" / name)
    # A user's own link stays, though its disk is not mounted today.
    (disk.run / "weights" / "vision").symlink_to(disk.run / "not mounted")
    (answer,), _ = await disk.deliver(1, server)
    assert isinstance(answer, ReloadResponse)
    assert disk.names() == ["weights/v000001", "weights/vision"]


def test_a_server_follows_a_link_of_its_root_to_a_version_in_memory_and_no_other_link(
    tmp_path: Path, shm: Path
) -> None:
    root = tmp_path / "runs"
    (root / "weights").mkdir(parents=True)
    places: dict[str, Callable[[], Path]] = {
        "memory": lambda: shm / "hocket-versions-1" / "v000001",
        "elsewhere": lambda: tmp_path / "hocket-versions-1" / "v000001",
        "other": lambda: shm / "other" / "v000001",
    }
    for name, place in places.items():
        place().mkdir(parents=True)
        (place() / "COMPLETE").touch()
        (root / "weights" / name).symlink_to(place())
    assert server_versions.find(root, "weights/memory") == shm / "hocket-versions-1" / "v000001"
    for name in ("weights/elsewhere", "weights/other", "../shm/hocket-versions-1/v000001"):
        with pytest.raises(ApiError, match="leads out of the root"):
            server_versions.find(root, name)
