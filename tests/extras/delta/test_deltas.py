"""Deltas and uploads in running servers: the model is the same, bit by bit, as after a full version."""

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest

from hocket.errors import ServerError
from hocket.extras.upload import FOLDER
from hocket.protocol import ReloadResponse, manifest
from hocket.sync.transports import Delivery
from support.engines import MovingModel
from support.tiny_server import TinyServer

pytestmark = [pytest.mark.engine, pytest.mark.long]


def assert_serves(server: TinyServer, trainer: MovingModel, delivery: Delivery, version: int) -> None:
    """The server acknowledged the very bytes of the trainer, and samples with them."""
    ((_, answer),) = delivery.answers.values()
    assert isinstance(answer, ReloadResponse), answer
    assert answer.checksum == manifest.total_checksum(manifest.specs(trainer.tensors().items()))
    assert server.health()["version"] == answer.version == version
    server.assert_is(trainer.model)
    server.model = trainer.model


def copies(server: TinyServer) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"hocket-weights-{server.popen.pid}-*"))


def uploaded(server: TinyServer) -> set[str]:
    """The versions that were sent to it and are left, without the run's name."""
    return {path.name[9:] for path in (server.root / f"{FOLDER}-1").iterdir()}


async def test_files_sent_over_http_serve_with_no_common_disk_and_after_a_restart(servers: Any, tmp_path: Path) -> None:
    server = servers.take("untied float32")
    first = server.next_version
    names: list[set[str]] = []
    try:
        trainer = MovingModel(server.model)
        disk = trainer.deltas(f"run.dir={tmp_path}/trainer/a", "sync.upload=true")
        async with server.trainer_client() as http:
            for version in (first, first + 1, first + 2):
                old = copy.deepcopy(trainer.model)
                trainer.step()
                for compare in (False, True):
                    delivery = await disk.deliver(version, [http], compare=compare)
                    assert_serves(server, trainer, delivery, version)
                server.assert_is_not(old, by=0.05)  # else the step would change nothing that shows
                names.append(uploaded(server))
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
    async with again.trainer_client() as http:
        delivery = await disk.deliver(first + 3, [http])
        assert_serves(again, trainer, delivery, first + 3)
        assert "in full: " in trainer.said[0]
        assert uploaded(again) == {f"deltas-v{first + 3:06d}", f"weights-v{first + 3:06d}"}
        # Several mebibytes, which the server refuses to take: its words must arrive all the same.
        folder = tmp_path / "large"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(80 << 20))
        with pytest.raises(ServerError, match="more than a version can have"):
            await http.upload(folder, "0123abcd-weights-v000009", timeout_s=60)
