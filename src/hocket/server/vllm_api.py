"""Run vLLM 0.32's engine, by its private names too.

Its arguments are in vllm_arguments.py, requests in vllm_requests.py, and vllm_weights.py changes
weights.
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
from hocket.server.vllm_arguments import app_arguments, is_cpu_build
from hocket.server.vllm_weights import adapter_request

logger = logging.getLogger("hocket")

ROUTES = frozenset({"/v1/models", "/v1/completions", "/v1/chat/completions"})
ROUTES |= {"/metrics", "/docs", "/docs/oauth2-redirect", "/openapi.json"}
"""The routes of vLLM that are served; others can abort anybody's requests, for one."""
ABORT_TIMEOUT_S = 2.0
LOOK_S = 1.0  # between looks at whether the engine lives
SLOTS = 4
"""Requests that the engine is given, per sequence that it decodes at the same time; the others wait in the server."""
Generate = Callable[[Any, str], AsyncGenerator[Any, None]]
"""(vLLM's SamplingParams, id of the request) -> vLLM's RequestOutputs."""
Sample = Callable[[Generate, Any, Any, str], AsyncGenerator[Any, None]]
"""(how to ask, vLLM's prompt, parameters and id of a request) -> what its caller gets."""
SAMPLE: ContextVar[Sample | None] = ContextVar("sample", default=None)
"""What samples for the request being served; None: the engine, as it is asked."""


# Else Python searches vLLM and torch for garbage once more at its end, for seconds.
atexit.register(gc.freeze)


def _shown(record: logging.LogRecord) -> bool:
    """Decide whether to show a log record of vLLM: what ends an engine is in `last_words`."""
    return record.exc_info is None or TRACEBACK in os.environ


logging.getLogger("vllm.v1.engine.async_llm").addFilter(_shown)


def die_with_parent_process() -> None:
    """Kill this child as soon as its parent is gone: vLLM's own would outlive it and keep its memory."""
    parent: Any = multiprocessing.parent_process()
    if parent is not None:
        die_with_parent(parent.pid, signal.SIGKILL)


def allow_amx() -> None:
    """Ask the kernel for AMX, which vLLM's attention in bfloat16 uses without asking."""
    import torch

    if not torch.cpu._init_amx():
        torch.cpu._is_amx_tile_supported = lambda: False  # where vLLM asks


def start_engine(args: Namespace) -> Any:
    """Start an engine, which loads the model. Returns its AsyncLLM.

    Call it outside an event loop, where a signal can interrupt it. If the engine can hold an adapter,
    every request uses one: call `drop_adapter` before the first request.
    """
    import vllm.v1.engine.utils
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.core import EngineCoreProc

    import hocket.server.vllm_text  # noqa: F401 - vLLM's own routes make text as it does

    # Without the usage, vLLM takes a quarter of the batched tokens on an H100.
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(
        UsageContext.OPENAI_API_SERVER
    )
    llm_class = _admitting_llm(SLOTS * config.scheduler_config.max_num_seqs)
    # On a CPU the engine is a fork: a new process would import all of vLLM again, half of the start.
    if is_cpu_build():
        vllm.v1.engine.utils.get_mp_context = Forks
    # The engine's process runs our function, which calls vLLM's. A forked child inherits both; in
    # any other one the class is vLLM's own again.
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
    """A forked engine. Its parent imports vLLM's app meanwhile, in a thread.

    The thread starts after the fork: a lock that it held at the fork would stay locked for ever in
    the child.
    """

    def start(self) -> None:
        super().start()
        threading.Thread(target=_import_app).start()


class Forks(ForkContext):
    Process = ForkedEngine


def _import_app() -> None:
    for part in ("app", "cli_args", "api_server.app_state"):
        importlib.import_module(f"vllm.entrypoints.launchers.{part}")


