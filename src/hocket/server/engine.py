"""The generation engine: completions with versions, and weights that change under them without a restart."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from hocket.config import Config
from hocket.protocol import (
    AdapterConfig,
    CollectiveSource,
    DiskSource,
    ErrorBody,
    GenerateRequest,
    GroupRequest,
    GroupResponse,
    Health,
    Memory,
    ReloadRequest,
    ReloadResponse,
    SamplingParams,
    SessionRequest,
    SleepRequest,
    SleepResponse,
    Status,
    UploadResponse,
    WakeRequest,
)
from hocket.server import versions, vllm_api
from hocket.server.errors import ApiError
from hocket.server.requests import Job
from hocket.server.sampler import RESTART, Sampler
from hocket.server.uploads import Uploads
from hocket.system import as_completed
from hocket.types import InFlight

T = TypeVar("T")

logger = logging.getLogger("hocket")

ABORT_TIMEOUT_S = 2.0
RELOAD = "publish a good version; a reload that succeeds brings the server back"
PARTS: tuple[Memory, ...] = ("weights", "kv_cache")
ASLEEP = ErrorBody(
    code="asleep",
    message="the engine is asleep: a trainer is using the GPU",
    hint="send the request again when it is awake; if the trainer is gone, start it again, or restart the server",
)


class Engine:
    """vLLM's engine with numbered weights.

    Args:
        llm: a running AsyncLLM.
        config: model, server and sync sections are used.
    """

    def __init__(self, llm: Any, config: Config) -> None:
        self.llm = llm
        llm.refuse = self._refuse_failed
        self._config = config
        self._model = config.model.path
        self._timeout_s = config.sync.timeout_s
        self._root = config.sync_root.resolve()
        self._session = secrets.token_hex(8)
        self._sampler = Sampler(llm, config, self._broken)
        self._status: Status = "loading"
        self._failure: ErrorBody | None = None
        self._version = 0
        self._held: tuple[str, ReloadResponse] | None = None
        self._asleep: tuple[Memory, ...] = ()
        self._has_weights = True
        self._group: str | None = None
        self._shapes: versions.ModelShapes | None = None
        self._copy = versions.PatchedCopy()
        self._uploads = Uploads(self._root)
        self._base_replaced = self._stopping = False
        self._reload_lock = asyncio.Lock()
        self._engine_errors = vllm_api.engine_errors()

    async def start(self) -> None:
        """Labels the first weights and generates once, so that no request pays for the first time."""
        await self._call("hocket_drop_adapter")
        await self.llm.update_weight_version(str(self._version))
        sampling = SamplingParams(max_tokens=2)
        await self._sampler.complete(Job(prompt=0, index=0, token_ids=[0], sampling=sampling, seed=None))
        self._status = "ready"

    @property
    def version(self) -> int:
        """The weight version that new tokens are sampled with."""
        return self._version

    @property
    def model(self) -> str:
        """What was loaded at the start, as the config names it."""
        return self._model

    def failure(self) -> ErrorBody | None:
        """Returns why the engine can't generate, None where it can."""
        return self._broken() or (ASLEEP if self._asleep else None)

    def _broken(self) -> ErrorBody | None:
        if self.llm.errored and not self._stopping and (self._failure is None or self._failure.code != "engine_dead"):
            self._fail("engine_dead", "the engine's process ended", RESTART)
        return self._failure

    def health(self) -> Health:
        """Returns the answer to /health."""
        failure = self.failure()
        return Health(
            status="asleep" if failure is ASLEEP and self._status == "ready" else self._status,
            version=self._version,
            model=self._model,
            dtype=vllm_api.dtype(self.llm),
            vocab_size=vllm_api.vocab_size(self.llm),
            max_length=vllm_api.max_length(self.llm),
            tokenizer_sha256=self._sampler.tokenizer_sha256,
            session=self._session,
            in_flight=self._sampler.in_flight,
            root=str(self._root),
            device=vllm_api.device(self.llm),
            workers=vllm_api.num_workers(self.llm),
            kv_tokens=vllm_api.kv_tokens(self.llm),
            error=None if failure is ASLEEP else failure,
        )

    async def read(self, body: bytes) -> tuple[GenerateRequest, list[Job]]:
        """Validates and tokenizes the body of /generate. Raises ApiError with a status of 4xx."""
        request, jobs = await self._sampler.read(body)
        self._check_session(request.session)
        return request, jobs

    def check(self, request: SessionRequest) -> None:
        """Raises ApiError where the engine could not sample in this way, or the caller counts on another one."""
        self._check_session(request.session)
        self._sampler.check(request.sampling)

    def _check_session(self, session: str | None) -> None:
        if session not in (None, self._session):
            raise ApiError(409, "other_session", "this server was started again", "bring it up to date first")

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests of vLLM's own routes."""
        with contextlib.suppress(*self._engine_errors):  # they have ended with it
            if request_ids:
                await self.llm.abort(request_ids)

    def completions(self, jobs: Sequence[Job]) -> AsyncGenerator[tuple[Job, dict[str, Any]], None]:
        """Yields each job with its Completion as a plain dict, in the order in which they finish.

        Leaving the iteration early aborts what is still running. Raises ApiError where generation breaks off.
        """
        return as_completed([self._sampler.complete(job) for job in jobs])

    async def join_group(self, request: GroupRequest) -> GroupResponse:
        """Connects the engine's workers with the trainer; repeating it does no harm.

        Raises:
            ApiError: 503, they can't reach each other, or the engine is dead.
        """
        async with self._reload_lock:
            self._refuse_dead()
            workers = vllm_api.num_workers(self.llm)
            if request.session != self._group:
                self._group = None
                # Nothing is sampled while the workers wait for each other: no longer than our own deadline.
                request = request.model_copy(update={"timeout_s": min(request.timeout_s, self._timeout_s)})
                try:
                    async with asyncio.timeout(request.timeout_s):
                        await self._call("hocket_join_group", request.model_dump_json(), workers + 1)
                except Exception as error:
                    message = f"the workers can't join the trainer at {request.host}:{request.port}: {_cause(error)}"
                    hint = "can this machine reach that address? sync.backend=disk needs no such connection"
                    raise ApiError(503, "no_group", message, hint) from error
                self._group = request.session
            return GroupResponse(session=request.session, workers=workers)

    async def reload(self, request: ReloadRequest) -> ReloadResponse:
        """Takes over a weight version; what becomes of requests in flight, the request says.

        Nothing changes where the version is refused. Where loading itself fails, the engine stays paused, all requests
        end with the reason, and the next reload that succeeds brings everything back.

        Raises:
            ApiError: 4xx, refused before the model was touched; 500 or 503, the engine failed.
        """
        async with self._reload_lock:
            self._refuse_dead()
            if "weights" in self._asleep:
                hint = 'POST /wake_up {"tags": ["weights"]} first, as a trainer with launch.share_gpu=true does'
                raise ApiError(409, "asleep", "the engine's weights are off the GPU: it is asleep", hint)
            start = time.perf_counter()
            shapes = await self._model_shapes()
            uploaded = self._uploads.present()
            source = request.source
            if isinstance(source, DiskSource):
                key = source.name
                folder = await self._reading_files(versions.find, self._root, source.name)
                described = await self._reading_files(versions.read_manifest, folder)
                if (held := self._holds(key, request.version)) and held.checksum == described.checksum:
                    return held
                adapter = await self._reading_files(versions.read_adapter, folder, described)
                expected = self._expected(adapter, shapes)
                folder = await self._reading_files(self._copy.whole, folder, described, request.version, expected)
                call, checksum = "hocket_load_disk", described.checksum
                arguments: tuple[str, ...] = (str(folder), adapter.model_dump_json() if adapter else "")
            else:
                key = source.session
                if held := self._holds(key, request.version):
                    return held
                adapter = source.adapter
                self._check_transfer(source, self._expected(adapter, shapes))
                # Each bucket is verified on its arrival, by the checksums that came with it.
                call, checksum, arguments = "hocket_load_group", None, (source.model_dump_json(),)
            if not self._asleep:  # else it is paused, and stays so until its KV cache wakes up
                await self._pause(request.in_flight)
            self._status = "updating"
            self._base_replaced |= adapter is None
            loaded = await self._load(request, call, arguments, checksum)
            self._has_weights, self._version = True, request.version
            if self._stopping:
                raise ApiError(503, "shutting_down", "the server is shutting down", "publish it again when it is back")
            self._status, self._failure = "ready", None
            response = ReloadResponse(
                version=request.version,
                seconds=time.perf_counter() - start,
                num_tensors=loaded["num_tensors"],
                checksum=loaded["checksum"],
                session=self._session,
            )
            self._held = (key, response)
            await asyncio.to_thread(self._uploads.remove, uploaded, key)
            return response

    async def sleep(self, request: SleepRequest) -> SleepResponse:
        """Takes weights and KV cache off the GPU, once requests in flight are where the request wants them.

        Raises:
            ApiError: 409, the server was not started for it; 503, requests in flight did not end in time, and go on;
                500 or 503, the engine failed.
        """
        async with self._reload_lock:
            self._refuse_dead()
            if not self._config.launch.share_gpu:
                hint = "start server and trainer with launch.share_gpu=true"
                raise ApiError(409, "no_sleep_mode", "this server was not started to share its GPU", hint)
            if "weights" not in self._asleep:
                if not self._asleep:
                    await self._pause(request.in_flight)
                self._asleep = PARTS
                await self._move(vllm_api.sleep(self.llm, request.level))
                if request.level == 2:
                    self._has_weights, self._held, self._base_replaced = False, None, True
            return self._sleep_response()

    async def wake_up(self, request: WakeRequest) -> SleepResponse:
        """Brings parts back to the GPU; with the last of them, generation goes on.

        Raises:
            ApiError: 409, the KV cache would wake up before there are weights; 500 or 503, the engine failed.
        """
        async with self._reload_lock:
            self._refuse_dead()
            waking = [part for part in PARTS if part in request.tags and part in self._asleep]
            left = tuple(part for part in self._asleep if part not in waking)
            if waking and not left and not self._has_weights:
                hint = 'POST /wake_up {"tags": ["weights"]}, then /reload_weights, then wake up the rest'
                raise ApiError(409, "no_weights", "the engine dropped its weights when it fell asleep", hint)
            if waking:
                await self._move(vllm_api.wake_up(self.llm, waking))
                self._asleep = left
            return self._sleep_response()

    def _sleep_response(self) -> SleepResponse:
        return SleepResponse(asleep=list(self._asleep), session=self._session)

    async def _pause(self, in_flight: InFlight) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await vllm_api.pause(self.llm, in_flight)
        except TimeoutError as error:
            message = f"{self._sampler.in_flight} requests did not end within sync.timeout_s={self._timeout_s:g}"
            if self._failure is None:  # a half-loaded model must not run
                await self._go_on(message)
            hint = "they go on; set a higher sync.timeout_s, or sync.in_flight=keep"
            raise ApiError(503, "busy", message, hint) from error
        except self._engine_errors:
            self._refuse_dead()
            raise

    async def _go_on(self, message: str) -> None:
        """Resumes the engine. Raises ApiError where it does not: its requests end, and it is as after a failed load."""
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self.llm.resume_generation()
        except Exception as error:
            self._refuse_dead()
            reason = self._fail("not_resumed", f"{message}, and the engine does not go on: {_cause(error)}", RELOAD)
            await self._abort_all()
            raise ApiError.of(503, reason) from error

    async def _move(self, moving: Awaitable[None]) -> None:
        """Waits for the engine to fall asleep or wake up. One that failed to holds nobody knows what."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await moving
        except Exception as error:
            if isinstance(error, TimeoutError):
                error = TimeoutError(f"not done after sync.timeout_s={self._timeout_s:g}")
            code = "engine_dead" if self.llm.errored else "sleep_failed"
            message = f"the engine could not leave the GPU, or come back to it: {_cause(error)}"
            hint = f"is anything else on this GPU, or server.gpu_memory_utilization too high? {RESTART}"
            reason = self._fail(code, message, hint)
            await self._abort_all()
            raise ApiError.of(500, reason) from error

    async def upload(self, name: str, file: str, chunks: AsyncIterator[bytes]) -> UploadResponse:
        """Takes one file of a version that the trainer sends.

        Raises:
            ApiError: 4xx, it is not what a version consists of; 507, the disk is full.
        """
        return await self._uploads.receive(name, file, chunks, versions.max_bytes(await self._model_shapes()))

    async def _model_shapes(self) -> versions.ModelShapes:
        if self._shapes is None:
            self._shapes = await self._reading_files(versions.model_shapes, self._model)
        return self._shapes

    async def _reading_files(self, function: Callable[..., T], *arguments: Any) -> T:
        """Returns what a function that reads files returns. Raises ApiError past the deadline: a disk may hang."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.to_thread(function, *arguments)
        except TimeoutError as error:
            message = f"files were not read within sync.timeout_s={self._timeout_s:g}; is the disk they are on alive?"
            raise ApiError(503, "slow_disk", message, "the old weights keep serving; publish it again") from error

    def _refuse_failed(self) -> None:
        """Ends a request that was let in before the engine failed: in the paused engine nothing ever would."""
        if self._failure is not None:
            raise ApiError.of(503, self._failure)

    def _refuse_dead(self) -> None:
        failure = self.failure()
        if failure is not None and failure.code in ("engine_dead", "shutting_down", "sleep_failed"):
            raise ApiError.of(503, failure)

    def _holds(self, key: str, version: int) -> ReloadResponse | None:
        """Returns the answer to give where the model holds this version, from this source, already."""
        if self._held is None or self._failure is not None:
            return None
        held, response = self._held
        return response if (held, response.version) == (key, version) else None

    def _expected(self, adapter: AdapterConfig | None, model: versions.ModelShapes) -> versions.ModelShapes:
        """Returns what the tensors must be. Raises ApiError where this is an adapter that can't be used here."""
        if adapter is None:
            return model
        if self._base_replaced:
            message = "the weights that an adapter belongs to are gone: a whole version has replaced them"
            raise ApiError(409, "base_replaced", message, "restart the server")
        highest = vllm_api.max_lora_rank(self.llm)
        if adapter.r > highest:
            message = f"the adapter has rank {adapter.r}, the engine takes adapters up to rank {highest}"
            hint = f"start the server with the trainer's model.lora, or server.max_lora_rank={adapter.r}"
            raise ApiError(409, "rank_too_high", message, hint)
        return versions.adapter_shapes(adapter, model)

    def _check_transfer(self, source: CollectiveSource, shapes: versions.ModelShapes) -> None:
        if source.session != self._group:
            raise ApiError(409, "no_group", f"there is no weight group {source.session}", "POST /init_weight_group")
        layout = [item for bucket in source.buckets for item in bucket]
        versions.check_layout(layout, shapes)
        versions.refuse_copies(layout, shapes)

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Calls all workers and returns what each of them answered. Raises RuntimeError where one failed."""
        answers = await self.llm.collective_rpc(method, args=arguments)
        for answer in answers:
            if "error" in answer:
                raise RuntimeError(answer["error"])
        return [answer["value"] for answer in answers]

    async def _load(
        self, request: ReloadRequest, call: str, arguments: Sequence[str], checksum: str | None
    ) -> dict[str, Any]:
        """Has the workers of a paused engine load, and resumes if all of them then hold the same, and what was sent."""
        try:
            async with asyncio.timeout(self._timeout_s):
                answers = await self._call(call, *arguments)
                if len({checksum or answers[0]["checksum"], *(answer["checksum"] for answer in answers)}) > 1:
                    raise RuntimeError("the tensors that reached the model are not those that were published")
                await self.llm.update_weight_version(str(request.version))
                if not self._asleep and not self._stopping:
                    await self.llm.resume_generation()
        # Whatever went wrong, the model may be half loaded: the engine must not run before a reload succeeds.
        except Exception as error:
            self._group = None if isinstance(request.source, CollectiveSource) else self._group
            reason = await self._loading_failed(request.version, error)
            raise ApiError.of(500, reason) from error
        loaded: dict[str, Any] = answers[0]
        return loaded

    async def _loading_failed(self, version: int, error: Exception) -> ErrorBody:
        self._held, self._has_weights = None, False
        if self.llm.errored:
            return self._fail("engine_dead", f"the engine's process ended while it loaded version {version}", RESTART)
        if isinstance(error, TimeoutError):
            error = TimeoutError(f"not done after sync.timeout_s={self._timeout_s:g}")
        reason = self._fail("reload_failed", f"loading version {version} failed: {_cause(error)}", RELOAD)
        # Nobody can say when a good version comes: the requests end now, with the reason, not at their deadline.
        await self._abort_all()
        return reason

    async def _abort_all(self) -> None:
        """Ends every request, those of vLLM's own routes too; nothing is sampled until generation is resumed."""
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self.llm.pause_generation(mode="abort", clear_cache=True)
        # vLLM reports whatever fails in the engine as a plain Exception. This is on the way out of another failure.
        except Exception as error:  # noqa: BLE001
            logger.warning("requests in flight could not be aborted: %s", _cause(error))

    def _fail(self, code: str, message: str, hint: str) -> ErrorBody:
        self._status = "failed"
        self._failure = ErrorBody(code=code, message=message, hint=hint)
        return self._failure

    async def stop(self) -> None:
        """Ends every request with an error that says that the server is shutting down."""
        self._stopping = True
        self._fail("shutting_down", "the server is shutting down", "send the request again when it is back")
        await self._abort_all()
        self._sampler.close()
        self._copy.discard()


def _cause(error: Exception) -> str:
    """Returns the first line of an error: vLLM appends the traceback of its worker."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
