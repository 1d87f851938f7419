"""Log-probabilities of given tokens; the logits of a whole batch never exist at the same time."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hocket.common.registry import Registry
from hocket.config import Config
from hocket.errors import ConfigError

if TYPE_CHECKING:
    from hocket.trainer.batching import TrainBatch

CHUNK_TOKENS = 512  # of a policy's forward pass
KEPT_BYTES = 128 << 20  # of a row's log-probs of all tokens; to compute more again saves memory


class Logits(NamedTuple):
    """What becomes of the output of a model's head."""

    factor: float = 1.0
    cap: float | None = None  # that they stay below

    def of(self, output: Tensor) -> Tensor:
        scaled = output if self.factor == 1 else output * self.factor
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


class TokenStatistics:
    """Numbers about the distribution p of each sampled token, taken on the way of a forward pass, and their sums.

    Example: a plugin that reports how likely the likeliest tokens are.

        class Highest(TokenStatistics):
            def of_tokens(
                self, logprobs_cv: Tensor, entropies_cv: Tensor, entropy_c: Tensor
            ) -> Sequence[Tensor]:
                return [logprobs_cv.amax(dim=-1)]

            def sums(
                self, batch: TrainBatch, logprobs_bt: Tensor, entropy_bt: Tensor, *of_tokens: Tensor
            ) -> dict[str, Tensor]:
                return {"highest": of_tokens[0].exp().where(batch.mask_bt, 0.0).sum() / batch.num_tokens_global}

        @token_statistics("highest")
        def highest(config: Config) -> TokenStatistics:
            return Highest()
    """

    def of_tokens(
        self, logprobs_cv: Tensor, entropies_cv: Tensor, entropy_c: Tensor
    ) -> Sequence[Tensor]:
        """Compute numbers of c tokens, [c] each, without gradient.

        Args:
            logprobs_cv: log p of all v tokens of the vocabulary.
            entropies_cv: −p log p; may be overwritten.
            entropy_c: its sums.
        """
        raise NotImplementedError

    def sums(
        self, batch: "TrainBatch", logprobs_bt: Tensor, entropy_bt: Tensor, *of_tokens: Tensor
    ) -> dict[str, Tensor]:
        """Sum the numbers of a micro-batch, [b, t] each and 0 where its mask is False, into metrics of the step."""
        raise NotImplementedError


TOKEN_STATISTICS: Registry[Callable[[Config], TokenStatistics | None]] = Registry(
    "token statistics", draws="hocket.extras.checks.draws"
)
token_statistics = TOKEN_STATISTICS.register
"""Decorator of a function that makes TokenStatistics, or returns None where the config needs none."""


def chosen_statistics(config: Config) -> TokenStatistics | None:
    """Make the statistics that a run takes. Raises ConfigError where two are asked for."""
    chosen: TokenStatistics | None = None
    for make in TOKEN_STATISTICS.each():
        made = make(config)
        if made is not None and chosen is not None:
            names = f"{type(chosen).__name__} and {type(made).__name__}"
            raise ConfigError(
                f"{names} both take statistics of tokens, and only one can: turn one off"
            )
        chosen = made or chosen
    return chosen


def token_logprobs(
    hidden_brh: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    target_ids_bt: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    trained_n: Tensor,
    row_n: Tensor,
    max_tokens: int,
    entropy_gradient: bool = False,
    recomputes: bool = True,
    statistics: TokenStatistics | None = None,
) -> tuple[Tensor, ...]:
    """Compute log p(target), p's entropy, and the statistics of tokens, float32 [b, t] each.

    p is softmax(lm_head(hidden) / temperature). Logits exist for `chunk_tokens` positions at a time, and again in the
    backward pass; without `recomputes` it has kept log p, 4 bytes per position and token of the vocabulary.

    Args:
        lm_head: hidden [n, h] → logits [n, vocabulary]; of a module, for ZeRO-3's hooks.
        trained_n: places in the flattened [b, t], as a mask would have the host wait; elsewhere the results are 0.
        row_n: their places in the flattened [b, r] of the hidden states.
        max_tokens: the head is called as often as for this many positions.
        entropy_gradient: costs another pass over a chunk's logits.
    """
    hidden_nh = hidden_brh.flatten(0, 1).index_select(0, row_n)
    targets_n = target_ids_bt.flatten().index_select(0, trained_n)
    num_calls = max(1, -(-max(len(targets_n), max_tokens) // chunk_tokens))

    def of_chunk(hidden_ch: Tensor, targets_c: Tensor) -> tuple[Tensor, ...]:
        logits_cv = lm_head(hidden_ch).float()
        logprobs_cv = (logits_cv if temperature == 1 else logits_cv / temperature).log_softmax(
            dim=-1
        )
        logprobs_c = logprobs_cv.gather(-1, targets_c[:, None]).squeeze(-1)
        with torch.no_grad():
            probs_cv = logprobs_cv.exp()
            entropies_cv = torch.special.entr(probs_cv, out=probs_cv)  # −p log p, 0 where p is
            entropy_c = entropies_cv.sum(dim=-1)
            others = (
                statistics.of_tokens(logprobs_cv, entropies_cv, entropy_c) if statistics else ()
            )
        # Last: the backward pass computes again only what it needs.
        if entropy_gradient and torch.is_grad_enabled():
            entropy_c = -(logprobs_cv.exp() * logprobs_cv.where(logprobs_cv > -torch.inf, 0.0)).sum(
                dim=-1
            )
        return logprobs_c, entropy_c, *others

    chunks = []
    for start in range(0, num_calls * chunk_tokens, chunk_tokens):
        part = (hidden_nh[start : start + chunk_tokens], targets_n[start : start + chunk_tokens])
        if recomputes:
            chunks.append(
                checkpoint(of_chunk, *part, use_reentrant=False, preserve_rng_state=False)
            )
        else:
            chunks.append(of_chunk(*part))
    zeros = torch.zeros(target_ids_bt.numel(), dtype=torch.float32, device=hidden_brh.device)
    columns_n = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return tuple(
        zeros.index_copy(0, trained_n, values_n).view_as(target_ids_bt) for values_n in columns_n
    )
