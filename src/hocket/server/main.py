"""Starts the generation server, and ends it without leaving anything behind."""

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hocket.config import Config
from hocket.errors import ConfigError
from hocket.server import vllm_api, worker

GRACE_S = 3.0
"""How long requests in flight, and then the engine's processes, get to end by themselves."""
KEEP_ALIVE_S = 600


def serve(config: Config) -> None:
    """Loads the model and serves it until Ctrl-C or SIGTERM; then returns, with every child process ended.

    Where it is called in a script, that must be below `if __name__ == "__main__":`, as the engine's processes import
    the script again.

    Raises:
        ConfigError: the address is not allowed or taken, or vLLM can't run this model with these settings.
    """
    start = time.perf_counter()
    _check(config)
    with contextlib.closing(_bind(config.server.host, config.server.port)) as sock, _ending_children():
        prepare_environment(config)
        vllm_api.preload_engine()
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, _interrupt)
            _say(f"loading model {config.model.path}")
            llm, args, seconds = _start_engine(config)
            try:
                _run(_serve(llm, args, config, sock, seconds, start))
            finally:
                _ignore_signals()  # an impatient second Ctrl-C must not leave anything behind
                llm.shutdown(timeout=GRACE_S)
        except _Interrupted:
            pass
        _say("stopped")


def prepare_environment(config: Config) -> None:
    """Sets what vLLM reads from the environment, in this process and its children; what the user set is kept."""
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1",  # /health must be able to say what happened
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "TORCH_LOGS": "-torch._library.triton",
    }
    if "VLLM_LOGGING_LEVEL" not in os.environ:  # whoever asks for more gets vLLM's own logging
        defaults["VLLM_LOGGING_CONFIG_PATH"] = str(Path(__file__).with_name("logging.json"))
    if vllm_api.is_cpu_build():
        defaults |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker lives in the engine's process: one start less
            # One core is the trainer's: two processes on the same core wait for each other in busy loops.
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) - 1)),
            "TORCHDYNAMO_DISABLE": "1",  # or the first log-probs wait half a minute for a compiler
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        if config.server.tensor_parallel_size > 1:  # else vLLM wants a NUMA node for each worker
            defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    for key, value in defaults.items():
        os.environ.setdefault(key, value)
    os.environ[worker.SERVER_PID] = str(os.getpid())
    warnings.filterwarnings("ignore", category=FutureWarning)


def _check(config: Config) -> None:
    host = config.server.host
    if config.token is None and not _is_loopback(host):
        raise ConfigError(
            f"server.host={host} lets other machines in: set server.token (or HOCKET_TOKEN) to at least 8 characters, "
            f"or keep server.host=127.0.0.1"
        )
    if config.model.random_init:
        raise ConfigError(
            "model.random_init has no meaning for the server: its random weights would not be the trainer's. "
            "Save a model first, e.g. with `python run.py sft`, and set model.path to it"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bind(host: str, port: int) -> socket.socket:
    """Takes the port at once; whoever connects before the server listens is refused, not kept waiting."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"server.host={host} is no address of this machine: {error}") from error
    failure: OSError | None = None
    # Reuse is only for connections of an ended server that the kernel still remembers: two servers that are both
    # still loading could otherwise take the same port.
    for reuse in (False, True):
        sock = socket.socket(family, socket.SOCK_STREAM)
        if reuse:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    assert failure is not None
    if failure.errno == 98:  # EADDRINUSE
        raise ConfigError(f"port {port} is in use by {_holder(port)}; set server.port=") from failure
    raise ConfigError(f"can't listen on server.host={host} server.port={port}: {failure.strerror}") from failure


def _holder(port: int) -> str:
    import psutil

    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == "LISTEN" and connection.pid:
                return f"process {connection.pid} ({' '.join(psutil.Process(connection.pid).cmdline())[:80]})"
    return "another process"


def _start_engine(config: Config) -> tuple[Any, Namespace, dict[str, float]]:
    start = time.perf_counter()
    vllm_api.import_all()
    imported = time.perf_counter()
    try:
        args = vllm_api.engine_arguments(config)
        llm = vllm_api.start_engine(args)
    except (ValueError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"vLLM can't run model.path={config.model.path} with these settings: {error}\n"
            f"What the engine itself printed above names the cause. If memory is short: lower model.max_length or "
            f"server.max_concurrent; for the KV cache set server.kv_cache_mib or server.gpu_memory_utilization"
        ) from error
    return llm, args, {"import": imported - start, "engine": time.perf_counter() - imported}


async def _serve(
    llm: Any, args: Namespace, config: Config, sock: socket.socket, seconds: dict[str, float], start: float
) -> None:
    import uvicorn

    from hocket.server.app import assemble
    from hocket.server.engine import Engine

    loading = time.perf_counter()
    engine = Engine(llm, config)
    app = await vllm_api.openai_app(llm, args)
    door = assemble(app, engine, config)
    await engine.start()
    seconds["routes and first tokens"] = time.perf_counter() - loading
    server = uvicorn.Server(
        uvicorn.Config(
            door,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,  # longer than any client keeps an idle connection
            timeout_graceful_shutdown=int(GRACE_S),
        )
    )
    server.capture_signals = contextlib.nullcontext  # type: ignore  # our handlers end the engine, too
    app.state.server = server
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    # Connections take this over from the listening socket, and the port is free again as soon as the server has ended.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        parts = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())
        _say(f"ready on {config.own_url} in {time.perf_counter() - start:.1f} s ({parts})")
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait((serving, stop), return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    _say("stopping")
    await engine.stop()
    server.should_exit = True
    await serving


def _run(main: Any) -> None:
    import uvloop

    uvloop.run(main)


@contextlib.contextmanager
def _ending_children() -> Iterator[None]:
    """Ends, on the way out, every process that was started on the way in: first asked, then killed."""
    import psutil

    me = psutil.Process()
    before = set(me.children(recursive=True))
    try:
        yield
    finally:
        _ignore_signals()
        left = [child for child in me.children(recursive=True) if child not in before and not _ends_by_itself(child)]
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate()
        for child in psutil.wait_procs(left, timeout=GRACE_S)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _ends_by_itself(process: Any) -> bool:
    """Python's resource tracker ends after its parent: first it removes what that has left behind."""
    return any("multiprocessing.resource_tracker" in part for part in process.cmdline())


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


class _Interrupted(BaseException):
    """Ctrl-C or SIGTERM while the model loads. vLLM swallows a KeyboardInterrupt there and then waits for minutes."""


def _interrupt(number: int, frame: Any) -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):  # there is nothing yet that they could finish
        with contextlib.suppress(psutil.NoSuchProcess):
            if not _ends_by_itself(child):
                child.kill()
    raise _Interrupted


def _say(line: str) -> None:
    print(f"hocket: {line}", file=sys.stdout, flush=True)
