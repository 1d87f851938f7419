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
from hocket.protocol import Completion, GenerateRequest, PromptInput, SamplingParams, ToolCall
from hocket.server import vllm_requests
from hocket.server.errors import ApiError, check_count, check_finite, invalid, parse
from hocket.types import Message

MIN_TEMPERATURE = 0.01
"""vLLM samples at this temperature where a request has a lower one, and only logs a warning."""
_NUMBERS = itertools.count()  # for the ids of requests in the engine


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One completion to sample."""

    prompt: int  # number of its prompt in the request
    index: int  # its number among the completions of that prompt
    token_ids: list[int]  # the prompt; with images, each is expanded to all of its tokens
    sampling: SamplingParams
    seed: int | None = None
    image_prompt: Any = None  # vLLM's form of a prompt that has images
    tools: vllm_requests.FindCalls | None = None  # finds the tool calls in the turn
    begun: int = 0  # how many of the prompt's last tokens belong to the model's turn
    request_id: str = dataclasses.field(default_factory=lambda: f"hocket-{next(_NUMBERS)}")


class Sampler:
    """Sample completions, unless `require_ready` raises the reason why the engine can't."""

    def __init__(
        self,
        llm: Any,
        tokenizer: Any,
        require_ready: Callable[[], None],
        template: Mapping[str, Any],
    ) -> None:
        self.image_reader: Any = None  # an ImageReader (vision.py), once that part is installed
        # The token that stands for one image; None for a model that takes no images.
        self.placeholder = getattr(tokenizer, "placeholder", None)
        self._llm = llm
        self._tokenizer = tokenizer
        self._require_ready = require_ready
        self._template = template  # options of the chat template
        # How many completions of one HTTP request the engine has at once.
        self._window = 2 * int(llm.vllm_config.scheduler_config.max_num_seqs)
        self._max_length = int(llm.model_config.max_model_len)
        # Two threads must not use one tokenizer at once: the thread that parses bodies has a copy.
        self._parsing = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="parse")
        self._parsing_tokenizer = copy.deepcopy(tokenizer)

    async def read(self, body: bytes) -> tuple[GenerateRequest, list[Job]]:
        """Parse a body in the parsing thread. Raises ApiError with 4xx."""
        return await asyncio.get_running_loop().run_in_executor(self._parsing, self.parse, body)

    def parse(self, body: bytes) -> tuple[GenerateRequest, list[Job]]:
        """Read a body and list its jobs, prompt by prompt. Raises ApiError with 4xx."""
        # Check what concerns the request as a whole.
        request = parse(GenerateRequest, body)
        seeds = _seeds(request)
        if request.begun is not None and len(request.begun) != len(request.prompts):
            message = f"begun: {len(request.begun)} numbers for {len(request.prompts)} prompts"
            raise invalid(message, "send one number per prompt, or leave it out")
        check_count(sum(map(len, seeds)))
        self.check_sampling(request.sampling)
        tools = None
        if request.tools is not None:
            tools = vllm_requests.find_calls(self._parsing_tokenizer, request.tools)

        # Tokenize each prompt, and make a job for each of its completions.
        jobs = list[Job]()
        for number, (prompt, prompt_seeds) in enumerate(zip(request.prompts, seeds, strict=True)):
            where = f"prompts.{number}"
            token_ids, images = self._token_ids(prompt, where)
            image_prompt = None
            if images:
                image_prompt = self.image_reader.expand(token_ids, images, where)
                token_ids = image_prompt["prompt_token_ids"]
            begun = request.begun[number] if request.begun is not None else 0
            if begun > len(token_ids):
                message = f"begun.{number}: {begun} tokens of a prompt of {len(token_ids)}"
                hint = "it counts those at the prompt's end that the model wrote in the same turn"
                raise invalid(message, hint)
            sampling = self._sampling_that_fits(request, len(token_ids), where)
            for index, seed in enumerate(prompt_seeds):
                job = Job(number, index, token_ids, sampling, seed, image_prompt, tools, begun)
                jobs.append(job)
        return request, jobs

    def _sampling_that_fits(
        self, request: GenerateRequest, num_tokens: int, where: str
    ) -> SamplingParams:
        """Fit max_tokens into the context after a prompt of `num_tokens`, if the request allows it.

        Raises ApiError where prompt and completion do not fit: vLLM would lower max_tokens.
        """
        sampling = request.sampling
        if request.fit:
            room = max(1, self._max_length - num_tokens)
            max_tokens = min(sampling.max_tokens, room)
            sampling = sampling.model_copy(update={"max_tokens": max_tokens})
        if num_tokens + sampling.max_tokens > self._max_length:
            message = (
                f"{where}: {num_tokens} prompt tokens + max_tokens {sampling.max_tokens} do not "
                f"fit into the context of {self._max_length} tokens"
            )
            hint = (
                "shorten the prompt, lower sampling.max_tokens, or raise the server's "
                "model.max_length"
            )
            raise invalid(message, hint, code="context_too_long")
        return sampling

    async def completions(
        self, jobs: Sequence[Job]
    ) -> AsyncGenerator[tuple[Job, Completion], None]:
        """Yield each job with its completion, as they finish; leaving early aborts the other jobs.

        The engine gets only a window of the jobs at a time. It is slow to forget requests that it
        has queued, and the requests of others wait behind them.
        """
        sampling = as_completed(self.complete, jobs, at_once=self._window)
        async with contextlib.aclosing(sampling) as finished:
            try:
                async for job_and_completion in finished:
                    yield job_and_completion
            except BaseException:
                # All in one message to the engine, before each is cancelled by itself.
                await vllm_requests.abort(self._llm, [job.request_id for job in jobs])
                raise

    async def complete(self, job: Job) -> tuple[Job, Completion]:
        """Sample one completion. Raises ApiError where it is refused or breaks off."""
        prompt = job.image_prompt or job.token_ids
        output = await vllm_requests.complete(
            self._llm, prompt, job.sampling, job.seed, job.request_id, job.begun
        )
        if output.finish_reason == "abort":
            self._require_ready()
            raise ApiError(503, "aborted", "generation was aborted", "send it again")
        check_finite(output.logprobs.logprobs)

        # A token that ended the turn is no part of its text. The stop string, which vLLM cuts off,
        # and the rest of the token in which it ends are the after_text.
        token_ids: list[int] = output.token_ids
        stopped = output.finish_reason == "stop"
        at_string = stopped and isinstance(output.stop_reason, str)
        text_ids = token_ids[:-1] if stopped and not at_string else token_ids
        text = turn_text(self._tokenizer.decode, job.token_ids, job.begun, text_ids)
        after_text = ""
        if at_string:
            after_text = text.removeprefix(output.text)
            text = output.text

        calls = list[ToolCall]()
        if job.tools is not None:
            # A request may stop at the tag that ends a call: the parser needs that tag, too.
            at_stop_id = output.stop_reason in job.sampling.stop_token_ids
            beginning = job.token_ids[len(job.token_ids) - job.begun :]
            turn = beginning + (token_ids if at_stop_id else text_ids)
            # The tool parser uses the parsing thread's tokenizer.
            calls = await asyncio.get_running_loop().run_in_executor(self._parsing, job.tools, turn)
        completion = Completion(
            token_ids=array("I", token_ids),
            logprobs=array("f", output.logprobs.logprobs),
            text=text,
            after_text=after_text,
            finish_reason=output.finish_reason,
            versions=vllm_requests.version_spans(output),
            tool_calls=tuple(calls),
            prompt_token_ids=tuple(job.token_ids) if job.image_prompt else (),
        )
        return job, completion

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raise ApiError where vLLM would sample in another way."""
        temperature = sampling.temperature
        if 0 < temperature < MIN_TEMPERATURE:
            lowest = f"{MIN_TEMPERATURE}, the engine's lowest"
            message = f"sampling.temperature: {temperature} is below {lowest}"
            raise invalid(message, "use 0 for greedy decoding")

    def _token_ids(self, prompt: PromptInput, where: str) -> tuple[list[int], Sequence[str]]:
        """Tokenize a prompt. Returns token ids, with one placeholder per image, and the images."""
        if isinstance(prompt, str):
            return list(self._parsing_tokenizer(prompt, add_special_tokens=True)["input_ids"]), ()
        if isinstance(prompt, dict):
            return prompt["token_ids"], prompt["images"]
        if prompt and isinstance(prompt[0], dict):
            is_multimodal = self.placeholder is not None
            messages, images = _separate_images(prompt, is_multimodal=is_multimodal)
            return self._render(messages, where), images
        return prompt, ()  # type: ignore[return-value]  # the schema leaves nothing but token ids

    def _render(self, messages: Any, where: str) -> list[int]:
        """Apply the chat template. Raises ApiError where it refuses the messages."""
        options = {"add_generation_prompt": True, "return_dict": False} | dict(self._template)
        try:
            return list(self._parsing_tokenizer.apply_chat_template(messages, **options))
        # A template is a program: besides its own refusals it fails in these ways.
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            message = f"{where}: the chat template refused these messages: {error}"
            hint = (
                "look at the model's chat template for the roles and their order; text and token "
                "ids need none"
            )
            raise invalid(message, hint, code="chat_template_error") from error


def _separate_images(messages: Any, *, is_multimodal: bool) -> tuple[list[Message], list[str]]:
    """Separate the images from chat messages.

    Returns the messages as chat templates want them, with {"type": "image"} in place of each image,
    and the URLs of the images. Some templates of multimodal models take only lists as content.
    """
    plain = list[Message]()
    images = list[str]()
    for message in messages:
        content = message["content"]
        if is_multimodal and isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, str):
            images += [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
            content = [part if part["type"] == "text" else {"type": "image"} for part in content]
        plain.append(message | {"content": content})
    return plain, images


def _seeds(request: GenerateRequest) -> Sequence[Sequence[int | None]]:
    """List the seeds of each prompt's completions; None where the engine draws one.

    Raises ApiError for lists of seeds that do not match the prompts.
    """
    num_prompts = len(request.prompts)
    n = request.n

    # The request lists every seed.
    if request.seeds is not None:
        if n != 1 or len(request.seeds) != num_prompts:
            message = f"seeds: {len(request.seeds)} lists for {num_prompts} prompts, n={n}"
            hint = "send one list of seeds per prompt, one seed per completion, and no n"
            raise invalid(message, hint)
        return request.seeds

    # Otherwise they count up from sampling.seed, over all completions of the request.
    first = request.sampling.seed
    if first is None:
        return [[None] * n] * num_prompts
    seeds = list[list[int]]()
    for number in range(num_prompts):
        start = first + number * n
        seeds.append([(start + index) % 2**63 for index in range(n)])
    return seeds
