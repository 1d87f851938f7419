"""Write a model's folder from what a run leaves: a checkpoint or an adapter."""

from pathlib import Path

import torch
import transformers

from hocket.common.files import kind_of, newest_version
from hocket.config import ModelConfig
from hocket.errors import ConfigError
from hocket.trainer import checkpoints
from hocket.trainer.policy import PREFIX, WEIGHTS
from hocket.trainer.state import MASTER, POLICY, SavedTensors


def export(folder: Path, output: Path, *, base: str | None) -> None:
    """Write a model from a checkpoint or an adapter; `base`: the model before training, if moved."""
    folder = Path(newest_version(str(folder)))
    kind = kind_of(folder)
    if output.exists():
        raise ConfigError(f"{output} exists already; name another folder")
    transformers.utils.logging.disable_progress_bar()
    if kind in WEIGHTS:
        return WEIGHTS[kind].export(folder, output, base=base)
    if kind != "checkpoint":
        wanted = "RUN/checkpoints/step_N, or RUN/weights/vN of a run with model.lora"
        raise ConfigError(f"{folder} is neither a checkpoint nor an adapter; name {wanted}")
    run = checkpoints.read(folder)
    dtype = getattr(torch, run.trainer["dtype"])
    began = run.config["model"]
    config = ModelConfig.model_validate({**began, "path": base or began["path"]})
    saved = SavedTensors(folder)
    prefix = f"{POLICY}/{MASTER}/{PREFIX}"
    tensors = {
        name.removeprefix(prefix): saved.read(name).to(dtype) for name in saved.shapes() if name.startswith(prefix)
    }
    WEIGHTS[config.weights](config).make_model(tensors, dtype, output)
