"""The generation engine: numbered weights that change without a restart."""

import asyncio
import functools
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hocket import protocol
from hocket.common.tasks import cancel
from hocket.data import tokenizer as tokenizers
from hocket.server import versions, vllm_api
from hocket.server.errors import ApiError, cause_of
from hocket.server.generate import RESTART, Job, Sampler
from hocket.server.holder import Holder
from hocket.types import InFlight

T = TypeVar("T")

RELOAD = "publish a good version; a reload that succeeds brings the server back"


class Found(NamedTuple):
    """A version at its source, before any check."""

    key: str  # of the source: the same version from another one may be another run's
    checksum: str | None  # None where it shows as the version comes
    prepare: Callable[[], Awaitable[tuple[str, ...]]]  # checks it; returns the workers' method that loads it, arguments
    is_whole: bool = True  # or an adapter
    discard: Callable[[], None] = lambda: None  # what may be wrong, after a failure


Find = Callable[[Any, int], Awaitable[Found]]
"""(source in a ReloadRequest, version) -> where it is. Raises ApiError with 4xx where it is not there."""


class Held(NamedTuple):
    """The version that the model holds."""

    key: str  # of the source that it came from
    answer: protocol.ReloadResponse


class Residence:
    """Where the engine lives: on a device of its own, which it never leaves."""

    reason: protocol.ErrorBody | None = None  # why it can't generate there now

    async def rise(self) -> bool:
        """Bring the weights back; return whether they were away, and so nothing runs."""
        return False

    async def wake(self) -> None:
        """Bring back what is still away, so that generation goes on."""


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
        versions.remove_left()
        self.llm = llm
        llm.require_ready = admitted
        self.model = model
        self.version = 0  # the weight version that new tokens are sampled with
        self.sampler = Sampler(llm, tokenizer, admitted, template)
        self.root = root.resolve()
        self.timeout_s = timeout_s
        self.share_gpu = share_gpu
        self.session = secrets.token_hex(8)
        self.num_workers = int(llm.vllm_config.parallel_config.world_size)
        self.sources: dict[str, Find] = {"disk": self._find_on_disk}
        self.residence = Residence()
        self.holder = Holder()
        self.lock = asyncio.Lock()  # of what changes the engine
        self.base_replaced = False  # whether the weights that adapters belong to are gone
        first = protocol.ReloadResponse(version=0, seconds=0, num_tensors=0, checksum="", session=self.session)
        self.held: Held | None = Held("", first)  # None where the model holds no version whole
        self._tokenizer_sha256 = tokenizers.fingerprint(tokenizer)
        self._status: protocol.Status = "loading"
        self._failure: protocol.ErrorBody | None = None

    async def start(self) -> None:
        """Label the first weights and generate once, so that no request pays for the first time."""
        await vllm_api.call_workers(self.llm, "hocket_drop_adapter")
        await self.llm.update_weight_version(str(self.version))
        await self.sampler.complete(
            Job(prompt=0, index=0, token_ids=[0], sampling=protocol.SamplingParams(max_tokens=2))
        )
        self._status = "ready"

    def require_ready(self, *, admits: Collection[str] = ()) -> None:
        """Raise ApiError where the engine can't generate, unless its code is one of `admits`."""
        reason = self._reason()
        if reason is not None and reason.code not in admits:
            raise ApiError(503, **reason.model_dump())

    def _reason(self) -> protocol.ErrorBody | None:
        is_lost = self._failure is not None and protocol.meaning(self._failure.code).gone
        if self.llm.errored and not is_lost:
            self._fail("engine_dead", "the engine's process ended", RESTART)
        return self._failure or self.residence.reason

    def health(self) -> protocol.Health:
        asleep = self._reason() is not None and self._status == "ready"
        model = self.llm.model_config
        vllm = self.llm.vllm_config
        return protocol.Health(
            status="asleep" if asleep else self._status,
            version=self.version,
            model=self.model,
            dtype=str(model.dtype).removeprefix("torch."),
            vocab_size=int(model.get_vocab_size()),  # embeddings: often more than the tokenizer has tokens
            max_length=int(model.max_model_len),
            tokenizer_sha256=self._tokenizer_sha256,
            session=self.session,
            in_flight=self.llm.in_flight,
            root=str(self.root),
            device=str(vllm.device_config.device_type),
            workers=self.num_workers,
            kv_tokens=int(vllm.cache_config.num_gpu_blocks or 0) * int(vllm.cache_config.block_size),
            error=self._failure,
        )

    async def heartbeat(self, request: protocol.HeartbeatRequest) -> protocol.Health:
        """Take the server for a trainer, keep it, or leave it; another one's requests are refused."""
        if request.leaving:
            self.holder.leave(request.trainer)
        else:
            self.holder.hear(request.trainer, take_over=request.take_over)
        return self.health()

    async def read(self, body: bytes) -> tuple[protocol.GenerateRequest, list[Job]]:
        request, jobs = await self.sampler.read(body)
        self.admit(request)
        return request, jobs

    def admit(self, request: protocol.GenerateRequest | protocol.SessionRequest) -> None:
        """Raise ApiError where another trainer has the server, or it has restarted since the caller's session."""
        self.holder.hear(request.trainer)
        if request.session not in (None, self.session):
            raise ApiError(409, "other_session", "this server was started again", "bring it up to date first")

    async def reload(self, request: protocol.ReloadRequest) -> protocol.ReloadResponse:
        """Load a weight version, or compare the model with it; `request.in_flight` decides about running requests.

        A version refused with 4xx changes nothing; any other one wakes the engine up. Where loading fails, which also
        finds wrong bytes, or the model differs (409 not_held), the engine stays paused, requests end with the reason,
        and the next reload that succeeds brings everything back. A comparison that breaks off leaves everything as it
        was.
        """
        async with self.lock:
            self.holder.hear(request.trainer)
            self.require_ready(admits=() if request.compare else protocol.CURABLE)
            start = time.perf_counter()
            found = await self.sources[request.source.kind](request.source, request.version)
            held = self._held_as(request.version, found)
            if request.compare:
                if held is None:
                    message = f"the engine does not hold this version {request.version}, so it can't be compared"
                    raise ApiError(503, "other_version", message, "load it first")
                found = found._replace(checksum=held.answer.checksum)
            elif held is not None and held.key == found.key:
                await self.residence.wake()
                return held.answer
            call = await found.prepare()
            if not await self.residence.rise():
                await self.pause("keep" if request.compare else request.in_flight, clear_cache=not request.compare)
            self._status = "updating"
            self.base_replaced |= found.is_whole
            loaded = await self._load(request, found, call)
            self.version = request.version
            self.require_ready(admits=protocol.CURABLE)  # it may be shutting down
            self._status = "ready"
            self._failure = None
            seconds = time.perf_counter() - start
            answer = protocol.ReloadResponse(version=request.version, seconds=seconds, session=self.session, **loaded)
            self.held = Held(found.key, answer)
            await self.residence.wake()
            return answer

    def _held_as(self, version: int, found: Found) -> Held | None:
        """Return what the model holds if that is this version."""
        held = None if self._failure else self.held
        if held is None or held.answer.version != version or found.checksum not in (None, held.answer.checksum):
            return None
        return held

    async def _find_on_disk(self, source: protocol.DiskSource, version: int) -> Found:
        folder, described, adapter = await self.reading(versions.read, self.root, source.name)

        async def prepare() -> tuple[str, ...]:
            expected = await self.expected(adapter)
            await self.reading(versions.check, folder, described, version, expected)
            return "hocket_load_disk", str(folder), adapter.model_dump_json() if adapter else ""

        return Found(source.name, described.checksum, prepare, is_whole=adapter is None)

    async def expected(self, adapter: protocol.AdapterConfig | None) -> versions.ModelShapes:
        """Return the tensors that a version of the model, or this adapter of it, has."""
        model = await self.reading(versions.model_shapes, self.model)
        if adapter is None:
            return model
        lora = self.llm.vllm_config.lora_config
        shapes = versions.adapter_shapes(adapter, model, 0 if lora is None else int(lora.max_lora_rank))
        if self.base_replaced:
            message = "the weights that an adapter belongs to are gone: a whole version has replaced them"
            raise ApiError(409, "base_replaced", message, "restart the server with the trainer's model.lora")
        return shapes

    async def pause(self, in_flight: InFlight, *, clear_cache: bool = True) -> None:
        """Stop generation; raise ApiError where running requests take too long."""
        try:
            await self.in_time(vllm_api.pause(self.llm, in_flight, clear_cache=clear_cache))
        except TimeoutError as late:
            message = f"{self.llm.in_flight} requests did not end within sync.timeout_s={self.timeout_s:g}"
            try:
                if self._failure is None:  # a half-loaded model must not run
                    await asyncio.wait_for(self.llm.resume_generation(), vllm_api.ABORT_TIMEOUT_S)
            except Exception as error:
                message += f", and the engine does not go on: {cause_of(error)}"
                raise await self.fail_all(503, "not_resumed", message, RELOAD) from error
            hint = "they go on; set a higher sync.timeout_s, or sync.in_flight=keep"
            raise ApiError(503, "busy", message, hint) from late

    async def reading(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a function that reads files. Raises ApiError past the deadline: a disk may hang."""
        try:
            return await self.in_time(asyncio.to_thread(function, *arguments))
        except TimeoutError as error:
            message = f"the files were not read within sync.timeout_s={self.timeout_s:g}: does their disk hang?"
            raise ApiError(503, "slow_disk", message, "the old weights keep serving; publish it again") from error

    async def in_time(self, work: Awaitable[T]) -> T:
        """Return the result of the work. Raises TimeoutError that names the setting, ApiError where the engine is lost.

        vLLM never answers calls that its process had not finished when it ended.
        """
        task = asyncio.ensure_future(work)
        try:
            async with asyncio.timeout(self.timeout_s):
                while not task.done():
                    self.require_ready(admits=protocol.CURABLE)
                    await asyncio.wait([task], timeout=vllm_api.LOOK_S)
                return task.result()
        except TimeoutError as error:
            raise TimeoutError(f"not done after sync.timeout_s={self.timeout_s:g}") from error
        except Exception:
            self.require_ready(admits=protocol.CURABLE)
            raise
        finally:
            await cancel([task])

    async def _load(self, request: protocol.ReloadRequest, found: Found, call: tuple[str, ...]) -> dict[str, Any]:
        """Load on all workers of a paused engine and resume; return `checksum` and `num_tensors`."""
        different: list[str] = []

        async def load() -> dict[str, Any]:
            answers: list[dict[str, Any]] = await vllm_api.call_workers(self.llm, *call, request.compare)
            sums = {answer["checksum"] for answer in answers}
            if sums != {found.checksum or answers[0]["checksum"]}:
                raise RuntimeError("the tensors that reached the model are not those that were published")
            different.extend(sorted({name for answer in answers for name in answer["different"]}))
            if different:
                raise RuntimeError(f"the model differs in {', '.join(different[:3])} ({len(different)} in all)")
            if not request.compare:
                await self.llm.update_weight_version(str(request.version))
            await self._resume()
            return {name: answers[0][name] for name in ("checksum", "num_tensors")}

        try:
            return await self.in_time(load())
        # Whatever went wrong, the model may be half loaded: the engine must not run before a reload succeeds.
        except Exception as error:
            found.discard()
            doing = "comparing with" if request.compare else "loading"
            message = f"{doing} version {request.version} failed: {cause_of(error)}"
            # Workers that report an error have put back what they compared.
            if request.compare and isinstance(error, RuntimeError) and not different:
                self._status = "ready"
                await self.in_time(self._resume())
                raise ApiError(500, "compare_failed", message, "the engine goes on as before") from error
            self.held = None
            failure = await self.fail_all(500, "reload_failed", message, RELOAD)
            raise ApiError(409, "not_held", message, RELOAD) if different else failure from error

    async def _resume(self) -> None:
        self.require_ready(admits=protocol.CURABLE)  # it may be shutting down
        if self.residence.reason is None:
            await self.llm.resume_generation()

    async def fail_all(self, status: int, code: str, message: str, hint: str) -> ApiError:
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
        """End every request: the server is shutting down."""
        self._fail("shutting_down", "the server is shutting down", "send the request again when it is back")
        await vllm_api.abort_all(self.llm)
