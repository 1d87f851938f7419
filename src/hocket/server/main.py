"""Start the generation server, and stop it with all of its processes."""

import asyncio
import contextlib
import errno
import gc
import os
import resource
import signal
import socket
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import psutil

from hocket.common.machine import bound_nccl, cpu_threads, holder, is_loopback, refuse_open
from hocket.common.registry import Registry, load_plugins
from hocket.common.shell import socket_folder
from hocket.common.tasks import starting
from hocket.config import Config
from hocket.data import model_folder
from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError, ServerError, program, remedy
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
KEEP_ALIVE_S = 600  # longer than any client keeps an idle connection
MAX_HEAD_BYTES = 64 << 10  # limit of a request line and its headers
OTHER_SETTINGS = (
    "another model.path; or, where memory is short, a lower model.max_length or "
    "server.engine.max_num_seqs, and for the KV cache another server.kv_cache_mib or "
    "server.gpu_memory_utilization"
)
"""The settings to try after the engine failed; the end of an error sentence."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
HTTP_PARTS: Registry[Callable[["uvicorn.Config"], None]] = Registry(
    "HTTP part",
    public="hocket.extras.public",
)
http_part = HTTP_PARTS.register
"""Register a function that changes uvicorn's settings before a server listens (decorator).

It is called for every HTTP server of hocket, also for the reward server (serve-reward) and the page
of a run.

Args:
    name: its name; no setting names it.

Example: a file under `server.plugins` that bounds the requests that are answered at once.

    @http_part("bounded")
    def bounded(http: uvicorn.Config) -> None:
        http.limit_concurrency = 512
"""


def serve(config: Config) -> None:
    """Load the model and serve it until Ctrl-C or SIGTERM; return with every child process ended.

    In a script, call it below `if __name__ == "__main__":`, as the engine's processes import the
    script again. Raises ConfigError where the server can't start, and ServerError where the engine
    ends.
    """
    import uvloop

    start = time.perf_counter()
    server = config.server
    if config.model.random_init:
        raise ConfigError(
            "model.random_init has no meaning for the server: its random weights would not be the "
            f"trainer's. Save a model first, by {program()} sft CONFIG, and serve it: "
            "model.path=RUN/model model.random_init=false"
        )
    with (
        contextlib.closing(bind(server.host, server.port, config.token)) as sock,
        _ending_children(),
    ):
        # The engine's process must not hold the port.
        os.register_at_fork(after_in_child=sock.close)

        # Prepare this process; vLLM, imported later, reads the environment variables.
        workers = (config.launch.servers or 1) * server.tensor_parallel_size
        threads = cpu_threads(config.model.path, processes=workers)
        prepare_environment(server.tensor_parallel_size, threads)
        bound_nccl(config.sync.bucket_timeout_s)
        load_plugins(server.plugins)

        # Import the server's parts: some name modules that are imported while the engine loads.
        from hocket.server.parts import PARTS

        list(PARTS.each())

        # Load the model. A signal ends the process at once until the event loop takes signals over.
        _on_signals(_end_at_once)
        print(f"hocket: loading model {config.model.path}", flush=True)
        with starting():
            args, llm = _load(config)
            gc.freeze()  # later garbage collections skip all objects that exist by now

        # Serve. An engine that is lost ends the server with the cause.
        try:
            uvloop.run(_serve(config, args, llm, sock, start))
        except ApiError as error:
            raise _server_error(error, llm) from error
        finally:
            _on_signals(signal.SIG_IGN)  # an impatient second Ctrl-C must not leave anything behind
            llm.shutdown(timeout=GRACE_S)
    print("hocket: stopped", flush=True)


def _server_error(error: ApiError, llm: Any) -> ServerError:
    """Make the error that ends the server, with the cause if the engine's process ended."""
    message = f"{error}; {error.body.hint}"
    if error.body.code == "engine_dead":
        cause = vllm_api.last_words(llm) or "it was killed, perhaps for memory (dmesg)"
        message = f"{error}: {cause}; start the server again, or with {OTHER_SETTINGS}"
    return ServerError(message, code=error.body.code)


def _load(config: Config) -> tuple[Namespace, Any]:
    """Load the model. Returns vLLM's arguments and the engine. Raises ConfigError."""
    try:
        # Refuse a bad model folder before the engine starts.
        tokenizer = model_folder.examine(config.model, trains=False)
        note = tokenizers.said_end(config.model.path, tokenizer)
        if note:
            print(f"hocket: {note}", flush=True)
        args = vllm_arguments.engine_arguments(config)
        return args, vllm_api.start_engine(args)
    except (ValueError, RuntimeError, OSError) as error:
        cure = remedy(error) or f"start the server with {OTHER_SETTINGS}"
        raise ConfigError(f"vLLM can't run this model: {error}; {cure}") from error


