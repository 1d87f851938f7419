"""The folders of one run's versions, and a server that reads them."""

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from hocket import config as config_module
from hocket.errors import ServerError
from hocket.protocol import ReloadRequest, ReloadResponse, manifest
from hocket.protocol.manifest import ModelShapes
from hocket.server import versions
from hocket.server.errors import ApiError
from hocket.server.state import Held
from hocket.sync.disk import DiskTransport
from hocket.sync.transports import Answer, Sending, chosen_transport
from hocket.sync.versions import Versions
from hocket.types import Metrics
from support import fakes
from support.servers import FakeServer
from support.weights import FakeTrainer

SHAPES = {"a": (40, 50), "b": (9,)}


class FileServer(FakeServer):
    """Loads versions as an engine does, into a dictionary; `harms` hurt the files before."""

    def __init__(self, url: str, root: Path) -> None:
        super().__init__(url)
        self.root = root
        self.held: Held | None = None
        self.harms: list[Callable[[Path], None]] = []
        self.holds: dict[str, torch.Tensor] = {}
        self.names: list[str] = []

    async def reload(self, request: ReloadRequest, timeout_s: float) -> ReloadResponse:
        assert timeout_s == 300.0
        name: str = request.source.name  # type: ignore[union-attr]
        self.names.append("/".join(name.split("/")[-2:]))
        if self.harms:
            self.harms.pop()(self.root / name)
        try:
            folder = self.root / name
            described = fakes.manifest_of(folder)
            versions.check_manifest(described, request.version, ModelShapes(shapes=SHAPES, tied={}))
            folder = self.whole(folder, request, described)
            versions.check_headers(folder, described)
        except ApiError as error:
            raise ServerError(error.body.message, code=error.body.code, status=error.status) from error
        except OSError as error:
            raise ServerError(str(error), code="bad_version", status=409) from error
        holds = load_file(folder / "model.safetensors")
        if manifest.specs(holds.items()) != described.tensors:
            self.held = None
            raise ServerError("loading failed", code="reload_failed", status=500)
        self.holds, answer = holds, fakes.reloaded(request.version, described.checksum)
        self.held = Held(request.source, answer)
        return answer

    def whole(self, folder: Path, request: ReloadRequest, described: manifest.Manifest) -> Path:
        """Returns the folder that holds the whole version."""
        return folder


class Disk:
    """The folders and the transport of one run, which publish what `trainer` holds."""

    def __init__(self, tmp_path: Path, *settings: str) -> None:
        config = config_module.load(None, [f"run.dir={tmp_path}/runs/a", *settings])
        weights = {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}
        self.trainer = FakeTrainer({"a": weights["a"]}, {"b": weights["b"]})
        self.said, self.run = list[str](), tmp_path / "runs" / "a"
        self.versions = Versions(config.run_dir, self.trainer)  # type: ignore[arg-type]
        sending = Sending(
            config=config,
            trainer=self.trainer,  # type: ignore[arg-type]
            versions=self.versions,
            disk=functools.partial(DiskTransport, self.versions, config.sync_root, config.sync, self.said.append),
            say=self.said.append,
            at_end=lambda function: None,
        )
        self._transport = chosen_transport(config.chosen(on_gpu=False).sync)(sending)

    def step(self, *at: int) -> None:
        self.trainer.step("a", *at)

    async def deliver(self, version: int, *servers: FileServer, compare: bool = False) -> tuple[list[Answer], Metrics]:
        """Publishes to the servers; one that does not answer an error must hold the trainer's weights."""
        delivery = await self._transport.deliver(version, servers, compare=compare)  # type: ignore[arg-type]
        for server, (checksum, answer) in zip(servers, delivery.answers.values(), strict=True):
            if isinstance(answer, ReloadResponse):
                assert (answer.version, answer.checksum) == (version, checksum)
                for name, tensor in self.trainer.weights.items():
                    assert torch.equal(server.holds[name].view(torch.int16), tensor.view(torch.int16)), name
        return [answer for _, answer in delivery.answers.values()], delivery.metrics

    def names(self) -> list[str]:
        return sorted(str(path.relative_to(self.run)) for path in self.run.glob("*/*"))

    def size(self, name: str) -> float:
        return sum(path.stat().st_size for path in (self.run / name).iterdir()) / 2**20
