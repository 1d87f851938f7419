"""Start the generation server, and stop it with all of its processes."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import threading
import time
import warnings
from argparse import Namespace
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil

from hocket.common.machine import bound_nccl, cpu_threads, holder, is_loopback
from hocket.common.tasks import cancel
from hocket.config import Config
from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError, ServerError
from hocket.protocol import CURABLE
from hocket.server import vllm_api, vllm_arguments
from hocket.server.errors import ApiError
from hocket.server.vllm_api import LOOK_S

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

    from hocket.server.engine import Engine

GRACE_S = 3
"""Seconds for requests in flight, and then for the engine's processes, to end by themselves."""
LAST_WORDS_S = 15.0
KEEP_ALIVE_S = 600  # longer than any client keeps an idle connection
OTHER_SETTINGS = (
    "another model.path; or, where memory is short, a lower model.max_length or server.engine.max_num_seqs, and for "
    "the KV cache another server.kv_cache_mib or server.gpu_memory_utilization"
)
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(config: Config) -> None:
    """Load the model and serve it until Ctrl-C or SIGTERM; return with every child process ended.

    In a script, call it below `if __name__ == "__main__":`, as the engine's processes import the script again.
    """
    import uvloop

    start = time.perf_counter()
    server = config.server
    check(server.host, config.token, random_init=config.model.random_init)
    with contextlib.closing(bind(server.host, server.port)) as sock, _ending_children():
        os.register_at_fork(after_in_child=sock.close)  # the engine's process must not hold the port
        workers = (config.launch.servers or 1) * server.tensor_parallel_size
        threads = cpu_threads(config.model.path, processes=workers)
        prepare_environment(server.tensor_parallel_size, threads)
        bound_nccl(config.sync.bucket_timeout_s)
        interrupted = threading.Event()
        try:
            for number in SIGNALS:
                signal.signal(number, partial(_interrupt, interrupted))
            print(f"hocket: loading model {config.model.path}", flush=True)
            try:
                tokenizers.load(config.model.path)  # what is wrong with the folder is said before the engine starts
                args = vllm_arguments.engine_arguments(config)
                llm = vllm_api.start_engine(args)
                if interrupted.is_set():
                    raise _Interrupted
            except (ValueError, RuntimeError, OSError) as error:
                raise ConfigError(
                    f"vLLM can't run this model: {error}; start the server with {OTHER_SETTINGS}"
                ) from error
            try:
                from hocket.server.engine import Engine

                engine = Engine(
                    llm,
                    model=config.model.path,
                    root=config.sync_root,
                    timeout_s=config.sync.timeout_s,
                    share_gpu=config.launch.share_gpu,
                    template=config.data.template_options,
                )
                uvloop.run(_serve(engine, args, sock, config.token, config.own_url, start))
            finally:
                _ignore_signals()  # an impatient second Ctrl-C must not leave anything behind
                llm.shutdown(timeout=GRACE_S)
        except BaseException:
            if not interrupted.is_set():
                raise
        print("hocket: stopped", flush=True)


def prepare_environment(tensor_parallel_size: int, threads: int) -> None:
    """Set vLLM's environment variables for this process and its children, except those of the user."""
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1",  # /health must be able to report the cause
        "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings are about what hocket does on purpose
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "TORCH_LOGS": "-torch._library.triton",
    }
    if vllm_arguments.is_cpu_build():
        defaults |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker lives in the engine's process: one start less
            "OMP_NUM_THREADS": str(threads),
            "TORCHDYNAMO_DISABLE": "1",  # or the first log-probs wait half a minute for a compiler
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        if tensor_parallel_size > 1:  # else vLLM wants a NUMA node for each worker
            defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    for key, value in defaults.items():
        os.environ.setdefault(key, value)
    warnings.filterwarnings("ignore", category=FutureWarning)


def check(host: str, token: str | None, *, random_init: bool) -> None:
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"server.host={host} lets other machines in: set server.token (or HOCKET_TOKEN) to at least 8 characters, "
            f"or keep server.host=127.0.0.1"
        )
    if random_init:
        raise ConfigError(
            "model.random_init has no meaning for the server: its random weights would not be the trainer's. "
            "Save a model first, e.g. with `python run.py sft`, and set model.path to it"
        )


