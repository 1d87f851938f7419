"""Run vLLM 0.32's engine. This module uses vLLM's private names, too.

vllm_arguments.py makes the engine's arguments, vllm_requests.py its requests, and vllm_weights.py
changes its weights.
"""

import asyncio
import atexit
import contextlib
import functools
import gc
import importlib
import logging
import math
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
import threading
import traceback
from argparse import Namespace
from collections.abc import AsyncGenerator, Callable, Sequence
from contextvars import ContextVar
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any

from hocket.common.processes import die_with_parent
from hocket.errors import TRACEBACK, cause_of
from hocket.server.errors import ApiError
from hocket.server.vllm_arguments import is_cpu_build
from hocket.server.vllm_weights import adapter_request

logger = logging.getLogger("hocket")

IMPORTED_EARLY: list[str] = []
"""Modules that parts of the server use; they are imported while the engine's process starts."""
ABORT_TIMEOUT_S = 2.0  # seconds for vLLM to end all requests
LOOK_S = 1.0  # seconds between two looks at whether the engine lives
SLOTS = 4
"""Requests in the engine per sequence that it decodes at once; further ones wait in the server."""
Generate = Callable[[Any, str], AsyncGenerator[Any, None]]
"""The engine's generate for one prompt: (vLLM's SamplingParams, request id) -> RequestOutputs."""
Sample = Callable[[Generate, Any, Any, str], AsyncGenerator[Any, None]]
"""(generate, vLLM's prompt, SamplingParams, request id) -> the RequestOutputs for the client. It
chooses what to call `generate` with, and how often."""
SAMPLE: ContextVar[Sample | None] = ContextVar("sample", default=None)
"""What samples in place of the engine's generate, for the HTTP request that is being served."""


# Otherwise Python searches vLLM and torch for garbage once more at its end, for seconds.
atexit.register(gc.freeze)


def _shown(record: logging.LogRecord) -> bool:
    """Hide log records with a traceback: `last_words` has the error that ends an engine.

    The environment variable HOCKET_TRACEBACK shows them.
    """
    return record.exc_info is None or TRACEBACK in os.environ


logging.getLogger("vllm.v1.engine.async_llm").addFilter(_shown)


def die_with_parent_process() -> None:
    """Have the kernel kill this child as soon as its parent is gone.

    Without it vLLM's processes would outlive the server, and keep its memory.
    """
    parent: Any = multiprocessing.parent_process()
    if parent is not None:
        die_with_parent(parent.pid, signal.SIGKILL)


def allow_amx() -> None:
    """Ask the kernel for AMX, which vLLM's attention in bfloat16 uses without asking."""
    import torch

    if not torch.cpu._init_amx():
        # The kernel refused. vLLM calls this function to see whether there is AMX.
        torch.cpu._is_amx_tile_supported = lambda: False


def start_engine(args: Namespace) -> Any:
    """Start an engine, which loads the model. Returns its AsyncLLM.

    Call it outside an event loop, where a signal can interrupt it. If the engine can hold an
    adapter, every request uses one: call `drop_adapter` before the first request.
    """
    import vllm.v1.engine.utils
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.core import EngineCoreProc

    # The import alone replaces the class that makes the text of vLLM's routes.
    import hocket.server.vllm_text  # noqa: F401

    # Without the usage, vLLM takes a quarter of the batched tokens on an H100.
    usage = UsageContext.OPENAI_API_SERVER
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(usage)
    llm_class = _admitting_llm(SLOTS * config.scheduler_config.max_num_seqs)
    # On a CPU the engine is a fork. A new process would import all of vLLM again, which takes half
    # of the start.
    if is_cpu_build():
        vllm.v1.engine.utils.get_mp_context = Forks
    # The engine's process runs run_engine, which calls vLLM's function. A fork of this process has
    # that under another name; a new process imports vLLM's class as it was.
    original = EngineCoreProc.run_engine_core
    EngineCoreProc.vllm_run_engine_core = original
    EngineCoreProc.run_engine_core = functools.partial(run_engine, llm_class.last_words)
    try:
        return llm_class.from_vllm_config(config)
    except RuntimeError as error:
        raise RuntimeError(last_words(llm_class) or str(error)) from error
    finally:
        EngineCoreProc.run_engine_core = original


