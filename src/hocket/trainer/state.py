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

BUCKET_BYTES = 1 << 30  # bytes of a checkpoint's file; a larger tensor is alone in its file


class SavedTensors:
    """Reads the tensors of a checkpoint, or of any folder with files of `write_bucket`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file: Any = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                self._file_of[name] = file

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Map the names of all tensors to their shapes, without reading them."""
        files = self._file_of.items()
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in files}

    def read(self, name: str) -> Tensor:
        """Read one tensor."""
        return cast(Tensor, self._file_of[name].get_tensor(name))

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raise TrainerError if names or shapes are not the expected ones."""
        saved = self.shapes()
        different = saved.items() ^ expected.items()
        if not different:
            return
        name = min(name for name, _ in different)
        saved_shape = saved.get(name, "missing")
        expected_shape = expected.get(name, "missing")
        raise TrainerError(
            f"the checkpoint {self._folder} is of another model: {name} is {saved_shape} there, "
            f"{expected_shape} here"
        )


def export(folder: Path, output: Path, *, base: str | None) -> None:
    """Write a model from a checkpoint or an adapter.

    Args:
        folder: the checkpoint, the adapter, or a folder with versions of it.
        output: the new folder.
        base: the model before training, if it is no longer where it was.

    Raises:
        ConfigError: `folder` is neither a checkpoint nor an adapter, or `output` exists.
    """
    folder = Path(newest_version(str(folder)))
    kind = kind_of(folder)
    if output.exists():
        raise ConfigError(f"{output} exists already; name another folder")
    transformers.utils.logging.disable_progress_bar()

    # A way to store weights (weights.py, lora.py) exports its own folders.
    if kind in WEIGHTS.names:
        return WEIGHTS.get(kind).export(folder, output, base=base)
    if kind != "checkpoint":
        wanted = "RUN/checkpoints/step_N, or RUN/weights/vN of a run with model.lora"
        raise ConfigError(f"{folder} is neither a checkpoint nor an adapter; name {wanted}")

    # A checkpoint has the policy's float32 weights; the model gets them in the dtype of its run.
    run = checkpoints.read(folder)
    dtype = getattr(torch, run.trainer["dtype"])
    model = dict(run.config["model"])
    if base:
        model["path"] = base
    config = ModelConfig.model_validate(model)
    saved = SavedTensors(folder)
    prefix = f"{POLICY}/{MASTER}/{PREFIX}"
    tensors = {}
    for name in saved.shapes():
        if name.startswith(prefix):
            tensors[name.removeprefix(prefix)] = saved.read(name).to(dtype)
    WEIGHTS.get(config.weights)(config).make_model(tensors, dtype, output)
