"""The routes of sessions on an app of their own, with a fake engine."""

from typing import Any

import httpx
from fastapi import FastAPI
from tests.server.test_app import FakeEngine

from hocket.protocol import ErrorBody
from hocket.server import parts
from support.engines import asking, error_of, wrap

SESSION: dict[str, Any] = {"sampling": {"max_tokens": 4}, "max_length": 32, "max_calls": 2, "idle_timeout_s": 9.0}


async def test_a_session_is_opened_read_and_closed(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    session_id = (await http.post("/sessions", json=SESSION)).json()["id"]
    assert (await http.get(f"/sessions/{session_id}")).json() == {"calls": [], "cut_off": False}
    assert (await http.delete(f"/sessions/{session_id}")).json() == {"calls": [], "cut_off": False}
    for method in ("GET", "DELETE"):
        assert error_of(await http.request(method, f"/sessions/{session_id}")) == (404, "no_session")
    bad: list[dict[str, Any]] = [{"max_calls": 0}, {"sampling": {"temperature": 0.001}}, {"n": 2}]
    for wrong in ({**SESSION, **one} for one in [*bad, {"idle_timeout_s": 1e300}]):
        assert (await http.post("/sessions", json=wrong)).status_code == 422, wrong
    asleep, failed = [(await http.post("/sessions", json=SESSION)).json()["id"] for _ in range(2)]
    engine.reason = ErrorBody(code="asleep", message="asleep", hint="wait")
    assert (await http.delete(f"/sessions/{asleep}")).json() == {"calls": [], "cut_off": False}
    engine.reason = ErrorBody(code="engine_dead", message="gone", hint="restart")
    assert (await http.post("/sessions", json=SESSION)).json()["error"]["code"] == "engine_dead"
    assert (await http.get(f"/sessions/{failed}")).status_code == 200
    # Its agent may have taken the failure for an answer.
    assert (await http.delete(f"/sessions/{failed}")).json()["error"]["code"] == "engine_dead"
    assert (await http.get(f"/sessions/{failed}")).json()["error"]["code"] == "no_session"


async def test_only_its_own_key_opens_a_session(engine: FakeEngine) -> None:
    app = FastAPI()

    @app.api_route("/v1/models")
    async def models() -> str:
        return "reached"

    door = wrap(engine, app.router.routes[-1], token="the token")
    async with asking(door) as http:

        async def ask(method: str, path: str, key: str, scheme: str = "Bearer") -> int:
            headers = {"Authorization": f"{scheme} {key}"}
            return (await http.request(method, path, json=SESSION, headers=headers)).status_code

        opened, other = [
            (await http.post("/sessions", json=SESSION, headers={"Authorization": "Bearer the token"})).json()
            for _ in range(2)
        ]
        key, its = opened["key"], f"/sessions/{opened['id']}"
        assert await ask("GET", f"{its}/v1/models", key) == 200
        assert await ask("GET", f"{its}/v1/models", "the token") == 200
        assert await ask("GET", f"{its}/v1/models", key, "Basic") == 401
        assert await ask("GET", f"/sessions/{other['id']}/v1/models", key) == 401
        assert await ask("GET", f"{its}/v1/%2e%2e/generate", key) == 404
        for method, path in (("GET", its), ("DELETE", its), ("POST", "/sessions"), ("POST", "/reload_weights")):
            assert await ask(method, path, key) == 401
        assert await ask("DELETE", its, "the token") == 200
        assert await ask("GET", f"{its}/v1/models", key) == 401


async def test_after_a_failure_no_session_is_opened_or_asked(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.reason = ErrorBody(code="reload_failed", message="half loaded", hint="reload")
    for path in ("/sessions", "/sessions/x/v1/completions"):
        refused = await http.post(path, json=SESSION)
        assert refused.status_code == 503, path
        assert refused.json()["error"] == {"code": "reload_failed", "message": "half loaded", "hint": "reload"}


async def test_docs_describe_the_body_of_a_session(http: httpx.AsyncClient) -> None:
    schema = (await http.get("/openapi.json")).json()
    body = schema["paths"]["/sessions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/SessionRequest"}


def test_sessions_are_installed_behind_all_other_parts_that_ship() -> None:
    assert [install.__module__ for install in parts.PARTS.each()][-1] == "hocket.extras.agents.sessions"
