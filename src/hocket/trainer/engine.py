"""DeepSpeed behind a small interface: nothing is compiled, and no step skipped silently."""

import contextlib
import dataclasses
import datetime
import functools
import gc
import importlib
import io
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket.config import TrainerConfig
from hocket.errors import ConfigError
from hocket.trainer import share_gpu
from hocket.trainer.choices import chosen_recomputation
from hocket.trainer.ranks import Ranks

POLICY = "policy"  # prefix of the names of the trained model's tensors in a checkpoint
MASTER = "master"
KINDS = (MASTER, "exp_avg", "exp_avg_sq")  # names of AdamW's moments
BUCKET_ELEMENTS = (
    50_000_000  # summed over ranks at a time; DeepSpeed would allocate ten times as many
)

PRECISION: Mapping[torch.dtype, Mapping[str, Any]] = {
    torch.float32: {},
    torch.float16: {"fp16": {"enabled": True, "initial_scale_power": 12, "hysteresis": 1}},
    torch.bfloat16: {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",  # or ranks would round the sums of their gradients
    },
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How one rank holds its models."""

    config: TrainerConfig
    dtype: torch.dtype  # of forward and backward passes
    ranks: Ranks

    @property
    def stage(self) -> int:
        on_gpu = self.ranks.device.type == "cuda"
        return default_zero_stage(self.config, self.dtype, num_ranks=self.ranks.size, on_gpu=on_gpu)

    def parameter_dtype(self) -> torch.dtype:
        scales = self.stage > 0 and self.ranks.device.type == "cuda"
        if self.dtype == torch.float16 and not scales:
            advice = "set that, or model.dtype=bfloat16 or float32"
            raise ConfigError(
                f"float16 can be trained on GPUs alone, with trainer.zero_stage=1, 2 or 3: {advice}"
            )
        return self.dtype if self.stage > 0 else torch.float32


def load_deepspeed(ranks: Ranks) -> Any:
    os.environ["DS_ACCELERATOR"] = ranks.device.type  # whatever a shell has
    deepspeed = importlib.import_module("deepspeed")
    # It would be compiled at first start, and is for tensor-parallel inference.
    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    ranks.destroy = deepspeed.comm.destroy_process_group  # it also forgets DeepSpeed's copies
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    if groups._WORLD_GROUP is None:  # DeepSpeed's own would wait half an hour for a lost rank
        groups._WORLD_GROUP = dist.new_group(timeout=datetime.timedelta(seconds=ranks.timeout_s))
    return deepspeed


def initialize(setup: Setup, **options: Any) -> Any:
    deepspeed = load_deepspeed(setup.ranks)
    autocast: Any = importlib.import_module("deepspeed.runtime.torch_autocast")
    autocast.TORCH_AUTOCAST_INITIALIZED = (
        False  # by an earlier run here: it sums gradients in 16 bits
    )
    gc.freeze()  # for its memory statistics, DeepSpeed collects garbage up to 15 times
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints them whatever the log level
            engine, *_ = deepspeed.initialize(
                **options, config=deepspeed_config(setup), dist_init_required=False
            )
    finally:
        gc.unfreeze()
    return engine


def spread(module: nn.Module, setup: Setup) -> None:
    """Leave each rank its part of the weights, module by module; at first rank 0 has all, and others meta tensors."""
    device = setup.ranks.device
    zero = load_deepspeed(setup.ranks).zero
    dtypes = [parameter.dtype for parameter in module.parameters()]
    dist.broadcast_object_list(
        dtypes, src=0, device=device
    )  # transformers may keep some in float32
    dtype_of = dict(zip(module.parameters(), dtypes, strict=True))
    for part in module.modules():
        own = list(part.parameters(recurse=False))
        for parameter in own:
            if parameter.is_meta:  # a tied one was so in the first of its modules alone
                empty = torch.empty_like(parameter, dtype=dtype_of[parameter], device=device)
                whole = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                torch.utils.swap_tensors(parameter, whole)  # type: ignore[no-untyped-call]
        for name, buffer in part.named_buffers(recurse=False):
            here = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
            dist.broadcast(here, src=0)
            setattr(part, name, here)
        if own:  # rank 0's are sent, and every rank keeps its part
            zero.Init(module=nn.ParameterList(own), config_dict_or_path=deepspeed_config(setup))


def default_zero_stage(
    config: TrainerConfig, dtype: torch.dtype, *, num_ranks: int, on_gpu: bool
) -> int:
    if config.zero_stage is not None:
        return config.zero_stage
    if num_ranks == 1 and dtype == torch.float32 and not config.offload_optimizer:
        return 0
    if not on_gpu:
        return 1
    return (
        3 if config.offload_optimizer else 2
    )  # float32 sums of gradients leave the GPU at stage 3 alone


def deepspeed_config(setup: Setup) -> dict[str, Any]:
    config = setup.config
    stage = setup.stage
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": BUCKET_ELEMENTS}
    values: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # nominal: the trainer accumulates itself
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm if stage > 0 else 0.0,  # `step` does it there
        "steps_per_print": 10**9,
    }
    if config.gradient_checkpointing:
        leaves = chosen_recomputation(config.gradient_checkpointing).gathered_at_once
        if leaves:
            zero["leaf_module"] = {"name_suffixes": list(leaves)}
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        values["zero_force_ds_cpu_optimizer"] = (
            False  # it would be compiled; torch's AdamW runs there too
        )
    if setup.dtype == torch.bfloat16 and stage == 0:
        values["torch_autocast"] = {
            "enabled": True,
            "dtype": "bfloat16",
        }  # its own bf16 optimizer loses precision here
    else:
        values |= PRECISION[setup.dtype]
    zero |= config.deepspeed.get("zero_optimization", {})
    return {**values, **config.deepspeed, "zero_optimization": zero}


def learning_rate(config: TrainerConfig, steps: int) -> float:
    if steps < config.warmup_steps:
        return config.learning_rate * ((steps + 1) / config.warmup_steps)
    left = max(0.0, (config.steps - steps) / max(1, config.steps - config.warmup_steps))
    factors = {"constant": 1.0, "linear": left, "cosine": 0.5 * (1 - math.cos(math.pi * left))}
    return config.learning_rate * factors[config.schedule]


class DeepSpeedEngine:
    """Trains one module, with float32 master weights and AdamW; `name`: prefix of its tensors in a checkpoint.

    They are read from AdamW's memory: DeepSpeed's checkpoints fit only the ranks and the stage that wrote them.
    """

    def __init__(self, module: Any, setup: Setup, *, name: str) -> None:
        self.stage = setup.stage
        self.module = module
        self._name = name
        self._config = config = setup.config
        self._dtype = setup.dtype
        self._ranks = setup.ranks
        if self.stage == 3:
            spread(module, setup)
        self._trained = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        has_adapter = module.weights.adapter is not None  # servers have what is under it
        self._published = self._trained if has_adapter else dict(module.named_parameters())
        self._adamw = torch.optim.AdamW(
            self._trained.values(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._engine = initialize(setup, model=module, optimizer=self._adamw)
        for flat in self._flats():  # as AdamW would at its first step
            step = torch.zeros((), device=flat.device)
            moments = {"exp_avg": torch.zeros_like(flat), "exp_avg_sq": torch.zeros_like(flat)}
            self._adamw.state[flat] = {"step": step, **moments}
        self.num_steps = (
            0  # of the run, in which this module learnt or would have, had there been a signal
        )
        # One rank alone would copy all gradients to sum them.
        self._engine.enable_backward_allreduce = self.stage > 0 or self._ranks.size > 1
        self._scaler: dict[str, Any] = {}  # of float16 losses
        if self._dtype == torch.float16:
            self._scaler = vars(self._engine.optimizer.loss_scaler)
            self._scaler["raise_error_at_min_scale"] = (
                False  # there a step is skipped like any other
            )

    @property
    def learning_rate(self) -> float:
        return learning_rate(self._config, self.num_steps)

    def plan(self, steps: int) -> None:
        self._config = self._config.model_copy(update={"steps": steps})

    @property
    def loss_scale(self) -> float | None:
        """Factor on float16 losses, halved after a gradient that is not finite; else None."""
        return self._scaler.get("cur_scale")

    def forward(self, *args: Any) -> Any:
        return self._engine(*args)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate the gradient of this rank's share of the loss; on the last one, sum it over ranks."""
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over ranks, and those that compute a row together all have its loss.
        self._engine.backward(
            loss * (self._ranks.size / self._ranks.part.size), scale_wrt_gas=False
        )

    def step(self, *, rescale: bool = True) -> float | None:
        """Clip, apply, clear the gradient; return its norm, None if not finite (`rescale`: lower the loss scale)."""
        (group,) = self._adamw.param_groups
        group["lr"] = self.learning_rate
        return self._step_without_zero() if self.stage == 0 else self._step_with_zero(rescale)

    def _step_without_zero(self) -> float | None:
        """Clip, and look for NaN: at stage 0 DeepSpeed does not, nor does it report the norm."""
        norm = float(nn.utils.clip_grad_norm_(self._trained.values(), self._config.max_grad_norm))
        if math.isfinite(norm):
            self._engine.step()
            return norm
        self._engine.zero_grad()
        return None

    def _step_with_zero(self, rescale: bool) -> float | None:
        scaling = dict(self._scaler)
        self._engine.step()
        if self._engine.was_step_applied():
            return float(self._engine.get_global_grad_norm())
        if (
            self.stage < 3
        ):  # DeepSpeed 0.19 keeps offloaded gradients, and every later step would be skipped
            gradients = getattr(
                self._engine.optimizer, "averaged_gradients", {}
            )  # not in bfloat16 at stage 1
            gradients.update(dict.fromkeys(gradients))
        if not rescale:
            self._scaler.update(scaling)
        return None

    def broken_gradients(self) -> list[str]:
        """Return the parameters whose gradient is not finite. All ranks call it."""
        full_grad = importlib.import_module("deepspeed.utils").safe_get_full_grad
        gradients = ((name, full_grad(parameter)) for name, parameter in self._trained.items())
        return [
            name
            for name, gradient in gradients
            if gradient is not None and not bool(gradient.isfinite().all())
        ]

    def layout(self, max_bytes: int, *, trained: bool = False) -> list[list[tuple[str, Tensor]]]:
        """List the buckets that `buckets` yields, on the meta device."""
        on_meta = functools.partial(torch.empty, dtype=self._dtype, device="meta")
        named = self._trained if trained else self._published
        tensors = ((name, on_meta(whole_shape(parameter))) for name, parameter in named.items())
        return list(in_buckets(tensors, max_bytes))

    def buckets(
        self, max_bytes: int, *, trained: bool = False
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield (name, whole tensor) of what is published, tied ones once, on rank 0; all ranks must exhaust it."""
        for bucket in self.layout(max_bytes, trained=trained):
            parameters = {name: self._published[name] for name, _ in bucket}
            # Whole, where ZeRO-3 spreads them; writes would be lost.
            with importlib.import_module("deepspeed").zero.GatheredParameters(
                list(parameters.values())
            ):
                if self._ranks.is_main:
                    yield [
                        (name, parameter.detach().to(self._dtype))
                        for name, parameter in parameters.items()
                    ]

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield "MODEL/KIND/parameter" and the whole float32 tensor on rank 0's CPU. All ranks must exhaust it."""
        for name, shape, place, view in self._pieces():
            whole = torch.zeros(shape.numel(), device=self._ranks.device)
            whole[place].copy_(view)
            if self.stage > 0:
                dist.all_reduce(whole.view(torch.int32))  # as bits, 0 on other ranks: -0.0 survives
            if self._ranks.is_main:
                yield name, whole.view(shape).to("cpu", copy=True)

    def counters(self) -> dict[str, Any]:
        scale = {
            key: value for key, value in self._scaler.items() if isinstance(value, int | float)
        }
        updates = max(
            int(self._adamw.state[flat]["step"]) for flat in self._flats()
        )  # 0 without gradients at stage 0
        return {"updates": updates, "scheduled": self.num_steps, "loss_scale": scale}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(shape) for name, shape, *_ in self._pieces()}

    def restore(self, read: Callable[[str], Tensor] | None, counters: Mapping[str, Any]) -> None:
        """Restore what `state` and `counters` gave, at any stage and size. Only rank 0 can `read`."""
        for name, shape, place, view in self._pieces():
            whole = torch.empty(shape.numel(), device=self._ranks.device)
            if read is not None:
                whole.copy_(read(name).view(-1))
            dist.broadcast(whole, src=0)
            view.copy_(whole[place])
        for flat in self._flats():
            self._adamw.state[flat]["step"].fill_(counters["updates"])
        self._to_parameters()
        self._scaler.update(counters["loss_scale"])
        self.num_steps = counters["scheduled"]

    def tensors(self) -> Iterator[Tensor]:
        module = self._engine.module
        return share_gpu.tensors_in(
            list(module.parameters()), list(module.buffers()), self._engine.optimizer
        )

    def close(self) -> None:
        self._engine.destroy()

    def _pieces(self) -> Iterator[tuple[str, torch.Size, slice, Tensor]]:
        """Yield each tensor's name and shape, this rank's slice of it, and that in AdamW's memory, flat."""
        for name, parameter in self._trained.items():
            start, flat, offset, size = self._find(parameter)
            found = {MASTER: flat.detach(), **self._adamw.state[flat]}
            for kind in KINDS:
                piece = found[kind].view(-1).narrow(0, offset, size)
                yield (
                    f"{self._name}/{kind}/{name}",
                    whole_shape(parameter),
                    slice(start, start + size),
                    piece,
                )

    def _find(self, parameter: Any) -> tuple[int, Tensor, int, int]:
        """Return this rank's start in the parameter, the tensor that AdamW steps on, the place there, and the size."""
        if self.stage == 0:
            return 0, parameter, 0, parameter.numel()
        flats = self._flats()
        if self.stage == 3:
            zero = self._engine.optimizer
            group, offset, size = zero.grad_position[zero.get_param_id(parameter)]
            start = size * zero._get_param_partition_rank(parameter)
            return (
                start,
                flats[group],
                offset,
                max(0, min(size, parameter.ds_numel - start)),
            )  # the rest is padding
        mapping = parameter._hp_mapping
        if mapping is None:  # other ranks hold all of it
            return 0, flats[0], 0, 0
        address = mapping.hp_fragment_address
        return (
            mapping.lp_fragment_address.start,
            flats[mapping.param_group_index],
            address.start,
            address.numel,
        )

    def _flats(self) -> list[Tensor]:
        """List the tensors that AdamW updates: the parameters (ZeRO-0), or flat parts of them."""
        (group,) = self._adamw.param_groups
        # ZeRO-3 gives it to AdamW during a step only.
        return list(
            self._engine.optimizer.fp32_partitioned_groups_flat
            if self.stage == 3
            else group["params"]
        )

    def _to_parameters(self) -> None:
        zero = self._engine.optimizer
        if self.stage in (1, 2):
            zero.update_lp_params()
        elif self.stage == 3:
            zero.checkpoint_event_prologue()  # split the parameters that every rank holds whole
            for flat, master in zip(zero.fp16_partitioned_groups_flat, self._flats(), strict=True):
                flat.data.copy_(master.data)
            zero.checkpoint_event_epilogue()  # gather them again


def in_buckets(
    tensors: Iterable[tuple[str, Tensor]], max_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the tensors in lists of at most max_bytes; a larger one is alone."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket = []
            size = 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))
