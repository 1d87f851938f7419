"""How much memory a step takes.

It is estimated before models are loaded, and measured for trainer.micro_batch_tokens=auto on a GPU.
The estimate is good to about 15 % for the usual decoder, and too high with 16-bit autocast
(ZeRO-0).
"""

import dataclasses
import math
import os
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from hocket.common import machine
from hocket.config import ModelConfig, TrainerConfig
from hocket.errors import ConfigError, TrainerError
from hocket.trainer.batching import divide
from hocket.trainer.choices import chosen_recomputation
from hocket.trainer.engine import BUCKET_ELEMENTS, default_zero_stage
from hocket.trainer.flops import Shape
from hocket.trainer.logprobs import CHUNK_TOKENS, KEPT_BYTES
from hocket.trainer.ranks import Ranks
from hocket.trainer.step import Learner
from hocket.trainer.weights import head_of, is_multimodal, linear_layers
from hocket.types import Image, TokenSequence, TrainSample

GIB = 1 << 30
Models = Iterable[tuple[ModelConfig, Any]]  # each with its skeleton
LARGEST_MICRO_BATCH = 1 << 17  # kernels that count elements in 32 bits may fail above
MAX_TRIES = 40
WORTH_A_TRY = 1.1  # least growth from one size to the next
BESIDE = 2 * GIB  # of a server on the same GPU, once it works
MARGIN = 0.1  # of what is free
ROW_BYTES = 8 << 20  # of a row's largest activation, on a CPU
LEAST_ROW = 1024  # positions; with fewer, to sum gradients takes longer than is saved
_TOLERANCE = 0.15  # of the estimate
_HEAD_BYTES = 8  # per logit of a chunk, beside its log-softmax: two gradients in float32
_NF4_BYTES = 0.53  # per weight: 4 bits, and a scale for each block of 64
_GATHERED = (
    1_000_000_000  # weights that ZeRO-3 has whole at most (DeepSpeed's stage3_max_live_parameters)
)


# Bytes of gradients, by ZeRO stage and whether weights have 16 bits:
# for a trained parameter on each rank, and for one that is shared among the ranks;
# for an element of a bucket that is reduced, and for its copy in float32.
_GRADIENTS = {
    (0, False): (4, 0, 0, 0),
    (0, True): (4, 0, 0, 0),
    (1, False): (4, 0, 4, 0),
    (1, True): (8, 0, 0, 0),
    (2, False): (0, 4, 4, 0),
    (2, True): (2, 4, 2, 4),
    (3, False): (0, 8, 4, 0),
    (3, True): (0, 10, 4, 0),
}
_OFFLOADED_3 = (0, 0, 4, 4)  # at stage 3 the sums are on the CPU, but for those of a bucket


class Estimate(NamedTuple):
    """Bytes that a rank needs on its device at the peak of a step."""

    weights: float
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(self))

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {_gib(value)}" for name, value in self._asdict().items())
        return f"about {_gib(self.total)} GiB per rank: {parts}"


