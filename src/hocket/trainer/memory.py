"""How much memory a step takes: estimated before anything is loaded, measured for trainer.micro_batch_tokens: auto.

The estimate knows the architecture's sizes and what DeepSpeed keeps (measured with 0.19.8); it is good to some 15 % for
the usual decoder, and high where 16 bits are autocast (ZeRO-0). The measurement sees what is allocated while something
runs. Never knows samples or losses.
"""

import dataclasses
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hocket import system
from hocket.config import TrainerConfig
from hocket.errors import ConfigError
from hocket.trainer.engine import BUCKET_ELEMENTS

GIB = 1 << 30
LARGEST_MICRO_BATCH = 1 << 17
"""Beyond it nothing gets faster, and kernels that count elements in 32 bits may fail."""
_MARGIN = 0.1  # of what is free: fragments, buffers of kernels and of communication
_TOLERANCE = 0.15  # of the estimate
_HEAD_BYTES = 12  # per logit of a chunk: log-softmax, its gradient and that of the logits, in float32
_NF4_BYTES = 0.53  # per weight: 4 bits, and a scale for each block of 64
_GRADIENT_BYTES = {  # ZeRO stage and whether in 16 bits: bytes per trained parameter, on each rank and shared by them
    (0, False): (4, 0),
    (0, True): (4, 0),
    (1, False): (4, 0),
    (1, True): (8, 0),
    (2, False): (0, 4),
    (2, True): (2, 4),
    (3, False): (0, 8),
    (3, True): (0, 10),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What memory depends on of a model; sizes per layer where nothing else is said.

    Attributes:
        num_trained: those of the parameters that are not frozen.
        num_quantized: those that are held in 4 bits.
        query_size, key_size: heads × size of one.
        inner_size: width of the MLP; of a mixture of experts, of all that a token takes.
        itemsize: bytes of a number in forward and backward passes.
    """

    num_parameters: int
    num_trained: int
    num_layers: int
    hidden_size: int
    query_size: int
    key_size: int
    inner_size: int
    vocab_size: int
    itemsize: int
    num_quantized: int = 0

    @classmethod
    def of(cls, model: Any, dtype: torch.dtype, *, quantized: bool = False) -> "Model":
        """Reads a transformers model; one on the meta device will do.

        Args:
            quantized: its frozen linear layers, all but the output head, are held in 4 bits.
        """
        head = model.get_output_embeddings()
        layers = [part for part in model.modules() if isinstance(part, nn.Linear) and part is not head]
        text = model.config.get_text_config()
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        experts = getattr(text, "num_experts_per_tok", None)
        return cls(
            num_parameters=sum(p.numel() for p in model.parameters()),
            num_trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            num_layers=text.num_hidden_layers,
            hidden_size=text.hidden_size,
            query_size=size * text.num_attention_heads,
            key_size=size * (getattr(text, "num_key_value_heads", None) or text.num_attention_heads),
            inner_size=experts * text.moe_intermediate_size
            if experts
            else getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            vocab_size=text.vocab_size,
            itemsize=dtype.itemsize,
            num_quantized=sum(part.weight.numel() for part in layers if not part.weight.requires_grad)
            if quantized
            else 0,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes that one rank needs on its device at the worst moment of a step, by what they are for."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """Bytes of all of it."""
        return float(sum(dataclasses.astuple(self)))

    def __str__(self) -> str:
        parts = (f"{name} {_gib(value)}" for name, value in dataclasses.asdict(self).items())
        return f"about {_gib(self.total)} GiB per rank: {', '.join(parts)}"


def estimate(model: Model, config: TrainerConfig, *, stage: int, num_ranks: int, offloads: bool) -> Estimate:
    """Returns what a step with micro-batches of the configured size needs; with "auto", of one chunk of tokens.

    Args:
        stage: of ZeRO: above 0 the ranks share the optimizer's state, with 2 the gradients, with 3 the weights.
        offloads: the optimizer's state lies elsewhere than on the device.
    """
    trained, half = model.num_trained, model.itemsize < 4
    whole, shared = _GRADIENT_BYTES[stage, half]
    bucket = 0 if stage == 0 or (stage == 1 and half) else BUCKET_ELEMENTS * model.itemsize
    optimizer = 8 * trained if stage == 0 else 12 * trained / num_ranks
    itemsize = 4 if stage == 0 else model.itemsize  # there 16 bits are autocast
    tokens = config.logprob_chunk_tokens if config.micro_batch_tokens == "auto" else config.micro_batch_tokens
    norms = (4 * itemsize + 8) * model.hidden_size  # they compute in float32
    layer = norms + itemsize * (3 * model.query_size + 2 * model.key_size + 4 * model.inner_size)
    per_token = model.num_layers * layer + norms
    if config.gradient_checkpointing:
        per_token = model.num_layers * itemsize * model.hidden_size + norms + layer
    return Estimate(
        weights=((model.num_parameters - model.num_quantized) * itemsize + _NF4_BYTES * model.num_quantized)
        / (num_ranks if stage == 3 else 1),
        gradients=trained * (whole + shared / num_ranks) + bucket,
        optimizer=0 if offloads else optimizer,
        activations=tokens * per_token,
        logits=_HEAD_BYTES * min(tokens, config.logprob_chunk_tokens) * model.vocab_size,
    )


def together(policy: Estimate, *, critic: Estimate | None, reference: Estimate | None) -> Estimate:
    """Returns what a step needs with these models beside the policy; critic and policy run one after the other."""
    beside = [model for model in (critic, reference) if model is not None]
    trained = [policy, *([critic] if critic is not None else [])]
    return Estimate(
        weights=policy.weights + sum(model.weights for model in beside),
        gradients=sum(model.gradients for model in trained),
        optimizer=sum(model.optimizer for model in trained),
        activations=max(model.activations for model in trained),
        logits=policy.logits,
    )


def check(needed: Callable[[TrainerConfig], Estimate], config: TrainerConfig, available: int) -> Estimate:
    """Returns the estimate for the config. Raises ConfigError, with a way out, where clearly less is available.

    Args:
        needed: the estimate for a config.
        available: bytes for one rank.
    """
    found = needed(config)
    if found.total * (1 - _TOLERANCE) <= available:
        return found
    changes: list[dict[str, Any]] = [{"gradient_checkpointing": True}, {"offload_optimizer": True}, {"zero_stage": 3}]
    if config.micro_batch_tokens != "auto":
        changes.append({"micro_batch_tokens": config.micro_batch_tokens // 2})
    changes.append({"logprob_chunk_tokens": config.logprob_chunk_tokens // 2 or 1})
    helps = []
    for change in changes:
        total = needed(config.model_copy(update=change)).total
        if total < 0.95 * found.total:
            helps += [f"trainer.{key}={str(value).lower()} ({_gib(total)})" for key, value in change.items()]
    raise ConfigError(
        f"a step needs {found}; there are {_gib(available)}. Set {', '.join([*helps, 'model.lora={}'])}, train on more "
        "ranks, or take a smaller model"
    )


def available_bytes(device: torch.device) -> int:
    """Returns how much more this rank can allocate; on a CPU, its share of what is free to the ranks of the machine."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return system.free_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def largest_micro_batch(first: tuple[int, int], second: tuple[int, int], available: float) -> int:
    """Returns how many tokens fit: memory is a fixed part and one per token, read off two measurements (tokens, bytes).

    >>> largest_micro_batch((100, 3000), (200, 5000), 11111)  # 1000 + 20 per token, and a tenth stays free
    449
    """
    per_token = (second[1] - first[1]) / (second[0] - first[0])
    fixed = first[1] - per_token * first[0]
    room = (1 - _MARGIN) * available - fixed
    return int(min(LARGEST_MICRO_BATCH, max(0.0, room) / max(per_token, 1e-9)))


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Runs it and returns by how much memory on the device grew at the worst moment.

    On a CPU, whose allocator keeps no record, every tensor that the work makes is counted until it is gone.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        peak: int = torch.cuda.max_memory_allocated(device) - before
        return peak
    counting = _Counting()
    with counting:
        work()
    return counting.peak


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Follows the storages that operators allocate."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {value.untyped_storage()._cdata for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)}
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._alive:
                    self._alive.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _gone(self, key: int, num_bytes: int) -> None:
        self._alive.discard(key)
        self.now -= num_bytes


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}" if num_bytes < 10 * GIB else f"{num_bytes / GIB:.0f}"
