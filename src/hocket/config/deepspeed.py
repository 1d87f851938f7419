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
_ZERO = "zero_optimization."
_STAGE_3 = f"{_ZERO}stage3_"
"""What begins so is passed on, too."""


def read_deepspeed(value: Any) -> Any:
    """Return the settings, or a file's, without those left to the trainer ("auto"). Raise ValueError for others."""
    if isinstance(value, str):
        try:
            value = json.loads(Path(value).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"no JSON file of DeepSpeed's settings can be read there: {error}") from error
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
