"""A trainer in memory, as publishing sees it: weights to write and to send, and log-probs to compare."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from hocket.protocol import TensorLayout, TensorSpec, manifest, nccl
from hocket.types import TrainSample


class FakeTrainer:
    """Streams its weights bucket by bucket; disagrees with servers by the next of `gaps`, or by 1e-6."""

    device, adapter = torch.device("cpu"), None

    def __init__(self, *buckets: Mapping[str, Tensor]) -> None:
        self.buckets = buckets
        self.num_trained = len(buckets)  # buckets; the others are frozen
        self.failures: list[Exception] = []  # each ends an export or a stream, when some is written or sent
        self.exports = 0
        self.gaps: list[float] = []
        self.scored: list[Sequence[TrainSample]] = []

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: tensor for bucket in self.buckets for name, tensor in bucket.items()}

    def step(self, name: str, *at: int) -> None:
        """Changes some elements of a tensor."""
        self.weights[name].view(-1)[list(at)] += 1

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)

    def export(self, folder: Path) -> dict[str, TensorSpec]:
        self.exports += 1
        save_file(self.weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text("{}")
        self._fail()
        return manifest.specs(self.weights.items())

    def layout(self, max_bytes: int, *, trained: bool = False) -> list[list[TensorLayout]]:
        assert max_bytes == nccl.BUCKET_BYTES
        return [nccl.layout([*bucket.items()]) for bucket in self._sent(trained)]

    def stream(
        self, max_bytes: int, sink: Callable[[Sequence[tuple[str, Tensor]]], None], *, trained: bool = False
    ) -> None:
        for bucket in self._sent(trained):
            sink([*bucket.items()])
            self._fail()

    def _sent(self, trained: bool) -> Sequence[Mapping[str, Tensor]]:
        return self.buckets[: self.num_trained] if trained else self.buckets

    def logprobs(self, samples: Sequence[TrainSample]) -> list[tuple[float, ...]]:
        self.scored.append(samples)
        gap = self.gaps.pop(0) if self.gaps else 1e-6
        return [tuple(value + gap if value else 0.0 for value in sample.sequence.logprobs) for sample in samples]
