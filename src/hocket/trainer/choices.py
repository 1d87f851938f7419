"""Register kernels, ways to recompute activations, and ways to divide a row among ranks.

Settings of the trainer choose them by name. Torch is imported only if a choice needs it, so that a
config is refused at once.
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
    """Replaces PyTorch's kernels by others.

    `trainer.kernels` names a subclass, with the options that its `__init__` takes.

    Example: a plugin that has torch.compile take the whole model.

        @kernels("whole")
        class Whole(Kernels):
            def __init__(self, *, mode: str = "default") -> None:
                self._mode = mode

            def apply(self, model: Any) -> None:
                model.compile(mode=self._mode)
    """

    def refuse(self, config: TrainerConfig) -> None:
        """Raise ConfigError if other settings contradict these kernels.

        It is called before a model is loaded.
        """

    def apply(self, model: Any) -> None:
        """Change a transformers model so that it uses these kernels; it is on the CPU as yet."""
        raise NotImplementedError


class Recomputation:
    """Recomputes each layer in the backward pass from the layer's input, which it keeps.

    This is trainer.gradient_checkpointing=true. A subclass saves more memory;
    `trainer.gradient_checkpointing` names it.

    Example: a plugin that keeps the layers' inputs on the CPU.

        @recomputation("inputs_on_cpu")
        class InputsOnCpu(Recomputation):
            def forward_pass(self) -> AbstractContextManager[None]:
                return torch.autograd.graph.save_on_cpu()

            def bytes_per_token(self, shape: Shape, itemsize: int, layer: float) -> float:
                return layer
    """

    gathered_at_once: tuple[str, ...] = ()
    """Last parts of the names of modules that some ranks call more often than others.

    ZeRO-3 gathers the weights of each once, with all modules in it, as ranks must gather together.
    """

    def prepare(self, model: Any) -> None:
        """Change a transformers model; it recomputes its layers already."""

    def forward_pass(self) -> AbstractContextManager[None]:
        """Make the context in which a forward pass of the layers runs."""
        return nullcontext()

    def bytes_per_token(self, shape: "Shape", itemsize: int, layer: float) -> float:
        """Estimate the bytes of activations per token at the peak of the backward pass.

        Args:
            shape: the sizes of the model.
            itemsize: bytes of a number.
            layer: bytes per token of all activations of a layer.
        """
        # The inputs of all layers, and the activations of the layer that is recomputed.
        return shape.layers * itemsize * shape.hidden + layer


EAGER = "eager"  # the name of PyTorch's own kernels

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
"""Decorator of a function that makes this rank's part of a row.

Its arguments are the number of ranks that compute a row together, and all ranks.
"""


def check(config: TrainerConfig) -> None:
    """Raise ConfigError for names that are not registered, and for settings that contradict.

    Plugins must be loaded.
    """
    if config.kernels != EAGER:
        chosen_kernels(config.kernels).refuse(config)
    if config.gradient_checkpointing:
        chosen_recomputation(config.gradient_checkpointing)
    if not isinstance(config.share_prefixes, bool):
        from hocket.trainer import packing  # it imports numpy

        packing.chosen_packer(config.share_prefixes)
    if config.sequence_parallel > 1:
        chosen_row_division()


def chosen_kernels(chosen: str | dict[str, Any]) -> Kernels:
    """Make the kernels that `trainer.kernels` names. Raises ConfigError."""
    return KERNELS.choose(chosen, "trainer.kernels")()


def chosen_recomputation(chosen: bool | str | dict[str, Any]) -> Recomputation:
    """Make the recomputation that trainer.gradient_checkpointing names. Raises ConfigError.

    `chosen` is not False.
    """
    if isinstance(chosen, bool):
        return Recomputation()
    return RECOMPUTATIONS.choose(chosen, "trainer.gradient_checkpointing")()


def chosen_row_division() -> "Callable[[int, Ranks], RowPart]":
    """Make the division of a row among `trainer.sequence_parallel` ranks. Raises ConfigError."""
    return ROW_DIVISIONS.get("ulysses", "trainer.sequence_parallel: ")
