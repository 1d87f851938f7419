"""Master weights and Adam's moments as whole float32 tensors, whatever ZeRO has made of them.

DeepSpeed's own checkpoints fit only the number of ranks and the ZeRO stage that wrote them. Here each parameter has a
name and a whole shape, so that any number of ranks at any stage can take it up. AdamW steps on the parameters
themselves (ZeRO-0), or on flat tensors of which each rank has one part: this module knows where in them a parameter is.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

MASTER = "master"
_MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (MASTER, *_MOMENTS)


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """What this rank has of one parameter: positions `start` and on of the flattened whole.

    Attributes:
        views: kind → flat tensor, which is the optimizer's own memory.
    """

    start: int
    views: Mapping[str, Tensor]

    def put_into(self, whole: Tensor, kind: str) -> None:
        """Copies this rank's part to where it belongs in the flat `whole`."""
        view = self.views[kind]
        whole[self.start : self.start + view.numel()] = view

    def take_from(self, whole: Tensor, kind: str) -> None:
        """Takes this rank's part over from the flat `whole`."""
        view = self.views[kind]
        view.copy_(whole[self.start : self.start + view.numel()])


class MasterState:
    """Finds the pieces in the optimizer's memory.

    Args:
        stage: of ZeRO.
        zero: DeepSpeed's optimizer around it.
        adamw: the optimizer that steps.
    """

    def __init__(self, stage: int, zero: Any, adamw: torch.optim.AdamW) -> None:
        self._stage = stage
        self._zero = zero
        self._adamw = adamw
        for flat in self._flats():
            if not adamw.state[flat]:  # as AdamW begins, but before its first step
                adamw.state[flat] = {
                    "step": torch.zeros((), device=flat.device),
                    **{moment: torch.zeros_like(flat) for moment in _MOMENTS},
                }

    @property
    def step(self) -> int:
        """Updates that AdamW has made."""
        return max(int(self._adamw.state[flat]["step"]) for flat in self._flats())

    @step.setter
    def step(self, value: int) -> None:
        for flat in self._flats():
            self._adamw.state[flat]["step"].fill_(value)

    def piece(self, parameter: nn.Parameter) -> Piece | None:
        """Returns this rank's piece, None where other ranks have all of the parameter."""
        if self._stage == 0:
            return Piece(0, {kind: tensor.view(-1) for kind, tensor in self._of(parameter).items()})
        if self._stage == 3:
            return self._partition(parameter)
        mapping = getattr(parameter, "_hp_mapping")  # noqa: B009 - DeepSpeed's own
        if mapping is None:
            return None
        flat, address = self._flats()[mapping.param_group_index], mapping.hp_fragment_address
        views = {kind: whole.narrow(0, address.start, address.numel) for kind, whole in self._of(flat).items()}
        return Piece(mapping.lp_fragment_address.start, views)

    def to_parameters(self) -> None:
        """Has the module compute with the master weights as they are now."""
        if self._stage in (1, 2):
            self._zero.update_lp_params()
        elif self._stage == 3:
            self._zero.checkpoint_event_prologue()  # parameters that every rank holds whole are cut up,
            pairs = zip(self._zero.fp16_partitioned_groups_flat, self._flats(), strict=True)
            for flat, master in pairs:
                flat.data.copy_(master.data)
            self._zero.checkpoint_event_epilogue()  # and gathered again

    def _partition(self, parameter: Any) -> Piece:
        def view(key: str | None) -> Tensor:
            found: Tensor = self._zero._get_fp32_opt_state_partition(parameter, False, key)[0]
            return found.detach()

        start = self._zero._get_param_partition_rank(parameter) * view(None).numel()
        inside = max(0, min(view(None).numel(), parameter.ds_numel - start))  # what is beyond its end is padding
        return Piece(start, {kind: view(None if kind == MASTER else kind)[:inside] for kind in KINDS})

    def _of(self, flat: Tensor) -> dict[str, Tensor]:
        state = self._adamw.state[flat]
        return {MASTER: flat.detach(), **{moment: state[moment] for moment in _MOMENTS}}

    def _flats(self) -> list[Tensor]:
        """Returns what AdamW steps on."""
        if self._stage == 3:  # it is lent to AdamW for the time of a step only
            flats: list[Tensor] = self._zero.fp32_partitioned_groups_flat
            return flats
        return [flat for group in self._adamw.param_groups for flat in group["params"]]
