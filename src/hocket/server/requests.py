"""From the body of /generate to engine requests: everything that can be wrong is refused here, before the engine."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jinja2
import pydantic

from hocket.config import ServerConfig
from hocket.protocol import GenerateRequest, PromptInput, SamplingParams, Toolbox
from hocket.server.errors import from_validation, invalid

MIN_TEMPERATURE = 0.01
"""vLLM silently samples at this temperature when asked for a lower one."""
ROLES = ("system", "developer", "user", "assistant", "tool")
OPTIONAL_MESSAGE_KEYS = frozenset({"name", "tool_calls", "tool_call_id"})


FindCalls = Callable[[Sequence[int], bool], list[dict[str, str]]]
"""(token ids, whether the last one ended the text) → ToolCalls as plain dicts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One completion to sample: number `index` of prompt `prompt`; `tools` finds the calls in it."""

    prompt: int
    index: int
    token_ids: list[int]
    sampling: SamplingParams
    seed: int | None
    tools: "FindCalls | None" = None


class RequestReader:
    """Turns bodies into jobs within the limits of a model and a server.

    Args:
        tokenizer: Hugging Face tokenizer; used by one thread at a time.
        vocab_size: ids from 0 to vocab_size - 1 have an embedding.
        max_length: longest prompt + completion in tokens.
        find_calls: returns what finds calls of a request's tools, or raises ValueError where nothing could.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab_size: int,
        max_length: int,
        limits: ServerConfig,
        find_calls: Callable[[Any, Toolbox], FindCalls],
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_length = max_length
        self._limits = limits
        self._find_calls = find_calls
        longest_token = max((len(token) for token in tokenizer.get_vocab()), default=1)
        self._max_characters = max_length * longest_token

    def read(self, body: bytes) -> tuple[GenerateRequest, list[Job]]:
        """Returns the validated request and its jobs, prompt by prompt. Raises ApiError with a status of 4xx."""
        try:
            request = GenerateRequest.model_validate_json(body)
        except pydantic.ValidationError as error:
            raise from_validation(error) from None
        self._check_limits(request)
        tools = None if request.tools is None else self._tools(request.tools)
        jobs: list[Job] = []
        for number, prompt in enumerate(request.prompts):
            token_ids = self._token_ids(prompt, f"prompts.{number}")
            self._check_length(token_ids, request.sampling.max_tokens, f"prompts.{number}")
            for index, seed in enumerate(_seeds(request, number)):
                jobs.append(
                    Job(
                        prompt=number,
                        index=index,
                        token_ids=token_ids,
                        sampling=request.sampling,
                        seed=seed,
                        tools=tools,
                    )
                )
        return request, jobs

    def _tools(self, tools: Toolbox) -> FindCalls:
        try:
            return self._find_calls(self._tokenizer, tools)
        except ValueError as error:
            raise invalid(
                f"tools: {error}", "the parser must be one of vLLM's, each tool as in OpenAI's API"
            ) from error

    def _check_limits(self, request: GenerateRequest) -> None:
        for what, value, limit, key in (
            ("prompts", len(request.prompts), self._limits.max_prompts, "server.max_prompts"),
            ("n", request.n, self._limits.max_n, "server.max_n"),
        ):
            _check_most(what, value, limit, key)
        if request.seeds is not None:
            if request.n != 1 or len(request.seeds) != len(request.prompts):
                message = f"seeds: {len(request.seeds)} lists for {len(request.prompts)} prompts, n={request.n}"
                raise invalid(message, "send one list of seeds per prompt, one seed per completion, and no n")
            _check_most("seeds of a prompt", max(map(len, request.seeds)), self._limits.max_n, "server.max_n")
        self.check_sampling(request.sampling)

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raises ApiError where the engine could not sample in this way."""
        for what, stop in (("sampling.stop", sampling.stop), ("sampling.stop_token_ids", sampling.stop_token_ids)):
            _check_most(what, len(stop), self._limits.max_stop, "server.max_stop")
        if 0 < sampling.temperature < MIN_TEMPERATURE:
            raise invalid(
                f"sampling.temperature: {sampling.temperature} is below {MIN_TEMPERATURE}, the engine's lowest",
                "use 0 for greedy decoding",
            )
        if sampling.top_k > self._vocab_size:
            raise invalid(
                f"sampling.top_k: {_short(sampling.top_k)} is more than the vocabulary's {self._vocab_size}",
                "use -1 to keep every token",
            )
        self._check_ids(sampling.stop_token_ids, "sampling.stop_token_ids")

    def _check_length(self, token_ids: Sequence[int], max_tokens: int, where: str) -> None:
        if not token_ids:
            raise invalid(f"{where}: the prompt has no tokens", "send at least one token", code="empty_prompt")
        if len(token_ids) + max_tokens > self._max_length:
            raise invalid(
                f"{where}: {len(token_ids)} prompt tokens + max_tokens {_short(max_tokens)} do not fit into the "
                f"context of {self._max_length} tokens",
                "shorten the prompt, lower sampling.max_tokens, or raise the server's model.max_length",
                code="context_too_long",
            )
        self._check_ids(token_ids, where)

    def _check_ids(self, token_ids: Sequence[int], where: str) -> None:
        if token_ids and max(token_ids) >= self._vocab_size:
            raise invalid(
                f"{where}: token id {_short(max(token_ids))} is outside the vocabulary of {self._vocab_size}",
                "do trainer and server use the same tokenizer? /health tells the server's tokenizer_sha256",
                code="token_out_of_vocabulary",
            )

    def _token_ids(self, prompt: PromptInput, where: str) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise invalid(f"{where}: the prompt is empty", "send at least one character", code="empty_prompt")
            self._check_characters(len(prompt), where)
            return list(self._tokenizer(prompt, add_special_tokens=True)["input_ids"])
        if prompt and isinstance(prompt[0], dict):
            return self._render(prompt, where)
        return prompt  # type: ignore[return-value]  # the schema leaves nothing but token ids

    def _check_characters(self, count: int, where: str) -> None:
        if count > self._max_characters:
            raise invalid(
                f"{where}: {count} characters can't fit into the context of {self._max_length} tokens",
                "shorten the prompt",
                code="context_too_long",
            )

    def _render(self, messages: Any, where: str) -> list[int]:
        for number, message in enumerate(messages):
            _check_message(message, f"{where}.{number}")
        self._check_characters(sum(len(message["content"]) for message in messages), where)
        if not self._tokenizer.chat_template:
            raise invalid(
                f"{where}: this model has no chat template", "send text or token ids", code="no_chat_template"
            )
        try:
            rendered = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        # A template is a small program: besides its own refusals it fails in these ways on messages it did not expect.
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise invalid(
                f"{where}: the chat template refused these messages: {error}",
                "look at the model's chat template for the roles and their order",
                code="chat_template_error",
            ) from error
        return list(rendered)


def _seeds(request: GenerateRequest, number: int) -> Sequence[int | None]:
    """Returns the seed of each completion of one prompt, None where the engine shall draw one."""
    if request.seeds is not None:
        return request.seeds[number]
    first = request.sampling.seed
    if first is None:
        return [None] * request.n
    return [(first + number * request.n + index) % 2**63 for index in range(request.n)]


def _check_message(message: dict[str, Any], where: str) -> None:
    unknown = sorted(message.keys() - OPTIONAL_MESSAGE_KEYS - {"role", "content"})
    if unknown:
        raise invalid(f"{where}: unknown field {unknown[0]!r}", "a message has role and content")
    if message.get("role") not in ROLES:
        raise invalid(f"{where}.role: must be one of {', '.join(ROLES)}", "a message has role and content")
    if not isinstance(message.get("content"), str):
        raise invalid(f"{where}.content: must be text", "a message has role and content")


def _check_most(what: str, value: int, limit: int, key: str) -> None:
    if value > limit:
        raise invalid(f"{what}: {_short(value)} is more than {limit}", f"send less, or raise {key}")


def _short(value: int) -> str:
    """Prints a number, but not one of a thousand digits."""
    return str(value) if abs(value) < 10**12 else "a huge number"
