"""Deltas and uploads on disk, against a fake server that reads the folders as a real one does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hocket import config as config_module
from hocket import delta, manifest
from hocket.errors import HocketError, ServerError, SyncError
from hocket.protocol import ReloadRequest, ReloadResponse, TensorSpec
from hocket.server.errors import ApiError
from hocket.server.versions import ModelShapes, PatchedCopy
from hocket.sync.disk import DiskTransport

SHAPES = {"a": (40, 50), "b": (9,)}


class FakeTrainer:
    """Weights that change in a few places with each `step`."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
        self.exports = 0
        self.fails = False

    def step(self, *at: int) -> None:
        for place in at:
            self.weights["a"].view(-1)[place] += 1

    def export(self, folder: Path) -> dict[str, TensorSpec]:
        self.exports += 1
        save_file(self.weights, folder / "model.safetensors")
        return manifest.specs(self.weights.items())

    def stream(self, max_bytes: int, sink: Callable[..., None]) -> None:
        for item in self.weights.items():
            sink([item])
        if self.fails:
            raise OSError(28, "No space left on device")


class FakeServer:
    """Takes versions as an engine does, into a dictionary."""

    def __init__(self, url: str, root: Path) -> None:
        self.url, self.root = url, root
        self.copy = PatchedCopy()
        self.holds: dict[str, torch.Tensor] = {}
        self.names: list[str] = []

    async def reload_weights(self, request: ReloadRequest, *, timeout_s: float) -> ReloadResponse:
        name: str = request.source.name
        self.names.append("/".join(name.split("/")[-2:]))
        shapes = ModelShapes(shapes=SHAPES, tied={})
        try:
            described = manifest.read(self.root / name)
            folder = self.copy.whole(self.root / name, described, request.version, shapes)
        except ApiError as error:
            raise ServerError(error.body.message, code=error.body.code, status=error.status) from error
        self.holds = load_file(folder / "model.safetensors")
        return ReloadResponse(
            version=request.version, seconds=0.1, num_tensors=2, checksum=described.checksum, session="s"
        )

    async def upload(self, folder: Path, name: str, *, timeout_s: float) -> str:
        (self.root / "up" / name).mkdir(parents=True)
        for path in folder.iterdir():
            (self.root / "up" / name / path.name).write_bytes(path.read_bytes())
        return f"up/{name}"


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    server = FakeServer("http://server", tmp_path / "runs")
    yield server
    server.copy.discard()


def make(tmp_path: Path, *settings: str) -> tuple[FakeTrainer, DiskTransport]:
    trainer = FakeTrainer()
    config = config_module.load(None, [f"run.dir={tmp_path}/runs/a", "sync.delta=true", *settings])
    return trainer, DiskTransport(config, trainer)


def assert_same(server: FakeServer, trainer: FakeTrainer) -> None:
    for name, tensor in trainer.weights.items():
        assert torch.equal(server.holds[name].view(torch.int16), tensor.view(torch.int16)), name


def folders(tmp_path: Path) -> list[str]:
    run = tmp_path / "runs" / "a"
    return sorted(str(path.relative_to(run)) for path in run.glob("*/*"))


async def test_after_the_first_version_only_what_changed_is_written(tmp_path: Path, server: FakeServer) -> None:
    trainer, disk = make(tmp_path)
    first = await disk.deliver(1, [server])
    assert (first.changed, folders(tmp_path)) == (None, ["weights/v000001"])
    trainer.step(3, 700)
    second = await disk.deliver(2, [server])
    folder = tmp_path / "runs" / "a" / "deltas" / "v000002"
    assert sorted(path.name for path in folder.iterdir()) == ["COMPLETE", "delta.safetensors", "manifest.json"]
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # whoever may read one may read all
    made = manifest.read(folder)
    assert made.base is not None
    assert (made.version, made.base.version, made.base.checksum) == (2, 1, first.checksum)
    assert made.checksum == manifest.build(2, trainer.weights.items()).checksum == second.checksum
    assert second.changed == 2 / (40 * 50 + 9)
    assert [(part, tensor.numel()) for part, tensor in sorted(load_file(folder / "delta.safetensors").items())] == [
        ("a:gaps", 4),  # 3 and, in two more digits, 696
        ("a:values", 2),
    ]
    assert second.num_bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert_same(server, trainer)


async def test_a_chain_of_deltas_ends_bit_by_bit_where_a_full_version_would(tmp_path: Path, server: FakeServer) -> None:
    trainer, disk = make(tmp_path, "sync.keep=1")
    for version in range(1, 8):
        trainer.step(version, 100 * version)
        delivery = await disk.deliver(version, [server])
        assert delivery.answers[0].checksum == delivery.checksum
        assert_same(server, trainer)
    assert server.names == ["weights/v000001", *(f"deltas/v00000{version}" for version in range(2, 8))]
    assert (trainer.exports, folders(tmp_path)) == (1, ["deltas/v000007", "weights/v000001"])


