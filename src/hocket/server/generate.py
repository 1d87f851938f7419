"""Answer /generate: read the body, have vLLM sample, build the completions."""

import asyncio
import concurrent.futures
import contextlib
import copy
import dataclasses
import itertools
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import jinja2

from hocket.common.tasks import as_completed
from hocket.data.text import turn_text
from hocket.protocol import Completion, GenerateRequest, PromptInput, SamplingParams
from hocket.server import vllm_requests
from hocket.server.errors import ApiError, check_count, check_finite, invalid, parse
from hocket.types import Message

MIN_TEMPERATURE = 0.01
"""vLLM silently samples at this temperature when asked for a lower one."""
_NUMBERS = itertools.count()


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One completion to sample."""

    prompt: int  # number of its prompt in the request
    index: int  # among the completions of that prompt
    token_ids: list[int]
    sampling: SamplingParams
    seed: int | None = None
    pictured: Any = None  # vLLM's prompt, where it has images
    tools: vllm_requests.FindCalls | None = None
    begun: int = 0  # of the last tokens, how many belong to the same turn
    request_id: str = dataclasses.field(default_factory=lambda: f"hocket-{next(_NUMBERS)}")


class Sampler:
    """Sample completions, unless `require_ready` raises why the engine can't."""

    def __init__(
        self,
        llm: Any,
        tokenizer: Any,
        require_ready: Callable[[], None],
        template: Mapping[str, Any],
    ) -> None:
        self.eyes: Any = None  # what opens images: server/vision.py
        self.placeholder = getattr(tokenizer, "placeholder", None)  # the token that stands for one
        self._llm = llm
        self._tokenizer = tokenizer
        self._require_ready = require_ready
        self._template = template  # options of the chat template
        self._window = 2 * int(
            llm.vllm_config.scheduler_config.max_num_seqs
        )  # of one request in the engine
        self._max_length = int(llm.model_config.max_model_len)
        # Two threads must not use one tokenizer at once: bodies are read in a thread of their own, with a copy.
        self._reading = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="read")
        self._reader = copy.deepcopy(tokenizer)

    async def read(self, body: bytes) -> tuple[GenerateRequest, list[Job]]:
        """Return a body and its jobs, prompt by prompt. Raises ApiError with 4xx."""
        return await asyncio.get_running_loop().run_in_executor(self._reading, self.parse, body)

    def parse(self, body: bytes) -> tuple[GenerateRequest, list[Job]]:
        request = parse(GenerateRequest, body)
        if request.seeds is not None and (
            request.n != 1 or len(request.seeds) != len(request.prompts)
        ):
            message = f"seeds: {len(request.seeds)} lists for {len(request.prompts)} prompts, n={request.n}"
            raise invalid(
                message, "send one list of seeds per prompt, one seed per completion, and no n"
            )
        seeds: Sequence[Sequence[int | None]] = request.seeds or _seeds(request)
        if request.begun is not None and len(request.begun) != len(request.prompts):
            message = f"begun: {len(request.begun)} numbers for {len(request.prompts)} prompts"
            raise invalid(message, "send one number per prompt, or leave it out")
        check_count(sum(map(len, seeds)))
        self.check_sampling(request.sampling)
        tools = (
            None if request.tools is None else vllm_requests.find_calls(self._reader, request.tools)
        )
        jobs = []
        for number, (prompt, own_seeds) in enumerate(zip(request.prompts, seeds, strict=True)):
            token_ids, images = self._token_ids(prompt, f"prompts.{number}")
            pictured = None
            if images:
                pictured = self.eyes.expand(token_ids, images, f"prompts.{number}")
                token_ids = pictured["prompt_token_ids"]
            begun = request.begun[number] if request.begun is not None else 0
            if begun > len(token_ids):
                message = f"begun.{number}: {begun} tokens of a prompt of {len(token_ids)}"
                raise invalid(
                    message,
                    "it counts those at the prompt's end that the model wrote in the same turn",
                )
            sampling = request.sampling
            if request.fit:
                room = max(1, self._max_length - len(token_ids))
                sampling = sampling.model_copy(
                    update={"max_tokens": min(sampling.max_tokens, room)}
                )
            if (
                len(token_ids) + sampling.max_tokens > self._max_length
            ):  # vLLM would lower max_tokens
                raise invalid(
                    f"prompts.{number}: {len(token_ids)} prompt tokens + max_tokens {sampling.max_tokens} do not fit "
                    f"into the context of {self._max_length} tokens",
                    "shorten the prompt, lower sampling.max_tokens, or raise the server's model.max_length",
                    code="context_too_long",
                )
            for index, seed in enumerate(own_seeds):
                jobs.append(Job(number, index, token_ids, sampling, seed, pictured, tools, begun))
        return request, jobs

    async def completions(
        self, jobs: Sequence[Job]
    ) -> AsyncGenerator[tuple[Job, Completion], None]:
        """Yield each job with its completion, as they finish; leaving early aborts the rest.

        The engine gets a part of them at a time: what it has queued, it is slow to forget, and others wait behind it.
        """
        async with contextlib.aclosing(
            as_completed(self.complete, jobs, at_once=self._window)
        ) as finished:
            try:
                async for done in finished:
                    yield done
            except BaseException:
                await vllm_requests.abort(self._llm, [job.request_id for job in jobs])
                raise

    async def complete(self, job: Job) -> tuple[Job, Completion]:
        """Sample one completion. Raises ApiError where it is refused or breaks off."""
        prompt = job.pictured or job.token_ids
        output = await vllm_requests.complete(
            self._llm, prompt, job.sampling, job.seed, job.request_id, job.begun
        )
        if output.finish_reason == "abort":
            self._require_ready()
            raise ApiError(503, "aborted", "generation was aborted", "send it again")
        check_finite(output.logprobs.logprobs)
        token_ids = output.token_ids  # a list
        stopped = output.finish_reason == "stop"
        by_string = stopped and isinstance(output.stop_reason, str)
        # The token that ended it is no part of the text.
        written = token_ids[:-1] if stopped and not by_string else token_ids
        whole = turn_text(self._tokenizer.decode, job.token_ids, job.begun, written)
        text = output.text if by_string else whole
        calls = []
        if job.tools is not None:  # in the reading thread, whose tokenizer it uses
            # A tag that ends a call may be what the sampling stops at.
            chosen = by_string or output.stop_reason in job.sampling.stop_token_ids
            turn = job.token_ids[len(job.token_ids) - job.begun :] + (
                token_ids if chosen else written
            )
            calls = await asyncio.get_running_loop().run_in_executor(self._reading, job.tools, turn)
        completion = Completion(
            token_ids=array("I", token_ids),
            logprobs=array("f", output.logprobs.logprobs),
            text=text,
            after_text=whole.removeprefix(text) if by_string else "",
            finish_reason=output.finish_reason,
            versions=vllm_requests.version_spans(output),
            tool_calls=tuple(calls),
            prompt_token_ids=tuple(job.token_ids) if job.pictured else (),
        )
        return job, completion

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raise ApiError where vLLM would sample in another way."""
        if 0 < sampling.temperature < MIN_TEMPERATURE:
            message = f"sampling.temperature: {sampling.temperature} is below {MIN_TEMPERATURE}, the engine's lowest"
            raise invalid(message, "use 0 for greedy decoding")

    def _token_ids(self, prompt: PromptInput, where: str) -> tuple[list[int], Sequence[str]]:
        """Return a prompt's token ids, with one for each of its images, and these."""
        if isinstance(prompt, str):
            return list(self._reader(prompt, add_special_tokens=True)["input_ids"]), ()
        if isinstance(prompt, dict):
            return prompt["token_ids"], prompt["images"]
        if prompt and isinstance(prompt[0], dict):
            messages, images = _apart(prompt, sees=self.placeholder is not None)
            return self._render(messages, where), images
        return prompt, ()  # type: ignore[return-value]  # the schema leaves nothing but token ids

    def _render(self, messages: Any, where: str) -> list[int]:
        try:
            options = {"add_generation_prompt": True, "return_dict": False, **self._template}
            return list(self._reader.apply_chat_template(messages, **options))
        # A template is a program: besides its own refusals it fails in these ways.
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            message = f"{where}: the chat template refused these messages: {error}"
            hint = "look at the model's chat template for the roles and their order; text and token ids need none"
            raise invalid(message, hint, code="chat_template_error") from error


def _apart(messages: Any, *, sees: bool) -> tuple[list[Message], list[str]]:
    """Return messages as chat templates want them, {"type": "image"} in the place of images, and these.

    Some templates of models that see take no content but lists.
    """
    plain = list[Message]()
    images = list[str]()
    for message in messages:
        content = message["content"]
        if sees and isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, str):
            images += [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
            content = [part if part["type"] == "text" else {"type": "image"} for part in content]
        plain.append({**message, "content": content})
    return plain, images


def _seeds(request: GenerateRequest) -> list[list[int | None]]:
    """Return the seeds of each prompt's completions, None where the engine draws one."""
    first = request.sampling.seed
    n = request.n
    if first is None:
        return [[None] * n] * len(request.prompts)
    return [
        [(first + number * n + index) % 2**63 for index in range(n)]
        for number in range(len(request.prompts))
    ]
