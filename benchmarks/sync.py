"""Weight sync against the floor of the same machine: bytes and seconds by phase, of every transport.

Starts a real server on a random Qwen2 of 100 M parameters and a real trainer in this process. Each round measures, one
after the other so that a slow minute of the machine hits all of them: a bare broadcast of the same bytes between two
processes, a bare write (with fsync) and read of a file of the same bytes, vLLM's own reload from the page cache, and
every transport with the comparison of what was loaded. Prints medians in MiB and seconds, and ratios to the floors of
the same round; a line for each floor, and for each transport of full weights, then of adapters.
"""

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shared import ROOT, beside, make_model, parser, serving

if __name__ == "__main__":  # --help does not wait for what follows
    OPTIONS = parser(
        __doc__,
        "section.key=value for server and trainer",
        rounds=(5, "rounds that count, after one that warms up"),
        layers=(12, "layers of the model"),
        hidden=(768, "width of the model, a multiple of 64; 100 M parameters with 12 layers"),
        folder=(tempfile.gettempdir(), "where the model and the versions of its weights are written and removed"),
    ).parse_args()

from hocket import config as configs
from hocket.client.server import ServerClient
from hocket.errors import HocketError
from hocket.protocol import nccl
from hocket.sync.transports import Delivery, Transport
from hocket.types import TokenSequence, TrainSample
from support.processes import free_port

SERVE = """
import sys
from hocket.commands import cli
from hocket.extras.openai_api import routes
routes.ROUTES |= {"/pause", "/resume", "/collective_rpc"}  # not let through otherwise; the floor needs them
sys.exit(cli.main(sys.argv[1:]))
"""
DEVELOPMENT: dict[str, Any] = {
    "program": ["-c", SERVE],
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
    "VLLM_SERVER_DEV_MODE": "1",
}


def receive(pipe: Connection, port: int, sizes: Sequence[int]) -> None:
    """Is the other end of the bare broadcast: receives so many bytes each time that it is told to."""
    import torch

    group = join(nccl.find_store("127.0.0.1", port, 60), rank=1)
    while pipe.recv():
        for size in sizes:
            group.broadcast(torch.empty(size, dtype=torch.uint8))


def join(store: Any, rank: int) -> nccl.WeightGroup:
    import torch

    return nccl.WeightGroup(
        store=store,
        name="floor",
        rank=rank,
        size=2,
        device=torch.device("cpu"),
        address="127.0.0.1",
        timeout_s=60,
    )


class Floors:
    """What this machine takes for the same bytes at least, in seconds."""

    def __init__(self, url: str, folder: Path, model: Path, sizes: Sequence[int], stack: ExitStack) -> None:
        import torch

        self._url, self._folder, self._model = url, folder, model
        self._buckets = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in sizes]
        self._store = nccl.make_store("127.0.0.1", 60)
        self._peer = stack.enter_context(beside(receive, self._store.port, sizes))
        self._group = join(self._store, rank=0)

    def broadcast(self) -> float:
        self._peer.send(True)
        start = time.perf_counter()
        for bucket in self._buckets:
            self._group.broadcast(bucket)
        return time.perf_counter() - start

    def measure(self) -> dict[str, float]:
        """Returns the seconds of each."""
        write, read = self.write_and_read()
        return {"broadcast": self.broadcast(), "write": write, "read": read, "load": self.load()}

    def write_and_read(self) -> tuple[float, float]:
        path = self._folder / "floor"
        start = time.perf_counter()
        with path.open("wb") as file:
            for bucket in self._buckets:
                file.write(bucket.numpy().data)
            file.flush()
            os.fsync(file.fileno())
        written = time.perf_counter()
        with path.open("rb") as file:
            for bucket in self._buckets:
                file.readinto(bucket.numpy().data)
        seconds = (written - start, time.perf_counter() - written)
        path.unlink()
        return seconds

    def load(self) -> float:
        """vLLM's own reload of the model's files, which are in the page cache."""
        import httpx

        with httpx.Client(base_url=self._url, timeout=600, trust_env=False) as http:
            start = time.perf_counter()
            http.post("/pause", params={"mode": "keep"}).raise_for_status()
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(self._model)}}
            http.post("/collective_rpc", json=body).raise_for_status()
            http.post("/resume").raise_for_status()
            return time.perf_counter() - start


