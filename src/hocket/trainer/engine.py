"""DeepSpeed behind a small interface. Nothing has to be compiled, and no step is skipped silently."""

import contextlib
import datetime
import gc
import importlib
import io
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket.config import TrainerConfig
from hocket.errors import ConfigError
from hocket.trainer import offload
from hocket.trainer.ranks import Ranks
from hocket.trainer.state import KINDS, MasterState

BUCKET_ELEMENTS = 50_000_000  # summed over ranks at a time; DeepSpeed would allocate ten times as many

PRECISION: Mapping[torch.dtype, Mapping[str, Any]] = {
    torch.float32: {},
    torch.float16: {"fp16": {"enabled": True, "initial_scale_power": 12, "hysteresis": 1}},
    torch.bfloat16: {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",  # or ranks would round the sums of their gradients
    },
}


def load_deepspeed(ranks: Ranks) -> Any:
    if ranks.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed = importlib.import_module("deepspeed")
    # DeepSpeed would compile this operator at first start; it is for tensor-parallel inference.
    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    ranks.destroy = deepspeed.comm.destroy_process_group  # it also forgets DeepSpeed's copies
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    if groups._WORLD_GROUP is None:  # DeepSpeed's own would wait half an hour for a lost rank
        groups._WORLD_GROUP = dist.new_group(timeout=datetime.timedelta(seconds=ranks.timeout_s))
    return deepspeed


def initialize(ranks: Ranks, **options: Any) -> Any:
    deepspeed = load_deepspeed(ranks)
    autocast: Any = importlib.import_module("deepspeed.runtime.torch_autocast")
    autocast.TORCH_AUTOCAST_INITIALIZED = False  # by an earlier run here: it sums gradients in 16 bits
    gc.freeze()  # for its memory statistics, DeepSpeed collects garbage up to 15 times
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints them whatever the log level
            engine, *_ = deepspeed.initialize(**options, dist_init_required=False)
    finally:
        gc.unfreeze()
    return engine


