"""Train one module by DeepSpeed: nothing is compiled, and no step is skipped silently.

The rest of the trainer sees DeepSpeed through DeepSpeedEngine only. A `stage` is ZeRO's, and says
what the ranks divide among themselves: nothing at 0, the optimizer's state from 1 on, gradients
from 2 on, weights at 3.
"""

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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket.config import TrainerConfig
from hocket.errors import ConfigError
from hocket.trainer import share_gpu
from hocket.trainer.choices import chosen_recomputation
from hocket.trainer.ranks import Ranks

POLICY = "policy"  # prefix of the names of the policy's tensors in a checkpoint
MASTER = "master"  # the float32 weights
KINDS = (MASTER, "exp_avg", "exp_avg_sq")  # the last two are AdamW's names of its moments
# Elements that ranks sum at a time. DeepSpeed's default would allocate ten times as many.
BUCKET_ELEMENTS = 50_000_000

# DeepSpeed's settings for each dtype of forward and backward passes.
PRECISION: Mapping[torch.dtype, Mapping[str, Any]] = {
    torch.float32: {},
    torch.float16: {"fp16": {"enabled": True, "initial_scale_power": 12, "hysteresis": 1}},
    torch.bfloat16: {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",  # in bfloat16 the sums over ranks would be rounded
    },
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How one rank holds its models."""

    config: TrainerConfig
    dtype: torch.dtype  # dtype of forward and backward passes
    ranks: Ranks

    @property
    def stage(self) -> int:
        """ZeRO's stage."""
        on_gpu = self.ranks.device.type == "cuda"
        return default_zero_stage(self.config, self.dtype, num_ranks=self.ranks.size, on_gpu=on_gpu)

    def parameter_dtype(self) -> torch.dtype:
        """Choose the dtype in which a model is loaded: ZeRO keeps float32 masters of its own.

        Raises ConfigError for float16 where DeepSpeed can't scale the loss.
        """
        scales_loss = self.stage > 0 and self.ranks.device.type == "cuda"
        if self.dtype == torch.float16 and not scales_loss:
            advice = "set that, or model.dtype=bfloat16 or float32"
            raise ConfigError(
                f"float16 can be trained on GPUs alone, with trainer.zero_stage=1, 2 or 3: {advice}"
            )
        return self.dtype if self.stage > 0 else torch.float32


def load_deepspeed(ranks: Ranks) -> Any:
    """Import DeepSpeed, set up for this process's device and the ranks' deadline."""
    os.environ["DS_ACCELERATOR"] = ranks.device.type  # a value of the user's shell must not win
    deepspeed = importlib.import_module("deepspeed")

    # This operator would be compiled at the first start; only tensor-parallel inference needs it.
    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    ranks.destroy = deepspeed.comm.destroy_process_group  # it also forgets DeepSpeed's copies

    # The group that DeepSpeed would make itself waits half an hour for a lost rank.
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    if groups._WORLD_GROUP is None:
        groups._WORLD_GROUP = dist.new_group(timeout=datetime.timedelta(seconds=ranks.timeout_s))
    return deepspeed


def initialize(setup: Setup, **options: Any) -> Any:
    """Call deepspeed.initialize without its output; returns its engine."""
    deepspeed = load_deepspeed(setup.ranks)
    # An earlier run in this process may have set this: gradients would be summed in 16 bits.
    autocast: Any = importlib.import_module("deepspeed.runtime.torch_autocast")
    autocast.TORCH_AUTOCAST_INITIALIZED = False

    gc.freeze()  # for its memory statistics, DeepSpeed collects garbage up to 15 times
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints these at every log level
            results = deepspeed.initialize(
                **options, config=deepspeed_config(setup), dist_init_required=False
            )
    finally:
        gc.unfreeze()
    return results[0]


def spread(module: nn.Module, setup: Setup) -> None:
    """Divide the weights of a module among the ranks, submodule by submodule (ZeRO-3).

    At first rank 0 has all weights, and the other ranks have meta tensors. No rank ever holds more
    than one whole submodule on its device.
    """
    device = setup.ranks.device
    zero = load_deepspeed(setup.ranks).zero

    # Only rank 0 knows the dtypes: transformers may keep some parameters in float32.
    dtypes = [parameter.dtype for parameter in module.parameters()]
    dist.broadcast_object_list(dtypes, src=0, device=device)
    dtype_of = dict(zip(module.parameters(), dtypes, strict=True))

    for submodule in module.modules():
        # Allocate the parameters that this rank doesn't have. A tied one is a meta tensor only in
        # the first of its submodules.
        parameters = list(submodule.parameters(recurse=False))
        for parameter in parameters:
            if parameter.is_meta:
                empty = torch.empty_like(parameter, dtype=dtype_of[parameter], device=device)
                whole = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                torch.utils.swap_tensors(parameter, whole)  # type: ignore[no-untyped-call]

        # Every rank keeps whole buffers.
        for name, buffer in submodule.named_buffers(recurse=False):
            if buffer.is_meta:
                on_device = torch.empty_like(buffer, device=device)
            else:
                on_device = buffer.to(device)
            dist.broadcast(on_device, src=0)
            setattr(submodule, name, on_device)

        # DeepSpeed sends rank 0's parameters, and every rank keeps its part of each.
        if parameters:
            module_list = nn.ParameterList(parameters)
            zero.Init(module=module_list, config_dict_or_path=deepspeed_config(setup))


def default_zero_stage(
    config: TrainerConfig, dtype: torch.dtype, *, num_ranks: int, on_gpu: bool
) -> int:
    """Choose ZeRO's stage where trainer.zero_stage does not."""
    if config.zero_stage is not None:
        return config.zero_stage
    if num_ranks == 1 and dtype == torch.float32 and not config.offload_optimizer:
        return 0
    if not on_gpu:
        return 1
    # Float32 sums of gradients leave the GPU only at stage 3.
    return 3 if config.offload_optimizer else 2


def deepspeed_config(setup: Setup) -> dict[str, Any]:
    """Make DeepSpeed's configuration; trainer.deepspeed overrides all of it."""
    config = setup.config
    stage = setup.stage
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": BUCKET_ELEMENTS}
    values: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # nominal: the trainer accumulates itself
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm if stage > 0 else 0.0,  # at 0 the engine clips
        "steps_per_print": 10**9,
    }
    if config.gradient_checkpointing:
        leaves = chosen_recomputation(config.gradient_checkpointing).gathered_at_once
        if leaves:
            zero["leaf_module"] = {"name_suffixes": list(leaves)}
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        # DeepSpeed's own optimizer would be compiled; torch's AdamW runs on the CPU, too.
        values["zero_force_ds_cpu_optimizer"] = False
    if setup.dtype == torch.bfloat16 and stage == 0:
        # DeepSpeed's bfloat16 optimizer loses precision here.
        values["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    else:
        values |= PRECISION[setup.dtype]

    # A section zero_optimization of the user's is merged, every other one replaces.
    zero |= config.deepspeed.get("zero_optimization", {})
    values.update(config.deepspeed)
    values["zero_optimization"] = zero
    return values


class _Fragment(NamedTuple):
    """This rank's part of a parameter, and its place in the memory of AdamW."""

    start: int  # in the flattened parameter
    flat: Tensor  # the tensor that AdamW updates
    offset: int  # in `flat`
    size: int  # elements; 0 where other ranks hold the whole parameter


class _Piece(NamedTuple):
    """This rank's part of a tensor of a checkpoint."""

    name: str  # MODEL/KIND/parameter
    shape: torch.Size  # of the whole tensor
    place: slice  # of this rank's part in the flattened tensor
    view: Tensor  # this rank's part, flat, in the memory of AdamW


class DeepSpeedEngine:
    """Trains one module, with float32 master weights and AdamW.

    A checkpoint's tensors are read from AdamW's memory: DeepSpeed's own checkpoints fit only the
    number of ranks and the stage that wrote them.

    Args:
        module: a Policy, or another model with `weights`.
        setup: how this rank holds it.
        name: prefix of the names of its tensors in a checkpoint.
    """

    def __init__(self, module: Any, setup: Setup, *, name: str) -> None:
        self.stage = setup.stage
        self.module = module
        self._name = name
        self._config = config = setup.config
        self._dtype = setup.dtype
        self._ranks = setup.ranks
        self.num_steps = 0  # steps of the run in which this module learns, updated or not
        if self.stage == 3:
            spread(module, setup)

        # Servers have the base model under an adapter already: only the adapter is published.
        parameters = dict(module.named_parameters())
        self._trained = {
            name: parameter for name, parameter in parameters.items() if parameter.requires_grad
        }
        has_adapter = module.weights.adapter is not None
        self._published = self._trained if has_adapter else parameters

        self._peak_rate = float(config.learning_rate)  # the trainer has replaced `auto`
        self._adamw = torch.optim.AdamW(
            self._trained.values(),
            lr=self._peak_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._engine = initialize(setup, model=module, optimizer=self._adamw)
        # One rank alone would copy all gradients to sum them.
        self._engine.enable_backward_allreduce = self.stage > 0 or self._ranks.size > 1

        # Make AdamW's state now, as its first step would: a checkpoint may come before that.
        for flat in self._flats():
            self._adamw.state[flat] = {
                "step": torch.zeros((), device=flat.device),
                "exp_avg": torch.zeros_like(flat),
                "exp_avg_sq": torch.zeros_like(flat),
            }

        # The attributes of DeepSpeed's scaler of float16 losses. At its lowest scale, a step is
        # skipped like any other.
        self._scaler: dict[str, Any] = {}
        if self._dtype == torch.float16:
            self._scaler = vars(self._engine.optimizer.loss_scaler)
            self._scaler["raise_error_at_min_scale"] = False

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step: a linear warm-up, then the schedule."""
        config = self._config
        steps = self.num_steps
        if steps < config.warmup_steps:
            return self._peak_rate * ((steps + 1) / config.warmup_steps)
        decay_steps = max(1, config.steps - config.warmup_steps)
        remaining = max(0.0, (config.steps - steps) / decay_steps)  # from 1 down to 0
        factors = {
            "constant": 1.0,
            "linear": remaining,
            "cosine": 0.5 * (1 - math.cos(math.pi * remaining)),
        }
        return self._peak_rate * factors[config.schedule]

    def plan(self, steps: int) -> None:
        """Plan the learning rate's schedule to end after `steps`."""
        self._config = self._config.model_copy(update={"steps": steps})

    @property
    def loss_scale(self) -> float | None:
        """Factor on float16 losses, halved after a gradient that is not finite; else None."""
        return self._scaler.get("cur_scale")

    # Steps

    def forward(self, *args: Any) -> Any:
        """Run the module's forward pass."""
        return self._engine(*args)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add up the gradient of this rank's share of the loss; with `last`, sum it over ranks."""
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over the ranks, so a sum needs a factor of their number. Ranks that
        # compute a row together all have its loss, and count once.
        num_rows = self._ranks.size / self._ranks.part.size
        self._engine.backward(loss * num_rows, scale_wrt_gas=False)

    def step(self, *, rescale: bool = True) -> float | None:
        """Clip the gradient, update the weights, and clear the gradient.

        Returns the gradient's norm before clipping. Where that is not finite, the step is skipped
        and the result is None.

        Args:
            rescale: whether a skipped step may lower the loss scale.
        """
        (group,) = self._adamw.param_groups
        group["lr"] = self.learning_rate
        if self.stage == 0:
            return self._step_without_zero()
        return self._step_with_zero(rescale)

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

        # DeepSpeed 0.19 keeps offloaded gradients of a skipped step, and would skip all later ones.
        # With bfloat16 at stage 1 its optimizer has no such attribute.
        if self.stage < 3:
            gradients = getattr(self._engine.optimizer, "averaged_gradients", {})
            for group in gradients:
                gradients[group] = None
        if not rescale:
            self._scaler.update(scaling)
        return None

    def broken_gradients(self) -> list[str]:
        """List the parameters whose gradient is not finite. All ranks must call it."""
        full_grad = importlib.import_module("deepspeed.utils").safe_get_full_grad
        names = []
        for name, parameter in self._trained.items():
            gradient = full_grad(parameter)
            if gradient is not None and not bool(gradient.isfinite().all()):
                names.append(name)
        return names

    # Weights

    def layout(self, max_bytes: int, *, trained: bool = False) -> list[list[tuple[str, Tensor]]]:
        """List the buckets that `buckets` yields, with tensors on the meta device.

        Args:
            max_bytes: size of a bucket; a larger tensor has a bucket of its own.
            trained: list only the weights that are trained.
        """
        on_meta = functools.partial(torch.empty, dtype=self._dtype, device="meta")
        named = self._trained if trained else self._published
        tensors = ((name, on_meta(whole_shape(parameter))) for name, parameter in named.items())
        return list(in_buckets(tensors, max_bytes))

    def buckets(
        self, max_bytes: int, *, trained: bool = False
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield the published weights on rank 0, whole, as (name, tensor); tied ones once.

        All ranks must exhaust it.
        """
        zero = importlib.import_module("deepspeed").zero
        for bucket in self.layout(max_bytes, trained=trained):
            parameters = {name: self._published[name] for name, _ in bucket}
            # ZeRO-3 gathers the weights for this block only, and would lose what is written there.
            with zero.GatheredParameters(list(parameters.values())):
                if self._ranks.is_main:
                    yield [
                        (name, parameter.detach().to(self._dtype))
                        for name, parameter in parameters.items()
                    ]

    # Checkpoints

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield a checkpoint's tensors on rank 0 by name: whole, in float32, on the CPU.

        All ranks must exhaust it.
        """
        for piece in self._pieces():
            whole = torch.zeros(piece.shape.numel(), device=self._ranks.device)
            whole[piece.place].copy_(piece.view)
            if self.stage > 0:
                # Other ranks have zero bits there. As integers they leave even -0.0 as it is.
                dist.all_reduce(whole.view(torch.int32))
            if self._ranks.is_main:
                yield piece.name, whole.view(piece.shape).to("cpu", copy=True)

    def counters(self) -> dict[str, Any]:
        """Collect the state of a checkpoint that is no tensor, ready for JSON."""
        # At stage 0, AdamW does not count for parameters without a gradient.
        updates = max(int(self._adamw.state[flat]["step"]) for flat in self._flats())
        loss_scale = {
            key: value for key, value in self._scaler.items() if isinstance(value, int | float)
        }
        return {"updates": updates, "scheduled": self.num_steps, "loss_scale": loss_scale}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Map the names of a checkpoint's tensors to their shapes."""
        return {piece.name: tuple(piece.shape) for piece in self._pieces()}

    def restore(self, read: Callable[[str], Tensor] | None, counters: Mapping[str, Any]) -> None:
        """Restore a checkpoint's tensors and counters, whatever stage and ranks wrote them.

        Args:
            read: reads a whole tensor by its name; only on rank 0, which sends it to the others.
            counters: the result of `counters`.
        """
        for piece in self._pieces():
            whole = torch.empty(piece.shape.numel(), device=self._ranks.device)
            if read is not None:
                whole.copy_(read(piece.name).view(-1))
            dist.broadcast(whole, src=0)
            piece.view.copy_(whole[piece.place])
        for flat in self._flats():
            self._adamw.state[flat]["step"].fill_(counters["updates"])
        self._masters_to_parameters()
        self._scaler.update(counters["loss_scale"])
        self.num_steps = counters["scheduled"]

    # Memory

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors of the module and its optimizer."""
        module = self._engine.module
        return share_gpu.tensors_in(
            list(module.parameters()), list(module.buffers()), self._engine.optimizer
        )

    def close(self) -> None:
        """Free the memory of DeepSpeed."""
        self._engine.destroy()

    # What AdamW holds

    def _pieces(self) -> Iterator[_Piece]:
        """Yield this rank's part of every tensor of a checkpoint: the masters and both moments."""
        for name, parameter in self._trained.items():
            fragment = self._fragment(parameter)
            place = slice(fragment.start, fragment.start + fragment.size)
            tensors = {MASTER: fragment.flat.detach()} | self._adamw.state[fragment.flat]
            for kind in KINDS:
                view = tensors[kind].view(-1).narrow(0, fragment.offset, fragment.size)
                yield _Piece(f"{self._name}/{kind}/{name}", whole_shape(parameter), place, view)

    def _fragment(self, parameter: Any) -> _Fragment:
        """Locate this rank's part of a parameter in the tensors that AdamW updates."""
        if self.stage == 0:
            return _Fragment(0, parameter, 0, parameter.numel())
        flats = self._flats()
        if self.stage == 3:
            zero = self._engine.optimizer
            group, offset, size = zero.grad_position[zero.get_param_id(parameter)]
            start = size * zero._get_param_partition_rank(parameter)
            # All ranks have parts of the same size; behind the parameter's end is padding.
            size = max(0, min(size, parameter.ds_numel - start))
            return _Fragment(start, flats[group], offset, size)
        mapping = parameter._hp_mapping  # from the parameter to AdamW's tensor, its "hp" copy
        if mapping is None:  # this rank has no part
            return _Fragment(0, flats[0], 0, 0)
        start = mapping.lp_fragment_address.start
        address = mapping.hp_fragment_address
        return _Fragment(start, flats[mapping.param_group_index], address.start, address.numel)

    def _flats(self) -> list[Tensor]:
        """List the tensors that AdamW updates: the parameters (ZeRO-0), or flat parts of them."""
        # ZeRO-3 shows them to AdamW during a step only.
        if self.stage == 3:
            return list(self._engine.optimizer.fp32_partitioned_groups_flat)
        (group,) = self._adamw.param_groups
        return list(group["params"])

    def _masters_to_parameters(self) -> None:
        """Copy the float32 masters to the parameters of forward passes, rounded to their dtype."""
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
    """Group tensors, in order, into lists of at most max_bytes; a larger tensor is alone."""
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
    """Find the shape of a whole parameter, of which ZeRO-3 leaves a part on each rank."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))
