"""Receive weights inside the engine's processes.

vLLM mixes `WorkerExtension` into its worker. Importing this module in a process that was started
for a worker has that process end with its parent.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hocket.protocol import AdapterConfig, TensorSpec, manifest
from hocket.protocol.nccl import BucketPart
from hocket.server import lora, versions, vllm_api, vllm_weights
from hocket.server.nccl_worker import GroupReceiver
from hocket.server.vllm_api import answered
from hocket.server.vllm_arguments import is_cpu_build


class WorkerExtension(GroupReceiver):
    """Methods that the server calls by vLLM's `collective_rpc`, in each worker.

    Messages are JSON, as vLLM carries plain types only. The names begin with hocket_, as they are
    mixed with those of vLLM's worker.
    """

    # The tensors, by name, of the version that the model holds in full; {} while it holds none.
    hocket_held: Mapping[str, TensorSpec] = {}
    # While only the trained weights of a version come: the tensors of the version before, of which
    # the others stay. {} while all come.
    hocket_kept: Mapping[str, TensorSpec] = {}

    @answered
    def hocket_load_disk(
        self, folder: str, checksum: str = "", compare: bool = False
    ) -> dict[str, Any]:
        """Load a folder's tensors into the paused model, in place, or as an adapter beside it.

        Raises RuntimeError for another checksum. After an error the model is unusable until a load
        succeeds. With `compare` nothing changes, and the answer names the tensors that differ.
        """
        adapter = versions.read_adapter(Path(folder))
        return self._hocket_take(_read(Path(folder)), adapter, checksum, compare)

    @answered
    def hocket_drop_adapter(self) -> None:
        """Have every request use the model without an adapter."""
        vllm_weights.drop_adapter(self)

    def _hocket_take(
        self,
        parts: Iterator[BucketPart],
        adapter: AdapterConfig | None,
        checksum: str,
        compare: bool,
        give_up: Callable[[], None] = lambda: None,
        partial: bool = False,
    ) -> dict[str, Any]:
        """Load the parts of a version, or compare the model with them.

        `give_up` interrupts the making of parts after a failure. With `partial` the parts are the
        trained weights only. Raises RuntimeError where the parts have another checksum; "" accepts
        any, as the checksum of a broadcast is known only at its end.
        """
        if partial and not self.hocket_held:
            raise RuntimeError(
                "only trained weights are to come, and this server holds no version in full"
            )
        self.hocket_kept = self.hocket_held if partial else {}
        with _ahead(parts, give_up) as parts_ahead:
            answer = self._hocket_load(parts_ahead, adapter, compare)
        if checksum not in ("", answer["checksum"]):
            raise RuntimeError(
                "the tensors that reached the model are not those that were published"
            )
        return answer

    def _hocket_load(
        self, parts: Iterator[BucketPart], adapter: AdapterConfig | None, compare: bool
    ) -> dict[str, Any]:
        """Load tensors, or compare the model with them; describe those that the model then has."""
        specs = dict(self.hocket_kept)
        weights = _tensors(parts, specs)  # whoever reads them fills in the specs
        different = list[str]()
        if compare:
            compare_with = vllm_weights.COMPARISONS.get("bitwise")
            different = compare_with(self, weights, adapter)
        else:
            self.hocket_held = {}  # a load that breaks off leaves no version in full
            vllm_weights.load(self, weights, adapter)
            self.hocket_held = specs
        return {
            "checksum": manifest.total_checksum(specs),
            "num_tensors": len(specs),
            "different": different,
        }


@contextmanager
def _ahead(
    parts: Iterator[BucketPart], give_up: Callable[[], None]
) -> Iterator[Iterator[BucketPart]]:
    """Make two parts ahead in a thread, while the model loads the one before.

    Where the body raises, `give_up` interrupts the thread, which may wait for a part for long.
    """
    with ThreadPoolExecutor(1, "weights ahead") as thread:
        ahead = [thread.submit(next, parts, None) for _ in range(2)]

        def take() -> Iterator[BucketPart]:
            while True:
                part = ahead.pop(0).result()
                if part is None:  # there are no more
                    return
                ahead.append(thread.submit(next, parts, None))
                yield part

        try:
            yield take()
        except BaseException:
            give_up()
            raise


def _read(folder: Path) -> Iterator[BucketPart]:
    """Read a version from its folder, each tensor as a part of its own."""
    for name, tensor, spec in manifest.described(manifest.tensors(folder)):
        yield [(name, tensor)], {name: spec}


def _tensors(
    parts: Iterator[BucketPart], specs: dict[str, TensorSpec]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of all parts with their names; add their specs to `specs`."""
    for named_tensors, part_specs in parts:
        specs |= part_specs
        for _, tensor in named_tensors:
            # Another thread made the tensor, on its own stream: its memory must not be used again
            # before this thread's stream has read it.
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream())
        yield from named_tensors


vllm_api.die_with_parent_process()
vllm_api.allow_amx()
if is_cpu_build():
    lora.share_adapter()