def estimate(
    model: Any,
    config: TrainerConfig,
    *,
    dtype: torch.dtype,
    stage: int,
    num_ranks: int,
    offloads: bool = False,
    quantized: bool = False,
    row_tokens: float = math.inf,
) -> Estimate:
    """Estimate a step's memory with a transformers model, which may be on any device.

    With trainer.micro_batch_tokens=auto it is that of a micro-batch of one chunk. Rows that share
    much take more than is estimated.

    Args:
        stage: of ZeRO.
        offloads: whether the optimizer's state is off the device.
        quantized: whether frozen linear layers, except the head, have 4 bits.
        row_tokens: positions after which rows are long enough, as in `divide`.
    """
    shape = Shape.of(model)
    zero = config.deepspeed.get("zero_optimization", {})
    itemsize = 4 if stage == 0 else dtype.itemsize  # ZeRO-0 autocasts 16 bits
    count = sum(p.numel() for p in model.parameters())
    small = _frozen_in_layers(model) if quantized else 0
    weights = (count - small) * itemsize + _NF4_BYTES * small
    if stage == 3:
        gathered = min(count, float(zero.get("stage3_max_live_parameters", _GATHERED)))
        weights = weights / num_ranks + gathered * itemsize * (1 - 1 / num_ranks)
    row = CHUNK_TOKENS if config.micro_batch_tokens == "auto" else config.micro_batch_tokens
    positions = min(row, row_tokens)
    tokens = positions / config.sequence_parallel
    chunk = min(tokens, CHUNK_TOKENS)
    vocab = head_of(model).out_features
    logprobs = 4 * vocab * (tokens if 4 * vocab * positions <= KEPT_BYTES else chunk)
    logits = _HEAD_BYTES * vocab * chunk + logprobs
    sizes = [p.numel() for p in model.parameters() if p.requires_grad]
    if not sizes:
        return Estimate(weights=weights, logits=logits)
    trained = sum(sizes)
    largest = max(sizes)
    elements = float(zero.get("reduce_bucket_size", BUCKET_ELEMENTS))
    kept = _OFFLOADED_3 if offloads and stage == 3 else _GRADIENTS[stage, dtype.itemsize < 4]
    each, shared, bucket, copy = kept
    buckets = bucket * max(elements, largest) + copy * max(min(elements, trained), largest)
    moments = 8 * trained if stage == 0 else 12 * trained / num_ranks  # with master weights
    norms = (4 * itemsize + 8) * shape.hidden  # computed in float32
    layer = norms + itemsize * (3 * shape.query + 2 * shape.key + 4 * shape.inner)
    per_token: float = shape.layers * layer + norms
    if config.gradient_checkpointing:
        recomputation = chosen_recomputation(config.gradient_checkpointing)
        per_token = norms + recomputation.bytes_per_token(shape, itemsize, layer)
    return Estimate(
        weights=weights,
        gradients=trained * (each + shared / num_ranks) + buckets,
        optimizer=0 if offloads else moments,
        activations=tokens * per_token,
        logits=logits,
    )


def _frozen_in_layers(model: Any) -> int:
    return sum(
        part.weight.numel() for _, part in linear_layers(model) if not part.weight.requires_grad
    )


def needed(
    models: Models, config: TrainerConfig, dtype: torch.dtype, *, num_ranks: int, on_gpu: bool
) -> Estimate:
    """Estimate the memory of a step.

    Raises ConfigError where the ranks can't divide rows as trainer.sequence_parallel wants it.
    """
    parts = []
    for model, whole in models:
        if is_multimodal(whole.config) and config.sequence_parallel > 1:
            raise ConfigError(
                f"trainer.sequence_parallel: images of {model.path} can't be divided; set 1"
            )
        counts = {"ranks": num_ranks, f"attention heads of {model.path}": Shape.of(whole).heads}
        for name, count in counts.items():
            if count % config.sequence_parallel:
                size = f"trainer.sequence_parallel={config.sequence_parallel}"
                raise ConfigError(f"{size} does not divide the {count} {name}: set a divisor")
        part = estimate(
            whole,
            config,
            dtype=dtype,
            stage=default_zero_stage(config, dtype, num_ranks=num_ranks, on_gpu=on_gpu),
            num_ranks=num_ranks,
            offloads=config.offload_optimizer and on_gpu,
            quantized=model.quantizes,
            row_tokens=row_tokens(Shape.of(whole), on_gpu=on_gpu),
        )
        parts.append(part)
    weights, gradients, optimizer, activations, logits = zip(*parts, strict=True)
    most = {
        "activations": max(activations),
        "logits": max(logits),
    }  # the models run one after the other
    return Estimate(
        weights=sum(weights), gradients=sum(gradients), optimizer=sum(optimizer), **most
    )