class Bench:
    """One server and one trainer, with the transports to compare.

    Args:
        settings: what both processes share.
        transports: name → settings of its own.
        num_rounds: of each measurement, after one that warms up.
    """

    def __init__(self, settings: Sequence[str], transports: Mapping[str, Sequence[str]], num_rounds: int) -> None:
        from hocket.extras.delta.write import DeltaWriter
        from hocket.sync.disk import DiskTransport
        from hocket.sync.nccl import CollectiveTransport
        from hocket.sync.versions import Versions
        from hocket.trainer.trainer import Trainer

        config = configs.load(None, [*settings])
        self.trainer = Trainer(config)
        self.transports: dict[str, Transport] = {}
        for name, own in transports.items():
            chosen = configs.load(None, [*settings, f"run.dir={config.run_dir}-{name}", *own])
            if chosen.sync.backend == "nccl":
                self.transports[name] = CollectiveTransport(self.trainer, chosen.sync)
            else:
                versions = Versions(chosen.run_dir, self.trainer)
                write = DeltaWriter(versions).write if chosen.sync.transport == "delta" else None
                self.transports[name] = DiskTransport(versions, chosen.sync_root, chosen.sync, write=write)
        self._url = config.own_url
        self.version, self.num_rounds = 0, num_rounds

    async def rounds(self, names: Sequence[str], floors: "Floors | None" = None) -> dict[str, list[dict[str, float]]]:
        """Steps the trainer, then measures the transports, round by round."""
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        async with ServerClient(self._url) as client:
            for number in range(self.num_rounds + 1):
                self.trainer.step([sample(number)])
                floor = {} if floors is None else floors.measure()
                for name in names:
                    self.version += 1
                    start = time.perf_counter()
                    delivery: Delivery = await self.transports[name].deliver(self.version, [client])
                    seconds = time.perf_counter() - start
                    if isinstance(answer := delivery.answers[client][1], HocketError):
                        raise answer
                    start = time.perf_counter()
                    compared = await self.transports[name].deliver(self.version, [client], compare=True)
                    if isinstance(answer := compared.answers[client][1], HocketError):
                        raise answer
                    row = {"seconds": seconds, "compare": time.perf_counter() - start}
                    columns = {"MiB": "mebibytes", "prepare": "prepare_s", "transfer": "transfer_s"}
                    row |= {column: delivery.metrics[f"sync/{metric}"] for column, metric in columns.items()}
                    if number:
                        rows[name].append(row | floor)
        return rows

    def close(self) -> None:
        for transport in self.transports.values():
            getattr(transport, "close", lambda: None)()
        self.trainer.close()


def sample(seed: int) -> TrainSample:
    """A sequence that gives the step a gradient everywhere."""
    ids = tuple(random.Random(seed).choices(range(32_000), k=64))
    mask = (False,) * 8 + (True,) * 56
    return TrainSample(
        sequence=TokenSequence(
            token_ids=array("I", ids),
            mask=mask,
            logprobs=(-10.0,) * 64,
        ),
        advantages=(0.0,) * 8 + (1.0,) * 56,
    )


def report(name: str, rows: Sequence[dict[str, float]], ratios: dict[str, Callable[[dict[str, float]], float]]) -> None:
    """Prints medians over the rounds, and the ratios of each round's own figures."""
    keys = ("MiB", "seconds", "prepare", "transfer", "compare")
    columns = {key: statistics.median(row[key] for row in rows) for key in keys}
    text = "  ".join(f"{key} {value:7.3f}" for key, value in columns.items())
    for what, ratio in ratios.items():
        text += f"  {what} {statistics.median(ratio(row) for row in rows):.2f}"
    print(f"{name:11s} {text}", flush=True)


def main(folder: Path, options: argparse.Namespace) -> None:
    """Measures full weights, then adapters, which need a server of their own."""
    model = folder / "model"
    make_model(model, options.hidden, num_hidden_layers=options.layers)
    common = [
        f"model.path={model}",
        "model.dtype=bfloat16",
        f"sync.root={folder}",
        f"run.dir={folder}/run",
        "rollout.max_tokens=64",
        "trainer.learning_rate=1e-6",
        *options.settings,
    ]
    nccl.BUCKET_BYTES = 32 << 20
    full = [*common, f"server.port={free_port()}"]
    with serving(full, folder / "full.log", **DEVELOPMENT), ExitStack() as stack:
        transports = {"disk": (), "collective": ("sync.backend=nccl",), "delta": ("sync.backend=delta",)}
        bench = Bench(full, transports, options.rounds)
        sizes = [nccl.num_bytes(bucket) for bucket in bench.trainer.layout(nccl.BUCKET_BYTES)]
        floors = Floors(configs.load(None, full).own_url, folder, model, sizes, stack)
        rows = asyncio.run(bench.rounds(["collective", "disk"], floors))
        rows |= asyncio.run(bench.rounds(["delta"]))  # alone: each one changes the version before
        bench.close()
    print(f"{sum(sizes) / 2**20:.1f} MiB of weights, {len(sizes)} buckets, {options.rounds} rounds, medians in seconds")
    for what in ("broadcast", "write", "read", "load"):
        print(f"floor: {what:9s} {statistics.median(row[what] for row in rows['disk']):.3f}")
    report(
        "collective",
        rows["collective"],
        {"/ (broadcast + load)": lambda row: row["seconds"] / (row["broadcast"] + row["load"])},
    )
    report(
        "disk",
        rows["disk"],
        {
            "/ (write + read + load)": lambda row: row["seconds"] / (row["write"] + row["read"] + row["load"]),
            "/ (write + read)": lambda row: row["seconds"] / (row["write"] + row["read"]),
        },
    )
    adapter = [*common, f"server.port={free_port()}", "model.lora.rank=16"]
    with serving(adapter, folder / "adapter.log"):
        bench = Bench(adapter, {"adapter": (), "adapter nccl": ("sync.backend=nccl",)}, options.rounds)
        rows = {"delta": rows["delta"]} | asyncio.run(bench.rounds([*bench.transports]))
        bench.close()
    for name, found in rows.items():
        report(name, found, {"of the full bytes": lambda row: row["MiB"] * 2**20 / sum(sizes)})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="hocket-sync-", dir=OPTIONS.folder) as temporary:
        main(Path(temporary), OPTIONS)
