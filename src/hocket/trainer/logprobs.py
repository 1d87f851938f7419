"""Log-probabilities of given tokens without the logits of a whole batch ever existing at the same time."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 512  # of a policy's forward pass


def token_logprobs(
    hidden_bth: Tensor,
    lm_head: nn.Module,
    target_ids_bt: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    mask_bt: Tensor | None = None,
    max_tokens: int = 0,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (log softmax(lm_head(hidden) / temperature)[target], entropy of that softmax), float32 [b, t] each.

    Logits exist for `chunk_tokens` positions at a time and are computed again in the backward pass. Where the mask is
    false nothing is computed and both results are 0.

    Args:
        lm_head: hidden [n, h] → logits [n, vocabulary]. It is called as a module, so that hooks which gather its
            weights (ZeRO-3) run.
        max_tokens: the head is called as often as for this many positions, even where fewer are masked in.
        entropy_gradient: whether the entropy carries a gradient, which costs another pass over a chunk's logits.
    """
    select_bt = torch.ones_like(target_ids_bt, dtype=torch.bool) if mask_bt is None else mask_bt
    hidden_nh, targets_n = hidden_bth[select_bt], target_ids_bt[select_bt]
    num_calls = max(1, -(-max(len(targets_n), max_tokens) // chunk_tokens))

    def of_chunk(hidden_ch: Tensor, targets_c: Tensor) -> tuple[Tensor, Tensor]:
        logits_cv = lm_head(hidden_ch).float()
        logprobs_cv = (logits_cv if temperature == 1 else logits_cv / temperature).log_softmax(dim=-1)
        logprobs_c = logprobs_cv.gather(-1, targets_c[:, None]).squeeze(-1)
        # Last, as the backward pass computes only what it needs again: up to here, where the entropy has no gradient.
        if entropy_gradient and torch.is_grad_enabled():
            entropy_c = -(logprobs_cv.exp() * logprobs_cv.where(logprobs_cv > -torch.inf, 0.0)).sum(dim=-1)
        else:
            with torch.no_grad():
                probs_cv = logprobs_cv.exp()
                entropy_c = torch.special.entr(probs_cv, out=probs_cv).sum(dim=-1)  # −p log p, 0 where p is
        return logprobs_c, entropy_c

    chunks = []
    for start in range(0, num_calls * chunk_tokens, chunk_tokens):
        part = slice(start, start + chunk_tokens)
        chunks.append(
            checkpoint(of_chunk, hidden_nh[part], targets_n[part], use_reentrant=False, preserve_rng_state=False)
        )
    logprobs_n, entropy_n = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    zeros_bt = torch.zeros(target_ids_bt.shape, dtype=torch.float32, device=hidden_bth.device)
    return zeros_bt.masked_scatter(select_bt, logprobs_n), zeros_bt.masked_scatter(select_bt, entropy_n)
