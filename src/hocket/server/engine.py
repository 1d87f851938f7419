"""The generation engine: it samples with numbered weight versions, and loads them in its pauses."""

import asyncio
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
from hocket.server.state import ASLEEP, DEAD, STOPPING, Condition, EngineState, Held, Holder
from hocket.types import InFlight

T = TypeVar("T")

RELOAD = "publish a good version; a reload that succeeds brings the server back"
MODES = {"keep": "keep", "drain": "wait", "abort": "abort"}
"""vLLM's names of the values of sync.in_flight."""


class IncomingVersion(NamedTuple):
    """A version at its source, ready to be loaded."""

    call: tuple[str, ...]  # name of the workers' method that loads it, then its arguments
    checksum: str  # "" where it is known only once the version has come
    is_whole: bool = True  # False for an adapter
    # Called after a failure. Drops what the source keeps for later versions, as it may be wrong.
    discard: Callable[[], None] = lambda: None


Find = Callable[[Any, int], Awaitable[IncomingVersion]]
"""(source, version) -> the version, ready to be loaded.

Raises ApiError with 4xx where the source does not hold this version of the model.
"""


class GpuSharing(Protocol):
    """Brings an engine back to the GPU that it shares with a trainer (share_gpu.Sleeper)."""

    async def bring_back_weights(self) -> bool:
        """Bring the weights back. Returns True if the engine was asleep: then nothing runs."""

    async def bring_back_all(self) -> None:
        """Bring the KV cache back, too; generation goes on."""


