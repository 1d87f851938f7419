"""Deltas and uploads in running servers: the model is the same, bit by bit, as after a full version."""

import copy
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hocket import config as config_module
from hocket.client.server import ServerClient
from hocket.errors import ServerError
from hocket.protocol import ReloadResponse, TensorSpec, manifest
from hocket.server.uploads import FOLDER
from hocket.sync.deltas import DeltaWriter
from hocket.sync.disk import Versions
from hocket.sync.publish import Delivery
from hocket.sync.transports import DiskTransport

pytestmark = pytest.mark.engine


class FakeTrainer:
    """A model whose weights move a little with each step."""

    def __init__(self, model: Any) -> None:
        self.model, self.said = copy.deepcopy(model), list[str]()
        torch.manual_seed(1)

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.model.parameters():
            moved = torch.rand(parameter.shape) < 0.02
            parameter.copy_(torch.where(moved, parameter.flip(0), parameter))

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}

    def export(self, folder: Path) -> dict[str, TensorSpec]:
        save_file(self.tensors(), folder / "model.safetensors", metadata={"format": "pt"})
        return manifest.specs(self.tensors().items())

    def stream(self, max_bytes: int, sink: Callable[..., None]) -> None:
        for item in self.tensors().items():
            sink([item])


def client(server: Any, token: str | None = None) -> ServerClient:
    return ServerClient(str(server.client.base_url).rstrip("/"), token=token)


def assert_serves(server: Any, trainer: FakeTrainer, delivery: Delivery, version: int) -> None:
    """The server acknowledged the very bytes of the trainer, and samples with them."""
    ((_, answer),) = delivery.answers.values()
    assert isinstance(answer, ReloadResponse), answer
    assert answer.checksum == manifest.total_checksum(manifest.specs(trainer.tensors().items()))
    assert server.health()["version"] == answer.version == version
    assert max(server.gaps(model=trainer.model)) < 1e-4
    server.model = trainer.model


def copies(server: Any) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"hocket-weights-{server.popen.pid}-*"))


async def test_files_sent_over_http_serve_with_no_common_disk_and_after_a_restart(
    servers: Any, kit: Any, tmp_path: Path
) -> None:
    server = servers.take("untied float32")
    first = server.next_version
    names: list[set[str]] = []
    try:
        trainer = FakeTrainer(server.model)
        config = config_module.load(None, [f"run.dir={tmp_path}/trainer/a", "sync.backend=delta", "sync.upload=true"])
        versions = Versions(config.run_dir, trainer)  # type: ignore[arg-type]
        versions.first = DeltaWriter(versions).write
        disk = DiskTransport(versions, config.sync_root, config.sync, trainer.said.append)
        async with client(server, kit.TOKEN) as http:
            for version in (first, first + 1, first + 2):
                old = copy.deepcopy(trainer.model)
                trainer.step()
                for compare in (False, True):
                    delivery = await disk.deliver(version, [http], compare=compare)
                    assert_serves(server, trainer, delivery, version)
                assert statistics.mean(server.gaps(model=old)) > 0.05, "the step changed nothing that shows"
                names.append({path.name[9:] for path in (server.root / f"{FOLDER}-1").iterdir()})
        # The version that it holds, which came twice for the comparison, and the one before.
        sent = [f"weights-v{first:06d}", f"deltas-v{first + 1:06d}", f"deltas-v{first + 2:06d}"]
        assert names == [{sent[0]}, {*sent[:2]}, {*sent[1:]}]
        assert len(copies(server)) == 1
    finally:
        assert server.stop() == 0
    assert copies(server) == []

    again = servers("untied float32")
    trainer.step()
    again.next_version = first + 4
    async with client(again, kit.TOKEN) as http:
        delivery = await disk.deliver(first + 3, [http])
        assert_serves(again, trainer, delivery, first + 3)
        assert "in full: " in trainer.said[0]
        left = {path.name[9:] for path in (again.root / f"{FOLDER}-1").iterdir()}
        assert left == {f"deltas-v{first + 3:06d}", f"weights-v{first + 3:06d}"}
        # Several mebibytes, which the server refuses to take: its words must arrive all the same.
        folder = tmp_path / "large"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(80 << 20))
        with pytest.raises(ServerError, match="more than a version can have"):
            await http.upload(folder, "0123abcd-weights-v000009", timeout_s=60)
