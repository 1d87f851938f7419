"""The files of a training state: master weights and moments."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hocket.errors import TrainerError

POLICY = "policy"  # prefix of the names of the trained model's tensors
BUCKET_BYTES = 1 << 30  # of a file; a larger tensor is alone
MASTER = "master"
KINDS = (MASTER, "exp_avg", "exp_avg_sq")  # names of AdamW's moments


def write_bucket(folder: Path, bucket: Mapping[str, Tensor]) -> None:
    """Write one more file; raises OSError."""
    try:
        save_file(dict(bucket), folder / f"state_{len(list(folder.iterdir())):05d}.safetensors")
    except SafetensorError as error:  # names the disk's error in words only
        raise OSError(str(error)) from error


class SavedTensors:
    """Reads what `write_bucket` wrote."""

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
