"""Sessions: what an agent asks of vLLM's own OpenAI-compatible routes, recorded token by token.

A request to /sessions/ID/v1/... goes on to vLLM's /v1/... with its session in `CURRENT`, where the engine finds it:
what is recorded is what was really sampled, whichever route, template or stream it goes through. Knows nothing of vLLM
and of episodes.
"""

import contextlib
import dataclasses
import hmac
import itertools
import json
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hocket.protocol import AgentCall, AgentRecord, Completion, SamplingParams, SessionRequest
from hocket.server.errors import ApiError
from hocket.system import seed_of
from hocket.types import FinishReason, VersionSpan

CURRENT: ContextVar["Session | None"] = ContextVar("session", default=None)
"""The session that the request being served belongs to."""
MAX_SESSIONS = 4096
ROUTES = frozenset({("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models")})
"""What an agent may ask of vLLM."""
TOO_LONG = frozenset({"input_tokens", "input_text"})
"""What vLLM's own routes name as at fault where a prompt leaves no room for an answer."""
_PATH = re.compile(r"/sessions/(?P<id>[^/]+)(?P<route>/v1/.*)")


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class Call:
    """One request to the engine, as it was sampled; `versions` is None where it has not ended well.

    It is number `number` of those with the same prompt.
    """

    request_id: str
    number: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason = "abort"
    versions: Sequence[VersionSpan] | None = None

    def sampled(self, token_ids: Sequence[int], logprobs: Sequence[float], text: str) -> None:
        """Adds what has been sampled since the last time."""
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.text += text

    def recorded(self) -> AgentCall:
        """Returns what an agent's client may be told."""
        completion = None
        if self.versions is not None:
            completion = Completion(
                token_ids=tuple(self.token_ids),
                logprobs=tuple(self.logprobs),
                text=self.text,
                finish_reason=self.finish_reason,
                versions=tuple(self.versions),
            )
        prompt = tuple(self.prompt_token_ids)
        return AgentCall(prompt_token_ids=prompt, seed=self.sampling.seed, completion=completion)


class Session:
    """The calls of one episode.

    Attributes:
        key: what its agent proves itself with, here and nowhere else.
        calls: in the order in which they began.
        cut_off: whether a call was refused as it was one too many, or its prompt too long.
        closed: whether its trainer has no use for further calls.
    """

    def __init__(self, request: SessionRequest) -> None:
        self.id = secrets.token_hex(16)
        self.key = secrets.token_hex(16)
        self.calls: list[Call] = []
        self.cut_off = self.closed = False
        self._request = request
        self._running: set[Call] = set()
        self._begun = itertools.count()
        self._used = time.monotonic()

    @property
    def running(self) -> list[str]:
        """Ids of the engine's requests that have not ended."""
        return [call.request_id for call in self._running]

    @property
    def idle(self) -> bool:
        """Whether nothing has been heard of its agent for too long."""
        return not self._running and time.monotonic() - self._used > self._request.idle_timeout_s

    def touch(self) -> None:
        """Says that something has been heard of its agent."""
        self._used = time.monotonic()

    def begin(self, prompt_token_ids: list[int], max_tokens: int | None) -> Call:
        """Returns a new call: the session's own way of sampling, within the tokens that there is room for.

        The prompt decides its random numbers, and how often it was asked before: calls at the same time repeat, too,
        and so does one that the server ended.

        Args:
            max_tokens: what the agent asks for.

        Raises:
            ApiError: 400, it would be one call, or one prompt, too many.
        """
        sampling = self._request.sampling
        if len(self.calls) >= self._request.max_calls:
            self.cut_off = True
            message = f"this session has made its {self._request.max_calls} calls (env.max_turns)"
            raise ApiError(400, "too_many_calls", message, "have the agent come to an end, or raise env.max_turns")
        room = self._request.max_length - len(prompt_token_ids)
        if room < 1:
            self.cut_off = True
            message = (
                f"{len(prompt_token_ids)} prompt tokens leave no room in {self._request.max_length} (model.max_length)"
            )
            raise ApiError(400, "context_too_long", message, "have the agent say less, or raise model.max_length")
        most = min(sampling.max_tokens, room, max_tokens or room)
        taken = {call.number for call in self.calls if call.prompt_token_ids == prompt_token_ids}
        number = next(number for number in itertools.count() if number not in taken)
        seed = None if sampling.seed is None else seed_of(sampling.seed, number, *prompt_token_ids)
        call = Call(
            request_id=f"{self.id}-{next(self._begun)}",  # the client's own could be that of another session's call
            number=number,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling.model_copy(update={"max_tokens": most, "seed": seed}),
        )
        self.calls.append(call)
        return call

    def refuse_closed(self) -> None:
        """Raises ApiError where the session was closed."""
        if self.closed:
            raise ApiError(
                404, "no_session", "the session was closed, which ends its calls", "POST /sessions opens one"
            )

    def record(self) -> AgentRecord:
        """Returns what the trainer is told."""
        return AgentRecord(calls=tuple(call.recorded() for call in self.calls), cut_off=self.cut_off)

    @contextlib.contextmanager
    def serving(self, call: Call) -> Iterator[None]:
        """Counts a call as running for the time of its body, and not at all where the server ended it."""
        self.refuse_closed()
        self._running.add(call)
        try:
            yield
        except ApiError as error:
            if error.status == 503:  # no fault of its agent's, who will send it again
                self.calls.remove(call)
            raise
        finally:
            self._running.discard(call)
            self.touch()


