"""Describe in /openapi.json what vLLM's routes answer on this server.

vLLM's own schema leaves out the refusals of hocket's guard, the weight versions, and the bodies of
most answers.
"""

from typing import Any

import pydantic
from fastapi import FastAPI

from hocket.protocol import ErrorResponse
from hocket.server.parts import STATUSES

PREFIX = "#/components/schemas/"
VERSIONS = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "The weight versions that sampled this answer.",
}


def describe(app: FastAPI, paths: frozenset[str]) -> None:
    """Have the app's schema describe vLLM's routes, at these paths, in full."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = make()
            _complete(schema, paths)
        return make()

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(schema: dict[str, Any], paths: frozenset[str]) -> None:
    """Add to a schema what vLLM's routes answer here."""
    from vllm.entrypoints.anthropic.protocol import (
        AnthropicCountTokensResponse,
        AnthropicErrorResponse,
        AnthropicMessagesResponse,
    )
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse
    from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse as VllmErrorResponse
    from vllm.entrypoints.serve.engine.protocol import ModelList
    from vllm.entrypoints.serve.tokenize.protocol import DetokenizeResponse, TokenizeResponse

    sampled = {
        "/v1/completions": CompletionResponse,
        "/v1/chat/completions": ChatCompletionResponse,
        "/v1/messages": AnthropicMessagesResponse,
        "/v1/responses": ResponsesResponse,
        "/v1/responses/{response_id}": ResponsesResponse,
    }
    others = {
        "/v1/messages/count_tokens": AnthropicCountTokensResponse,
        "/v1/models": ModelList,
        "/tokenize": TokenizeResponse,
        "/detokenize": DetokenizeResponse,
    }
    components = schema["components"]["schemas"]
    for path in paths & schema["paths"].keys():
        errors: list[Any] = [ErrorResponse, VllmErrorResponse]
        if path.startswith("/v1/messages"):
            errors.append(AnthropicErrorResponse)
        refusal = _json({"anyOf": [_add(components, model) for model in errors]})
        for operation in schema["paths"][path].values():
            responses = operation["responses"]
            for status in STATUSES:
                responses[str(status)] = {"description": "Refused, with the reason."} | refusal
            if path in sampled:
                whole = _add(components, sampled[path])
                named = {"properties": {"weight_versions": VERSIONS}, "type": "object"}
                responses["200"] |= _json({"allOf": [whole, named]})
                responses["200"]["content"]["text/event-stream"] = {}
            elif path in others:
                responses["200"] |= _json(_add(components, others[path]))


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    """Make the part of a response's description that says what its JSON is."""
    return {"content": {"application/json": {"schema": schema}}}


def _add(components: dict[str, Any], model: type[pydantic.BaseModel]) -> dict[str, Any]:
    """Add a model, and those in it, to the schema's components. Returns a reference to it."""
    # Two models of vLLM and hocket have one name: the name of the module tells them apart.
    prefix = f"{model.__module__.replace('.', '__')}__"
    template = f"{PREFIX}{prefix}{{model}}"
    described = model.model_json_schema(ref_template=template, mode="serialization")
    for name, part in described.pop("$defs", {}).items():
        components[f"{prefix}{name}"] = part
    components[f"{prefix}{model.__name__}"] = described
    return {"$ref": f"{PREFIX}{prefix}{model.__name__}"}
