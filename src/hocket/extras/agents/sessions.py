"""Record the calls that agents make on vLLM's own client routes, token by token.

A request to /sessions/ID/v1/... goes on to vLLM's /v1/... with the recorder of its session in
`vllm_api.SAMPLE`, where the engine finds it: so what was really sampled is recorded, in whatever
route, template or stream.
"""

import contextlib
import dataclasses
import functools
import hmac
import itertools
import json
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from fastapi import FastAPI
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hocket.common.redaction import SESSION_KEY
from hocket.common.tasks import seed_of
from hocket.protocol import (
    AgentCall,
    AgentRecord,
    Completion,
    SamplingParams,
    SessionRequest,
    SessionResponse,
)
from hocket.server import vllm_api, vllm_requests
from hocket.server.errors import ApiError, check_finite
from hocket.server.generate import Sampler
from hocket.server.middleware import read_body, replay
from hocket.server.parts import Server, router, server_part
from hocket.types import Image

MAX_SESSIONS = 4096
ROUTES = (
    "GET /v1/models",
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/responses",
)
"""The routes of vLLM that an agent may use."""
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""The names of an agent's own limit, by route."""
TOO_LONG = frozenset({"input_tokens", "input_text"})
"""Parameters that vLLM's routes blame for a prompt that is longer than the context."""
NO_ROOM = "max_tokens must be at least 1, got 0"
"""What they say where it fills the context; an agent's own 0 is refused before."""
_NAMED = re.compile(rf"\(parameter=({'|'.join(sorted(TOO_LONG))})\b")
_PATH = re.compile(r"/sessions/([^/]+)/v1/.*")


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class SampledCall:
    """One request to the engine, as it was sampled."""

    request_id: str
    number: int  # among the calls with the same prompt
    answer_id: str = ""  # by which the agent may name it
    prompt_token_ids: list[int]
    images: tuple[Image, ...] = ()
    sampling: SamplingParams
    completion: Completion | None = None  # None until it has ended well


def _no_session(message: str) -> ApiError:
    return ApiError(404, "no_session", message, "POST /sessions opens one")


class OpenSession:
    """The calls of one episode."""

    def __init__(self, request: SessionRequest) -> None:
        self.id = SESSION_KEY + secrets.token_hex(16)
        self.key = secrets.token_hex(16)  # opens this session to its agent, and nothing else
        self.calls: list[SampledCall] = []  # in the order in which they began
        self.cut_off = False  # a call was refused as one too many, or its prompt as too long
        self.closed = False
        self._request = request
        self._running: set[SampledCall] = set()
        self._begun = itertools.count()
        self.used = time.monotonic()

    @property
    def running(self) -> list[str]:
        return [call.request_id for call in self._running]

    @property
    def max_tokens(self) -> int:
        """The most tokens of a call."""
        return self._request.sampling.max_tokens

    @property
    def idle(self) -> bool:
        return not self._running and time.monotonic() - self.used > self._request.idle_timeout_s

    def begin(
        self,
        prompt_token_ids: list[int],
        max_tokens: int,
        answer_id: str = "",
        images: tuple[Image, ...] = (),
    ) -> SampledCall:
        """Return a new call that is sampled as the session says; `max_tokens` is the agent's own
        limit.

        Its seed follows from the prompt and the calls with the same prompt before it: simultaneous
        calls repeat exactly, and so does one that the server ended. Raises ApiError: too many
        calls, or too long a prompt.
        """
        sampling = self._request.sampling
        if len(self.calls) >= self._request.max_calls:
            self.cut_off = True
            message = f"this session has made its {self._request.max_calls} calls (env.max_turns)"
            advice = "have the agent come to an end, or raise env.max_turns"
            raise ApiError(400, "too_many_calls", message, advice)
        length = len(prompt_token_ids)
        limit = self._request.max_length
        if length >= limit:
            self.cut_off = True
            message = f"{length} prompt tokens leave no room in {limit} (model.max_length)"
            advice = "have the agent say less, or raise model.max_length"
            raise ApiError(400, "context_too_long", message, advice)
        most = min(sampling.max_tokens, limit - length, max_tokens)
        # The lowest number that no other call with this prompt has: a call that the server ended
        # is forgotten, and repeated with its number.
        taken = set[int]()
        for call in self.calls:
            if call.prompt_token_ids == prompt_token_ids and call.images == images:
                taken.add(call.number)
        number = 0
        while number in taken:
            number += 1
        seed = None
        if sampling.seed is not None:
            names = [image.name for image in images]
            seed = seed_of(sampling.seed, number, *prompt_token_ids, *names)
        call = SampledCall(
            # The client's own id could be that of another session's call.
            request_id=f"{self.id}-{next(self._begun)}",
            number=number,
            answer_id=answer_id,
            prompt_token_ids=prompt_token_ids,
            images=images,
            sampling=sampling.model_copy(update={"max_tokens": most, "seed": seed}),
        )
        self.calls.append(call)
        return call

    def require_open(self) -> None:
        if self.closed:
            raise _no_session("the session was closed, which ends its calls")

    def record(self) -> AgentRecord:
        """Return the calls so far, as the trainer reads them."""
        calls = []
        for call in self.calls:
            recorded_call = AgentCall(
                id=call.answer_id,
                prompt_token_ids=tuple(call.prompt_token_ids),
                images=call.images,
                seed=call.sampling.seed,
                completion=call.completion,
            )
            calls.append(recorded_call)
        return AgentRecord(calls=tuple(calls), cut_off=self.cut_off)

    @contextlib.contextmanager
    def serving(self, call: SampledCall) -> Iterator[None]:
        """Count a call as running during the body; forget it where the server ended it."""
        self.require_open()
        self._running.add(call)
        try:
            yield
        except ApiError as error:
            if error.status == 503:  # no fault of the agent, which will send it again
                self.calls.remove(call)
            raise
        finally:
            self._running.discard(call)
            self.used = time.monotonic()