class Sessions:
    """All sessions of a server, within a bound; those that nobody uses any more are forgotten."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def open(self, request: SessionRequest) -> Session:
        """Returns a new session. Raises ApiError where there are too many."""
        for session in [session for session in self._sessions.values() if session.idle]:
            del self._sessions[session.id]
        if len(self._sessions) >= MAX_SESSIONS:
            message = f"there are {MAX_SESSIONS} sessions, which is the bound"
            raise ApiError(503, "too_many_sessions", message, "DELETE those that have ended, or lower env.concurrency")
        session = Session(request)
        self._sessions[session.id] = session
        return session

    def get(self, session_id: str) -> Session:
        """Returns a session. Raises ApiError where there is none, or it was idle for too long."""
        session = self._sessions.get(session_id)
        if session is None or session.idle:
            self._sessions.pop(session_id, None)
            message = f"there is no session {session_id[:64]!r}: it was deleted, idle for too long, or never there"
            raise ApiError(404, "no_session", message, "POST /sessions opens one")
        session.touch()
        return session

    def admits(self, path: str, key: bytes) -> bool:
        """Tells whether this key opens what is below a session's own base URL."""
        match = _PATH.fullmatch(path)
        session = self._sessions.get(match["id"]) if match is not None else None
        return session is not None and hmac.compare_digest(session.key.encode(), key)

    def close(self, session_id: str) -> Session:
        """Forgets a session and returns it. Raises ApiError where there is none."""
        session = self.get(session_id)
        session.closed = True
        del self._sessions[session_id]
        return session


class SessionDoor:
    """Sends what comes to /sessions/ID/v1/... on to vLLM's own /v1/..., in that session.

    Args:
        model: what vLLM calls its model; the agent may call it whatever it likes.
    """

    def __init__(self, app: ASGIApp, sessions: Sessions, model: str) -> None:
        self.app = app
        self._sessions = sessions
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match = _PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if match is None:
            # A request that a client sends before it has the answer to the last one is born in that one's context.
            with _current(None):
                await self.app(scope, receive, send)
            return
        try:
            session = self._sessions.get(match["id"])
            if (scope["method"], match["route"]) not in ROUTES:
                known = ", ".join(sorted(f"{method} {route}" for method, route in ROUTES))
                message = f"a session has no {scope['method']} {match['route']}"
                raise ApiError(404, "not_found", message, f"it has {known}")
            if scope["method"] == "POST":
                receive = self._checked(await receive(), receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        scope = {**scope, "path": match["route"], "raw_path": match["route"].encode()}
        with _current(session):
            await self.app(scope, receive, _watched(send, session))

    def _checked(self, message: Message, receive: Receive) -> Receive:
        """Returns a receive that gives this message, which has the whole body. Raises ApiError where it is refused."""
        body = None
        with contextlib.suppress(ValueError):  # vLLM says what is wrong with it
            body = json.loads(message.get("body", b""))
        if isinstance(body, dict):
            for field, hint in (("n", "send several requests"), ("best_of", "send several requests")):
                if body.get(field) not in (None, 1):
                    raise ApiError(400, "not_recorded", f"{field} must be 1 in a session", hint)
            if body.get("use_beam_search"):
                raise ApiError(400, "not_recorded", "beam search does not sample: nothing could be trained", "sample")
            if body.get("echo") or 0 in (body.get("max_tokens"), body.get("max_completion_tokens")):
                why = "a call in a session samples: echo, and max_tokens of 0, are not for it"
                raise ApiError(400, "not_recorded", why, "leave them out")
            body["model"] = self._model
            message = {**message, "body": json.dumps(body).encode()}
        waiting = [message]

        async def replayed() -> Message:
            return waiting.pop() if waiting else await receive()

        return replayed


@contextlib.contextmanager
def _current(session: Session | None) -> Iterator[None]:
    token = CURRENT.set(session)
    try:
        yield
    finally:
        CURRENT.reset(token)


def _watched(send: Send, session: Session) -> Send:
    """Returns a send that tells the session where vLLM itself refuses a prompt as too long."""
    refused = False

    async def watched(message: Message) -> None:
        nonlocal refused
        if message["type"] == "http.response.start":
            refused = message["status"] == 400
        elif refused:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # it says something else
                session.cut_off |= json.loads(message["body"])["error"]["param"] in TOO_LONG
        await send(message)

    return watched