async def test_every_so_many_versions_one_is_full(tmp_path: Path, server: FakeServer) -> None:
    trainer, disk = make(tmp_path, "sync.full_every=3")
    for version in range(1, 8):
        trainer.step(version)
        await disk.deliver(version, [server])
    assert [name.startswith("deltas") for name in server.names] == [False, True, False, True, True, False, True]
    assert_same(server, trainer)


async def test_a_server_that_lacks_the_base_is_sent_the_same_version_in_full(
    tmp_path: Path, server: FakeServer
) -> None:
    trainer, disk = make(tmp_path)
    await disk.deliver(1, [server])
    trainer.step(5)
    late = FakeServer("http://late", tmp_path / "runs")
    delivery = await disk.deliver(2, [server, late])
    assert (server.names, late.names) == (["weights/v000001", "deltas/v000002"], ["deltas/v000002", "weights/v000002"])
    assert [answer.checksum for answer in delivery.answers] == [delivery.checksum] * 2
    full, small = (
        sum(path.stat().st_size for path in (tmp_path / "runs/a" / name).iterdir())
        for name in ("weights/v000002", "deltas/v000002")
    )
    assert delivery.num_bytes == (2 * small + full) // 2
    assert len(delivery.notes) == 1
    assert "version 2 goes to http://late in full: this is what changed since version 1" in delivery.notes[0]
    trainer.step(6)
    delivery = await disk.deliver(3, [server, late])
    assert (server.names[-1], late.names[-1], delivery.notes) == ("deltas/v000003", "deltas/v000003", ())
    assert_same(server, trainer)
    assert_same(late, trainer)
    late.copy.discard()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


async def test_a_delta_that_was_tampered_with_is_refused_and_the_full_version_lands(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, disk = make(tmp_path)
    await disk.deliver(1, [server])
    patch = delta.patch

    def tampered(files: Path, folder: Path) -> None:
        flip(folder / "delta.safetensors")
        patch(files, folder)

    monkeypatch.setattr("hocket.delta.patch", tampered)
    trainer.step(5)
    delivery = await disk.deliver(2, [server])
    monkeypatch.undo()
    assert server.names[1:] == ["deltas/v000002", "weights/v000002"]
    assert "the bytes of tensor 'a' are not the ones that were published" in delivery.notes[0]
    assert_same(server, trainer)
    trainer.step(6)
    await disk.deliver(3, [server])
    assert server.names[3:] == ["deltas/v000003"]
    assert_same(server, trainer)


async def test_a_step_that_changed_nothing_is_a_version_too(tmp_path: Path, server: FakeServer) -> None:
    _, disk = make(tmp_path)
    await disk.deliver(1, [server])
    delivery = await disk.deliver(2, [server])
    assert (server.names, delivery.changed) == (["weights/v000001", "deltas/v000002"], 0.0)
    assert delivery.answers[0].version == 2


async def test_a_version_is_saved_as_a_complete_model_whatever_was_sent(tmp_path: Path, server: FakeServer) -> None:
    trainer, disk = make(tmp_path)
    for version in (1, 2):
        trainer.step(version)
        await disk.deliver(version, [server])
    folder = disk.write(2)
    assert folder == tmp_path / "runs/a/weights/v000002"
    assert torch.equal(load_file(folder / "model.safetensors")["a"], trainer.weights["a"])
    trainer.step(9)
    await disk.deliver(3, [server])
    assert server.names[-1] == "deltas/v000003"  # of version 2, whichever of its folders the server has
    assert_same(server, trainer)


async def test_after_a_failed_write_the_next_version_is_full(tmp_path: Path, server: FakeServer) -> None:
    trainer, disk = make(tmp_path)
    await disk.deliver(1, [server])
    trainer.fails = True
    trainer.step(2)
    with pytest.raises(SyncError, match=r"deltas/v000002: .*No space left on device.*Free space"):
        await disk.deliver(2, [server])
    trainer.fails = False
    await disk.deliver(2, [server])
    assert (server.names[-1], folders(tmp_path)) == ("weights/v000002", ["weights/v000001", "weights/v000002"])
    assert_same(server, trainer)


async def test_with_upload_a_server_loads_what_it_was_sent(tmp_path: Path) -> None:
    trainer, disk = make(tmp_path, "sync.upload=true")
    far = FakeServer("http://far", tmp_path / "elsewhere")
    for version in (1, 2, 3):
        trainer.step(version)
        await disk.deliver(version, [far])
    assert [name[11:] for name in far.names] == ["-weights-v000001", "-deltas-v000002", "-deltas-v000003"]
    assert_same(far, trainer)
    assert disk.write(3).name == "v000003"
    far.copy.discard()


async def test_any_other_failure_of_a_delta_is_no_reason_to_send_more(tmp_path: Path, server: FakeServer) -> None:
    trainer, disk = make(tmp_path)
    await disk.deliver(1, [server])

    async def dead(request: ReloadRequest, *, timeout_s: float) -> ReloadResponse:
        raise ServerError("gone", code="unreachable")

    server.reload_weights = dead
    trainer.step(1)
    delivery = await disk.deliver(2, [server])
    assert isinstance(delivery.answers[0], HocketError)
    assert (trainer.exports, folders(tmp_path)) == (1, ["deltas/v000002", "weights/v000001"])
