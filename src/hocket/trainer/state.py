"""The training state: master weights and moments, and their files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hocket.errors import TrainerError

POLICY = "policy"  # prefix of the names of the trained model's tensors
BUCKET_BYTES = 1 << 30  # most bytes of a file; a larger tensor is alone
MASTER = "master"
_MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (MASTER, *_MOMENTS)


class MasterState:
    """Finds master weights and Adam's moments in the optimizer's memory, at any ZeRO stage.

    DeepSpeed's own checkpoints fit only the ranks and the stage that wrote them. AdamW steps on the parameters
    themselves (ZeRO-0), or on flat tensors of which each rank has a part; `zero` is DeepSpeed's optimizer around it.
    """

    def __init__(self, stage: int, zero: Any, adamw: torch.optim.AdamW) -> None:
        self._stage = stage
        self._zero = zero
        self._adamw = adamw
        for flat in self._flats():
            if not adamw.state[flat]:  # AdamW fills it at its first step
                adamw.state[flat] = {
                    "step": torch.zeros((), device=flat.device),
                    **{moment: torch.zeros_like(flat) for moment in _MOMENTS},
                }

    @property
    def step(self) -> int:
        return max(int(self._adamw.state[flat]["step"]) for flat in self._flats())

    @step.setter
    def step(self, value: int) -> None:
        for flat in self._flats():
            self._adamw.state[flat]["step"].fill_(value)

    def piece(self, parameter: nn.Parameter) -> tuple[slice, Mapping[str, Tensor]]:
        """Return this rank's part of a flattened parameter: its place, and the optimizer's own memory."""
        if self._stage == 0:
            return slice(None), {kind: tensor.view(-1) for kind, tensor in self._of(parameter).items()}
        start, group, offset, size = self._find(parameter)
        flat = self._of(self._flats()[group])
        return slice(start, start + size), {kind: whole.narrow(0, offset, size) for kind, whole in flat.items()}

    def _find(self, parameter: Any) -> tuple[int, int, int, int]:
        """Return this rank's start in the parameter, its flat tensor, the place there, and its size."""
        if self._stage == 3:
            group, offset, size = self._zero.grad_position[self._zero.get_param_id(parameter)]
            start = size * self._zero._get_param_partition_rank(parameter)
            return start, group, offset, max(0, min(size, parameter.ds_numel - start))  # the rest is padding
        mapping = parameter._hp_mapping
        if mapping is None:  # other ranks hold all of it
            return 0, 0, 0, 0
        address = mapping.hp_fragment_address
        return mapping.lp_fragment_address.start, mapping.param_group_index, address.start, address.numel

    def to_parameters(self) -> None:
        if self._stage in (1, 2):
            self._zero.update_lp_params()
        elif self._stage == 3:
            self._zero.checkpoint_event_prologue()  # split the parameters that every rank holds whole
            for flat, master in zip(self._zero.fp16_partitioned_groups_flat, self._flats(), strict=True):
                flat.data.copy_(master.data)
            self._zero.checkpoint_event_epilogue()  # gather them again

    def _of(self, flat: Tensor) -> dict[str, Tensor]:
        state = self._adamw.state[flat]
        return {MASTER: flat.detach(), **{moment: state[moment] for moment in _MOMENTS}}

    def _flats(self) -> list[Tensor]:
        if self._stage == 3:  # AdamW holds them during a step only
            return cast(list[Tensor], self._zero.fp32_partitioned_groups_flat)
        return [flat for group in self._adamw.param_groups for flat in group["params"]]


def write_bucket(folder: Path, bucket: Mapping[str, Tensor]) -> None:
    """Write one more file of tensors; raises OSError."""
    try:
        save_file(dict(bucket), folder / f"state_{len(list(folder.iterdir())):05d}.safetensors")
    except SafetensorError as error:  # names the disk's error in words only
        raise OSError(str(error)) from error


class SavedTensors:
    """Reads what `write_bucket` wrote. Raises TrainerError where a file is damaged."""

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
        return {name: file.get_slice(name).get_shape() for name, file in self._files.items()}

    def read(self, *path: str) -> Tensor:
        name = "/".join(path)
        return cast(Tensor, self._files[name].get_tensor(name))

    def check(self, expected: Mapping[str, torch.Size]) -> None:
        """Raise TrainerError where the state is of another model."""
        saved = self.shapes()
        for name in sorted(saved.keys() | expected.keys()):
            there = saved.get(name, "missing")
            now = list(expected[name]) if name in expected else "missing"
            if there != now:
                raise TrainerError(
                    f"the checkpoint {self._folder} is of another model: {name} is {there} there, {now} here"
                )
