"""Estimate and measure how much memory a step takes.

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
from hocket.trainer.logprobs import CHUNK_TOKENS, kept_bytes
from hocket.trainer.ranks import Ranks
from hocket.trainer.step import Learner
from hocket.trainer.weights import head_of, is_multimodal, linear_layers
from hocket.types import Image, TokenSequence, TrainSample

GIB = 1 << 30
Models = Iterable[tuple[ModelConfig, Any]]  # each config with its model on the meta device
LARGEST_MICRO_BATCH = 1 << 17  # tokens; kernels that count elements in 32 bits may fail above
MAX_TRIES = 40  # sizes of a micro-batch that are measured
WORTH_A_TRY = 1.1  # a larger micro-batch is tried if it is larger by this factor
BESIDE = 2 * GIB  # memory that a server on the same GPU takes besides its own once it works
MARGIN = 0.1  # share of the free memory that stays free
ROW_BYTES = 8 << 20  # size of a row's largest activation on a CPU
LEAST_ROW = 1024  # positions; in shorter rows, summing gradients takes longer than is saved
TOLERANCE = 0.15  # relative error of the estimate
_HEAD_BYTES = 8  # per logit of a chunk, beside its log-softmax: two gradients in float32
_NF4_BYTES = 0.53  # per weight: 4 bits, and a scale for each block of 64
# Weights that ZeRO-3 gathers at most: DeepSpeed's default of stage3_max_live_parameters.
_GATHERED = 1_000_000_000


class GradientBytes(NamedTuple):
    """Bytes that gradients take at a ZeRO stage."""

    each: int  # per trained parameter, on each rank
    divided: int  # per trained parameter, divided by the number of ranks
    bucket: int  # per element of a bucket that is reduced
    bucket_copy: int  # per element of the bucket's copy in float32

    def total(self, sizes: Sequence[int], num_ranks: int, bucket_elements: float) -> float:
        """Compute the bytes for trained parameters of these sizes."""
        trained = sum(sizes)
        largest = max(sizes)  # a larger parameter than a bucket has a bucket of its own
        bucket = self.bucket * max(bucket_elements, largest)
        bucket_copy = self.bucket_copy * max(min(bucket_elements, trained), largest)
        return trained * (self.each + self.divided / num_ranks) + (bucket + bucket_copy)


# What DeepSpeed allocates, by (ZeRO stage, whether weights have 16 bits). Tests measure it; the four
# numbers are the fields of GradientBytes in their order.
_GRADIENTS = {
    (0, False): GradientBytes(4, 0, 0, 0),
    (0, True): GradientBytes(4, 0, 0, 0),
    (1, False): GradientBytes(4, 0, 4, 0),
    (1, True): GradientBytes(8, 0, 0, 0),
    (2, False): GradientBytes(0, 4, 4, 0),
    (2, True): GradientBytes(2, 4, 2, 4),
    (3, False): GradientBytes(0, 8, 4, 0),
    (3, True): GradientBytes(0, 10, 4, 0),
}
# With an offloaded optimizer at stage 3, the GPU has the gradients of a bucket alone.
_OFFLOADED_3 = GradientBytes(0, 0, 4, 4)


class Estimate(NamedTuple):
    """Bytes that a rank needs on its device at the peak of a step."""

    weights: float
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all parts, in bytes."""
        return float(sum(self))

    @property
    def parts(self) -> str:
        """The GiB of each part, in words."""
        return ", ".join(f"{name} {_gib(value)}" for name, value in self._asdict().items())

    def __str__(self) -> str:
        return f"about {_gib(self.total)} GiB per rank: {self.parts}"


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
    """Estimate the memory of a step of a transformers model, which may be on any device.

    With trainer.micro_batch_tokens=auto, it is the memory with a micro-batch of one chunk. Rows
    that share long prefixes take more than is estimated.

    Args:
        model: the model with its trained parameters, whose weights are not read.
        config: the settings of the trainer.
        dtype: precision of the forward pass.
        stage: ZeRO stage.
        num_ranks: ranks that share what ZeRO divides.
        offloads: whether the optimizer's state is off the device.
        quantized: whether frozen linear layers, except the head, have 4 bits.
        row_tokens: positions after which rows are long enough, as in `divide`.
    """
    itemsize = 4 if stage == 0 else dtype.itemsize  # ZeRO-0 autocasts float32 weights to 16 bits
    zero = config.deepspeed.get("zero_optimization", {})

    # Weights: at ZeRO-3 a rank's share, and what is gathered from the others.
    num_weights = sum(p.numel() for p in model.parameters())
    num_quantized = _frozen_in_layers(model) if quantized else 0
    weights = (num_weights - num_quantized) * itemsize + _NF4_BYTES * num_quantized
    if stage == 3:
        gathered = min(num_weights, float(zero.get("stage3_max_live_parameters", _GATHERED)))
        weights = weights / num_ranks + gathered * itemsize * (1 - 1 / num_ranks)

    tokens = config.micro_batch_tokens
    row = min(CHUNK_TOKENS if tokens == "auto" else tokens, row_tokens)
    part = row / config.sequence_parallel  # positions of a row that a rank computes
    # Rows may have any length on a GPU alone.
    kept = kept_bytes(num_weights, on_gpu=math.isinf(row_tokens))
    logits = _logit_bytes(head_of(model).out_features, row, part, kept)

    sizes = [p.numel() for p in model.parameters() if p.requires_grad]
    if not sizes:  # a frozen model runs forward only
        return Estimate(weights=weights, logits=logits)
    gradients = _OFFLOADED_3 if offloads and stage == 3 else _GRADIENTS[stage, dtype.itemsize < 4]
    bucket_elements = float(zero.get("reduce_bucket_size", BUCKET_ELEMENTS))

    # Optimizer: two moments and, above stage 0, master weights in float32.
    moments = 8 * sum(sizes) if stage == 0 else 12 * sum(sizes) / num_ranks
    return Estimate(
        weights=weights,
        gradients=gradients.total(sizes, num_ranks, bucket_elements),
        optimizer=0 if offloads else moments,
        activations=part * _activations_per_token(Shape.of(model), config, itemsize),
        logits=logits,
    )


