"""Publishing against a fake server: what is on disk when, and what happens when any part of it fails."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hocket import config as config_module
from hocket import manifest
from hocket.errors import ServerError, SyncError
from hocket.protocol import DiskSource, ReloadRequest, ReloadResponse, TensorSpec
from hocket.sync.delivery import Delivery
from hocket.sync.disk import DiskTransport

WEIGHTS = {"a": torch.tensor([1.0, 2.0]), "b": torch.ones(2, 2, dtype=torch.bfloat16)}


class FakeTrainer:
    def __init__(self, fails: bool = False) -> None:
        self.fails, self.exports = fails, 0

    def export(self, folder: Path) -> dict[str, TensorSpec]:
        self.exports += 1
        save_file(WEIGHTS, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
        if self.fails:
            raise OSError(28, "No space left on device")
        return manifest.specs(WEIGHTS.items())


class FakeServer:
    """Reads the published folder as a server would, and answers with what it finds or what it is told to."""

    def __init__(self, root: Path, error: ServerError | None = None) -> None:
        self.root, self.error = root, error
        self.requests: list[ReloadRequest] = []

    async def reload_weights(self, request: ReloadRequest, *, timeout_s: float) -> ReloadResponse:
        assert timeout_s == 300.0
        if self.error:
            raise self.error
        self.requests.append(request)
        assert isinstance(request.source, DiskSource)
        folder = self.root / request.source.name
        assert (folder / "COMPLETE").exists()
        found = manifest.read(folder)
        return ReloadResponse(
            version=request.version,
            seconds=0.1,
            num_tensors=len(found.tensors),
            checksum=found.checksum,
            session="s",
        )


def make(tmp_path: Path, *settings: str, fails: bool = False) -> tuple[FakeTrainer, DiskTransport]:
    config = config_module.load(None, [f"run.dir={tmp_path}/runs/a", *settings])
    trainer = FakeTrainer(fails)
    return trainer, DiskTransport(config, trainer)


async def deliver(disk: DiskTransport, version: int, *servers: FakeServer) -> Delivery:
    return await disk.deliver(version, servers)  # type: ignore[arg-type]


async def test_a_version_is_a_complete_folder_under_the_root_with_a_manifest(tmp_path: Path) -> None:
    _, disk = make(tmp_path, "sync.in_flight=drain")
    server = FakeServer(tmp_path / "runs")
    delivery = await deliver(disk, 7, server)
    folder = tmp_path / "runs" / "a" / "weights" / "v000007"
    source = DiskSource(name="a/weights/v000007")
    assert server.requests == [ReloadRequest(version=7, source=source, in_flight="drain")]
    assert sorted(path.name for path in folder.iterdir()) == [
        "COMPLETE",
        "config.json",
        "manifest.json",
        "model.safetensors",
    ]
    found = json.loads((folder / "manifest.json").read_text())
    assert found["version"] == 7
    assert {name: (t["dtype"], t["shape"]) for name, t in found["tensors"].items()} == {
        "a": ("float32", [2]),
        "b": ("bfloat16", [2, 2]),
    }
    assert delivery.checksum == found["checksum"]
    assert delivery.num_bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert [getattr(answer, "checksum", answer) for answer in delivery.answers] == [found["checksum"]]


async def test_all_servers_load_one_folder_and_the_failure_of_one_is_its_answer(tmp_path: Path) -> None:
    trainer, disk = make(tmp_path)
    gone = ServerError("can't reach it", code="unreachable")
    first, second, third = (FakeServer(tmp_path / "runs", error) for error in (None, gone, None))
    delivery = await deliver(disk, 1, first, second, third)
    assert [answer is gone for answer in delivery.answers] == [False, True, False]
    assert [len(server.requests) for server in (first, second, third)] == [1, 0, 1]
    await deliver(disk, 1, second, third)  # the version that a late server is brought up with
    assert trainer.exports == 1
    assert len(third.requests) == 2


async def test_a_failed_write_leaves_nothing_behind_and_asks_no_server(tmp_path: Path) -> None:
    trainer, disk = make(tmp_path, fails=True)
    server = FakeServer(tmp_path / "runs")
    with pytest.raises(SyncError, match=r"No space left on device.*Free space"):
        await deliver(disk, 1, server)
    assert list((tmp_path / "runs" / "a" / "weights").iterdir()) == []
    assert server.requests == []
    trainer.fails = False
    await deliver(disk, 1, server)  # once there is space the same version goes through
    assert len(server.requests) == 1


async def test_the_newest_versions_are_kept_and_older_ones_removed(tmp_path: Path) -> None:
    _, disk = make(tmp_path)
    for version in range(1, 5):
        await deliver(disk, version, FakeServer(tmp_path / "runs"))
    assert sorted(path.name for path in (tmp_path / "runs" / "a" / "weights").iterdir()) == ["v000003", "v000004"]


async def test_a_version_of_another_trainer_is_never_written_over(tmp_path: Path) -> None:
    await deliver(make(tmp_path)[1], 1, FakeServer(tmp_path / "runs"))
    with pytest.raises(SyncError, match=r"v000001 exists already; two trainers must not share run\.dir"):
        await deliver(make(tmp_path)[1], 1, FakeServer(tmp_path / "runs"))


async def test_versions_of_steps_that_are_taken_again_are_removed_first(tmp_path: Path) -> None:
    _, disk = make(tmp_path, "sync.keep=9")
    for version in (3, 4, 5):
        await deliver(disk, version)
    weights = tmp_path / "runs" / "a" / "weights"
    for name in ("v000004", "v000005"):
        (tmp_path / "runs" / "a" / "deltas" / name).mkdir(parents=True)
    _, resumed = make(tmp_path)
    resumed.remove_above(4)
    assert sorted(path.name for path in weights.iterdir()) == ["v000003", "v000004"]
    assert [path.name for path in (tmp_path / "runs" / "a" / "deltas").iterdir()] == ["v000004"]
    await deliver(resumed, 5)


def test_writing_alone_gives_a_folder_that_a_server_would_take(tmp_path: Path) -> None:
    trainer, disk = make(tmp_path)
    folder = disk.write(3)
    assert folder == tmp_path / "runs" / "a" / "weights" / "v000003"
    assert manifest.read(folder).version == 3
    assert disk.write(3) == folder
    assert trainer.exports == 1
