"""Read `trainer.deepspeed`, for DeepSpeed 0.19.8: `{...}`, or the path of somebody's
ds_config.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket.common.registry import refuse_owned
from hocket.config.sections import leaves, put
from hocket.config.whole import setting_reader

_OWNED = {
    "train_batch_size": "rollout.prompts_per_step and rollout.group_size",
    "train_micro_batch_size_per_gpu": "trainer.micro_batch_tokens",
    "gradient_accumulation_steps": "trainer.micro_batch_tokens",
    "optimizer": "trainer.learning_rate, trainer.betas and trainer.weight_decay",
    "scheduler": "trainer.schedule and trainer.warmup_steps",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "torch_autocast": "model.dtype",
    "activation_checkpointing": "trainer.gradient_checkpointing",
    "zero_optimization.offload_optimizer": "trainer.offload_optimizer",
}
_ZERO = "zero_optimization."
_PASSED = {
    "communication_data_type",
    "comms_logger",
    "dump_state",
    "flops_profiler",
    "memory_breakdown",
    "steps_per_print",
    "wall_clock_breakdown",
} | {
    f"{_ZERO}{name}"
    for name in (
        "allgather_bucket_size",
        "allgather_partitions",
        "contiguous_gradients",
        "enable_sanity_checks",
        "ignore_unused_parameters",
        "overlap_comm",
        "reduce_bucket_size",
        "reduce_scatter",
        "sub_group_size",
        "use_multi_rank_bucket_allreduce",
    )
}
_RENAMED = {
    "gradient_clipping": "trainer.max_grad_norm",
    "optimizer.params.lr": "trainer.learning_rate",
    "optimizer.params.betas": "trainer.betas",
    "optimizer.params.weight_decay": "trainer.weight_decay",
    "zero_optimization.stage": "trainer.zero_stage",
}
_MEANT: dict[str, dict[str, Any]] = {  # what a value means here; {}: it needs no setting
    "bf16.enabled=True": {"model.dtype": "bfloat16"},
    "bf16.enabled=False": {},
    "fp16.enabled=True": {"model.dtype": "float16"},
    "optimizer.type=Adam": {},
    "optimizer.type=AdamW": {},
    "zero_optimization={}": {},
    "zero_optimization.offload_optimizer.device=cpu": {"trainer.offload_optimizer": True},
    "zero_optimization.offload_optimizer.device=none": {},
    "zero_optimization.offload_optimizer.pin_memory=True": {},
    "zero_optimization.offload_optimizer.pin_memory=False": {},
}
_STAGE_3 = f"{_ZERO}stage3_"  # what begins so is passed on, too


@setting_reader("deepspeed")
def adopt(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keep in `trainer.deepspeed` only what DeepSpeed gets; the rest of it becomes settings.

    Raise ValueError where a setting contradicts it, or for what hocket sets or does not know.
    """
    trainer = values.get("trainer")
    wanted = _read(trainer.get("deepspeed")) if isinstance(trainer, Mapping) else None
    if not isinstance(wanted, Mapping):
        return values  # pydantic explains the error
    config = dict(values)
    passed: dict[str, Any] = {}
    others = []
    # "auto" leaves a setting to the trainer.
    settings = {name: value for name, value in leaves(wanted).items() if value != "auto"}
    # Many files scale the losses of a precision that they don't use.
    if not settings.get("fp16.enabled"):
        settings = {name: value for name, value in settings.items() if not name.startswith("fp16.")}
    for name, value in settings.items():
        kind = ".".join(name.split(".")[: 1 + name.startswith(_ZERO)])
        meant = {_RENAMED[name]: value} if name in _RENAMED else _MEANT.get(f"{name}={value}")
        if kind in _PASSED or kind.startswith(_STAGE_3):
            put(passed, name, value)
        elif meant is None:
            others.append(kind)
        else:
            _set(config, meant, f"{name}={value}")
    refuse_owned(
        "trainer.deepspeed.",
        dict.fromkeys(others),
        _OWNED,
        _PASSED,
        " is not passed on: leave it out",
    )
    put(config, "trainer.deepspeed", passed)
    return config


def _set(config: dict[str, Any], meant: Mapping[str, Any], wanted: str) -> None:
    """Put the settings of an entry into a config. Raise ValueError if it has other values."""
    for setting, value in meant.items():
        before = leaves(config).get(setting, value)
        if before != value:
            raise ValueError(
                f"trainer.deepspeed: {wanted}, but {setting}={before}: leave one of them out"
            )
        put(config, setting, value)


def _read(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(Path(value).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"trainer.deepspeed: no JSON file of its settings can be read there: {error}"
        ) from error