def check(
    models: Models, config: TrainerConfig, dtype: torch.dtype, device: torch.device, num_ranks: int
) -> Estimate:
    """Estimate the memory of a step; raise ConfigError where it clearly can't fit."""
    together = needed(models, config, dtype, num_ranks=num_ranks, on_gpu=device.type == "cuda")
    available = available_bytes(device)
    if together.total * (1 - _TOLERANCE) > available:
        raise ConfigError(
            f"a step needs {together}; there are {_gib(available)}. For activations and logits, "
            "set trainer.gradient_checkpointing=true and a smaller trainer.micro_batch_tokens; for "
            "the optimizer, trainer.offload_optimizer=true on a GPU; for weights, "
            "trainer.zero_stage=3 on more ranks; or model.lora={}"
        )
    return together


def available_bytes(device: torch.device) -> int:
    """Measure the bytes that this rank can still allocate; on a CPU, its part of what is free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return machine.free_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def row_tokens(shape: Shape, *, on_gpu: bool) -> float:
    """Compute after how many positions a row is long enough; inf on a GPU.

    On a CPU longer rows take more memory, at no higher speed.
    The C library gives large tensors back at once, and the kernel zeroes the pages of each new one.
    """
    if on_gpu:
        return math.inf
    return max(LEAST_ROW, ROW_BYTES // (4 * shape.inner))


def fit_micro_batch(
    learners: Sequence[Learner], ranks: Ranks, *, leaves: float, longest: int
) -> int:
    """Measure the largest micro-batch, in tokens, that fits into every rank's GPU.

    k times as many tokens take at most k times the memory.

    Args:
        leaves: bytes that stay free for other processes.
        longest: positions of the longest sequence.
    """
    size = CHUNK_TOKENS
    for learner in learners:  # the first run allocates what libraries keep
        rehearse(learner, size, ranks, longest)
    room = (1 - MARGIN) * (available_bytes(ranks.device) - leaves)
    for _ in range(MAX_TRIES):
        peak = max(_peak_bytes(learner, size, ranks, longest) for learner in learners)
        fits = ranks.smallest(int(min(LARGEST_MICRO_BATCH, max(0.0, room) * size / peak)))
        if size <= fits < WORTH_A_TRY * size:
            return size
        if fits < 2:
            break
        size = fits
    raise TrainerError(
        "trainer.micro_batch_tokens=auto: not even one sequence fits into the memory that is left; "
        "set trainer.gradient_checkpointing=true, or take more ranks"
    )


def rehearse(learner: Learner, num_positions: int, ranks: Ranks, longest: int) -> None:
    """Take a step on made-up sequences, full of images if the model sees.

    Its gradient is not finite, so that the optimiser leaves the weights as they are.
    """
    vision = learner.engine.module.vision
    span = [0]  # what sequences repeat: a token, and an image behind it if the model sees
    if vision:
        span += [vision.token] * vision.blank.length
    samples = []
    for start in range(0, num_positions, longest):
        length = min(longest, num_positions - start) + 1
        count = (length - 1) // len(span)  # the last token is not read
        ids = span * count + [0] * (length - count * len(span))
        images: list[Image] = []
        if vision:
            starts = range(1, count * len(span), len(span))
            images = [dataclasses.replace(vision.blank, start=start) for start in starts]
        zeros = (0.0,) * length
        sequence = TokenSequence(
            token_ids=array("I", ids), mask=(True,) * length, logprobs=zeros, images=tuple(images)
        )
        columns = dict.fromkeys(learner.reads, zeros)
        samples.append(TrainSample(sequence=sequence, advantages=zeros, columns=columns))
    [[make]] = divide(samples, micro_batch_tokens=num_positions, num_ranks=1)
    learner.engine.backward(learner.loss(make(ranks.device, ranks.part)).loss * math.nan, last=True)
    if learner.engine.step(rescale=False) is not None:
        raise TrainerError(
            "a rehearsed step has changed the weights; set trainer.micro_batch_tokens to a number"
        )


def _peak_bytes(learner: Learner, num_positions: int, ranks: Ranks, longest: int) -> int:
    torch.cuda.synchronize(ranks.device)
    torch.cuda.reset_peak_memory_stats(ranks.device)
    before = torch.cuda.memory_allocated(ranks.device)
    rehearse(learner, num_positions, ranks, longest)
    torch.cuda.synchronize(ranks.device)
    return torch.cuda.max_memory_allocated(ranks.device) - before


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"
