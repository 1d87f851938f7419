"""Whole versions and uploads on disk, against a fake server that reads the folders as a real one does."""

import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hocket.errors import ConfigError, ServerError, SyncError
from hocket.protocol import ReloadResponse, manifest
from hocket.sync import transports
from support import fakes
from support.disk import Disk, FileServer
from support.examples import plugged, shown

FULL = OSError(28, "No space left on device")


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], FileServer]:
    (tmp_path / "copies").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "copies"))
    monkeypatch.setattr("hocket.sync.disk.REST_S", 0.0)
    numbers = itertools.count()
    return lambda: FileServer(f"http://{next(numbers)}", tmp_path / "runs")


async def test_a_version_is_a_complete_folder_under_the_root_with_a_manifest(tmp_path: Path, servers: Any) -> None:
    disk, server, gone = Disk(tmp_path, "sync.in_flight=drain"), servers(), servers()
    gone.die()
    (said, answer), metrics = await disk.deliver(7, gone, server)
    assert (str(said), type(answer)) == (f"can't reach {gone.url}", ReloadResponse)
    folder = disk.run / "weights" / "v000007"
    [request] = server.requests
    assert (request.version, request.source.name, request.in_flight) == (7, "a/weights/v000007", "drain")
    files = ["COMPLETE", "config.json", "manifest.json", "model.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == files
    found = fakes.manifest_of(folder)
    assert found.version == 7
    assert found.tensors == manifest.specs(disk.trainer.weights.items())
    assert metrics["sync/mebibytes"] == disk.size("weights/v000007")
    await disk.deliver(7, server)  # the version that a late server is brought up with
    assert (disk.trainer.exports, len(server.requests)) == (1, 2)


async def no_room(disk: Disk, server: FileServer) -> None:
    """Publishes two versions of which each is tried three times before the disk has room for it."""
    for version in (1, 2):
        disk.step(version)
        disk.trainer.failures = [FULL] * 2
        with pytest.raises(SyncError, match=rf"weights/v00000{version}: .*No space left on device.*free space"):
            await disk.deliver(version, server)
        disk.trainer.failures = [FULL]  # once there is space the same version goes through
        await disk.deliver(version, server)
        assert "No space left on device; free space there" in disk.said[-1]
        assert disk.said[-1].endswith("It is tried once more in 0 s")
        names = [f"weights/v00000{number}" for number in range(1, version + 1)]
        assert server.names == disk.names() == names


async def test_a_version_that_the_disk_has_no_room_for_is_tried_once_more_and_leaves_nothing_behind(
    tmp_path: Path, servers: Any
) -> None:
    await no_room(Disk(tmp_path), servers())


async def test_a_version_is_never_written_over_but_those_of_steps_that_are_taken_again_are_removed(
    tmp_path: Path, servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.sync.versions.KEEP", 9)
    disk = Disk(tmp_path)
    for version in (3, 4, 5):
        await disk.deliver(version)
    for name in ("v000004", "v000005"):
        (disk.run / "deltas" / name).mkdir(parents=True)
    resumed = Disk(tmp_path)
    with pytest.raises(SyncError, match=r"v000005 exists already; two trainers must not share run\.dir"):
        await resumed.deliver(5)
    resumed.versions.restore({"version": 4})
    assert disk.names() == ["deltas/v000004", "weights/v000003", "weights/v000004"]
    await resumed.deliver(5)


def flip(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


async def hurt_once(disk: Disk, well: FileServer, server: FileServer, harm: Callable[[Path], None]) -> None:
    """Publishes two versions; the files of the first are hurt before one server reads them."""
    server.harms = [harm]
    await disk.deliver(1, server)  # which asserts that it holds the weights
    assert disk.trainer.exports == 2
    assert [*disk.names()] == ["weights/v000001"]
    (line,) = disk.said
    assert line.startswith(f"version 1 goes to {server.url} in full: ")
    disk.step(2)
    await disk.deliver(2, server, well)


@pytest.mark.parametrize("harm", [flip, cut, remove])
async def test_a_version_whose_files_were_hurt_is_published_once_more_before_the_run_ends(
    harm: Callable[[Path], None], tmp_path: Path, servers: Any
) -> None:
    await hurt_once(Disk(tmp_path), servers(), servers(), harm)


@pytest.mark.parametrize("harm", [flip, cut, remove])
async def test_a_version_whose_files_are_hurt_again_ends_the_run(
    harm: Callable[[Path], None], tmp_path: Path, servers: Any
) -> None:
    disk, server = Disk(tmp_path), servers()
    server.harms = [harm] * 2
    with pytest.raises(SyncError, match="v000001 does not hold the weights that were written to it"):
        await disk.deliver(1, server)


async def test_a_server_that_can_t_load_good_files_is_not_sent_them_again(tmp_path: Path, servers: Any) -> None:
    disk, server = Disk(tmp_path), servers()
    server.errors["reload"] = ServerError("loading failed", code="reload_failed", status=500)
    assert (await disk.deliver(1, server))[0] == [server.errors["reload"]]
    assert (disk.trainer.exports, disk.said) == (1, [])


async def test_a_resumed_run_that_publishes_nothing_more_has_its_last_version_and_keeps_the_number(
    tmp_path: Path, servers: Any
) -> None:
    disk = Disk(tmp_path)
    disk.versions.current += 1
    folder, state = disk.versions.save(), disk.versions.state()
    for _ in range(2):  # times that a replay goes on, without a signal
        resumed = Disk(tmp_path)
        resumed.versions.restore(state)
        state = resumed.versions.state()  # of its checkpoint
        assert (resumed.versions.save(), resumed.trainer.exports) == (folder, 0)
        assert resumed.names() == ["weights/v000001"]


async def test_a_transport_of_one_s_own_is_named_by_the_setting_with_its_options(tmp_path: Path, servers: Any) -> None:
    """The one that the documentation of `transport` shows."""
    head = (
        "import time\nfrom collections.abc import Callable, Sequence\n"
        "from hocket.client.server import ServerClient\n"
        "from hocket.sync.transports import Delivery, Sending, Transport, transport\n"
    )
    code = head + shown(transports, '@transport("timed")')
    with plugged(tmp_path, code, (transports.TRANSPORTS, "timed")):
        disk, server = Disk(tmp_path, "sync.backend={name: timed, unit: seconds}"), servers()
        await disk.deliver(1, server)
        assert re.fullmatch(r"version 1: \d+\.\d{3} seconds", disk.said[0])
        with pytest.raises(ConfigError, match=r"transport timed\(sending, unit\) has no option 'speed'"):
            Disk(tmp_path, "sync.backend={name: timed, speed: 2}")
    with pytest.raises(ConfigError, match=r"sync.backend: there is no transport 'timed'; known: .*disk, nccl;"):
        Disk(tmp_path, "sync.backend=timed")