class OpenSessions:
    """The sessions of a server; idle ones are forgotten."""

    def __init__(self) -> None:
        self._sessions: dict[str, OpenSession] = {}

    def open(self, request: SessionRequest) -> OpenSession:
        """Open a session. Raise ApiError where there are too many."""
        active = [session for session in self._sessions.values() if not session.idle]
        self._sessions = {session.id: session for session in active}
        if len(self._sessions) >= MAX_SESSIONS:
            message = f"there are {MAX_SESSIONS} sessions, which is the limit"
            advice = "DELETE those that have ended, or lower env.concurrency"
            raise ApiError(503, "too_many_sessions", message, advice)
        session = OpenSession(request)
        self._sessions[session.id] = session
        return session

    def get(self, session_id: str) -> OpenSession:
        """Return a session. Raises ApiError where there is none, or it was idle."""
        session = self._sessions.get(session_id)
        if session is None or session.idle:
            self._sessions.pop(session_id, None)
            reasons = "it was deleted, idle for too long, or never there"
            raise _no_session(f"there is no session {session_id[:64]!r}: {reasons}")
        session.used = time.monotonic()
        return session

    def admits(self, path: str, key: bytes) -> bool:
        """Check whether this key opens a path; it opens those below its session's base URL."""
        match = _PATH.fullmatch(path)
        session = self._sessions.get(match[1]) if match is not None else None
        return session is not None and hmac.compare_digest(session.key.encode(), key)

    def close(self, session_id: str) -> OpenSession:
        session = self.get(session_id)
        session.closed = True
        del self._sessions[session_id]
        return session


@server_part("agents")
def install(server: Server) -> None:
    """Add the routes of sessions, and let their keys open these."""
    engine = server.engine
    sessions = OpenSessions()
    server.guard.opens = sessions.admits
    routes = router()

    @routes.post("/sessions")
    async def open_session(request: SessionRequest) -> SessionResponse:
        """Open a session: /sessions/ID/v1 is an OpenAI-compatible base URL whose calls are
        recorded."""
        engine.require_ready()
        engine.admit(request)
        engine.sampler.check_sampling(request.sampling)
        session = sessions.open(request)
        return SessionResponse(id=session.id, key=session.key, model=engine.model)

    @routes.get("/sessions/{session_id}")
    async def read_session(session_id: str) -> AgentRecord:
        """Return the calls that have been sampled in a session."""
        return sessions.get(session_id).record()

    @routes.delete("/sessions/{session_id}")
    async def close_session(session_id: str) -> AgentRecord:
        """Close a session, abort its running calls, and return what had been sampled by then."""
        session = sessions.close(session_id)
        record = session.record()
        await vllm_requests.abort(engine.llm, session.running)
        # Where the engine has failed, the agent may have taken the failure for an answer.
        engine.require_ready(admits={"asleep"})
        return record

    server.app.include_router(routes)
    add_forwarding(server.app, sessions, engine.model, engine.sampler)


def add_forwarding(app: FastAPI, sessions: OpenSessions, model: str, sampler: Sampler) -> None:
    forward = Forward(app.router, sessions, model, sampler)
    app.router.routes.append(Route("/sessions/{session_id}/v1/{rest:path}", forward))


