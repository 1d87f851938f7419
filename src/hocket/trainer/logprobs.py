"""Compute the log-probabilities of target tokens, without the logits of a whole batch in memory."""

import functools
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

# Positions whose logits exist at the same time in a forward pass of the policy.
CHUNK_TOKENS = 512
# The log-probs of a row over the whole vocabulary are kept for the backward pass up to this many
# bytes, or more on a CPU (`kept_bytes`).
KEPT_BYTES = 128 << 20


class Logits(NamedTuple):
    """Turns the output of a model's head into its logits: cap · tanh(factor · output / cap)."""

    factor: float = 1.0
    cap: float | None = None  # bound of the absolute value (Gemma); None: no bound

    def of(self, output: Tensor) -> Tensor:
        """Compute the logits from the head's output, of any shape."""
        scaled = output if self.factor == 1 else output * self.factor
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


class TokenStatistics:
    """Computes metrics from the whole distribution p of each sampled token.

    `of_tokens` runs within the forward pass, where p exists; `sums` runs after the pass.

    Example: a plugin that reports how likely the likeliest tokens are.

        class Highest(TokenStatistics):
            def of_tokens(
                self, logprobs_cv: Tensor, entropies_cv: Tensor, entropy_c: Tensor
            ) -> Sequence[Tensor]:
                return [logprobs_cv.amax(dim=-1)]

            def sums(
                self, batch: TrainBatch, logprobs_bt: Tensor, entropy_bt: Tensor, *numbers: Tensor
            ) -> dict[str, Tensor]:
                highest_bt = numbers[0].exp().where(batch.mask_bt, 0.0)
                return {"highest": highest_bt.sum() / batch.num_tokens_global}

        @token_statistics("highest")
        def highest(config: Config) -> TokenStatistics:
            return Highest()
    """

    def of_tokens(
        self, logprobs_cv: Tensor, entropies_cv: Tensor, entropy_c: Tensor
    ) -> Sequence[Tensor]:
        """Compute numbers of a chunk of c tokens, each a tensor [c], without gradient.

        Args:
            logprobs_cv: log p of all v tokens of the vocabulary.
            entropies_cv: −p log p; may be overwritten.
            entropy_c: the sums of entropies_cv over the vocabulary.
        """
        raise NotImplementedError

    def sums(
        self, batch: "TrainBatch", logprobs_bt: Tensor, entropy_bt: Tensor, *numbers: Tensor
    ) -> dict[str, Tensor]:
        """Sum a micro-batch's numbers into metrics of the step.

        Args:
            numbers: the numbers that `of_tokens` computed, [b, t] each, and 0 where the batch's
                mask is False.
        """
        raise NotImplementedError


TOKEN_STATISTICS: Registry[Callable[[Config], TokenStatistics | None]] = Registry(
    "token statistics", draws="hocket.extras.checks.draws"
)
token_statistics = TOKEN_STATISTICS.register
"""Decorator of a function that makes TokenStatistics, or returns None if the config needs none."""


def chosen_statistics(config: Config) -> TokenStatistics | None:
    """Make the token statistics of a run, or return None if the config needs none.

    Raises ConfigError if two registered functions make some.
    """
    chosen: TokenStatistics | None = None
    for make in TOKEN_STATISTICS.each():
        statistics = make(config)
        if statistics is None:
            continue
        if chosen is not None:
            names = f"{type(chosen).__name__} and {type(statistics).__name__}"
            raise ConfigError(
                f"{names} both take statistics of tokens, and only one can: turn one off"
            )
        chosen = statistics
    return chosen


