"""The reference policy, from which KL divergences are measured: log-probs of a batch under frozen weights.

It is the model that the run starts from, or one of a folder, as a model of its own beside the policy; under an adapter
it is the base model that is there anyway. Never knows which divergence is measured, or what becomes of it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hocket.config import Config
from hocket.errors import ConfigError
from hocket.tokenizer import check_same_ids
from hocket.trainer import lora
from hocket.trainer.batching import TrainBatch
from hocket.trainer.engine import DeepSpeedEngine, whole_shape
from hocket.trainer.frozen import FrozenEngine
from hocket.trainer.policy import Policy
from hocket.trainer.ranks import Ranks

COPY_BYTES = 256 << 20
"""ZeRO-3 gathers the policy's weights for a reset in groups of this size."""


class Reference:
    """Log-probs under the reference policy.

    Args:
        policy: what is trained, by `engine`.
        load: which model → the model, with the trainer's settings.
        dtype: precision of the forward pass.

    Attributes:
        frozen: runs the reference; None where it is the policy without its adapter.
        reset_every: after so many steps the policy is copied into it; 0: never.

    Raises:
        ConfigError: the reference's tokenizer is not the policy's, or it can't be reset to the policy's weights.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        engine: DeepSpeedEngine,
        load: Callable[..., Policy],
        *,
        dtype: torch.dtype,
        ranks: Ranks,
    ) -> None:
        self._policy = policy
        self._engine = engine
        self.frozen: FrozenEngine | None = None
        self.reset_every = config.algorithm.reference_reset_every
        path = config.algorithm.reference
        if path is None and policy.adapter is not None:
            return
        if path is not None:
            check_same_ids(path, "algorithm.reference", config.model)
        model = load(config.model.beside(path))
        shapes = [{name: whole_shape(p) for name, p in module.named_parameters()} for module in (model, policy)]
        if self.reset_every and shapes[0] != shapes[1]:
            raise ConfigError(
                f"algorithm.reference_reset_every can't copy the policy into algorithm.reference={path}, which is "
                f"another architecture; leave one of the two out"
            )
        self.frozen = FrozenEngine(model, config.trainer, dtype=dtype, ranks=ranks)
        model.check_architecture(ranks.device)

    @torch.no_grad()
    def logprobs(self, batch: TrainBatch) -> Tensor:
        """Returns logprobs_bt of the batch's targets, 0 where its mask is false."""
        if self.frozen is not None:
            logprobs_bt: Tensor = self.frozen.forward(batch)[0]
            return logprobs_bt
        with lora.switched_off(self._policy.model):
            logprobs_bt = self._engine.forward(batch)[0]
        return logprobs_bt

    def reset_if_due(self) -> None:
        """Copies the policy into the reference after every algorithm.reference_reset_every steps of the policy.

        The optimizer goes on as it is (arXiv 2505.24864 starts it anew). All ranks must call it, after a step.
        """
        if self.frozen is not None and self.reset_every and self._engine.num_steps % self.reset_every == 0:
            self.frozen.copy_from(self._engine, COPY_BYTES)
