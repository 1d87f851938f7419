"""The training state: master weights and moments as whole float32 tensors, and their files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hocket.errors import TrainerError

POLICY = "policy"  # prefix of the names of the trained model's tensors
BUCKET_BYTES = 1 << 30  # most bytes of one file, and of CPU memory while it is written; a larger tensor is alone
MASTER = "master"
_MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (MASTER, *_MOMENTS)


class MasterState:
    """Finds master weights and Adam's moments in the optimizer's memory, on any ranks at any ZeRO stage.

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
        """Return this rank's part of a flattened parameter, maybe empty: its place, and the optimizer's own memory."""
        if self._stage == 0:
            return slice(None), {kind: tensor.view(-1) for kind, tensor in self._of(parameter).items()}
        if self._stage == 3:
            return self._partition(parameter)
        mapping = getattr(parameter, "_hp_mapping")  # noqa: B009 - DeepSpeed's own
        if mapping is None:  # other ranks hold all of it
            return slice(0), dict.fromkeys(KINDS, torch.empty(0))
        flat = self._flats()[mapping.param_group_index]
        address = mapping.hp_fragment_address
        views = {kind: whole.narrow(0, address.start, address.numel) for kind, whole in self._of(flat).items()}
        start = mapping.lp_fragment_address.start
        return slice(start, start + address.numel), views

    def to_parameters(self) -> None:
        if self._stage in (1, 2):
            self._zero.update_lp_params()
        elif self._stage == 3:
            self._zero.checkpoint_event_prologue()  # split the parameters that every rank holds whole
            for flat, master in zip(self._zero.fp16_partitioned_groups_flat, self._flats(), strict=True):
                flat.data.copy_(master.data)
            self._zero.checkpoint_event_epilogue()  # gather them again

    def _partition(self, parameter: Any) -> tuple[slice, Mapping[str, Tensor]]:
        def view(key: str | None) -> Tensor:
            found: Tensor = self._zero._get_fp32_opt_state_partition(parameter, False, key)[0]
            return found.detach()

        start = self._zero._get_param_partition_rank(parameter) * view(None).numel()
        inside = max(0, min(view(None).numel(), parameter.ds_numel - start))  # the rest is padding
        views = {kind: view(None if kind == MASTER else kind)[:inside] for kind in KINDS}
        return slice(start, start + inside), views

    def _of(self, flat: Tensor) -> dict[str, Tensor]:
        state = self._adamw.state[flat]
        return {MASTER: flat.detach(), **{moment: state[moment] for moment in _MOMENTS}}

    def _flats(self) -> list[Tensor]:
        if self._stage == 3:  # AdamW holds them during a step only
            return cast(list[Tensor], self._zero.fp32_partitioned_groups_flat)
        return [flat for group in self._adamw.param_groups for flat in group["params"]]


def write_bucket(folder: Path, bucket: Mapping[str, Tensor]) -> None:
    """Write one more file of tensors. Raise OSError where the disk can't be written."""
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
        """Return one tensor; its name is the path's parts, joined by a slash."""
        name = "/".join(path)
        return cast(Tensor, self._files[name].get_tensor(name))

    def check(self, expected: Mapping[str, torch.Size]) -> None:
        saved = self.shapes()
        here = {name: list(shape) for name, shape in expected.items()}
        for name in sorted(saved.keys() | here.keys()):
            there = saved.get(name, "missing")
            now = here.get(name, "missing")
            if there != now:
                raise TrainerError(
                    f"the checkpoint {self._folder} is of another model: {name} is {there} there, {now} here"
                )
