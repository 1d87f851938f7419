"""Jobs in, completions out: reads requests, has vLLM sample, and says in hocket's words what came of it.

Knows nothing of versions that come and go.
"""

import asyncio
import concurrent.futures
import copy
import math
from collections.abc import Callable
from typing import Any

from hocket import tokenizer as tokenizers
from hocket.config import Config
from hocket.protocol import ErrorBody, GenerateRequest, SamplingParams
from hocket.server import vllm_api
from hocket.server.errors import ApiError
from hocket.server.requests import Job, RequestReader

RESTART = "restart the server; its log says more"


class Sampler:
    """What /generate asks of vLLM's engine.

    Args:
        llm: a running AsyncLLM.
        config: model and server sections are used.
        broken: says what the engine has failed of, None where it works.

    Attributes:
        in_flight: completions that are being sampled.
        tokenizer_sha256: which tokenizer it is.
    """

    def __init__(self, llm: Any, config: Config, broken: Callable[[], ErrorBody | None]) -> None:
        self._llm = llm
        self._broken = broken
        self._tokenizer = tokenizers.load(config.model.path)
        self.tokenizer_sha256 = tokenizers.fingerprint(self._tokenizer)
        self.in_flight = 0
        # A tokenizer must not be used by two threads at once: prompts are read in one of their own, with a copy.
        self._reading = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="read")
        self._reader = RequestReader(
            copy.deepcopy(self._tokenizer),
            vocab_size=vllm_api.vocab_size(llm),
            max_length=vllm_api.max_length(llm),
            limits=config.server,
            find_calls=vllm_api.find_calls,
        )
        self._client_errors = vllm_api.client_errors()
        self._engine_errors = vllm_api.engine_errors()

    async def read(self, body: bytes) -> tuple[GenerateRequest, list[Job]]:
        """Validates and tokenizes the body of /generate. Raises ApiError with a status of 4xx."""
        return await asyncio.get_running_loop().run_in_executor(self._reading, self._reader.read, body)

    def check(self, sampling: SamplingParams) -> None:
        """Raises ApiError where the engine could not sample in this way."""
        self._reader.check_sampling(sampling)

    def close(self) -> None:
        """Reads no more requests."""
        self._reading.shutdown(wait=False, cancel_futures=True)

    async def complete(self, job: Job) -> tuple[Job, dict[str, Any]]:
        """Returns the job with its Completion as a plain dict. Raises ApiError where it breaks off."""
        if (broken := self._broken()) is not None:
            raise ApiError.of(503, broken)
        self.in_flight += 1
        try:
            output = await vllm_api.complete(self._llm, job, f"hocket-{job.prompt}-{job.index}")
        except self._client_errors as error:
            raise ApiError(422, "refused_by_engine", str(error), "change the request as the message says") from error
        except self._engine_errors as error:
            reason = self._broken() or ErrorBody(code="generation_failed", message=str(error), hint=RESTART)
            raise ApiError.of(503, reason) from error
        finally:
            self.in_flight -= 1
        if output.finish_reason == "abort":
            aborted = ErrorBody(code="aborted", message="generation was aborted", hint="send it again")
            raise ApiError.of(503, self._broken() or aborted)
        message = self._message(job, output)
        if job.tools is not None:  # where prompts are read, as it uses the same tokenizer
            stopped = output.finish_reason == "stop"
            calls = asyncio.get_running_loop().run_in_executor(self._reading, job.tools, output.token_ids, stopped)
            message["tool_calls"] = await calls
        return job, message

    def _message(self, job: Job, output: Any) -> dict[str, Any]:
        token_ids = list(output.token_ids)
        logprobs = output.logprobs.logprobs
        if not math.isfinite(sum(logprobs)):
            raise ApiError(500, "not_finite", "the weights give log-probs that are not finite", "publish good ones")
        return {
            "token_ids": token_ids,
            "logprobs": logprobs,
            "text": output.text if job.sampling.stop else self._decode(token_ids, output),
            "finish_reason": output.finish_reason,
            "versions": [[int(span.version), span.start, span.end] for span in output.weight_versions or ()],
        }

    def _decode(self, token_ids: list[int], output: Any) -> str:
        stopped = output.finish_reason == "stop"
        shown = token_ids[:-1] if stopped else token_ids  # the token that ended it is no part of the text
        return str(self._tokenizer.decode(shown, skip_special_tokens=True))
