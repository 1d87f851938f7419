"""The trainer's state in files: whole float32 tensors by name, in safetensors, each bucket a file of its own.

Which checkpoints there are, and what else is in them, hocket.checkpoints knows. From master weights alone a model in
Hugging Face format is made here.
"""

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hocket import tokenizer as tokenizers
from hocket.errors import ConfigError, TrainerError
from hocket.protocol import AdapterConfig
from hocket.system import flush
from hocket.trainer import lora
from hocket.trainer.master import MASTER
from hocket.trainer.policy import DTYPES, PREFIX, published_as, unshared, write_model

POLICY = "policy"
"""What the names of the trained model's tensors begin with."""
BUCKET_BYTES = 1 << 30
"""Most bytes of one file, and of what the CPU's memory holds while it is written; a larger tensor is alone."""


def write_bucket(folder: Path, bucket: Mapping[str, Tensor]) -> None:
    """Writes one more file, which is on the disk when this returns. Raises OSError."""
    path = folder / f"state_{len(list(folder.iterdir())):05d}.safetensors"
    try:
        save_file(dict(bucket), path)
    except SafetensorError as error:  # of the disk: it says so in words only
        raise OSError(str(error)) from error
    flush(path)


class SavedTensors:
    """Reads what `write_bucket` wrote, tensor by tensor.

    Raises:
        TrainerError: a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise TrainerError(f"{path} is damaged: {error}. Remove {folder}; the one before is used") from error
            self._files |= dict.fromkeys(file.keys(), file)  # type: ignore[no-untyped-call]

    def shapes(self) -> dict[str, list[int]]:
        """Returns every tensor's name and shape."""
        return {name: file.get_slice(name).get_shape() for name, file in self._files.items()}

    def read(self, name: str) -> Tensor:
        """Returns one tensor."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def check(self, expected: Mapping[str, torch.Size]) -> None:
        """Raises TrainerError where it is the state of another model."""
        saved = self.shapes()
        for name in sorted(saved.keys() ^ expected.keys()):
            holds = "holds" if name in saved else "lacks"
            raise TrainerError(f"the checkpoint {self._folder} is of another model: it {holds} {name}")
        for name, shape in expected.items():
            if list(shape) != saved[name]:
                raise TrainerError(
                    f"the checkpoint {self._folder} is of another model: {name} is {saved[name]} there, {list(shape)} "
                    "here"
                )


def export(folder: Path, output: Path, *, base: str, dtype: str, adapter: Mapping[str, Any] | None) -> None:
    """Writes the model of a checkpoint in Hugging Face format; an adapter is merged into its base model.

    Args:
        output: appears as a whole, or not at all.
        base: the model that training began with: its config and tokenizer are taken, of an adapter also its weights.
        dtype: of the written weights.
        adapter: an AdapterConfig's fields, where one was trained.

    Raises:
        ConfigError: `base` can't be loaded, or `output` exists.
        TrainerError: the checkpoint is damaged, or not of this model.
    """
    if output.exists():
        raise ConfigError(f"{output} exists already; remove it, or name another folder")
    transformers.utils.logging.disable_progress_bar()
    saved = SavedTensors(folder)
    prefix = f"{POLICY}/{MASTER}/{PREFIX}"
    names = [name.removeprefix(prefix) for name in saved.shapes() if name.startswith(prefix)]
    tensors = {name: saved.read(prefix + name).to(DTYPES[dtype]) for name in names}
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        if adapter is not None:
            named = {lora.published_name(name): tensor for name, tensor in tensors.items()}
            lora.save(partial, AdapterConfig.model_validate(adapter), named)
            lora.merge(partial, output, base=base)
            return
        tokenizer = tokenizers.load(base)
        try:
            with torch.device("meta"):
                architecture = transformers.AutoConfig.from_pretrained(base)
                model = transformers.AutoModelForCausalLM.from_config(architecture, dtype=DTYPES[dtype])
        except (OSError, ValueError) as error:
            raise ConfigError(f"can't read the config of {base}: {error}; where is it? model.path=") from error
        with contextlib.suppress(OSError):  # it has none
            model.generation_config = transformers.GenerationConfig.from_pretrained(base)
        expected = {name: parameter.shape for name, parameter in model.named_parameters()}
        if {name: tensor.shape for name, tensor in tensors.items()} != expected:
            raise TrainerError(f"the checkpoint {folder} is of another model than {base}; name it with model.path=")
        write_model(partial, model, tokenizer, unshared(published_as(model, tensors)), DTYPES[dtype])
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