def _logit_bytes(vocab: int, row: float, part: float, kept: int) -> float:
    """Estimate the bytes of a chunk's logits, and of the log-probs of the row if they are kept.

    `kept` is the bytes of log-probs that are kept at most.
    """
    chunk = min(part, CHUNK_TOKENS)
    keeps_row = 4 * vocab * row <= kept
    logprobs = 4 * vocab * (part if keeps_row else chunk)
    return _HEAD_BYTES * vocab * chunk + logprobs


def _frozen_in_layers(model: Any) -> int:
    """Count the frozen weights of linear layers, which are quantized."""
    weights = [layer.weight for _, layer in linear_layers(model)]
    return sum(weight.numel() for weight in weights if not weight.requires_grad)


def _activations_per_token(shape: Shape, config: TrainerConfig, itemsize: int) -> float:
    """Estimate the bytes of activations of a token at the peak of the backward pass."""
    norms = (4 * itemsize + 8) * shape.hidden  # norms compute in float32
    layer = norms + itemsize * (3 * shape.query + 2 * shape.key + 4 * shape.inner)
    if config.gradient_checkpointing:
        recomputation = chosen_recomputation(config.gradient_checkpointing)
        return norms + recomputation.bytes_per_token(shape, itemsize, layer)
    return shape.layers * layer + norms


def needed(
    models: Models, config: TrainerConfig, dtype: torch.dtype, *, num_ranks: int, on_gpu: bool
) -> Estimate:
    """Estimate the memory of a step of all models together.

    Raises ConfigError if the ranks can't divide rows by trainer.sequence_parallel.
    """
    together = Estimate(weights=0)
    for model_config, model in models:
        _check_sequence_parallel(model_config, model, config, num_ranks)
        estimated = estimate(
            model,
            config,
            dtype=dtype,
            stage=default_zero_stage(config, dtype, num_ranks=num_ranks, on_gpu=on_gpu),
            num_ranks=num_ranks,
            offloads=config.offload_optimizer and on_gpu,
            quantized=model_config.quantizes,
            row_tokens=row_tokens(Shape.of(model), on_gpu=on_gpu),
        )
        together = Estimate(
            weights=together.weights + estimated.weights,
            gradients=together.gradients + estimated.gradients,
            optimizer=together.optimizer + estimated.optimizer,
            # The models run one after another, so the largest counts.
            activations=max(together.activations, estimated.activations),
            logits=max(together.logits, estimated.logits),
        )
    return together


def _check_sequence_parallel(
    model_config: ModelConfig, model: Any, config: TrainerConfig, num_ranks: int
) -> None:
    if is_multimodal(model.config) and config.sequence_parallel > 1:
        raise ConfigError(
            f"trainer.sequence_parallel: images of {model_config.path} can't be divided; set 1"
        )
    heads = Shape.of(model).heads
    counts = {"ranks": num_ranks, f"attention heads of {model_config.path}": heads}
    for name, count in counts.items():
        if count % config.sequence_parallel:
            setting = f"trainer.sequence_parallel={config.sequence_parallel}"
            raise ConfigError(f"{setting} does not divide the {count} {name}: set a divisor")


