"""The whole app, with vLLM's own routes, around an engine that must not be asked anything."""

import os
from typing import Any
from unittest.mock import patch

import pytest
from starlette.routing import Route

from hocket.config import load
from hocket.extras.openai_api.routes import ROUTES, add_routes, vllm_app
from hocket.server import main
from hocket.server.app import assemble
from hocket.server.parts import STATUSES, Server
from hocket.server.vllm_arguments import app_arguments, engine_arguments
from support.engines import asking, idle_engine, make_model
from support.tiny_server import TOKEN

BEARER = {"Authorization": f"Bearer {TOKEN}"}
FREE = {"/health", "/ready", "/live"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from vllm.platforms import current_platform

    if current_platform.is_unspecified():
        pytest.skip("vLLM's build for GPUs reads no arguments where there is none, or it is hidden")
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_model(seed=0).config.save_pretrained(folder)
    with patch.dict(os.environ):
        main.prepare_environment(1, threads=1)
        arguments = engine_arguments(load(None, [f"model.path={folder}", "server.kv_cache_mib=64"]))
        server = assemble(idle_engine(), host="127.0.0.1", token=TOKEN, arguments=arguments)
        add_routes(server, vllm_app(app_arguments(arguments), ("generate",), None))
        yield server


def routes(server: Server) -> set[tuple[str, str]]:
    """Path and method of every route."""
    pairs = set[tuple[str, str]]()
    for route in server.app.routes:
        assert isinstance(route, Route)
        pairs |= {(route.path, method) for method in route.methods or ["GET"]}
    return pairs


async def test_every_route_of_the_whole_app_needs_the_token_but_those_that_tell_the_state(server: Server) -> None:
    pairs = routes(server)
    assert {("/generate", "POST"), ("/v1/chat/completions", "POST"), ("/metrics", "GET")} <= pairs
    async with asking(server.guard) as http:
        for path, method in sorted(pairs):
            for headers in ({}, {"Authorization": "Bearer wrong-token"}, {"x-api-key": "wrong-token"}):
                response = await http.request(method, path, headers=headers)
                is_free = path in FREE and method in ("GET", "HEAD")
                assert response.status_code == (200 if is_free else 401), (method, path)
        for path in ("/openapi.json", "/docs", "/metrics"):
            assert (await http.get(path, headers=BEARER)).status_code == 200, path
            assert (await http.head(path, headers=BEARER)).status_code == 200, path


async def test_of_vllm_s_routes_only_those_of_clients_are_served_and_health_is_ours(server: Server) -> None:
    assert [
        route.endpoint.__module__ for route in server.app.routes if isinstance(route, Route) and route.path in FREE
    ] == ["hocket.server.app"] * 3
    theirs = set[str]()
    for route in server.app.routes:
        assert isinstance(route, Route)
        if not route.endpoint.__module__.startswith(("hocket.", "fastapi.")):
            theirs.add(route.path)
    assert theirs == ROUTES, "vLLM's other routes abort requests, scale engines, and the like"


async def test_the_schema_has_every_refusal_of_every_route_and_the_versions_of_sampled_answers(server: Server) -> None:
    async with asking(server.guard) as http:
        schema = (await http.get("/openapi.json", headers=BEARER)).json()
    described = {(path, method.upper()) for path, methods in schema["paths"].items() for method in methods}
    # Sessions hand on what is described below /v1.
    hidden = {"/docs", "/docs/oauth2-redirect", "/openapi.json", "/sessions/{session_id}/v1/{rest:path}"}
    served = {(path.replace(":path}", "}"), method) for path, method in routes(server) if path not in hidden}
    assert described == {(path, method) for path, method in served if method != "HEAD"}
    for path in {path for path, _ in described} & ROUTES:
        for operation in schema["paths"][path].values():
            assert {str(status) for status in STATUSES} <= operation["responses"].keys(), path
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"):
        answer = schema["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert answer["allOf"][1]["properties"]["weight_versions"]["items"] == {"type": "integer"}


async def test_the_schema_refers_to_nothing_that_it_lacks(server: Server) -> None:
    async with asking(server.guard) as http:
        schema = (await http.get("/openapi.json", headers=BEARER)).json()
    waiting: list[Any] = [schema]
    references = set[str]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend(value.values())
            if isinstance(value.get("$ref"), str):
                references.add(value["$ref"])
        elif isinstance(value, list):
            waiting.extend(value)
    assert len(references) > 20
    names = {reference.removeprefix("#/components/schemas/") for reference in references}
    assert names <= schema["components"]["schemas"].keys()


async def test_a_wrong_method_is_told_all_methods_of_the_path(server: Server) -> None:
    async with asking(server.guard) as http:
        for path, methods in (("/v1/completions", "POST"), ("/v1/models", "GET"), ("/metrics", "GET")):
            wrong = await http.patch(path, headers=BEARER)
            assert (wrong.status_code, wrong.headers["allow"]) == (405, methods), path
