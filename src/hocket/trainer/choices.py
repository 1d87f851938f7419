"""What `trainer.*` chooses by name: kernels, ways to recompute activations, ways to divide a row among ranks.

Torch is imported only for a choice of the user's, so that a config is refused at once.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from hocket.common.registry import Registry
from hocket.config import TrainerConfig

if TYPE_CHECKING:
    from hocket.trainer.attention import RowPart
    from hocket.trainer.flops import Shape
    from hocket.trainer.ranks import Ranks


class Kernels:
    """Other kernels than PyTorch's own; `trainer.kernels` names them, with the options that `__init__` takes.

    Example: a plugin that has torch.compile take the whole model.

        @kernels("whole")
        class Whole(Kernels):
            def __init__(self, *, mode: str = "default") -> None:
                self._mode = mode

            def apply(self, model: Any) -> None:
                model.compile(mode=self._mode)
    """

    def refuse(self, config: TrainerConfig) -> None:
        """Raise ConfigError where other settings contradict these kernels; called before a model is loaded."""

    def apply(self, model: Any) -> None:
        """Have a transformers model on the CPU use them from its first forward pass on."""
        raise NotImplementedError


class Recomputation:
    """Recomputes each layer in the backward pass from the input that it keeps (trainer.gradient_checkpointing=true).

    A subclass saves more memory; `trainer.gradient_checkpointing` names it.

    Example: a plugin that keeps the layers' inputs on the CPU.

        @recomputation("inputs_on_cpu")
        class InputsOnCpu(Recomputation):
            def forward_pass(self) -> AbstractContextManager[None]:
                return torch.autograd.graph.save_on_cpu()

            def bytes_per_token(self, shape: Shape, itemsize: int, layer: float) -> float:
                return layer
    """

    gathered_at_once: tuple[str, ...] = ()
    """Last parts of names of modules that ranks call different numbers of times: ZeRO-3 gathers each once for all."""

    def prepare(self, model: Any) -> None:
        """Change a transformers model, which recomputes its layers already."""

    def forward_pass(self) -> AbstractContextManager[None]:
        """Return a context for one forward pass of the layers."""
        return nullcontext()

    def bytes_per_token(self, shape: "Shape", itemsize: int, layer: float) -> float:
        """Return the bytes of activations per token at the peak; `layer`: of one layer while it is recomputed."""
        return shape.layers * itemsize * shape.hidden + layer


EAGER = "eager"  # PyTorch's own kernels
KERNELS: Registry[Callable[..., Kernels]] = Registry(
    "kernels", compile="hocket.extras.kernels", liger="hocket.extras.kernels"
)
kernels = KERNELS.register
"""Decorator of a subclass of Kernels, which `trainer.kernels` then names."""
RECOMPUTATIONS: Registry[Callable[..., Recomputation]] = Registry(
    "recomputation", long="hocket.extras.long_rows"
)
recomputation = RECOMPUTATIONS.register
"""Decorator of a subclass of Recomputation, which `trainer.gradient_checkpointing` then names."""
ROW_DIVISIONS: Registry[Callable[[int, "Ranks"], "RowPart"]] = Registry(
    "row division", ulysses="hocket.extras.ulysses"
)
row_division = ROW_DIVISIONS.register
"""Decorator of a function (number of ranks that compute a row together, all ranks) → this rank's part of a row."""


def check(config: TrainerConfig) -> None:
    """Raise ConfigError for names that nobody has registered, or contradictions; plugins must be loaded."""
    if config.kernels != EAGER:
        chosen_kernels(config.kernels).refuse(config)
    if config.gradient_checkpointing:
        chosen_recomputation(config.gradient_checkpointing)
    if not isinstance(config.share_prefixes, bool):
        from hocket.trainer import packing  # which needs numpy

        packing.chosen_packer(config.share_prefixes)
    if config.sequence_parallel > 1:
        chosen_row_division()


def chosen_kernels(chosen: str | dict[str, Any]) -> Kernels:
    """Make the kernels that `trainer.kernels` names. Raises ConfigError."""
    return KERNELS.choose(chosen, "trainer.kernels")()


def chosen_recomputation(chosen: bool | str | dict[str, Any]) -> Recomputation:
    """Make what trainer.gradient_checkpointing, which is not false, chooses. Raises ConfigError."""
    if isinstance(chosen, bool):
        return Recomputation()
    return RECOMPUTATIONS.choose(chosen, "trainer.gradient_checkpointing")()


def chosen_row_division() -> "Callable[[int, Ranks], RowPart]":
    """Make the division of a row among `trainer.sequence_parallel` ranks. Raises ConfigError."""
    return ROW_DIVISIONS.get("ulysses", "trainer.sequence_parallel: ")
