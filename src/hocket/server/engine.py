"""The generation engine: numbered weights that change without a restart."""

import asyncio
import contextlib
import functools
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from hocket import protocol
from hocket.common.tasks import cancel
from hocket.data import tokenizer as tokenizers
from hocket.errors import cause_of
from hocket.protocol.manifest import ModelShapes, dtype_name, model_shapes
from hocket.server import versions, vllm_api
from hocket.server.errors import ApiError, invalid
from hocket.server.generate import Job, Sampler
from hocket.server.holder import Holder
from hocket.server.state import ASLEEP, DEAD, STOPPING, Condition, EngineState, Held
from hocket.types import InFlight

T = TypeVar("T")

RELOAD = "publish a good version; a reload that succeeds brings the server back"
MODES = {"keep": "keep", "drain": "wait", "abort": "abort"}  # of sync.in_flight, as vLLM names them


class Found(NamedTuple):
    """A version at its source, ready to be loaded."""

    call: tuple[str, ...]  # the workers' method that loads it, and its arguments
    checksum: str  # "" where it shows only as the version comes
    is_whole: bool = True  # or an adapter
    discard: Callable[[], None] = lambda: None  # what may be wrong, after a failure


Find = Callable[[Any, int], Awaitable[Found]]
"""(source, version) -> what is there. Raises ApiError with 4xx where that is not this version of the model."""


class SleepState(Protocol):
    """How much of an engine is on the GPU that it shares with a trainer (share_gpu.py)."""

    async def rise(self) -> bool:
        """Bring the weights back; return whether they were away: then nothing runs."""

    async def wake(self) -> None:
        """Bring back the rest, so that generation goes on."""