class ForkedEngine(ForkProcess):
    """A forked engine. Its parent imports the modules IMPORTED_EARLY meanwhile, in a thread.

    The thread starts after the fork: a lock that it held at the fork would stay locked for ever in
    the child.
    """

    def start(self) -> None:
        """Fork the engine, then import modules in a thread of this process."""
        super().start()
        threading.Thread(target=_import_early).start()


class Forks(ForkContext):
    """A context of multiprocessing whose processes are forked engines."""

    Process = ForkedEngine


def _import_early() -> None:
    for module in IMPORTED_EARLY:
        importlib.import_module(module)


def _admitting_llm(num_slots: int) -> Any:
    """Make a subclass of AsyncLLM that admits at most `num_slots` requests at once; others wait.

    Requests of vLLM's own routes are admitted here, too. Each first calls `require_ready`, which
    may raise. `in_flight` counts the requests that have a slot.
    """
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    slots = asyncio.Semaphore(num_slots)

    class AdmittingLLM(AsyncLLM):  # type: ignore[misc]  # vLLM is not typed
        """vLLM's engine, with slots for requests."""

        require_ready: Callable[[], None] = staticmethod(lambda: None)
        end_ids: Sequence[int] = ()  # tokens that end an answer, some of which vLLM does not know
        always_end_ids: Sequence[int] = ()  # those that end it also under ignore_eos
        # The file to which the engine's process writes the error that ends it.
        last_words = Path(tempfile.gettempdir(), f"hocket-engine-{secrets.token_hex(8)}.txt")
        in_flight = 0

        def generate(
            self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
        ) -> Any:
            """Yield the outputs of a request, sampled by SAMPLE if the server has set it."""
            # If the engine can hold an adapter it always has one, if only of zeros.
            if self.vllm_config.lora_config is not None:
                kwargs["lora_request"] = adapter_request("in memory")
            vllm_generate = super().generate

            def generate_admitted(params: Any, request_id: str) -> AsyncGenerator[Any, None]:
                self.require_ready()
                stop_token_ids = list(params.stop_token_ids or ())
                if not params.ignore_eos:
                    stop_token_ids.extend(self.end_ids)
                stop_token_ids.extend(self.always_end_ids)
                # vLLM's beam search calls with the same parameters again and again.
                params.stop_token_ids = list(dict.fromkeys(stop_token_ids))
                return self.admitted(vllm_generate(prompt, params, request_id, **kwargs))

            sample = SAMPLE.get()
            if sample is None:
                return generate_admitted(sampling_params, request_id)
            return sample(generate_admitted, prompt, sampling_params, request_id)

        async def admitted(self, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
            """Yield the outputs of a request once it has a slot. Raises ApiError."""
            async with contextlib.aclosing(outputs), slots:
                self.require_ready()
                self.in_flight += 1
                try:
                    async for output in outputs:
                        yield output
                except (EngineDeadError, EngineGenerateError) as error:
                    self.require_ready()
                    raise _failure(error) from error
                finally:
                    self.in_flight -= 1

    return AdmittingLLM


def _failure(error: Exception) -> ApiError:
    """Make the error of a request that vLLM could not begin. vLLM's own error has no message."""
    cause = error.__cause__ or error
    logger.error("vLLM could not begin a request", exc_info=cause)
    if isinstance(cause, ImportError):
        message = f"this server lacks a package for this request: {cause}"
        hint = (
            "leave out what asks for it, structured outputs for one, or install it in the "
            "server's environment"
        )
        return ApiError(422, "not_installed", message, hint)
    message = f"{type(cause).__name__}: {cause}"
    return ApiError(500, "generation_failed", message, "the server's log says more")


def bounded(plan: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Wrap vLLM's get_kv_cache_configs: the KV cache has only the blocks that requests can fill.

    A cache whose size is set stays as it is. A large GPU holds millions of a tiny model's blocks,
    and vLLM walks through all of them with each weight version.
    """

    def bounded_plan(config: Any, specs: Any, memory: Any) -> list[Any]:
        planned = plan(config, specs, memory)
        cache = config.cache_config
        length = config.model_config.max_model_len
        if cache.kv_cache_memory_bytes or cache.num_gpu_blocks_override:
            return planned

        # Count the blocks of a sequence of full length, then those of all requests with a slot.
        blocks_per_request = 0
        for group in planned[0].kv_cache_groups:
            blocks_per_request += math.ceil(length / group.kv_cache_spec.block_size)
        num_requests = SLOTS * config.scheduler_config.max_num_seqs
        most_blocks = 1 + num_requests * blocks_per_request  # vLLM keeps one block for itself
        if planned[0].num_blocks <= most_blocks:
            return planned
        cache.num_gpu_blocks_override = most_blocks
        return plan(config, specs, memory)

    return bounded_plan


def run_engine(last_words: Path, *args: Any, **kwargs: Any) -> None:
    """Run the engine in this process, which ends with the server.

    An error that ends the engine is written to the file `last_words`.
    """
    from vllm.v1.engine import core
    from vllm.v1.engine.core import EngineCoreProc

    def keep(record: logging.LogRecord) -> bool:
        # vLLM logs the error first, and then tells the server that the engine has ended: the file
        # is complete when the server looks.
        if record.exc_info and str(record.msg).startswith("EngineCore"):
            words = f"{cause_of(record.exc_info[1])}\n\n{traceback.format_exc()}"
            last_words.write_text(words, encoding="utf-8")
        return _shown(record)

    logging.getLogger("vllm.v1.engine.core").addFilter(keep)
    core.get_kv_cache_configs = bounded(core.get_kv_cache_configs)

    # A garbage collection writes to the objects that it looks at, and would so copy the memory that
    # a fork shares with its parent: have it skip all that exist by now.
    gc.freeze()
    gc.enable()
    die_with_parent_process()
    allow_amx()
    # A terminal's Ctrl-C is for the server, which ends this process after its requests.
    os.setpgid(0, 0)
    try:
        # In a fork, start_engine has kept vLLM's function under another name.
        run_core = getattr(EngineCoreProc, "vllm_run_engine_core", EngineCoreProc.run_engine_core)
        run_core(*args, **kwargs)
    except Exception:  # noqa: BLE001 - the server reports it, from last_words
        sys.exit(1)


def last_words(llm: Any) -> str:
    """Name the error that ended the engine, and the file with its traceback.

    Returns "" for an engine that runs, or that was killed.
    """
    path: Path = llm.last_words
    if not path.exists():
        return ""
    error = path.read_text("utf-8").splitlines()[0]
    return f"{error} (its traceback is in {path})"


def load() -> dict[str, Any]:
    """Read vLLM's gauges of its load, as the fields `waiting` and `kv_use` of Health.

    Returns {} before there are any.
    """
    from prometheus_client import REGISTRY

    names = {"vllm:num_requests_waiting": "waiting", "vllm:kv_cache_usage_perc": "kv_use"}
    fields: dict[str, Any] = {}
    for family in REGISTRY.restricted_registry(names).collect():
        per_engine = [sample.value for sample in family.samples]
        if names[family.name] == "waiting":
            fields["waiting"] = int(sum(per_engine))
        else:
            fields["kv_use"] = max(per_engine)
    return fields


async def abort_all(llm: Any) -> None:
    """End every request, also those of vLLM's routes; nothing runs until generation is resumed."""
    # vLLM reports failures of the engine as plain Exceptions. The caller reports another already.
    with contextlib.suppress(Exception):
        pausing = llm.pause_generation(mode="abort", clear_cache=True)
        await asyncio.wait_for(pausing, ABORT_TIMEOUT_S)


def answered(method: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Wrap a worker's method to return {"value": ...}, or {"error": ...} where it raises.

    A worker must not raise: vLLM would then take the answers of other workers for answers to later
    calls. `call_workers` raises the error in the server.
    """

    @functools.wraps(method)
    def answer(*args: Any) -> dict[str, Any]:
        try:
            return {"value": method(*args)}
        except Exception as error:  # noqa: BLE001 - the engine raises it again
            return {"error": cause_of(error)}

    return answer


async def call_workers(llm: Any, method: str, *arguments: Any) -> list[Any]:
    """Call a method of all workers, and return their answers. Raises RuntimeError if one failed."""
    answers = await llm.collective_rpc(method, args=arguments)
    for answer in answers:
        if "error" in answer:
            raise RuntimeError(answer["error"])
    return [answer["value"] for answer in answers]
