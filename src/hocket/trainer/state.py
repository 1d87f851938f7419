"""Read the tensors of a checkpoint, and write a model's folder from a checkpoint or an adapter."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import safe_open
from torch import Tensor

from hocket.common.files import kind_of, newest_version
from hocket.config import ModelConfig
from hocket.errors import ConfigError, TrainerError
from hocket.trainer import checkpoints
from hocket.trainer.engine import MASTER, POLICY
from hocket.trainer.policy import PREFIX
from hocket.trainer.weights import WEIGHTS

BUCKET_BYTES = 1 << 30  # of a file; a larger tensor is alone


class SavedTensors:
    """Reads what `checkpoints.write_bucket` wrote."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file: Any = safe_open(path, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}

    def read(self, name: str) -> Tensor:
        return cast(Tensor, self._files[name].get_tensor(name))

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        saved = self.shapes()
        different = saved.items() ^ expected.items()
        if different:
            name = min(name for name, _ in different)
            there, now = (shapes.get(name, "missing") for shapes in (saved, expected))
            raise TrainerError(
                f"the checkpoint {self._folder} is of another model: {name} is {there} there, {now} here"
            )


def export(folder: Path, output: Path, *, base: str | None) -> None:
    """Write a model from a checkpoint or an adapter; `base`: the model before training, if moved."""
    folder = Path(newest_version(str(folder)))
    kind = kind_of(folder)
    if output.exists():
        raise ConfigError(f"{output} exists already; name another folder")
    transformers.utils.logging.disable_progress_bar()
    if kind in WEIGHTS.names:
        return WEIGHTS.get(kind).export(folder, output, base=base)
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
        name.removeprefix(prefix): saved.read(name).to(dtype)
        for name in saved.shapes()
        if name.startswith(prefix)
    }
    WEIGHTS.get(config.weights)(config).make_model(tensors, dtype, output)