def prepare_environment(tensor_parallel_size: int, threads: int) -> None:
    """Set the environment variables that vLLM reads, except those that the user has set."""
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1",  # /health must be able to report the cause
        "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings are about what hocket does on purpose
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "TORCH_LOGS": "-torch._library.triton",
    }
    if vllm_arguments.is_cpu_build():
        defaults |= {
            # The worker runs in the engine's process, which saves the start of another process.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": str(threads),
            # Otherwise the first log-probs wait half a minute for a compiler.
            "TORCHDYNAMO_DISABLE": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        # By default vLLM wants a NUMA node for each of several workers.
        if tensor_parallel_size > 1:
            defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    folder = socket_folder()
    if folder is not None:
        defaults["VLLM_RPC_BASE_PATH"] = folder

    # Kubernetes sets VLLM_PORT to a URL where a service is called vllm; vLLM wants a number.
    if not os.environ.get("VLLM_PORT", "0").isdecimal():
        del os.environ["VLLM_PORT"]

    # Set only what is not set yet. setproctitle, by which vLLM names the engine's process, looks in
    # memory for the arguments in front of the first variable. If that one is set again, even to the
    # same value, it lies elsewhere, and the process keeps its name.
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning)


def bind(host: str, port: int, token: str | None) -> socket.socket:
    """Take the port at once; until `listen`, the kernel refuses connections. Raises ConfigError."""
    refuse_open("server", host, token)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"server.host={host} is no address of this machine: {error}") from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Try without SO_REUSEADDR first: with it, two servers that are still loading could take the
        # same port. It is only for a port whose ended server left connections in the kernel.
        with contextlib.suppress(OSError):
            sock.bind(address)
            return sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        reason = f"can't listen on server.host={host} server.port={port}: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            reason = f"port {port} is in use by {holder(port)}; set another server.port"
        raise ConfigError(reason) from error
    return sock


def listen(sock: socket.socket) -> None:
    """Accept connections. Call it before you print a line that tells clients to connect."""
    # Connections inherit this: the port is free again as soon as the server has ended.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.listen()


def http_server(app: "ASGIApp", host: str) -> "uvicorn.Server":
    """Make the uvicorn server of an app, with every HTTP part installed.

    Also raises the limit of open files of this process, as each connection takes one. Prints a
    warning where other machines can connect and no part replaces uvicorn's plain HTTP protocol.
    """
    import uvicorn

    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))  # a shell's 1,024 are few
    config = uvicorn.Config(
        app,
        host=host,
        http="h11",  # httptools, which some machines have, takes heads of any length
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        ws="none",
        reset_contextvars=True,  # a pipelined request would inherit the context of the last one
        log_level="error",  # a warning for each odd request would let strangers fill the disk
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    for install in HTTP_PARTS.each():
        install(config)
    if config.http == "h11" and not is_loopback(host):
        lacks = "closes connections whose requests are late, or bounds those of one address"
        warning = f"{host} lets other machines in, and nothing {lacks}: put a proxy in front"
        print(f"hocket: {warning}", flush=True)
    return uvicorn.Server(config)


async def _serve(
    config: Config, args: Namespace, llm: Any, sock: socket.socket, start: float
) -> None:
    """Serve until a signal comes. Raises ApiError where the engine is lost."""
    from hocket.server.app import assemble
    from hocket.server.engine import Engine

    # Build the engine, the app with its routes, and the HTTP server around it.
    engine = Engine(
        llm,
        model=config.model.path,
        root=config.sync_root,
        timeout_s=config.sync.timeout_s,
        share_gpu=config.launch.share_gpu,
        template=config.data.template_options,
    )
    app = assemble(
        engine,
        host=args.host,
        token=config.token,
        arguments=args,
        image_hosts=config.data.image_hosts,
        max_requests=config.server.max_requests,
    )
    server = http_server(app.guard, args.host)
    # uvicorn must not handle signals: our handlers end the engine, too.
    server.capture_signals = contextlib.nullcontext  # type: ignore

    # Generate once, then let clients in.
    await engine.start()
    await app.start()
    stopping = asyncio.Event()
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    listen(sock)
    print(f"hocket: ready on {config.own_url} in {time.perf_counter() - start:.1f} s", flush=True)

    # Serve until a signal, the end of the HTTP server, or the loss of the engine.
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    serving.add_done_callback(lambda _: stopping.set())
    try:
        await _watch(engine, stopping)
    finally:
        print("hocket: stopping", flush=True)
        await engine.stop()
        server.should_exit = True
        await serving


async def _watch(engine: "Engine", stopping: asyncio.Event) -> None:
    """Wait until the server is to stop.

    Raises ApiError where the engine is lost, after time for clients to learn the reason.
    """
    while not stopping.is_set():
        try:
            engine.require_ready(admits=CURABLE)
        except ApiError:
            await asyncio.sleep(GRACE_S)  # /health and the requests in flight report the reason
            raise
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), LOOK_S)


@contextlib.contextmanager
def _ending_children() -> Iterator[None]:
    """Kill, in the end, every child process that the body has started."""
    before = psutil.Process().children(recursive=True)  # children of a script that calls serve
    try:
        yield
    finally:
        _on_signals(signal.SIG_IGN)
        _kill_children(spared=before)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _kill_children(*, spared: Iterable[psutil.Process] = ()) -> None:
    """Kill all descendants except `spared` and Python's resource tracker.

    The tracker cleans up and then ends by itself.
    """
    for child in set(psutil.Process().children(recursive=True)).difference(spared):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "multiprocessing.resource_tracker" not in " ".join(child.cmdline()):
                child.kill()


def _on_signals(handler: Any) -> None:
    for number in SIGNALS:
        signal.signal(number, handler)


def _end_at_once(number: int, frame: Any) -> None:
    """End this process: while the model loads, vLLM swallows exceptions and waits for minutes."""
    _kill_children()
    os.write(1, b"hocket: stopped\n")
    os._exit(0)
