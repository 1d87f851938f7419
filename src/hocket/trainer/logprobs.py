"""Log-probabilities of given tokens; the logits of a whole batch never exist at the same time."""

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
    trained_n: Tensor | None = None,
    max_tokens: int = 0,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (log softmax(lm_head(hidden) / temperature)[target], entropy of that softmax), float32 [b, t] each.

    Logits exist for `chunk_tokens` positions at a time and are computed again in the backward pass.

    Args:
        lm_head: hidden [n, h] → logits [n, vocabulary]; a module, for ZeRO-3's hooks.
        trained_n: places in the flattened [b, t]; elsewhere both results are 0. By default all. (With a mask the host
            would wait for the device.)
        max_tokens: the head is called as often as for this many positions.
        entropy_gradient: costs another pass over a chunk's logits.
    """
    if trained_n is None:
        trained_n = torch.arange(target_ids_bt.numel(), device=target_ids_bt.device)
    hidden_nh = hidden_bth.flatten(0, 1).index_select(0, trained_n)
    targets_n = target_ids_bt.flatten().index_select(0, trained_n)
    num_calls = max(1, -(-max(len(targets_n), max_tokens) // chunk_tokens))

    def of_chunk(hidden_ch: Tensor, targets_c: Tensor) -> tuple[Tensor, Tensor]:
        logits_cv = lm_head(hidden_ch).float()
        logprobs_cv = (logits_cv if temperature == 1 else logits_cv / temperature).log_softmax(dim=-1)
        logprobs_c = logprobs_cv.gather(-1, targets_c[:, None]).squeeze(-1)
        # Last: the backward pass computes again only what it needs.
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
    zeros = torch.zeros(target_ids_bt.numel(), dtype=torch.float32, device=hidden_bth.device)
    logprobs, entropy = (zeros.index_copy(0, trained_n, values_n) for values_n in (logprobs_n, entropy_n))
    return logprobs.view_as(target_ids_bt), entropy.view_as(target_ids_bt)
