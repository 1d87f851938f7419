"""Measure the log-probs of a KL penalty's reference policy.

The reference is a frozen model, the model under a trained adapter, or a model on a server.
"""

import asyncio
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pydantic
import torch
from torch import Tensor

from hocket.client.server import ServerClient
from hocket.config import Config, ModelConfig
from hocket.data import model_folder
from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError, ErrorOutcome, ServerError
from hocket.protocol.messages import Request
from hocket.trainer import engine, share_gpu
from hocket.trainer.batching import TrainBatch
from hocket.trainer.objective import Auxiliary, LoadingTrainer, Measure, column
from hocket.trainer.policy import Policy
from hocket.types import TokenSequence

SCORE_TIMEOUT_S = 600.0  # time limit of the request for a sequence
WAITS_S = (2.0, 10.0, 30.0)  # seconds before each retry after a server's failure

log = logging.getLogger(__name__)


@column("ref_logprobs")
def reference(config: Config) -> Auxiliary | None:
    """Measure the reference's log-probs if the loss has a KL penalty."""
    if config.algorithm.kl == "off":
        return None
    path = config.algorithm.reference
    model = config.model
    if path is not None and "://" in path:
        sha256 = tokenizers.fingerprint(tokenizers.load(model.path))
        ask = functools.partial(_ask_until_answered, path, sha256)
        return Auxiliary(column="ref_logprobs", ask=ask)
    if path is None and model.weights == "adapter":
        # The reference is in memory already: the policy without its adapter.
        return Auxiliary(column="ref_logprobs", load=_under_adapter)
    return frozen(path, "algorithm.reference", model)


def frozen(path: str | None, setting: str, model: ModelConfig) -> Auxiliary:
    """Measure the log-probs of a frozen whole model.

    Raises ConfigError if its tokenizer has other ids than the policy's.

    Args:
        path: the frozen model; None: the model that the run starts from.
        setting: the setting that names it, for errors.
        model: the policy.
    """
    reference_model = model.beside(path)
    if path is not None:
        tokenizer = model_folder.examine(reference_model, setting, needs_weights=False)
        tokenizers.check_same_ids(tokenizer, f"{setting}={path}", model)

    def load(trainer: LoadingTrainer) -> Measure:
        frozen_model = FrozenModel(trainer.load_model(reference_model, Policy), trainer.setup)
        trainer.tensors.append(frozen_model.tensors)
        return frozen_model.logprobs

    return Auxiliary(column="ref_logprobs", model=reference_model, load=load)


def _under_adapter(trainer: LoadingTrainer) -> Measure:
    def logprobs(batch: TrainBatch) -> Tensor:
        with trainer.policy.weights.base(trainer.policy.model):
            return trainer.columns["logprobs"](batch)

    return logprobs


class _Scores(pydantic.BaseModel):
    choices: list[dict[str, Any]]


class _ScoreRequest(Request[_Scores]):
    """POST /v1/completions of vLLM, which scores a sequence.

    All tokens but the last are the prompt, so that the context has room for the token that vLLM
    samples. The last token is scored in place of that one.
    """

    route = "/v1/completions"
    answer = _Scores
    prompt: list[int]
    prompt_logprobs: int = 0  # how many likely tokens vLLM lists beside each token of the prompt
    max_tokens: int = 1
    logprobs: int = 1
    logprob_token_ids: list[int]  # the last token, whatever is sampled
    return_tokens_as_token_ids: bool = True


async def _ask_until_answered(
    url: str, sha256: str, sequences: Sequence[TokenSequence], token: str | None
) -> list[list[float]]:
    """Have a server compute the log-probs of sampled tokens at temperature 1.

    Failures that may pass are retried after WAITS_S.

    Args:
        url: the server of the reference.
        sha256: the fingerprint of the policy's tokenizer, which the server must have.
        sequences: the sequences; tokens that were not sampled get 0.
        token: the servers' token, or None.
    """
    if any(sequence.images for sequence in sequences):
        raise ConfigError(
            f"algorithm.reference={url}: a server scores no images; name a folder instead"
        )
    for wait_s in WAITS_S:
        try:
            return await _ask(url, sha256, sequences, token)
        except ServerError as error:
            has_refused = error.status is not None and error.status < 500
            if has_refused and error.outcome is not ErrorOutcome.AGAIN:
                raise
            log.warning("%s; it is asked again in %g s", error, wait_s)
        await asyncio.sleep(wait_s)
    return await _ask(url, sha256, sequences, token)  # the last try: errors end the step


async def _ask(
    url: str, sha256: str, sequences: Sequence[TokenSequence], token: str | None
) -> list[list[float]]:
    async with ServerClient(url, token=token) as server:
        health = await server.health()
        if health.tokenizer_sha256 != sha256:
            raise ConfigError(
                f"algorithm.reference={url} serves {health.model}, with another tokenizer than "
                "model.path: the same ids are other tokens; serve one with the same tokenizer"
            )
        return await asyncio.gather(*(_score(server, sequence) for sequence in sequences))


async def _score(server: ServerClient, sequence: TokenSequence) -> list[float]:
    """Request the log-prob of each token of a sequence; 0 where the token was not sampled.

    Raises ServerError if the answer has not one log-prob per token.
    """
    ids = list(sequence.token_ids)
    prompt = ids[:-1]
    last_id = ids[-1]
    request = _ScoreRequest(prompt=prompt, logprob_token_ids=[last_id])
    (choice,) = (await server.ask(request, timeout_s=SCORE_TIMEOUT_S)).choices
    prompt_logprobs = choice["prompt_logprobs"]
    if len(prompt_logprobs) != len(prompt):
        raise ServerError(
            f"{server.url}{request.route} answered {len(prompt_logprobs)} log-probs for a prompt "
            f"of {len(prompt)} tokens; serve algorithm.reference with the vLLM of this version",
            code="protocol",
            status=200,  # another try would be answered the same
        )

    # vLLM has none for the first token, which no sequence has sampled.
    logprobs = []
    for id_, is_sampled, by_id in zip(prompt, sequence.mask[:-1], prompt_logprobs, strict=True):
        logprobs.append(by_id[str(id_)]["logprob"] if is_sampled else 0.0)
    last_logprob = choice["logprobs"]["top_logprobs"][0][f"token_id:{last_id}"]
    logprobs.append(last_logprob if sequence.mask[-1] else 0.0)
    return logprobs


class FrozenModel:
    """Computes log-probs without gradients: whole on every rank or, at ZeRO-3, spread over them."""

    def __init__(self, module: Policy, setup: engine.Setup) -> None:
        self._module = module.requires_grad_(False).eval()
        self._setup = setup
        device = setup.ranks.device
        if setup.stage == 3:
            engine.spread(module, setup)
            engine.initialize(setup, model=module)  # DeepSpeed's hooks gather the weights
        else:
            module.to(device)
        module.check_architecture(device)

    def logprobs(self, batch: TrainBatch) -> Tensor:
        """Compute the log-prob of each target of a batch, [b, t]."""
        # ZeRO-0 has float32 weights, and computes in 16 bits as the policy does.
        casts = self._setup.stage == 0 and self._setup.dtype != torch.float32
        with torch.autocast(self._setup.ranks.device.type, self._setup.dtype, enabled=casts):
            logprobs_bt: Tensor = self._module(batch)[0]
        return logprobs_bt

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the model, which may be moved off the GPU between steps."""
        return share_gpu.tensors_in(list(self._module.parameters()), list(self._module.buffers()))
