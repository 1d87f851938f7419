"""What is refused before a model loads."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import uvicorn

from hocket import config
from hocket.common import environment
from hocket.common.registry import Registry, load_plugins
from hocket.errors import ConfigError, ServerError
from hocket.server import main
from hocket.server.errors import ApiError
from support.processes import free_port, wait_for

SOURCE = str(Path(__file__).resolve().parents[2] / "src")


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOCKET_TOKEN", raising=False)


@pytest.mark.parametrize(
    ("host", "open_to_all"),
    [
        *((host, True) for host in ("0.0.0.0", "::", "192.168.1.2", "example.org")),
        *((host, False) for host in ("127.0.0.1", "127.0.0.2", "localhost")),
    ],
)
def test_other_machines_are_let_in_only_with_a_token(host: str, open_to_all: bool) -> None:
    with pytest.raises(ConfigError, match=r"set server\.token") if open_to_all else contextlib.nullcontext():
        main.bind(host, 0, None).close()


@pytest.mark.parametrize(("host", "is_public"), [("0.0.0.0", True), ("192.168.1.2", True), ("127.0.0.1", False)])
def test_without_a_part_against_strangers_a_public_server_says_what_to_put_in_front(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], host: str, is_public: bool
) -> None:
    parts: Registry[Any] = Registry("HTTP part")
    monkeypatch.setattr(main, "HTTP_PARTS", parts)
    assert main.http_server(Mock(), host).config.http == "h11"
    (*_, line) = ["", *capsys.readouterr().out.splitlines()]
    assert line.startswith(f"hocket: {host} lets other machines in") is is_public
    assert line.endswith("put a proxy in front") is is_public

    def install(http: uvicorn.Config) -> None:
        http.http = asyncio.Protocol

    parts.register("mine")(install)
    main.http_server(Mock(), host)
    assert capsys.readouterr().out == ""
    Registry.every.remove(parts)


def test_a_user_s_http_part_changes_uvicorn_s_settings(tmp_path: Path) -> None:
    shown = re.search(r"    @http_part\(\"bounded\"\)\n(.*\n)+?(?=\"\"\")", Path(main.__file__).read_text("utf-8"))
    assert shown is not None
    file = tmp_path / "bounded.py"
    file.write_text("import uvicorn\nfrom hocket.server.main import http_part\n\n" + textwrap.dedent(shown[0]))
    load_plugins([str(file)])
    assert main.http_server(Mock(), "127.0.0.1").config.limit_concurrency == 512
    main.HTTP_PARTS.forget("bounded")
    assert main.http_server(Mock(), "127.0.0.1").config.limit_concurrency is None


def test_random_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="would not be the trainer's"):
        main.serve(config.load(None, ["model.random_init=true", "sync.root=/versions"]))  # run.dir is not asked for


def test_while_a_server_loads_its_port_is_taken_and_clients_are_refused_at_once() -> None:
    with main.bind("127.0.0.1", 0, None) as first:
        with pytest.raises(ConfigError, match=r"in use by another process; set another server\.port"):
            main.bind("127.0.0.1", first.getsockname()[1], None)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(first.getsockname(), timeout=30)
        first.listen()
        with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()} "):
            main.bind("127.0.0.1", first.getsockname()[1], None)


def test_a_port_is_free_again_although_the_kernel_remembers_its_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        client = socket.create_connection(address)
        accepted, _ = listener.accept()
        accepted.close()  # the side that closes first is remembered
        assert client.recv(1) == b""
        client.close()

    def is_free() -> bool:
        with contextlib.suppress(ConfigError):
            main.bind(*address, None).close()
            return True
        return False

    wait_for(is_free, "the client's last packet may still be on its way")


def test_an_address_of_no_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="no address of this machine"):
        main.bind("no.such.host.invalid", 8000, "long-enough")


def test_the_user_s_environment_stays_and_run_py_sets_other_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "7"})
    monkeypatch.setattr(main.vllm_arguments, "is_cpu_build", lambda: True)
    main.prepare_environment(1, threads=3)
    assert (os.environ["OMP_NUM_THREADS"], os.environ["TORCHDYNAMO_DISABLE"]) == ("7", "1")
    assert "VLLM_CPU_OMP_THREADS_BIND" not in os.environ
    main.prepare_environment(2, threads=3)
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"  # or its workers would need a NUMA node each
    by_server = set(os.environ)
    os.environ.clear()
    environment.prepare()
    assert by_server & set(os.environ) == set()
    assert {"VLLM_NO_USAGE_STATS", "TOKENIZERS_PARALLELISM"} <= by_server | set(os.environ)


def test_what_kubernetes_or_a_long_temporary_folder_would_break_in_the_engine_is_set_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_PORT", "tcp://10.0.0.1:8000")  # of a service called vllm
    monkeypatch.setattr("tempfile.tempdir", "/" + "x" * 70)
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    main.prepare_environment(1, threads=3)
    assert "VLLM_PORT" not in os.environ
    assert len(os.environ["VLLM_RPC_BASE_PATH"]) < 20
    monkeypatch.setenv("VLLM_PORT", "5000")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path)[:70])
    del os.environ["VLLM_RPC_BASE_PATH"]
    main.prepare_environment(1, threads=3)
    assert os.environ["VLLM_PORT"] == "5000"
    assert "VLLM_RPC_BASE_PATH" not in os.environ


def test_torch_is_imported_only_while_the_engine_s_process_imports_it_too() -> None:
    script = "import sys, hocket.server.main; sys.exit('torch' in sys.modules or 'fastapi' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": SOURCE}).returncode == 0


INTERRUPTED = """
import contextlib, os, signal, sys
from hocket import config
from hocket.server import main