class Forward:
    """Send requests to /sessions/ID/v1/... on to vLLM's /v1/..., in that session and with the name
    `model`."""

    def __init__(self, app: ASGIApp, sessions: OpenSessions, model: str, sampler: Sampler) -> None:
        self._app = app
        self._sessions = sessions
        self._model = model
        self._sampler = sampler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = self._sessions.get(scope["path_params"]["session_id"])
        route = f"/v1/{scope['path_params']['rest']}"
        request = f"{scope['method']} {route}"
        if request not in ROUTES:
            advice = f"it has {', '.join(ROUTES)}"
            raise ApiError(404, "not_found", f"a session has no {request}", advice)
        message = await receive()  # it has the whole body, if there is one
        message["body"] = await read_body(self._checked, message["body"], session)
        sample = functools.partial(recording, session, self._sampler)
        vllm_api.SAMPLE.set(sample)  # in the request's own context (main.http_server)
        inner = dict(scope)
        inner.update(path=route, raw_path=route.encode())
        await self._app(inner, replay(message, receive), _watched(send, session))

    def _checked(self, content: bytes, session: OpenSession) -> bytes:
        """Return a body with the model's name, and a limit that the session allows.

        Raises ApiError where it can't be recorded.
        """
        body = json.loads(content or "null")
        if not isinstance(body, dict):
            return content  # vLLM says what is wrong with it
        wrong = [name for name in ("n", "best_of") if body.get(name) not in (None, 1)]
        wrong += [name for name in ("use_beam_search", "echo") if body.get(name)]
        wrong += [name for name in LIMITS if body.get(name) == 0]
        if wrong:
            reason = f"{', '.join(wrong)}: only one sampled completion per call can be trained"
            raise ApiError(400, "not_recorded", reason, "leave it out")
        # A response of another session would bring its chat into this one.
        previous = body.get("previous_response_id")
        if previous is not None and previous not in {call.answer_id for call in session.calls}:
            message = f"this session has no response {str(previous)[:100]!r}"
            raise ApiError(404, "no_response", message, "go on from one of this session's own")
        # Agents ask for many more tokens than the model has room for, which vLLM would refuse.
        for name in LIMITS:
            if isinstance(body.get(name), int):
                body[name] = min(body[name], session.max_tokens)
        return json.dumps(body | {"model": self._model}).encode()


def _watched(send: Send, session: OpenSession) -> Send:
    """Return a send that marks the session as cut off where vLLM refuses a prompt as too long."""

    async def watched(message: Message) -> None:
        # Most messages are no error, or one of another kind.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            error = json.loads(message["body"])["error"]
            text = error["message"]
            # The messages route has the parameter in the text alone.
            is_too_long = error.get("param") in TOO_LONG or _NAMED.search(text) is not None
            session.cut_off |= is_too_long or NO_ROOM in text
        await send(message)

    return watched


def recording(
    session: OpenSession,
    sampler: Sampler,
    ask: vllm_api.Generate,
    prompt: Any,
    params: Any,
    request_id: str,
) -> AsyncGenerator[Any, None]:
    """Ask the engine for a completion; record it in its session, sampled as that says."""
    vllm_requests.refuse_constraints(params)
    images = sampler.image_reader.places(prompt)
    if request_id.startswith("cmpl-"):
        # "-0" is the number of the prompt, which the answer's id lacks.
        request_id = request_id.removesuffix("-0")
    elif request_id.startswith("resp_"):
        request_id = request_id.rpartition("_")[0]  # likewise, without the number of the request
    call = session.begin(list(prompt["prompt_token_ids"]), params.max_tokens, request_id, images)

    def sample() -> AsyncGenerator[Any, None]:
        session.require_open()
        return ask(vllm_requests.call_params(params, call.sampling), call.request_id)

    return recorded(sample, session, call)


async def recorded(
    sample: Callable[[], AsyncGenerator[Any, None]], session: OpenSession, call: SampledCall
) -> AsyncGenerator[Any, None]:
    """Yield and record a call's outputs; one that is left early is not recorded as completed.

    It begins again where new weights abort it before its first output; later that raises ApiError.
    """
    token_ids = list[int]()
    logprobs = list[float]()
    text = ""
    with session.serving(call):
        while not token_ids:
            async with contextlib.aclosing(sample()) as outputs:
                async for output in outputs:
                    (done,) = output.outputs
                    if done.finish_reason == "abort":
                        break
                    new = []
                    for token_id, by_token in zip(done.token_ids, done.logprobs, strict=True):
                        new.append(by_token[token_id].logprob)
                    check_finite(new)
                    token_ids += done.token_ids
                    logprobs += new
                    text += done.text
                    if done.finish_reason in ("stop", "length"):
                        call.completion = Completion(
                            token_ids=tuple(token_ids),
                            logprobs=tuple(logprobs),
                            text=text,
                            finish_reason=done.finish_reason,
                            versions=vllm_requests.version_spans(done),
                        )
                    yield output
                else:
                    return
        sample()  # raises another reason, if there is one
        message = (
            "generation was aborted as new weights came (sync.in_flight=abort), and what was "
            "streamed can't be taken back: set sync.in_flight=keep"
        )
        raise ApiError(503, "aborted", message, "or have the agent ask again")