def bind(host: str, port: int) -> socket.socket:
    """Take the port at once; until the server listens, the kernel refuses connections."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"server.host={host} is no address of this machine: {error}") from error
    # Reuse is only for connections of an ended server that the kernel still remembers: two servers that are both
    # still loading could otherwise take the same port.
    for reuse in (False, True):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:
            sock.bind(address)
            break
        except OSError as error:
            sock.close()
            if reuse:
                used = f"port {port} is in use by {holder(port) or 'another process'}; set another server.port"
                other = f"can't listen on server.host={host} server.port={port}: {error.strerror}"
                raise ConfigError(used if error.errno == errno.EADDRINUSE else other) from error
    return sock


def http_server(app: "ASGIApp") -> "uvicorn.Server":
    import uvicorn

    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_S)
    config.timeout_keep_alive = KEEP_ALIVE_S
    return uvicorn.Server(config)


async def _serve(
    engine: "Engine", args: Namespace, sock: socket.socket, token: str | None, url: str, start: float
) -> None:
    """Serve until a signal comes. Raises ServerError where the engine is lost: this process is to be started again."""
    from hocket.server.app import assemble

    app = await vllm_api.openai_app(engine.llm, args)
    served = assemble(app, engine, host=args.host, token=token)
    try:
        await engine.start()
    except ApiError as error:
        if engine.llm.errored:
            raise await _lost(engine) from error
        raise
    server = http_server(served)
    server.capture_signals = contextlib.nullcontext  # type: ignore  # our handlers end the engine, too
    app.state.server = server
    signalled = asyncio.Event()
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, signalled.set)
    # Connections inherit this from the listening socket: the port is free again as soon as the server has ended.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.listen()  # who reads the line may ask at once
    print(f"hocket: ready on {url} in {time.perf_counter() - start:.1f} s", flush=True)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    lost = asyncio.create_task(_lost(engine))
    stopping = asyncio.create_task(signalled.wait())
    await asyncio.wait([serving, lost, stopping], return_when=asyncio.FIRST_COMPLETED)
    print("hocket: stopping", flush=True)
    loss = lost.result() if lost.done() else None
    await cancel([lost, stopping])
    await engine.stop()
    server.should_exit = True
    await serving
    if loss is not None:
        raise loss


async def _lost(engine: "Engine") -> ServerError:
    """Return the error of a lost engine, once /health and the requests in flight have had time to tell it."""
    while True:
        try:
            engine.require_ready(admits=CURABLE)
            await asyncio.sleep(LOOK_S)
        except ApiError as error:
            await asyncio.sleep(GRACE_S)
            why = await _last_words(engine) or "it was killed, perhaps for memory (dmesg)"
            message = f"{error}: {why}; start the server again, or with {OTHER_SETTINGS}"
            return ServerError(message, code=error.body.code)


async def _last_words(engine: "Engine") -> str:
    """Return what the engine says as it ends, which takes it long; nothing if it was killed."""
    end = time.monotonic() + LAST_WORDS_S
    while _children() and not vllm_api.last_words(engine.llm) and time.monotonic() < end:
        await asyncio.sleep(0.1)
    return vllm_api.last_words(engine.llm)


@contextlib.contextmanager
def _ending_children() -> Iterator[None]:
    """Kill every process that was started in the body, and has not ended with the engine."""
    before = set(_children())
    try:
        yield
    finally:
        _ignore_signals()
        _kill(set(_children()) - before)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _children() -> list[psutil.Process]:
    """Return all descendants but Python's resource tracker, which cleans up after its parent and then ends."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any("multiprocessing.resource_tracker" in part for part in child.cmdline()):
                found.append(child)
    return found


def _kill(children: Iterable[psutil.Process]) -> None:
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def _ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class _Interrupted(BaseException):
    """Ctrl-C or SIGTERM while the model loads. vLLM swallows a KeyboardInterrupt there and then waits for minutes."""


def _interrupt(interrupted: threading.Event, number: int, frame: Any) -> None:
    interrupted.set()  # as Python drops what is raised within some callbacks, at a fork for example
    _kill(_children())  # they have no work to finish yet
    raise _Interrupted