def start_engine(args):
    print(os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"], flush=True)  # torch reads it before the first weight group
    with contextlib.suppress(BaseException):  # "Exception ignored in ...", as Python does within some callbacks
        signal.raise_signal(signal.SIGINT)

main.model_folder.examine = main.tokenizers.said_end = main.vllm_arguments.engine_arguments = lambda *_, **__: None
main.vllm_api.start_engine = start_engine
main.serve(config.load(None, sys.argv[1:]))
"""


def test_an_interrupt_while_the_engine_starts_ends_the_server_also_where_python_drops_it() -> None:
    command = [sys.executable, "-c", INTERRUPTED, f"server.port={free_port()}"]
    ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": SOURCE}, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[1:] == ["75", "hocket: stopped"]


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> dict[int, object]:
    """Make `main.serve` leave this process as it is; return the handlers of signals that it sets."""
    monkeypatch.setattr(main, "prepare_environment", lambda *_: None)
    monkeypatch.setattr("gc.freeze", lambda: None)  # later tests look through what there is
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "75")
    handlers: dict[int, object] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    return handlers


def test_a_script_that_serves_keeps_its_processes_and_signals(tmp_path: Path, handlers: dict[int, object]) -> None:
    own = subprocess.Popen(["sleep", "infinity"])
    with pytest.raises(ConfigError, match=r"is no model: it has no config\.json"):
        main.serve(config.load(None, [f"server.port={free_port()}", f"model.path={tmp_path}"]))
    ended = own.poll()
    own.kill()
    own.wait()
    assert ended is None
    assert handlers == {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("engine_dead", "gone: it was killed, perhaps for memory (dmesg); start the server again, or with another"),
        ("sleep_failed", "gone; restart it"),
    ],
)
def test_a_server_that_ends_with_its_engine_says_why_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    llm = Mock(last_words=Path("/nowhere"))
    monkeypatch.setattr(main, "_load", lambda _: (None, llm))
    monkeypatch.setattr(main, "_serve", AsyncMock(side_effect=ApiError(503, code, "gone", "restart it")))
    with pytest.raises(ServerError, match=re.escape(said)) as ended:
        main.serve(config.load(None, [f"server.port={free_port()}"]))
    assert ended.value.code == code
    llm.shutdown.assert_called_once_with(timeout=main.GRACE_S)


async def test_only_an_engine_that_no_reload_brings_back_ends_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = [None, "reload_failed", "asleep", "engine_dead"]

    def require_ready(*, admits: Collection[str]) -> None:
        reason = reasons.pop(0)
        if reason is not None and reason not in admits:
            raise ApiError(503, reason, "the engine's process ended", "restart")

    monkeypatch.setattr(main, "LOOK_S", 0.001)
    monkeypatch.setattr(main, "GRACE_S", 0.001)
    engine: Any = SimpleNamespace(require_ready=require_ready)
    with pytest.raises(ApiError, match="the engine's process ended"):
        await main._watch(engine, asyncio.Event())
    stopping = asyncio.Event()
    stopping.set()
    await main._watch(engine, stopping)
