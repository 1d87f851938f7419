"""The reference policy of a KL penalty: a frozen model, the one under a trained adapter, or one on a server."""

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

SCORE_TIMEOUT_S = 600.0
WAITS_S = (2.0, 10.0, 30.0)  # for a server that fails

log = logging.getLogger(__name__)


@column("ref_logprobs")
def reference(config: Config) -> Auxiliary | None:
    """Measure the reference's log-probs, where there is a KL."""
    if config.algorithm.kl == "off":
        return None
    path = config.algorithm.reference
    model = config.model
    if path is not None and "://" in path:
        sha256 = tokenizers.fingerprint(tokenizers.load(model.path))
        return Auxiliary(column="ref_logprobs", ask=functools.partial(_ask, path, sha256))
    if path is None and model.weights == "adapter":
        return Auxiliary(column="ref_logprobs", load=_under_adapter)
    return frozen(path, "algorithm.reference", model)


def frozen(path: str | None, setting: str, model: ModelConfig) -> Auxiliary:
    """Return the log-probs of the whole model at `path`, or that the run starts from."""
    own = model.beside(path)
    if path is not None:
        tokenizers.check_same_ids(
            model_folder.examine(own, setting, needs_weights=False), f"{setting}={path}", model
        )

    def load(trainer: LoadingTrainer) -> Measure:
        frozen = FrozenModel(trainer.load_model(own, Policy), trainer.setup)
        trainer.tensors.append(frozen.tensors)
        return frozen.logprobs

    return Auxiliary(column="ref_logprobs", model=own, load=load)


def _under_adapter(trainer: LoadingTrainer) -> Measure:
    def logprobs(batch: TrainBatch) -> Tensor:
        with trainer.policy.weights.base(trainer.policy.model):
            return trainer.columns["logprobs"](batch)

    return logprobs


class _Scores(pydantic.BaseModel):
    choices: list[dict[str, Any]]


class _ScoreRequest(Request[_Scores]):
    """POST /v1/completions of vLLM: all tokens but the last are the prompt, which must leave room to sample one."""

    route = "/v1/completions"
    answer = _Scores
    prompt: list[int]
    prompt_logprobs: int = 0  # of tokens besides the prompt's own
    max_tokens: int = 1
    logprobs: int = 1
    logprob_token_ids: list[int]  # the last one, whatever is sampled
    return_tokens_as_token_ids: bool = True


async def _ask(
    url: str, sha256: str, sequences: Sequence[TokenSequence], token: str | None
) -> list[list[float]]:
    """Have a server score what was sampled, at temperature 1; ask again after a failure. `sha256`: of the tokenizer."""
    if any(sequence.images for sequence in sequences):
        raise ConfigError(
            f"algorithm.reference={url}: a server scores no images; name a folder instead"
        )
    for wait_s in WAITS_S:
        try:
            return await _scores(url, sha256, sequences, token)
        except ServerError as error:
            refused = error.status is not None and error.status < 500
            if refused and error.outcome is not ErrorOutcome.AGAIN:
                raise
            log.warning("%s; it is asked again in %g s", error, wait_s)
        await asyncio.sleep(wait_s)
    return await _scores(url, sha256, sequences, token)


async def _scores(
    url: str, sha256: str, sequences: Sequence[TokenSequence], token: str | None
) -> list[list[float]]:
    async with ServerClient(url, token=token) as server:
        health = await server.health()
        if health.tokenizer_sha256 != sha256:
            what = f"algorithm.reference={url} serves {health.model}, with another tokenizer than model.path"
            raise ConfigError(
                f"{what}: the same ids are other tokens; serve one with the same tokenizer"
            )
        return await asyncio.gather(*(_score(server, sequence) for sequence in sequences))


async def _score(server: ServerClient, sequence: TokenSequence) -> list[float]:
    *read, last = sequence.token_ids
    request = _ScoreRequest(prompt=read, logprob_token_ids=[last])
    (choice,) = (await server.ask(request, timeout_s=SCORE_TIMEOUT_S)).choices
    known = zip(read, sequence.mask, choice["prompt_logprobs"], strict=False)
    found = [by_id[str(one)]["logprob"] if sampled else 0.0 for one, sampled, by_id in known]
    of_last = choice["logprobs"]["top_logprobs"][0][f"token_id:{last}"]
    return [*found, of_last if sequence.mask[-1] else 0.0]


class FrozenModel:
    """Runs without gradients: whole on every rank or, beside ZeRO-3, spread over the ranks."""

    def __init__(self, module: Policy, setup: engine.Setup) -> None:
        self._module = module.requires_grad_(False).eval()
        self._setup = setup
        device = setup.ranks.device
        if setup.stage == 3:
            engine.spread(module, setup)
            engine.initialize(setup, model=module)  # its hooks gather the weights
        else:
            module.to(device)
        module.check_architecture(device)

    def logprobs(self, batch: TrainBatch) -> Tensor:
        casts = self._setup.stage == 0 and self._setup.dtype != torch.float32
        with torch.autocast(self._setup.ranks.device.type, self._setup.dtype, enabled=casts):
            logprobs_bt: Tensor = self._module(batch)[0]
        return logprobs_bt

    def tensors(self) -> Iterator[Tensor]:
        return share_gpu.tensors_in(list(self._module.parameters()), list(self._module.buffers()))