def kept_bytes(num_weights: int, *, on_gpu: bool) -> int:
    """Compute how many bytes of a row's log-probs are kept for the backward pass at most.

    Larger ones are computed again, which saves memory. On a CPU, where rows are short, those up to
    the size of the model's weights in float32 are kept.
    """
    return KEPT_BYTES if on_gpu else max(KEPT_BYTES, 4 * num_weights)


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
    """Compute log p(target), the entropy of p, and the token statistics, each float32 [b, t].

    p is softmax(lm_head(hidden) / temperature). Logits exist for a chunk of positions at a time.

    Args:
        hidden_brh: the last hidden states of the rows.
        lm_head: maps hidden states [n, h] to logits [n, vocabulary]. It must call the head's
            module, so that ZeRO-3's hooks gather the weights.
        target_ids_bt: the token to predict at each place.
        temperature: the sampling temperature of p.
        chunk_tokens: positions per call of the head.
        trained_n: places in the flattened [b, t] of the n tokens whose results are computed; all
            other results are 0. With a mask in place of places, the host would wait for the device.
        row_n: places in the flattened [b, r] of the hidden states that predict these n tokens.
        max_tokens: the head is called as often as this many positions need, which must be the same
            on all ranks.
        entropy_gradient: whether the entropy has a gradient; it costs another pass over the logits.
        recomputes: whether the backward pass computes the logits again. If not, log p is kept for
            it, which takes 4 bytes per position and token of the vocabulary.
        statistics: what else is computed from p.
    """
    hidden_nh = hidden_brh.flatten(0, 1).index_select(0, row_n)
    targets_n = target_ids_bt.flatten().index_select(0, trained_n)
    columns_of: Callable[[Tensor, Tensor], tuple[Tensor, ...]] = functools.partial(
        _columns_of_chunk, lm_head, temperature, entropy_gradient, statistics
    )
    if recomputes:
        columns_of = functools.partial(
            checkpoint, columns_of, use_reentrant=False, preserve_rng_state=False
        )

    # Every rank calls the head equally often, and at least once, with empty chunks at the end if it
    # has fewer positions: each call gathers weights from all ranks (ZeRO-3). A caller that is no
    # rank among several may leave max_tokens at 0.
    num_tokens = max(len(targets_n), max_tokens, 1)
    chunks = []
    for start in range(0, num_tokens, chunk_tokens):
        end = start + chunk_tokens
        chunks.append(columns_of(hidden_nh[start:end], targets_n[start:end]))

    # Join the chunks of each column, and put the n values back to their places.
    zeros = torch.zeros(target_ids_bt.numel(), dtype=torch.float32, device=hidden_brh.device)
    results = []
    for parts in zip(*chunks, strict=True):
        values_n = torch.cat(parts)
        results.append(zeros.index_copy(0, trained_n, values_n).view_as(target_ids_bt))
    return tuple(results)


def _columns_of_chunk(
    lm_head: Callable[[Tensor], Tensor],
    temperature: float,
    entropy_gradient: bool,
    statistics: TokenStatistics | None,
    hidden_ch: Tensor,
    targets_c: Tensor,
) -> tuple[Tensor, ...]:
    """Compute the results of `token_logprobs` for a chunk of c tokens, [c] each."""
    logits_cv = lm_head(hidden_ch).float()
    if temperature != 1:
        logits_cv = logits_cv / temperature
    logprobs_cv = logits_cv.log_softmax(dim=-1)
    logprobs_c = logprobs_cv.gather(-1, targets_c[:, None]).squeeze(-1)

    # The backward pass computes this function again only up to the last tensor that it needs: up to
    # here, unless the entropy has a gradient.
    with torch.no_grad():
        probs_cv = logprobs_cv.exp()
        # −p log p, and 0 where p is 0. It overwrites p to save memory.
        entropies_cv = torch.special.entr(probs_cv, out=probs_cv)
        entropy_c = entropies_cv.sum(dim=-1)
        numbers: Sequence[Tensor] = ()
        if statistics:
            numbers = statistics.of_tokens(logprobs_cv, entropies_cv, entropy_c)

    if entropy_gradient and torch.is_grad_enabled():
        finite_cv = logprobs_cv.where(logprobs_cv > -torch.inf, 0.0)
        entropy_c = -(logprobs_cv.exp() * finite_cv).sum(dim=-1)
    return logprobs_c, entropy_c, *numbers