class Engine:
    """An AsyncLLM with numbered weights from `root`; each step of a reload has the deadline `timeout_s`."""

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
        # Requests that were let in before the engine fell asleep wait until it wakes up.
        admitted = functools.partial(self.require_ready, admits={"asleep"})
        tokenizer = tokenizers.load(model)
        versions.remove_leftovers()
        self.llm = llm
        llm.require_ready = admitted
        llm.ends = sorted(tokenizers.end_ids(model, tokenizer) - {tokenizer.placeholder})
        self.model = model
        self.sampler = Sampler(llm, tokenizer, admitted, template)
        self.root = root.resolve()
        self.timeout_s = timeout_s
        self.share_gpu = share_gpu
        self.session = secrets.token_hex(8)
        self.num_workers = int(llm.vllm_config.parallel_config.world_size)
        self.sources: dict[str, Find] = {
            "disk": self._find_on_disk
        }  # by kind; parts of the server add theirs
        self._sleep_state: SleepState | None = None  # None: it shares no GPU
        self.holder = Holder()
        self.lock = asyncio.Lock()  # of what changes the engine
        first = protocol.ReloadResponse(
            version=0, seconds=0, num_tensors=0, checksum="", session=self.session
        )
        self._condition = Condition(Held(None, first))
        self._tokenizer_sha256 = tokenizers.fingerprint(tokenizer)
        self._architecture = "unknown"

    async def start(self) -> None:
        """Label the first weights and generate once, which takes longer the first time."""
        await vllm_api.call_workers(self.llm, "hocket_drop_adapter")
        await self.llm.update_weight_version(str(self.version))
        await self.sampler.complete(
            Job(prompt=0, index=0, token_ids=[0], sampling=protocol.SamplingParams(max_tokens=2))
        )
        with contextlib.suppress(
            OSError, ValueError
        ):  # of a model that transformers, and so a trainer, can't load
            self._architecture = (await asyncio.to_thread(model_shapes, self.model)).architecture

    @property
    def max_adapter_rank(self) -> int:
        lora = self.llm.vllm_config.lora_config
        return 0 if lora is None else int(lora.max_lora_rank)

    @property
    def version(self) -> int:
        """The number of the version with which new tokens are sampled."""
        return self._condition.version

    @property
    def held(self) -> Held | None:
        """The version that the model holds; None where it holds none whole."""
        return self._condition.held

    @property
    def is_asleep(self) -> bool:
        return self._condition.is_asleep

    def require_ready(self, *, admits: Collection[str] = ()) -> None:
        """Raise ApiError where the engine can't generate, but for codes of `admits`."""
        reason = self._reason()
        if reason is not None and reason.code not in admits:
            raise ApiError(503, **reason.model_dump())

    def require_alive(self) -> None:
        """Raise ApiError where no reload brings the engine back."""
        self.require_ready(admits=protocol.CURABLE)

    def _reason(self) -> protocol.ErrorBody | None:
        """Look whether the engine lives; then say why it can't generate."""
        # While the server is shutting down, the end of the engine's process is no failure.
        if self.llm.errored and self._condition.state is not EngineState.STOPPING:
            self._condition.move(EngineState.LOST, DEAD)
        return self._condition.reason

    def _fail(self, reason: protocol.ErrorBody) -> None:
        if reason.code not in protocol.CURABLE:
            state = EngineState.LOST
        elif self._condition.is_asleep:
            state = EngineState.BROKEN_ASLEEP
        else:
            state = EngineState.BROKEN
        self._condition.move(state, reason)

    def share(self, sleep_state: SleepState) -> None:
        """Wake this up with each reload: the engine shares its GPU."""
        self._sleep_state = sleep_state

    def fall_asleep(self) -> None:
        """Refuse to generate from now on. Raises ApiError where the engine is lost."""
        self.require_alive()
        if self._condition.state is EngineState.READY:
            self._condition.move(EngineState.ASLEEP, ASLEEP)
        elif self._condition.state is EngineState.BROKEN:
            self._condition.move(EngineState.BROKEN_ASLEEP, self._condition.reason)

    def drop_weights(self) -> None:
        """Note that the weights were thrown away, as the engine fell asleep."""
        self._condition.drop_weights()

    def wake(self) -> None:
        """Generate again, if only sleep was in the way."""
        if self._condition.state is EngineState.ASLEEP:
            self._condition.move(EngineState.READY, None)

    def _mend(self) -> None:
        """Leave a failure behind, as a load has succeeded. Raises ApiError where the engine is lost."""
        self.require_alive()  # it may be shutting down
        if self._condition.state is EngineState.BROKEN:
            self._condition.move(EngineState.READY, None)
        elif self._condition.state is EngineState.BROKEN_ASLEEP:
            self._condition.move(EngineState.ASLEEP, ASLEEP)

    @property
    def _status(self) -> protocol.Status:
        if self._reason() is None:
            return "updating" if self.lock.locked() else "ready"
        return "asleep" if self._condition.state is EngineState.ASLEEP else "failed"

    def health(self) -> protocol.Health:
        model = self.llm.model_config
        vllm = self.llm.vllm_config
        return protocol.Health(
            status=self._status,
            version=self.version,
            model=self.model,
            dtype=dtype_name(model.dtype),
            architecture=self._architecture,
            vocab_size=int(model.get_vocab_size()),  # often more than the tokenizer has tokens
            max_length=int(model.max_model_len),
            max_adapter_rank=self.max_adapter_rank,
            tokenizer_sha256=self._tokenizer_sha256,
            session=self.session,
            in_flight=self.llm.in_flight,
            root=str(self.root),
            device=str(vllm.device_config.device_type),
            workers=self.num_workers,
            kv_tokens=int(vllm.cache_config.num_gpu_blocks) * int(vllm.cache_config.block_size),
            **vllm_api.load(),
            error=self._condition.failure,
        )

    async def heartbeat(self, request: protocol.HeartbeatRequest) -> protocol.Health:
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
        """Raise ApiError where another trainer has the server, or the caller's session is over."""
        self.holder.hear(request.trainer)
        if request.session not in (None, self.session):
            raise ApiError(
                409, "other_session", "this server was started again", "bring it up to date first"
            )

    async def reload(self, request: protocol.ReloadRequest) -> protocol.ReloadResponse:
        """Load a weight version, or compare the model with it.

        A version refused with 4xx changes nothing; any other one wakes the engine up. If loading
        fails, on wrong bytes too, or the model differs (409 not_held), the engine stays paused and
        requests end with the reason until a reload succeeds. A comparison that breaks off changes
        nothing.
        """
        async with self.lock:
            self.holder.hear(request.trainer)
            self.require_ready(admits=() if request.compare else protocol.CURABLE)
            start = time.perf_counter()
            # Find the version while generation goes on, and refuse one that can't be loaded.
            find = self._source(request.source.kind)
            incoming = await find(request.source, request.version)
            held = self._held_as(request.version, incoming)
            if request.compare:
                return await self._compare(request.version, incoming, held, start)
            # A version that is held already is not loaded again; a broadcast's source tells its run.
            if held is None or held.source != request.source:
                held = await self._load(request, incoming, start)
            if self._sleep_state is not None:
                await self._sleep_state.wake()
            return held.answer

    def _source(self, kind: str) -> Find:
        if kind not in self.sources:
            message = f"source.kind: no part of this server reads {kind!r}; it reads {', '.join(sorted(self.sources))}"
            raise invalid(
                message,
                "start it with the part's file under server.plugins, or set another sync.backend",
            )
        return self.sources[kind]

    def _held_as(self, version: int, incoming: Found) -> Held | None:
        """Return this version if the model holds it already; a resumed run gives its name to other weights."""
        held = self.held
        if (
            held is None
            or held.answer.version != version
            or incoming.checksum not in ("", held.answer.checksum)
        ):
            return None
        return held

    async def _load(self, request: protocol.ReloadRequest, incoming: Found, start: float) -> Held:
        async def load() -> dict[str, Any]:
            answers: list[dict[str, Any]] = await vllm_api.call_workers(
                self.llm, *incoming.call, incoming.checksum, False
            )
            await self.llm.update_weight_version(str(request.version))
            await self._resume()
            return answers[0]

        was_asleep = self._sleep_state is not None and await self._sleep_state.rise()
        if not was_asleep:
            await self.pause(request.in_flight)
        if incoming.is_whole:
            self._condition.replace_base()
        loaded = await self._change(f"loading version {request.version}", incoming, load())
        self._mend()
        answer = protocol.ReloadResponse(
            version=request.version,
            seconds=time.perf_counter() - start,
            num_tensors=loaded["num_tensors"],
            checksum=loaded["checksum"],
            session=self.session,
        )
        held = Held(request.source, answer)
        self._condition.hold(held)
        return held

    async def _compare(
        self, version: int, incoming: Found, held: Held | None, start: float
    ) -> protocol.ReloadResponse:
        if held is None:
            message = f"the engine does not hold this version {version}, so it can't be compared"
            raise ApiError(503, "other_version", message, "load it first")
        doing = f"comparing with version {version}"

        async def compare() -> None:
            try:
                answers = await vllm_api.call_workers(
                    self.llm, *incoming.call, held.answer.checksum, True
                )
            except RuntimeError as error:  # of workers, which have put back what they compared
                await self._resume()
                message = f"{doing} failed: {cause_of(error)}"
                raise ApiError(
                    500, "compare_failed", message, "the engine goes on as before"
                ) from error
            different = sorted(set().union(*(answer["different"] for answer in answers)))
            if different:
                names = ", ".join(different[:3])
                message = f"{doing} failed: the model differs in {names} ({len(different)} in all)"
                await self.fail_all(500, "reload_failed", message, RELOAD)
                raise ApiError(409, "not_held", message, RELOAD)
            await self._resume()

        await self.pause("keep", clear_cache=False)
        await self._change(doing, incoming, compare())
        return held.answer.model_copy(update={"seconds": time.perf_counter() - start})

    async def _change(self, doing: str, incoming: Found, work: Awaitable[T]) -> T:
        """Return the work's result. Where it fails, the engine stays paused: its model may be half loaded."""
        try:
            return await self.in_time(work)
        except Exception as error:
            incoming.discard()
            if isinstance(error, ApiError):  # which says what the engine does now
                raise
            raise await self.fail_all(
                500, "reload_failed", f"{doing} failed: {cause_of(error)}", RELOAD
            ) from error

    async def _resume(self) -> None:
        self.require_alive()  # it may be shutting down
        if not self.is_asleep:
            await self.llm.resume_generation()

    async def _find_on_disk(self, source: protocol.DiskSource, version: int) -> Found:
        folder, described, adapter = await self.reading(versions.read, self.root, source.name)
        expected = await self.expected(adapter)
        versions.check_manifest(described, version, expected)
        await self.reading(versions.check_headers, folder, described)
        return Found(
            ("hocket_load_disk", str(folder)), described.checksum, is_whole=adapter is None
        )

    async def expected(self, adapter: protocol.AdapterConfig | None) -> ModelShapes:
        """Return the tensors of the model, or of this adapter of it."""
        model = await self.reading(model_shapes, self.model)
        if adapter is None:
            return model
        shapes = versions.adapter_shapes(adapter, model, self.max_adapter_rank)
        if self._condition.is_base_replaced:
            message = (
                "the weights that an adapter belongs to are gone: a whole version has replaced them"
            )
            raise ApiError(
                409, "base_replaced", message, "restart the server with the trainer's model.lora"
            )
        return shapes

    async def pause(self, in_flight: InFlight, *, clear_cache: bool = True) -> None:
        """Stop generation. Raises ApiError where running requests take too long."""
        try:
            await self.in_time(
                self.llm.pause_generation(mode=MODES[in_flight], clear_cache=clear_cache)
            )
        except TimeoutError as late:
            message = f"{self.llm.in_flight} requests did not end within sync.timeout_s={self.timeout_s:g}"
            try:
                await asyncio.wait_for(self.llm.resume_generation(), vllm_api.ABORT_TIMEOUT_S)
            except Exception as error:
                message += f", and the engine does not go on: {cause_of(error)}"
                raise await self.fail_all(503, "not_resumed", message, RELOAD) from error
            hint = "they go on; set a higher sync.timeout_s, or sync.in_flight=keep"
            raise ApiError(503, "busy", message, hint) from late

    async def reading(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that reads files. Raises ApiError past the deadline."""
        try:
            return await self.in_time(asyncio.to_thread(function, *arguments))
        except TimeoutError as error:
            message = f"the files were not read within sync.timeout_s={self.timeout_s:g}: does their disk hang?"
            raise ApiError(
                503, "slow_disk", message, "the old weights keep serving; publish it again"
            ) from error

    async def in_time(self, work: Awaitable[T]) -> T:
        """Return the work's result. Raises TimeoutError with the setting, or ApiError where the engine is lost.

        vLLM never answers the calls of a process that ended.
        """
        task = asyncio.ensure_future(work)
        try:
            async with asyncio.timeout(self.timeout_s):
                while not task.done():
                    self.require_alive()
                    await asyncio.wait([task], timeout=vllm_api.LOOK_S)
                return task.result()
        except TimeoutError as error:
            raise TimeoutError(f"not done after sync.timeout_s={self.timeout_s:g}") from error
        except Exception:
            self.require_alive()
            raise
        finally:
            await cancel([task])

    async def fail_all(self, status: int, code: str, message: str, hint: str) -> ApiError:
        """End all requests with a failure, as no good version may come in time; return its error.

        Raises ApiError where the engine is lost, which says more.
        """
        self.require_alive()
        error = ApiError(status, code, message, hint)
        self._fail(error.body)
        await vllm_api.abort_all(self.llm)
        return error

    async def stop(self) -> None:
        """End every request: the server is shutting down."""
        self._condition.move(EngineState.STOPPING, STOPPING)
        await vllm_api.abort_all(self.llm)
