"""Settings of DeepSpeed: passed on, taken over under another name, or refused."""

import json
from pathlib import Path

import pytest

from hocket import config
from hocket.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "trainer.deepspeed.scheduler.type=WarmupLR trainer.deepspeed.train_batch_size=64",
            "set trainer.schedule and trainer.warmup_steps; trainer.deepspeed.train_batch_size can't be set, as hocket",
        ),
        (
            "trainer.deepspeed.zero_optimization.stage=3 trainer.zero_stage=2",
            "stage=3, but trainer.zero_stage=2: leave",
        ),
        ("trainer.deepspeed.optimizer.type=Lion", "optimizer can't be set, as hocket sets it: set trainer.learning"),
        ("trainer.deepspeed.zero_optimization.offload_optimizer.device=nvme", "set trainer.offload_optimizer"),
        ("trainer.deepspeed.zero_optimization.zenflow={}", "zero_optimization.zenflow is not passed on: leave it out"),
        ("trainer.deepspeed.zero_optimization.overlap_com=true", "did you mean 'zero_optimization.overlap_comm'?"),
        ("trainer.deepspeed=nowhere.json", "no JSON file of its settings can be read there: [Errno 2]"),
        ("trainer.deepspeed=[1]", "trainer.deepspeed: must be a mapping of key: value"),
        ("model=3 trainer.deepspeed.bf16.enabled=true", "can't set 'model.dtype': 'model' is not a section"),
    ],
)
def test_what_hocket_sets_or_does_not_know_is_named_with_its_setting(overrides: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(None, overrides.split(" "))
    assert message in str(caught.value)


def test_what_a_file_of_deepspeed_sets_that_hocket_has_under_another_name_is_taken_over(tmp_path: Path) -> None:
    # As transformers documents it for ZeRO-3 with offload, with numbers in place of some "auto".
    path = tmp_path / "ds_config.json"
    values = {
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "min_loss_scale": 1},
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-6, "betas": [0.9, 0.95], "eps": "auto", "weight_decay": 0.1},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "stage3_max_live_parameters": 1e9,
        },
        "wall_clock_breakdown": True,
        "gradient_clipping": 0.5,
        "train_batch_size": "auto",
    }
    path.write_text(json.dumps(values))
    found = config.load(None, [f"trainer.deepspeed={path}"])
    assert found.model.dtype == "bfloat16"
    expected = {"learning_rate": 3e-6, "betas": (0.9, 0.95), "weight_decay": 0.1, "max_grad_norm": 0.5}
    expected |= {"zero_stage": 3, "offload_optimizer": True}
    zero = {"overlap_comm": True, "stage3_max_live_parameters": 1e9}
    expected["deepspeed"] = {"zero_optimization": zero, "wall_clock_breakdown": True}
    assert {key: getattr(found.trainer, key) for key in expected} == expected
    assert config.load(None, {f"trainer.{key}": value for key, value in expected.items()}).trainer == found.trainer
    assert config.load(None, ["trainer.deepspeed.zero_optimization={}"]).trainer.deepspeed == {}