def check(
    models: Models, config: TrainerConfig, dtype: torch.dtype, device: torch.device, num_ranks: int
) -> Estimate:
    """Estimate the memory of a step. Raises ConfigError if it clearly can't fit."""
    together = needed(models, config, dtype, num_ranks=num_ranks, on_gpu=device.type == "cuda")
    available = available_bytes(device)
    if together.total * (1 - TOLERANCE) > available:
        raise ConfigError(
            f"a step needs {together}; there are {_gib(available)}. For activations and logits, "
            "set trainer.gradient_checkpointing=true and a smaller trainer.micro_batch_tokens; for "
            "the optimizer, trainer.offload_optimizer=true on a GPU; for weights, "
            "trainer.zero_stage=3 on more ranks; or model.lora={}"
        )
    return together


def available_bytes(device: torch.device) -> int:
    """Measure the bytes that this rank can still allocate: on a CPU, its share of what is free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # PyTorch's allocator has memory in reserve that the driver counts as taken.
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return machine.free_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def row_tokens(shape: Shape, *, on_gpu: bool) -> float:
    """Compute the number of positions after which a row is long enough; inf on a GPU.

    On a CPU longer rows take more memory and are no faster: the C library returns large tensors to
    the system at once, and the kernel zeroes the pages of each new one.
    """
    if on_gpu:
        return math.inf
    return max(LEAST_ROW, ROW_BYTES // (4 * shape.inner))


def fit_micro_batch(
    learners: Sequence[Learner], ranks: Ranks, *, leaves: float, longest: int
) -> int:
    """Measure the largest micro-batch, in tokens, that fits into every rank's GPU.

    It relies on this: k times as many tokens take at most k times the memory. Raises TrainerError
    if not even one sequence fits.

    Args:
        learners: the trained models; each must fit.
        ranks: all ranks must call this together.
        leaves: bytes that stay free for other processes.
        longest: positions of the longest sequence.
    """
    size = CHUNK_TOKENS
    # A first run allocates what libraries keep, so that it is not measured.
    for learner in learners:
        rehearse(learner, size, ranks, longest)
    room = (1 - MARGIN) * (available_bytes(ranks.device) - leaves)
    for _ in range(MAX_TRIES):
        peak = max(_peak_bytes(learner, size, ranks, longest) for learner in learners)
        fits = int(min(LARGEST_MICRO_BATCH, max(0.0, room) * size / peak))
        fits = ranks.smallest(fits)  # one size for all ranks
        if size <= fits < WORTH_A_TRY * size:  # `size` fits, and no much larger one would
            return size
        if fits < 2:
            break
        size = fits
    raise TrainerError(
        "trainer.micro_batch_tokens=auto: not even one sequence fits into the memory that is left; "
        "set trainer.gradient_checkpointing=true, or take more ranks"
    )


def rehearse(learner: Learner, num_positions: int, ranks: Ranks, longest: int) -> None:
    """Take a step on made-up sequences, full of images if the model takes images.

    Its gradient is not finite, so that the optimizer leaves the weights as they are.
    """
    vision = learner.engine.module.vision
    pattern = [0]  # the tokens that a sequence repeats: a token, and the tokens of an image
    if vision:
        pattern += [vision.token] * vision.blank.length

    # Fill the positions with sequences of the greatest length, and a shorter one at the end.
    samples = []
    for start in range(0, num_positions, longest):
        length = min(longest, num_positions - start) + 1
        count = (length - 1) // len(pattern)  # the last token is not read
        token_ids = pattern * count + [0] * (length - count * len(pattern))
        images: list[Image] = []
        if vision:
            starts = range(1, count * len(pattern), len(pattern))
            images = [dataclasses.replace(vision.blank, start=start) for start in starts]
        zeros = (0.0,) * length
        sequence = TokenSequence(
            token_ids=array("I", token_ids),
            mask=(True,) * length,
            logprobs=zeros,
            images=tuple(images),
        )
        columns = dict.fromkeys(learner.reads, zeros)
        samples.append(TrainSample(sequence=sequence, advantages=zeros, columns=columns))

    # They make one micro-batch on one rank.
    [[make_batch]] = divide(samples, micro_batch_tokens=num_positions, num_ranks=1)
    batch = make_batch(ranks.device, ranks.part)
    learner.engine.backward(learner.loss(batch).loss * math.nan, last=True)
    if learner.engine.step(rescale=False) is not None:
        raise TrainerError(
            "a rehearsed step has changed the weights; set trainer.micro_batch_tokens to a number"
        )


def _peak_bytes(learner: Learner, num_positions: int, ranks: Ranks, longest: int) -> int:
    """Measure the bytes that a step takes at its peak beside what is allocated before."""
    torch.cuda.synchronize(ranks.device)
    torch.cuda.reset_peak_memory_stats(ranks.device)
    before = torch.cuda.memory_allocated(ranks.device)
    rehearse(learner, num_positions, ranks, longest)
    torch.cuda.synchronize(ranks.device)
    return torch.cuda.max_memory_allocated(ranks.device) - before


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"
