"""Check what `trainer.deepspeed` passes on to DeepSpeed 0.19.8; `{...}`, or the path of somebody's ds_config.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket.common.registry import refuse_owned

_OWNED = {
    "train_batch_size": "rollout.prompts_per_step and rollout.group_size",
    "train_micro_batch_size_per_gpu": "trainer.micro_batch_tokens",
    "gradient_accumulation_steps": "trainer.micro_batch_tokens",
    "gradient_clipping": "trainer.max_grad_norm",
    "optimizer": "trainer.learning_rate, trainer.betas and trainer.weight_decay",
    "scheduler": "trainer.schedule and trainer.warmup_steps",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "torch_autocast": "model.dtype",
    "activation_checkpointing": "trainer.gradient_checkpointing",
    "zero_optimization.stage": "trainer.zero_stage",
    "zero_optimization.offload_optimizer": "trainer.offload_optimizer",
}
_PASSED = {
    "communication_data_type",
    "comms_logger",
    "dump_state",
    "flops_profiler",
    "memory_breakdown",
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.allgather_partitions",
    "zero_optimization.contiguous_gradients",
    "zero_optimization.enable_sanity_checks",
    "zero_optimization.ignore_unused_parameters",
    "zero_optimization.overlap_comm",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.reduce_scatter",
    "zero_optimization.sub_group_size",
    "zero_optimization.use_multi_rank_bucket_allreduce",
}
_OFFLOAD = "zero_optimization.offload_optimizer"
_ADOPTED = {
    "gradient_clipping": "trainer.max_grad_norm",
    "optimizer.params.lr": "trainer.learning_rate",
    "optimizer.params.betas": "trainer.betas",
    "optimizer.params.weight_decay": "trainer.weight_decay",
    "bf16.enabled": "model.dtype",
    "fp16.enabled": "model.dtype",
    "zero_optimization.stage": "trainer.zero_stage",
    f"{_OFFLOAD}.device": "trainer.offload_optimizer",
}
"""What hocket has under another name."""
_VALUES: dict[str, dict[Any, Any]] = {
    "bf16.enabled": {True: "bfloat16"},
    "fp16.enabled": {True: "float16"},
    f"{_OFFLOAD}.device": {"cpu": True},
}
"""Where its values are others."""
_ANYWAY = {
    "optimizer.type": ("Adam", "AdamW"),
    "bf16.enabled": (False,),
    "fp16.enabled": (False,),
    f"{_OFFLOAD}.device": ("none",),
    f"{_OFFLOAD}.pin_memory": (True, False),
}
"""What needs no setting."""
_ZERO = "zero_optimization."
_STAGE_3 = f"{_ZERO}stage3_"
"""What begins so is passed on, too."""


def adopt(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a whole config with what `trainer.deepspeed` sets that hocket has under another name.

    Raise ValueError where the config sets that, too, and otherwise.
    """
    trainer = values.get("trainer")
    asked = _read(trainer.get("deepspeed")) if isinstance(trainer, Mapping) else None
    if not isinstance(trainer, Mapping) or not isinstance(asked, Mapping):
        return values
    leaves = _leaves(asked)
    if not leaves.get("fp16.enabled"):  # many files say how to scale the losses of a precision that they don't use
        leaves = {name: value for name, value in leaves.items() if not name.startswith("fp16.")}
    left: dict[str, Any] = {}
    sections = {name: dict(values.get(name) or {}) for name in ("model", "trainer")}
    for name, value in leaves.items():
        section, _, key = _ADOPTED.get(name, "").partition(".")
        item = _VALUES[name].get(value) if name in _VALUES else value
        if value in _ANYWAY.get(name, ()):
            continue
        if section and item is not None:
            if sections[section].setdefault(key, item) != item:
                other = f"{section}.{key}={sections[section][key]}"
                raise ValueError(f"trainer.deepspeed: {name}={value}, but {other}: leave one of them out")
        else:
            *parents, last = name.split(".")
            target = left
            for parent in parents:
                target = target.setdefault(parent, {})
            target[last] = value
    sections["trainer"]["deepspeed"] = left
    return {**values, **sections}


def _leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values by their path, without those left to the trainer ("auto")."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= _leaves(value, f"{prefix}{name}.")
        elif value != "auto":
            found[f"{prefix}{name}"] = value
    return found


def _read(value: Any) -> Any:
    """Return the content of a file, else the value."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(Path(value).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"trainer.deepspeed: no JSON file of its settings can be read there: {error}") from error


def read_deepspeed(value: Any) -> Any:
    """Return the settings without those left to the trainer ("auto"). Raise ValueError that lists all others."""
    if not isinstance(value, Mapping):
        return value  # pydantic says what it should be
    zero = value.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise ValueError(f"zero_optimization must be a mapping, got {zero!r}")
    asked = {key: item for key, item in value.items() if key != "zero_optimization" and item != "auto"}
    nested = {f"{_ZERO}{key}": item for key, item in zero.items() if item != "auto"}
    known = _PASSED.union(name for name in nested if name.startswith(_STAGE_3))
    refuse_owned("", [*asked, *nested], _OWNED, known, " is not passed on: leave it out")
    if nested:
        asked["zero_optimization"] = {name.removeprefix(_ZERO): item for name, item in nested.items()}
    return asked
