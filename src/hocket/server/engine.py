"""Run the generation engine: numbered weights that change without a restart, and sleep beside a trainer."""

import asyncio
import functools
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hocket import protocol
from hocket.common.tasks import cancel
from hocket.data import tokenizer as tokenizers
from hocket.server import versions, vllm_api
from hocket.server.errors import ApiError, cause_of
from hocket.server.generate import RESTART, Job, Sampler
from hocket.server.holder import Holder
from hocket.server.uploads import Uploads
from hocket.types import InFlight

T = TypeVar("T")

REACH_S = 5.0
"""Seconds for a first connection to the trainer's address; then the workers join."""
JOIN_SHARE, JOIN_POLL_S = 0.5, 0.05
"""Share of the deadline that joining may take, as others wait for it, and seconds between looks at it."""
RELOAD = "publish a good version; a reload that succeeds brings the server back"
PARTS = ("weights", "kv_cache")
"""What leaves the GPU while the engine sleeps, in the order in which it comes back."""
ASLEEP = protocol.ErrorBody(
    code="asleep",
    message="the engine is asleep: a trainer is using the GPU",
    hint="send the request again when it is awake; if the trainer is gone, start it again, or restart the server",
)


class Engine:
    """Give a running AsyncLLM numbered weights from `root`; each step of a reload has the deadline `timeout_s`."""

    def __init__(
        self,
        llm: Any,
        *,
        model: str,
        root: Path,
        timeout_s: float,
        share_gpu: bool = False,
        template: Mapping[str, Any],  # options of the chat template
    ) -> None:
        admitted = functools.partial(self.require_ready, admits={"asleep"})  # requests let in before the engine fell
        tokenizer = tokenizers.load(model)
        self.llm = llm
        llm.require_ready = admitted
        self.model = model
        self.version = 0  # the weight version that new tokens are sampled with
        self.sampler = Sampler(llm, tokenizer, admitted, template)
        self._tokenizer_sha256 = tokenizers.fingerprint(tokenizer)
        self._root = root.resolve()
        self._timeout_s = timeout_s
        self._share_gpu = share_gpu
        self._session = secrets.token_hex(8)
        self._workers = int(llm.vllm_config.parallel_config.world_size)
        lora = llm.vllm_config.lora_config
        self._max_rank = 0 if lora is None else int(lora.max_lora_rank)
        self._status: protocol.Status = "loading"
        self._failure: protocol.ErrorBody | None = None
        first = protocol.ReloadResponse(version=0, seconds=0, num_tensors=0, checksum="", session=self._session)
        self._held: protocol.ReloadResponse | None = first  # None where the model holds no version whole
        self._source = ""  # that it came from
        self._asleep: tuple[str, ...] = ()  # those of PARTS that are off the GPU
        self._group: str | None = None
        self._copy = versions.PatchedCopy()
        self._uploads = Uploads(self._root)
        self._holder = Holder()
        self._base_replaced = False
        self._reload_lock = asyncio.Lock()

    async def start(self) -> None:
        """Label the first weights and generate once, so that no request pays for the first time."""
        await vllm_api.call_workers(self.llm, "hocket_drop_adapter")
        await self.llm.update_weight_version(str(self.version))
        await self.sampler.complete(
            Job(prompt=0, index=0, token_ids=[0], sampling=protocol.SamplingParams(max_tokens=2))
        )
        self._status = "ready"

    def require_ready(self, *, admits: Collection[str] = ()) -> None:
        """Raise ApiError with the reason where the engine can't generate, unless its code is one of `admits`."""
        reason = self._reason()
        if reason is not None and reason.code not in admits:
            raise ApiError(503, **reason.model_dump())

    def _reason(self) -> protocol.ErrorBody | None:
        is_lost = self._failure is not None and protocol.meaning(self._failure.code).gone
        if self.llm.errored and not is_lost:
            self._fail("engine_dead", "the engine's process ended", RESTART)
        return self._failure or (ASLEEP if self._asleep else None)

    def health(self) -> protocol.Health:
        """Return the answer to /health."""
        self._reason()  # it may be found dead
        model, vllm = self.llm.model_config, self.llm.vllm_config
        return protocol.Health(
            status="asleep" if self._asleep and self._status == "ready" else self._status,
            version=self.version,
            model=self.model,
            dtype=str(model.dtype).removeprefix("torch."),
            vocab_size=int(model.get_vocab_size()),  # embeddings: often more than the tokenizer has tokens
            max_length=int(model.max_model_len),
            tokenizer_sha256=self._tokenizer_sha256,
            session=self._session,
            in_flight=self.llm.in_flight,
            root=str(self._root),
            device=str(vllm.device_config.device_type),
            workers=self._workers,
            kv_tokens=int(vllm.cache_config.num_gpu_blocks or 0) * int(vllm.cache_config.block_size),
            error=self._failure,
        )

    def heartbeat(self, request: protocol.HeartbeatRequest) -> protocol.Health:
        """Note that a trainer lives, or leaves. Raises ApiError where the server works for another one."""
        if request.leaving:
            self._holder.leave(request.trainer)
        else:
            self._holder.hear(request.trainer, take_over=request.take_over)
        return self.health()

    async def read(self, body: bytes) -> tuple[protocol.GenerateRequest, list[Job]]:
        """Validate and tokenize the body of /generate. Raises ApiError with a status of 4xx."""
        request, jobs = await self.sampler.read(body)
        self.admit(request)
        return request, jobs

    def admit(self, request: protocol.GenerateRequest | protocol.SessionRequest) -> None:
        """Raise ApiError where another trainer has the server, or it has restarted since the caller's session."""
        self._holder.hear(request.trainer)
        if request.session not in (None, self._session):
            raise ApiError(409, "other_session", "this server was started again", "bring it up to date first")

    async def _join(self, group: protocol.GroupAddress) -> None:
        """Connect the workers with the trainer while the engine goes on; raise ApiError where they can't reach it."""
        try:
            async with asyncio.timeout(REACH_S):  # before the workers leave the group that they have
                _, connection = await asyncio.open_connection(group.host, group.port)
                connection.close()
            self._group, joined = None, [False]
            async with asyncio.timeout(JOIN_SHARE * min(group.timeout_s, self._timeout_s)):
                while not all(joined):
                    await asyncio.sleep(JOIN_POLL_S)
                    message, size = group.model_dump_json(), self._workers + 1
                    joining = vllm_api.call_workers(self.llm, "hocket_join_group", message, size)
                    joined = await self._in_time(joining)
        except Exception as error:
            self.require_ready(admits=protocol.CURABLE)
            message = f"the workers can't join the trainer at {group.host}:{group.port}: {cause_of(error)}"
            hint = "can this machine reach that address? sync.backend=disk needs no such connection"
            raise ApiError(409, "no_group", message, hint) from error
        self._group = group.name

    async def reload(self, request: protocol.ReloadRequest) -> protocol.ReloadResponse:
        """Load a weight version, or compare the model with it; `request.in_flight` decides about running requests.

        A version refused with 4xx changes nothing; any other one wakes the engine up. Where loading itself fails, which
        also finds wrong bytes, or the model is found to differ (409 not_held), the engine stays paused, all requests
        end with the reason, and the next reload that succeeds brings everything back. A comparison that breaks off
        leaves everything as it was.
        """
        async with self._reload_lock:
            self._holder.hear(request.trainer)
            self.require_ready(admits=() if request.compare else protocol.CURABLE)
            start = time.perf_counter()
            shapes = await self._reading(versions.model_shapes, self.model)
            source = request.source
            if isinstance(source, protocol.DiskSource):
                key = source.name
                folder, described, adapter = await self._reading(versions.read, self._root, key)
                if held := self._holds(request, key, described.checksum):
                    await self._wake(PARTS)
                    return held
                expected = self._expected(adapter, shapes)
                folder = await self._reading(self._copy.whole, folder, described, request.version, expected)
                call, checksum = "hocket_load_disk", described.checksum
                arguments: tuple[str, ...] = (str(folder), adapter.model_dump_json() if adapter else "")
            else:
                key = source.group.name
                if held := self._holds(request, key):
                    return held
                adapter = source.adapter
                versions.check_buckets(source.buckets, self._expected(adapter, shapes))
                if key != self._group:
                    await self._join(source.group)
                call, arguments = "hocket_load_group", (source.model_dump_json(),)
                checksum = self._held.checksum if request.compare and self._held else ""
            if self._asleep:  # it is paused, and stays so until its KV cache wakes up
                await self._wake(PARTS[:1])
            else:
                await self._pause("keep" if request.compare else request.in_flight, clear_cache=not request.compare)
            self._status = "updating"
            self._base_replaced |= adapter is None
            loaded = await self._load(request, call, arguments, checksum)
            self.version = request.version
            self.require_ready(admits=protocol.CURABLE)  # it may be shutting down
            self._status, self._failure = "ready", None
            seconds = time.perf_counter() - start
            response = protocol.ReloadResponse(
                version=request.version, seconds=seconds, session=self._session, **loaded
            )
            self._held = response
            self._source = key
            await self._wake(PARTS)
            return response

    async def sleep(self, request: protocol.SleepRequest) -> protocol.Health:
        """Take weights and KV cache off the GPU; `request.in_flight` decides about running requests."""
        async with self._reload_lock:
            self._holder.hear(request.trainer)
            self.require_ready(admits=protocol.CURABLE)
            if not self._share_gpu:
                hint = "start server and trainer with launch.share_gpu=true"
                raise ApiError(409, "no_sleep_mode", "this server was not started to share its GPU", hint)
            if "weights" not in self._asleep:
                if not self._asleep:
                    await self._pause(request.in_flight)
                self._asleep = PARTS
                # Nothing runs any more; any other mode than keep would end paused requests.
                await self._move(self.llm.sleep(level=request.level, mode="keep"))
                if request.level == 2:
                    self._held, self._base_replaced = None, True
            return self.health()

    async def wake_up(self, request: protocol.WakeRequest) -> protocol.Health:
        """Bring the engine back to the GPU with the weights that it had."""
        async with self._reload_lock:
            self._holder.hear(request.trainer)
            self.require_ready(admits=protocol.CURABLE)
            if self._asleep and self._held is None:
                message = "the engine dropped its weights when it fell asleep, or they failed to load"
                raise ApiError(409, "no_weights", message, "POST /reload_weights, which wakes it up")
            await self._wake(PARTS)
            return self.health()

    async def _wake(self, parts: Sequence[str]) -> None:
        """Bring those parts back to the GPU that are off it; generation goes on with the last of them."""
        if waking := [part for part in parts if part in self._asleep]:
            await self._move(self.llm.wake_up(tags=waking))
            self._asleep = tuple(part for part in self._asleep if part not in waking)

    async def _pause(self, in_flight: InFlight, *, clear_cache: bool = True) -> None:
        try:
            await self._in_time(vllm_api.pause(self.llm, in_flight, clear_cache=clear_cache))
        except TimeoutError as late:
            message = f"{self.llm.in_flight} requests did not end within sync.timeout_s={self._timeout_s:g}"
            try:
                if self._failure is None:  # a half-loaded model must not run
                    await asyncio.wait_for(self.llm.resume_generation(), vllm_api.ABORT_TIMEOUT_S)
            except Exception as error:
                message += f", and the engine does not go on: {cause_of(error)}"
                raise await self._fail_all(503, "not_resumed", message, RELOAD) from error
            hint = "they go on; set a higher sync.timeout_s, or sync.in_flight=keep"
            raise ApiError(503, "busy", message, hint) from late

    async def _move(self, moving: Awaitable[None]) -> None:
        """Wait for the engine to fall asleep or wake up. After a failure its memory is in an unknown state."""
        try:
            await self._in_time(moving)
        except Exception as error:
            message = f"the engine could not leave the GPU, or come back to it: {cause_of(error)}"
            hint = f"is anything else on this GPU, or server.gpu_memory_utilization too high? {RESTART}"
            raise await self._fail_all(500, "sleep_failed", message, hint) from error

    async def _reading(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a function that reads files. Raises ApiError past the deadline: a disk may hang."""
        try:
            return await self._in_time(asyncio.to_thread(function, *arguments))
        except TimeoutError as error:
            message = f"the files were not read within sync.timeout_s={self._timeout_s:g}: does their disk hang?"
            raise ApiError(503, "slow_disk", message, "the old weights keep serving; publish it again") from error

    async def _in_time(self, work: Awaitable[T]) -> T:
        """Return the result of the work. Raises TimeoutError that names the setting, ApiError where the engine is lost.

        vLLM never answers calls that its process had not finished when it ended.
        """
        task = asyncio.ensure_future(work)
        try:
            async with asyncio.timeout(self._timeout_s):
                while not task.done():
                    self.require_ready(admits=protocol.CURABLE)
                    await asyncio.wait([task], timeout=vllm_api.LOOK_S)
                return task.result()
        except TimeoutError as error:
            raise TimeoutError(f"not done after sync.timeout_s={self._timeout_s:g}") from error
        except Exception:
            self.require_ready(admits=protocol.CURABLE)
            raise
        finally:
            await cancel([task])

    async def upload(self, name: str, file: str, chunks: AsyncIterator[bytes]) -> protocol.DiskSource:
        shapes = await self._reading(versions.model_shapes, self.model)
        return await self._uploads.receive(name, file, chunks, versions.max_bytes(shapes))

    def _holds(
        self, request: protocol.ReloadRequest, key: str, checksum: str | None = None
    ) -> protocol.ReloadResponse | None:
        """Return the earlier answer where the model holds this version from this source, and it is not to be compared.

        Raises ApiError where it is to be compared, but is not what the model holds.
        """
        held = None if self._failure else self._held
        if held and (held.version != request.version or checksum not in (None, held.checksum)):
            held = None
        if not request.compare:
            return held if key == self._source else None
        if held is None:
            message = f"the engine does not hold this version {request.version}, so it can't be compared with it"
            raise ApiError(503, "other_version", message, "load it first")
        return None

    def _expected(self, adapter: protocol.AdapterConfig | None, model: versions.ModelShapes) -> versions.ModelShapes:
        if adapter is None:
            return model
        shapes = versions.adapter_shapes(adapter, model, self._max_rank)
        if self._base_replaced:
            message = "the weights that an adapter belongs to are gone: a whole version has replaced them"
            raise ApiError(409, "base_replaced", message, "restart the server with the trainer's model.lora")
        return shapes

    async def _load(
        self, request: protocol.ReloadRequest, call: str, arguments: Sequence[str], checksum: str
    ) -> dict[str, Any]:
        """Load on all workers of a paused engine and resume; return `checksum` and `num_tensors` of what went in."""
        different: list[str] = []

        async def load() -> dict[str, Any]:
            answers: list[dict[str, Any]] = await vllm_api.call_workers(self.llm, call, *arguments, request.compare)
            if len({checksum or answers[0]["checksum"], *(answer["checksum"] for answer in answers)}) > 1:
                raise RuntimeError("the tensors that reached the model are not those that were published")
            different.extend(sorted({name for answer in answers for name in answer["different"]}))
            if different:
                raise RuntimeError(f"the model differs in {', '.join(different[:3])} ({len(different)} in all)")
            if not request.compare:
                await self.llm.update_weight_version(str(request.version))
            await self._resume()
            return {name: answers[0][name] for name in ("checksum", "num_tensors")}

        try:
            return await self._in_time(load())
        # Whatever went wrong, the model may be half loaded: the engine must not run before a reload succeeds.
        except Exception as error:
            if isinstance(request.source, protocol.CollectiveSource):
                self._group = None
            doing = "comparing with" if request.compare else "loading"
            message = f"{doing} version {request.version} failed: {cause_of(error)}"
            # Workers that report an error have put back what they compared.
            if request.compare and isinstance(error, RuntimeError) and not different:
                self._status = "ready"
                await self._in_time(self._resume())
                raise ApiError(500, "compare_failed", message, "the engine goes on as before") from error
            self._held = None
            await asyncio.to_thread(self._copy.discard)  # it may be what was wrong
            failure = await self._fail_all(500, "reload_failed", message, RELOAD)
            raise ApiError(409, "not_held", message, RELOAD) if different else failure from error

    async def _resume(self) -> None:
        self.require_ready(admits=protocol.CURABLE)  # it may be shutting down
        if not self._asleep:
            await self.llm.resume_generation()

    async def _fail_all(self, status: int, code: str, message: str, hint: str) -> ApiError:
        """End all requests with a failure now, as no good version may come before their deadlines; return its error.

        Raises ApiError where the engine is lost, which says more.
        """
        self.require_ready(admits=protocol.CURABLE)
        reason = self._fail(code, message, hint)
        await vllm_api.abort_all(self.llm)
        return ApiError(status, **reason.model_dump())

    def _fail(self, code: str, message: str, hint: str) -> protocol.ErrorBody:
        self._status = "failed"
        self._failure = protocol.ErrorBody(code=code, message=message, hint=hint)
        return self._failure

    async def stop(self) -> None:
        """End every request with the error that the server is shutting down."""
        self._fail("shutting_down", "the server is shutting down", "send the request again when it is back")
        await vllm_api.abort_all(self.llm)
        self._copy.discard()