def _admitting_llm(num_slots: int) -> Any:
    """Make a class of AsyncLLM that admits at most `num_slots` requests at once; others wait.

    Requests of vLLM's own routes come this way, too. Each first calls `require_ready`, which may
    raise. `in_flight` counts the requests that have a slot.
    """
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    slots = asyncio.Semaphore(num_slots)

    class AdmittingLLM(AsyncLLM):  # type: ignore[misc]  # vLLM is not typed
        require_ready: Callable[[], None] = staticmethod(lambda: None)
        ends: Sequence[int] = ()  # tokens that end an answer, some of which vLLM does not know
        stops: Sequence[int] = ()  # those that end it even where a request ignores ends
        last_words = Path(tempfile.gettempdir(), f"hocket-engine-{secrets.token_hex(8)}.txt")
        in_flight = 0

        def generate(
            self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
        ) -> Any:
            # If the engine can hold an adapter it always has one, if only of zeros.
            if self.vllm_config.lora_config is not None:
                kwargs["lora_request"] = adapter_request("in memory")
            generate = super().generate

            def ask(params: Any, request_id: str) -> AsyncGenerator[Any, None]:
                self.require_ready()
                ends = self.stops if params.ignore_eos else [*self.ends, *self.stops]
                params.stop_token_ids = [*(params.stop_token_ids or ()), *ends]
                return self.admitted(generate(prompt, params, request_id, **kwargs))

            # An agent's session samples its own way, and asks as often as it wants.
            sample = SAMPLE.get()
            if sample is None:
                return ask(sampling_params, request_id)
            return sample(ask, prompt, sampling_params, request_id)

        async def admitted(self, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
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
    """Make the error of a request that vLLM could not begin; vLLM's own has no message."""
    cause = error.__cause__ or error
    logger.error("vLLM could not begin a request", exc_info=cause)
    if isinstance(cause, ImportError):
        hint = "leave out what asks for it, structured outputs for one, or install it in the server's environment"
        return ApiError(
            422, "not_installed", f"this server lacks a package for this request: {cause}", hint
        )
    return ApiError(
        500, "generation_failed", f"{type(cause).__name__}: {cause}", "the server's log says more"
    )


def bounded(plan: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Bound vLLM's plan of the KV cache to the blocks that requests can fill, unless a size is set.

    A large GPU holds millions of a tiny model's blocks, and vLLM walks through all of them with each
    weight version.
    """

    def bounded_plan(config: Any, specs: Any, memory: Any) -> list[Any]:
        planned = plan(config, specs, memory)
        cache = config.cache_config
        length = config.model_config.max_model_len
        each = sum(
            math.ceil(length / group.kv_cache_spec.block_size)
            for group in planned[0].kv_cache_groups
        )
        most = (
            1 + SLOTS * config.scheduler_config.max_num_seqs * each
        )  # vLLM keeps one block for itself
        if (
            cache.kv_cache_memory_bytes
            or cache.num_gpu_blocks_override
            or planned[0].num_blocks <= most
        ):
            return planned
        cache.num_gpu_blocks_override = most
        return plan(config, specs, memory)

    return bounded_plan


def run_engine(last_words: Path, *args: Any, **kwargs: Any) -> None:
    """Run the engine in this process, which ends with the server; write the error that ends it to a file."""
    from vllm.v1.engine import core
    from vllm.v1.engine.core import EngineCoreProc

    def keep(record: logging.LogRecord) -> bool:
        if record.exc_info and str(record.msg).startswith(
            "EngineCore"
        ):  # vLLM tells the server only after this
            words = f"{cause_of(record.exc_info[1])}\n\n{traceback.format_exc()}"
            last_words.write_text(words, encoding="utf-8")
        return _shown(record)

    logging.getLogger("vllm.v1.engine.core").addFilter(keep)
    core.get_kv_cache_configs = bounded(core.get_kv_cache_configs)
    # A search for garbage would copy the memory that a fork shares.
    gc.freeze()
    gc.enable()
    die_with_parent_process()
    allow_amx()
    # A terminal's Ctrl-C is for the server, which ends this process after its requests.
    os.setpgid(0, 0)
    try:
        # vLLM's own function: under its own name where this process is no fork.
        getattr(EngineCoreProc, "vllm_run_engine_core", EngineCoreProc.run_engine_core)(
            *args, **kwargs
        )
    except Exception:  # noqa: BLE001 - the server says it
        sys.exit(1)


def last_words(llm: Any) -> str:
    """Name the error that ended the engine and the place of its traceback; "" if it runs, or was killed."""
    path: Path = llm.last_words
    if not path.exists():
        return ""
    error = path.read_text("utf-8").splitlines()[0]
    return f"{error} (its traceback is in {path})"


async def openai_app(llm: Any, args: Namespace) -> Any:
    """Make vLLM's OpenAI-compatible app on the engine, with the ROUTES alone."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state

    args = app_arguments(args)
    tasks = await llm.get_supported_tasks()
    app = app_without_engine(args, tasks, llm.model_config)
    await init_app_state(llm, app.state, args, tasks)
    return app


def app_without_engine(args: Namespace, tasks: tuple[str, ...], model_config: Any) -> Any:
    from vllm.entrypoints.launchers.app import build_app

    app = build_app(args, tasks, model_config)
    app.router.routes[:] = [
        route for route in app.router.routes if getattr(route, "path", None) in ROUTES
    ]
    return app


def load() -> dict[str, Any]:
    """Read vLLM's gauges, as fields of Health; {} before there are any."""
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
    """End every request, vLLM's routes' too; nothing is sampled until generation is resumed."""
    # vLLM reports failures of the engine as plain Exceptions. The caller already reports another one.
    with contextlib.suppress(Exception):
        await asyncio.wait_for(
            llm.pause_generation(mode="abort", clear_cache=True), ABORT_TIMEOUT_S
        )


def answered(method: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Make a method return {"value": ...}, or {"error": ...} where it raises.

    A worker must not raise: vLLM would then take the other workers' answers for those to later calls.
    """

    @functools.wraps(method)
    def answer(*args: Any) -> dict[str, Any]:
        try:
            return {"value": method(*args)}
        except Exception as error:  # noqa: BLE001 - the engine raises it again
            return {"error": cause_of(error)}

    return answer


async def call_workers(llm: Any, method: str, *arguments: Any) -> list[Any]:
    """Call a method of all workers and return their answers. Raises RuntimeError where one failed."""
    answers = await llm.collective_rpc(method, args=arguments)
    for answer in answers:
        if "error" in answer:
            raise RuntimeError(answer["error"])
    return [answer["value"] for answer in answers]