def spread(module: nn.Module, settings: Mapping[str, Any], ranks: Ranks) -> None:
    """Leave each rank its part of the weights that rank 0 has loaded, module by module; elsewhere they are meta."""
    zero = load_deepspeed(ranks).zero
    dtypes = [parameter.dtype for parameter in module.parameters()]
    dist.broadcast_object_list(dtypes, src=0, device=ranks.device)  # transformers may keep some in float32 as it loads
    dtype_of = dict(zip(module.parameters(), dtypes, strict=True))
    placed: dict[nn.Parameter, nn.Parameter] = {}  # a tied one is in two modules
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.is_meta and parameter not in placed:
                empty = torch.empty_like(parameter, dtype=dtype_of[parameter], device=ranks.device)
                placed[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(part, name, placed.get(parameter, parameter))
        for name, buffer in part.named_buffers(recurse=False):
            here = torch.empty_like(buffer, device=ranks.device) if buffer.is_meta else buffer.to(ranks.device)
            dist.broadcast(here, src=0)
            setattr(part, name, here)
        if own := list(part.parameters(recurse=False)):  # rank 0's are sent, and every rank keeps its part
            zero.Init(module=nn.ParameterList(own), config_dict_or_path=dict(settings))


def default_zero_stage(config: TrainerConfig, dtype: torch.dtype, *, num_ranks: int, on_gpu: bool) -> int:
    """Return the configured stage; default 0 for one rank in float32, 1 on a CPU, 2 on a GPU."""
    if config.zero_stage is not None:
        return config.zero_stage
    if num_ranks == 1 and dtype == torch.float32 and not config.offload_optimizer:
        return 0
    if not on_gpu:
        return 1
    return 3 if config.offload_optimizer else 2  # float32 sums of gradients leave the GPU at stage 3 alone


def zero_stage(config: TrainerConfig, dtype: torch.dtype, ranks: Ranks) -> int:
    return default_zero_stage(config, dtype, num_ranks=ranks.size, on_gpu=ranks.device.type == "cuda")


def parameter_dtype(config: TrainerConfig, dtype: torch.dtype, ranks: Ranks) -> torch.dtype:
    stage = zero_stage(config, dtype, ranks)
    if dtype == torch.float16 and ranks.device.type == "cpu":
        raise ConfigError("float16 can't be trained on a CPU; set model.dtype to float32 or bfloat16")
    if stage > 0:
        return dtype
    if dtype == torch.float16:
        raise ConfigError("ZeRO stage 0 can't scale float16 losses; set trainer.zero_stage=1 or a bfloat16 dtype")
    return torch.float32


def deepspeed_config(config: TrainerConfig, *, stage: int, dtype: torch.dtype) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": BUCKET_ELEMENTS}
    values: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # nominal: the trainer forms micro-batches and accumulates itself
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm if stage > 0 else 0.0,  # `step` does it there
        "steps_per_print": 10**9,
    }
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        values["zero_force_ds_cpu_optimizer"] = False  # it would have to be compiled; torch's AdamW runs there too
    if dtype == torch.bfloat16 and stage == 0:
        values["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}  # its own bf16 optimizer loses precision here
    else:
        values |= PRECISION[dtype]
    zero |= config.deepspeed.get("zero_optimization", {})
    return {**values, **config.deepspeed, "zero_optimization": zero}


def learning_rate_factor(config: TrainerConfig) -> Callable[[int], float]:
    def factor(steps: int) -> float:
        if steps < config.warmup_steps:
            return (steps + 1) / config.warmup_steps
        left = max(0.0, (config.steps - steps) / max(1, config.steps - config.warmup_steps))
        return {"constant": 1.0, "linear": left, "cosine": 0.5 * (1 - math.cos(math.pi * left))}[config.schedule]

    return factor


class DeepSpeedEngine:
    """Trains one module, with float32 master weights and AdamW; `dtype`: of forward and backward passes."""

    def __init__(self, module: nn.Module, config: TrainerConfig, *, dtype: torch.dtype, ranks: Ranks) -> None:
        self.stage = zero_stage(config, dtype, ranks)
        self._config = config
        self._dtype = dtype
        self._ranks = ranks
        settings = deepspeed_config(config, stage=self.stage, dtype=dtype)
        if self.stage == 3:
            spread(module, settings, ranks)
        self._adamw = torch.optim.AdamW(
            [parameter for parameter in module.parameters() if parameter.requires_grad],
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._adamw, learning_rate_factor(config))
        self._engine = initialize(ranks, model=module, config=settings, optimizer=self._adamw)
        if self.stage == 0 and ranks.size == 1:  # else all gradients are copied to be summed over one rank
            self._engine.enable_backward_allreduce = False
        if dtype == torch.float16:  # at the lowest scale a step is skipped like any other
            self._engine.optimizer.loss_scaler.raise_error_at_min_scale = False

    @property
    def learning_rate(self) -> float:
        return float(self._scheduler.get_last_lr()[0])

    @property
    def num_steps(self) -> int:
        """Steps of the run that took an update."""
        return int(self._scheduler.last_epoch)

    def plan(self, steps: int) -> None:
        """Have the schedule end after `steps` in place of trainer.steps; call it first."""
        self._scheduler.lr_lambdas = [learning_rate_factor(self._config.model_copy(update={"steps": steps}))]

    def end_step(self) -> None:
        self._scheduler.step()

    @property
    def loss_scale(self) -> float | None:
        """Factor on float16 losses, halved after a gradient that is not finite; else None."""
        return float(self._loss_scaler()["cur_scale"]) if self._dtype == torch.float16 else None

    def bytes_to_come(self) -> int:
        """Return what the first step allocates on the device for good: AdamW's moments."""
        if self._config.offload_optimizer and self._ranks.device.type == "cuda":
            return 0
        trained = sum(whole_shape(parameter).numel() for _, parameter in self._trained())
        return 8 * trained // (1 if self.stage == 0 else self._ranks.size)

    def forward(self, *args: Any) -> Any:
        return self._engine(*args)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate the gradient of this rank's share of the loss; on the last one, sum it over ranks."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self._ranks.size, scale_wrt_gas=False)  # DeepSpeed averages over ranks

    def step(self, *, rescale: bool = True) -> float | None:
        """Clip, apply, clear the gradient; return its norm, None if not finite (`rescale`: lower the loss scale)."""
        norm: float | None = None
        if self.stage == 0:  # DeepSpeed neither reports the norm nor looks for NaN here
            norm = float(nn.utils.clip_grad_norm_([p for _, p in self._trained()], self._config.max_grad_norm))
            if not math.isfinite(norm):
                self._engine.zero_grad()
                return None
        scaling = dict(self._loss_scaler())
        self._engine.step()
        if self._engine.was_step_applied():
            return float(self._engine.get_global_grad_norm()) if norm is None else norm
        # Where ZeRO-1 or 2 offloads, DeepSpeed 0.19 keeps the gradients, and every later step would be skipped.
        gradients = getattr(self._engine.optimizer, "averaged_gradients", None)
        if self.stage in (1, 2) and gradients:
            gradients.update(dict.fromkeys(gradients))
        if not rescale:
            self._loss_scaler().update(scaling)
        return None

    def broken_gradients(self) -> list[str]:
        """Return the parameters whose gradient is not finite. All ranks call it."""
        full_grad = importlib.import_module("deepspeed.utils").safe_get_full_grad
        gradients = ((name, full_grad(parameter)) for name, parameter in self._trained())
        return [name for name, gradient in gradients if gradient is not None and not bool(gradient.isfinite().all())]

    def layout(self, max_bytes: int) -> list[list[tuple[str, Tensor]]]:
        """Return what `buckets` yields, on the meta device."""
        return [
            [(name, torch.empty(whole_shape(p), dtype=self._dtype, device="meta")) for name, p in group]
            for group in self.by_bytes(max_bytes)
        ]

    def buckets(self, max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield trained (name, whole tensor), tied ones once, on rank 0; all ranks must exhaust it."""
        for group in self.by_bytes(max_bytes):
            with gathered([parameter for _, parameter in group]):
                if self._ranks.is_main:
                    yield [(name, parameter.detach().to(self._dtype)) for name, parameter in group]

    def by_bytes(self, max_bytes: int) -> list[list[tuple[str, nn.Parameter]]]:
        groups: list[list[tuple[str, nn.Parameter]]] = []
        size = 0
        for name, parameter in self._trained():
            num_bytes = whole_shape(parameter).numel() * self._dtype.itemsize
            if size + num_bytes > max_bytes or not groups:
                groups.append([])
                size = 0
            groups[-1].append((name, parameter))
            size += num_bytes
        return groups

    def state(self, max_bytes: int) -> Iterator[dict[str, Tensor]]:
        """Yield "KIND/parameter" → whole float32 tensor on rank 0's CPU. All ranks must exhaust it."""
        master = self._master()
        bucket: dict[str, Tensor] = {}
        size = 0
        for name, parameter in self._trained():
            place, views = master.piece(parameter)
            for kind in KINDS:
                whole = torch.zeros(whole_shape(parameter).numel(), device=self._ranks.device)
                whole[place].copy_(views[kind])
                if self.stage > 0:
                    dist.all_reduce(whole.view(torch.int32))  # as bits, 0 on other ranks: -0.0 survives
                if self._ranks.is_main:
                    bucket[f"{kind}/{name}"] = whole.view(whole_shape(parameter)).to("cpu", copy=True)
                    size += whole.nbytes
                if size >= max_bytes:
                    yield bucket
                    bucket = {}
                    size = 0
        if bucket:
            yield bucket

    def counters(self) -> dict[str, Any]:
        scale = {key: value for key, value in self._loss_scaler().items() if isinstance(value, int | float)}
        return {"updates": self._master().step, "scheduled": self._scheduler.last_epoch, "loss_scale": scale}

    def shapes(self) -> dict[str, torch.Size]:
        return {f"{kind}/{name}": whole_shape(p) for name, p in self._trained() for kind in KINDS}

    def restore(self, read: Callable[[str], Tensor] | None, counters: Mapping[str, Any]) -> None:
        """Restore what `state` and `counters` gave, at any stage and size. Only rank 0 can `read`."""
        master = self._master()
        for name, parameter in self._trained():
            place, views = master.piece(parameter)
            for kind in KINDS:
                whole = torch.empty(whole_shape(parameter).numel(), device=self._ranks.device)
                if read is not None:
                    whole.copy_(read(f"{kind}/{name}").view(-1))
                dist.broadcast(whole, src=0)
                views[kind].copy_(whole[place])
        master.step = counters["updates"]
        master.to_parameters()
        self._loss_scaler().update(counters["loss_scale"])
        scheduler = self._scheduler
        (group,) = self._adamw.param_groups  # the schedule may have other settings now
        scheduler.last_epoch = counters["scheduled"]
        group["lr"] = scheduler.base_lrs[0] * scheduler.lr_lambdas[0](scheduler.last_epoch)
        scheduler._last_lr = [group["lr"]]

    def tensors(self) -> Iterator[Tensor]:
        module = self._engine.module
        return offload.tensors_in(list(module.parameters()), list(module.buffers()), self._engine.optimizer)

    def close(self) -> None:
        self._engine.destroy()

    def _master(self) -> MasterState:
        return MasterState(self.stage, self._engine.optimizer, self._adamw)

    def _loss_scaler(self) -> dict[str, Any]:
        return vars(self._engine.optimizer.loss_scaler) if self._dtype == torch.float16 else {}

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self._engine.module.named_parameters() if p.requires_grad]


def gathered(parameters: list[nn.Parameter]) -> Any:
    """Context in which parameters that ZeRO-3 spreads are whole; writes are lost."""
    return importlib.import_module("deepspeed").zero.GatheredParameters(parameters)


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))