class Engine:
    """An AsyncLLM with numbered weights.

    Folders of versions lie under `root`. Each step of a reload has the deadline `timeout_s`.
    """

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
        tokenizer = tokenizers.load(model)
        versions.remove_leftovers()

        # vLLM's engine, and what samples with it. The routes refuse requests while the engine is
        # asleep; those that had come before it fell asleep wait until it wakes up.
        require_ready_or_asleep = functools.partial(self.require_ready, admits={"asleep"})
        self.llm = llm
        llm.require_ready = require_ready_or_asleep
        # The placeholder of an image is one of the llm's always_end_ids (vision.py).
        llm.end_ids = sorted(tokenizers.end_ids(model, tokenizer) - {tokenizer.placeholder})
        self.model = model
        self.sampler = Sampler(llm, tokenizer, require_ready_or_asleep, template)

        # What the server is, for clients: settings that stay as they are.
        self.root = root.resolve()
        self.timeout_s = timeout_s
        self.share_gpu = share_gpu
        self.session = secrets.token_hex(8)
        self.num_workers = int(llm.vllm_config.parallel_config.world_size)
        self._tokenizer_sha256 = tokenizers.fingerprint(tokenizer)
        self._architecture = "unknown"

        # Where versions come from, by kind of source; parts of the server add theirs.
        self.sources: dict[str, Find] = {"disk": self._find_on_disk}

        # What changes while it serves.
        self._gpu_sharing: GpuSharing | None = None  # None where it shares no GPU
        self.holder = Holder()
        self.lock = asyncio.Lock()  # held by whatever changes the engine
        first = protocol.ReloadResponse(
            version=0, seconds=0, num_tensors=0, checksum="", session=self.session
        )
        self._condition = Condition(Held(None, first))

    async def start(self) -> None:
        """Label the first weights and generate once, which takes longer the first time."""
        await vllm_api.call_workers(self.llm, "hocket_drop_adapter")
        await self.llm.update_weight_version(str(self.version))
        sampling = protocol.SamplingParams(max_tokens=2)
        await self.sampler.complete(Job(prompt=0, index=0, token_ids=[0], sampling=sampling))
        try:
            self._architecture = (await asyncio.to_thread(model_shapes, self.model)).architecture
        except (OSError, ValueError) as error:
            # transformers, and so a trainer, can't load every model that vLLM can.
            reason = str(error).partition("\n")[0]
            self._architecture = f"unknown, as transformers can't load it ({reason})"

    @property
    def max_adapter_rank(self) -> int:
        """The highest rank of adapters that the engine takes; 0 where it takes none."""
        lora = self.llm.vllm_config.lora_config
        return 0 if lora is None else int(lora.max_lora_rank)

    @property
    def version(self) -> int:
        """The number of the version with which new tokens are sampled."""
        return self._condition.version

    @property
    def held(self) -> Held | None:
        """The version that the model holds; None while it holds no version as a whole."""
        return self._condition.held

    @property
    def is_asleep(self) -> bool:
        """True while the weights or the KV cache are off the GPU."""
        return self._condition.is_asleep

    def require_ready(self, *, admits: Collection[str] = ()) -> None:
        """Raise ApiError where the engine can't generate, unless `admits` has the reason's code."""
        reason = self._reason()
        if reason is not None and reason.code not in admits:
            raise ApiError(503, **reason.model_dump())

    def require_alive(self) -> None:
        """Raise ApiError where the engine is lost: no reload brings it back."""
        self.require_ready(admits=protocol.CURABLE)

    def _reason(self) -> protocol.ErrorBody | None:
        """Name the reason why the engine can't generate, or None. Notes first if it has died."""
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

    def share(self, gpu_sharing: GpuSharing) -> None:
        """Share the GPU with a trainer: from now on each reload wakes the engine."""
        self._gpu_sharing = gpu_sharing

    # These note what has changed, and move no memory: share_gpu.py does.

    def note_asleep(self) -> None:
        """Refuse to generate from now on. Raises ApiError where the engine is lost."""
        self.require_alive()
        if self._condition.state is EngineState.READY:
            self._condition.move(EngineState.ASLEEP, ASLEEP)
        elif self._condition.state is EngineState.BROKEN:
            self._condition.move(EngineState.BROKEN_ASLEEP, self._condition.reason)

    def note_weights_dropped(self) -> None:
        """Note that the weights were thrown away, as the engine fell asleep."""
        self._condition.held = None
        self._condition.is_base_replaced = True

    def note_awake(self) -> None:
        """Generate again, unless the engine is broken, too."""
        if self._condition.state is EngineState.ASLEEP:
            self._condition.move(EngineState.READY, None)

    def _note_loaded(self) -> None:
        """Leave the broken state after a load. Raises ApiError where the engine is lost."""
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
        """Describe the engine for /health, also while it can't generate."""
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
            **vllm_api.load(),  # vLLM's gauges of its load
            error=self._condition.failure,
        )

    async def heartbeat(self, request: protocol.HeartbeatRequest) -> protocol.Health:
        """Note that a trainer uses the server, or leaves it. Raises ApiError if another has it."""
        if request.leaving:
            self.holder.release(request.trainer)
        else:
            self.holder.claim(request.trainer, take_over=request.take_over)
        return self.health()

    async def read(self, body: bytes) -> tuple[protocol.GenerateRequest, list[Job]]:
        """Read the body of a generate request, and admit it. Raises ApiError."""
        request, jobs = await self.sampler.read(body)
        self.admit(request)
        return request, jobs

    def admit(self, request: protocol.GenerateRequest | protocol.SessionRequest) -> None:
        """Raise ApiError where another trainer has the server, or the caller's session is over."""
        self.holder.claim(request.trainer)
        if request.session not in (None, self.session):
            message = "this server was started again"
            raise ApiError(409, "other_session", message, "bring it up to date first")

    async def reload(self, request: protocol.ReloadRequest) -> protocol.ReloadResponse:
        """Load a weight version, or compare the model with it.

        A version refused with 4xx changes nothing; any other one wakes the engine up. If loading
        fails, on wrong bytes too, or the model differs (409 not_held), the engine stays paused and
        requests end with the reason until a reload succeeds. A comparison that breaks off changes
        nothing.
        """
        async with self.lock:
            self.holder.claim(request.trainer)
            self.require_ready(admits=() if request.compare else protocol.CURABLE)
            start = time.perf_counter()

            # Find the version while generation goes on, and refuse one that can't be loaded.
            find = self._finder_of(request.source.kind)
            incoming = await find(request.source, request.version)
            held = self._held_if_same(request.version, incoming)
            if request.compare:
                return await self._compare(request.version, incoming, held, start)

            # A version that is held already is not loaded again. Its source must be the same, too:
            # the source of a broadcast names the transfer.
            if held is None or held.source != request.source:
                held = await self._load(request, incoming, start)
            if self._gpu_sharing is not None:
                await self._gpu_sharing.bring_back_all()
            return held.answer

    def _finder_of(self, kind: str) -> Find:
        """Look up what finds versions in a kind of source. Raises ApiError for an unknown kind."""
        if kind not in self.sources:
            kinds = ", ".join(sorted(self.sources))
            message = f"source.kind: no part of this server reads {kind!r}; it reads {kinds}"
            hint = "start it with the part's file under server.plugins, or set another sync.backend"
            raise invalid(message, hint)
        return self.sources[kind]

    def _held_if_same(self, version: int, incoming: IncomingVersion) -> Held | None:
        """Look up the version that the model holds; None if it is another one than `incoming`.

        The checksum must agree, too: a run that was resumed may give the number to other weights.
        """
        held = self.held
        if held is None or held.answer.version != version:
            return None
        if incoming.checksum not in ("", held.answer.checksum):
            return None
        return held

    async def _load(
        self, request: protocol.ReloadRequest, incoming: IncomingVersion, start: float
    ) -> Held:
        """Pause, load a version into the model, and generate with it. Raises ApiError."""

        async def load() -> dict[str, Any]:
            only_compare = False
            answers: list[dict[str, Any]] = await vllm_api.call_workers(
                self.llm, *incoming.call, incoming.checksum, only_compare
            )
            await self.llm.update_weight_version(str(request.version))
            await self._resume()
            return answers[0]  # the workers agree, as each has read all tensors

        # An engine that was asleep is paused already.
        sharing = self._gpu_sharing
        was_asleep = sharing is not None and await sharing.bring_back_weights()
        if not was_asleep:
            await self.pause(request.in_flight)
        if incoming.is_whole:
            self._condition.is_base_replaced = True
        doing = f"loading version {request.version}"
        loaded = await self._work_on_model(doing, incoming, load())
        self._note_loaded()
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
        self, version: int, incoming: IncomingVersion, held: Held | None, start: float
    ) -> protocol.ReloadResponse:
        """Compare the model with a version that it holds, in a pause. Raises ApiError.

        The engine goes on if a worker fails, and stays paused if the model differs.
        """
        if held is None:
            message = f"the engine does not hold this version {version}, so it can't be compared"
            raise ApiError(503, "other_version", message, "load it first")
        doing = f"comparing with version {version}"

        # It decides itself whether the engine goes on, as `_work_on_model` expects of work that
        # raises ApiError.
        async def compare() -> None:
            only_compare = True
            try:
                answers = await vllm_api.call_workers(
                    self.llm, *incoming.call, held.answer.checksum, only_compare
                )
            except RuntimeError as error:
                # A worker failed. All workers have put back the weights that they compared.
                await self._resume()
                message = f"{doing} failed: {cause_of(error)}"
                hint = "the engine goes on as before"
                raise ApiError(500, "compare_failed", message, hint) from error

            # With tensor parallelism, each worker compares its own part of a tensor.
            names_that_differ = set[str]()
            for answer in answers:
                names_that_differ.update(answer["different"])
            different = sorted(names_that_differ)
            if different:
                names = ", ".join(different[:3])
                message = f"{doing} failed: the model differs in {names} ({len(different)} in all)"
                await self.fail_all(500, "reload_failed", message, RELOAD)
                raise ApiError(409, "not_held", message, RELOAD)
            await self._resume()

        await self.pause("keep", clear_cache=False)
        await self._work_on_model(doing, incoming, compare())
        return held.answer.model_copy(update={"seconds": time.perf_counter() - start})

    async def _work_on_model(self, doing: str, incoming: IncomingVersion, work: Awaitable[T]) -> T:
        """Wait for work on the model. Raises ApiError.

        Work that raises ApiError has seen to the engine itself. After any other failure the engine
        stays paused: its model may be half loaded.
        """
        try:
            return await self.in_time(work)
        except Exception as error:
            incoming.discard()
            if isinstance(error, ApiError):
                raise
            message = f"{doing} failed: {cause_of(error)}"
            raise await self.fail_all(500, "reload_failed", message, RELOAD) from error

    async def _resume(self) -> None:
        self.require_alive()  # it may be shutting down
        if not self.is_asleep:
            await self.llm.resume_generation()

    async def _find_on_disk(self, source: protocol.DiskSource, version: int) -> IncomingVersion:
        """Find a version in its folder, and check all of it except the tensors' values."""
        folder, described, adapter = await self.read_files(versions.read, self.root, source.name)
        expected = await self.expected(adapter)
        versions.check_manifest(described, version, expected)
        await self.read_files(versions.check_headers, folder, described)
        call = "hocket_load_disk", str(folder)
        return IncomingVersion(call, described.checksum, is_whole=adapter is None)

    async def expected(self, adapter: protocol.AdapterConfig | None) -> ModelShapes:
        """List the tensors of the model, or of this adapter of it. Raises ApiError."""
        model = await self.read_files(model_shapes, self.model)
        if adapter is None:
            return model
        shapes = versions.adapter_shapes(adapter, model, self.max_adapter_rank)
        if self._condition.is_base_replaced:
            message = (
                "the weights that an adapter belongs to are gone: a whole version has replaced them"
            )
            hint = "restart the server with the trainer's model.lora"
            raise ApiError(409, "base_replaced", message, hint)
        return shapes

    async def pause(self, in_flight: InFlight, *, clear_cache: bool = True) -> None:
        """Stop generation. Raises ApiError where running requests take too long."""
        mode = MODES[in_flight]
        try:
            await self.in_time(self.llm.pause_generation(mode=mode, clear_cache=clear_cache))
        except TimeoutError as late:
            deadline = f"sync.timeout_s={self.timeout_s:g}"
            message = f"{self.llm.in_flight} requests did not end within {deadline}"
            # Give up the pause: the requests go on, with the weights that they had.
            try:
                await asyncio.wait_for(self.llm.resume_generation(), vllm_api.ABORT_TIMEOUT_S)
            except Exception as error:
                message += f", and the engine does not go on: {cause_of(error)}"
                raise await self.fail_all(503, "not_resumed", message, RELOAD) from error
            hint = "they go on; set a higher sync.timeout_s, or sync.in_flight=keep"
            raise ApiError(503, "busy", message, hint) from late

    async def read_files(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that reads files, in a thread. Raises ApiError past the deadline."""
        try:
            return await self.in_time(asyncio.to_thread(function, *arguments))
        except TimeoutError as error:
            deadline = f"sync.timeout_s={self.timeout_s:g}"
            message = f"the files were not read within {deadline}: does their disk hang?"
            hint = "the old weights keep serving; publish it again"
            raise ApiError(503, "slow_disk", message, hint) from error

    async def in_time(self, work: Awaitable[T]) -> T:
        """Wait for work of the engine, at most `timeout_s`, and return its result.

        Raises TimeoutError that names the setting, or ApiError where the engine is lost: vLLM never
        answers the calls to a process that has ended, so this looks at it meanwhile.
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
        """End all requests with an error, and refuse further ones with it.

        None may wait for a good version, which may never come. Returns the error, for the caller to
        raise. Raises the ApiError of a lost engine in its place, as that one says more.
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
