"""Publishing against a fake server: what is on disk when, and what happens when any part of it fails."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hocket import config as config_module
from hocket import manifest
from hocket.config import Config
from hocket.errors import ServerError, SyncError
from hocket.protocol import ReloadResponse
from hocket.sync.disk import DiskSync

WEIGHTS = {"a": torch.tensor([1.0, 2.0]), "b": torch.ones(2, 2, dtype=torch.bfloat16)}


class FakeTrainer:
    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def export(self, folder: Path) -> None:
        save_file(WEIGHTS, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
        if self.fails:
            raise OSError(28, "No space left on device")


class FakeServer:
    """Reads the published folder as a server would, and answers with what it finds or what it is told to."""

    url = "http://server"

    def __init__(self, root: Path, *, checksum: str | None = None, error: ServerError | None = None) -> None:
        self.root, self.checksum, self.error = root, checksum, error
        self.names: list[str] = []

    async def reload_weights(self, version: int, name: str, *, timeout_s: float) -> ReloadResponse:
        if self.error:
            raise self.error
        self.names.append(name)
        folder = self.root / name
        assert (folder / "COMPLETE").exists()
        found = manifest.read(folder)
        return ReloadResponse(
            version=version, seconds=0.1, num_tensors=len(found.tensors), checksum=self.checksum or found.checksum
        )


def make(tmp_path: Path) -> tuple[Config, DiskSync]:
    config = config_module.load(None, [f"run.dir={tmp_path}/runs/a"])
    return config, DiskSync(config)


async def test_a_version_is_a_complete_folder_under_the_root_with_a_manifest(tmp_path: Path) -> None:
    _, sync = make(tmp_path)
    server = FakeServer(tmp_path / "runs")
    published = await sync.publish(FakeTrainer(), 7, server)
    folder = tmp_path / "runs" / "a" / "weights" / "v000007"
    assert published.folder == folder
    assert server.names == ["a/weights/v000007"]
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
    assert published.checksum == found["checksum"]
    assert published.num_bytes == sum(path.stat().st_size for path in folder.iterdir())


async def test_another_checksum_than_the_published_one_is_an_error(tmp_path: Path) -> None:
    _, sync = make(tmp_path)
    with pytest.raises(SyncError, match=r"holds version 1 with checksum beef.*was published"):
        await sync.publish(FakeTrainer(), 1, FakeServer(tmp_path / "runs", checksum="beef"))


async def test_a_refusal_by_the_server_is_an_error_with_its_words(tmp_path: Path) -> None:
    _, sync = make(tmp_path)
    refusal = ServerError("tensor a has another shape", code="wrong_shape", status=422)
    with pytest.raises(SyncError, match=r"version 1 did not reach http://server: tensor a has another shape"):
        await sync.publish(FakeTrainer(), 1, FakeServer(tmp_path / "runs", error=refusal))


async def test_a_failed_write_leaves_nothing_behind_and_asks_no_server(tmp_path: Path) -> None:
    _, sync = make(tmp_path)
    server = FakeServer(tmp_path / "runs")
    with pytest.raises(SyncError, match=r"No space left on device.*Free space"):
        await sync.publish(FakeTrainer(fails=True), 1, server)
    assert list((tmp_path / "runs" / "a" / "weights").iterdir()) == []
    assert server.names == []


async def test_the_newest_versions_are_kept_and_older_ones_removed(tmp_path: Path) -> None:
    _, sync = make(tmp_path)
    for version in range(1, 5):
        await sync.publish(FakeTrainer(), version, FakeServer(tmp_path / "runs"))
    assert sorted(path.name for path in (tmp_path / "runs" / "a" / "weights").iterdir()) == ["v000003", "v000004"]


async def test_a_version_is_never_written_over(tmp_path: Path) -> None:
    _, sync = make(tmp_path)
    await sync.publish(FakeTrainer(), 1, FakeServer(tmp_path / "runs"))
    with pytest.raises(SyncError, match="exists already"):
        await sync.publish(FakeTrainer(), 1, FakeServer(tmp_path / "runs"))
