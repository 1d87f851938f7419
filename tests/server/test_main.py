"""What is refused before a model loads."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hocket import config
from hocket.common import environment
from hocket.errors import ConfigError
from hocket.server import main
from hocket.server.errors import ApiError
from processes import free_port

SOURCE = str(Path(__file__).resolve().parents[2] / "src")


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOCKET_TOKEN", raising=False)


@pytest.mark.parametrize(
    ("host", "open_to_all"),
    [
        *((host, True) for host in ("0.0.0.0", "::", "192.168.1.2", "example.org")),
        *((host, False) for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost")),
    ],
)
def test_other_machines_are_let_in_only_with_a_token(host: str, open_to_all: bool) -> None:
    main.check(host, "long-enough", random_init=False)
    with pytest.raises(ConfigError, match=r"set server\.token") if open_to_all else contextlib.nullcontext():
        main.check(host, None, random_init=False)


def test_random_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="would not be the trainer's"):
        main.check("127.0.0.1", None, random_init=True)


def test_a_taken_port_is_named_with_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"port {port} is in use by process {os.getpid()} .*set another server\.port"
        ):
            main.bind("127.0.0.1", port)


def test_while_a_server_loads_its_port_is_taken_and_clients_are_refused_at_once() -> None:
    with main.bind("127.0.0.1", 0) as first:
        with pytest.raises(ConfigError, match="in use"):
            main.bind("127.0.0.1", first.getsockname()[1])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(first.getsockname(), timeout=30)


def test_a_port_is_free_again_although_the_kernel_remembers_its_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        client = socket.create_connection(address)
        accepted, _ = listener.accept()
        accepted.close()  # the side that closes first is remembered
        assert client.recv(1) == b""
        client.close()
    deadline = time.monotonic() + 30
    while True:  # the client's last packet may still be on its way
        try:
            main.bind(*address).close()
            return
        except ConfigError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_an_address_of_no_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="no address of this machine"):
        main.bind("no.such.host.invalid", 8000)


def test_the_environment_keeps_what_the_user_set_and_run_py_sets_other_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_torch_is_imported_only_while_the_engine_s_process_imports_it_too() -> None:
    script = "import sys, hocket.server.main; sys.exit('torch' in sys.modules or 'fastapi' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": SOURCE}).returncode == 0


@pytest.mark.parametrize("fails", [True, False])
def test_an_interrupt_while_the_engine_starts_ends_the_server_also_where_python_drops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    def start_engine(args: object) -> object:
        with contextlib.suppress(BaseException):  # "Exception ignored in ...", as Python does within some callbacks
            signal.raise_signal(signal.SIGINT)
        if fails:
            raise RuntimeError("the engine's process was killed")
        return object()

    before = [signal.getsignal(number) for number in main.SIGNALS]
    monkeypatch.setattr(main, "_children", list)  # those of the tests stay alive
    monkeypatch.setattr(main, "prepare_environment", lambda *_: None)
    monkeypatch.setattr(main.tokenizers, "load", lambda _: None)
    monkeypatch.setattr(main.vllm_arguments, "engine_arguments", lambda _: None)
    monkeypatch.setattr(main.vllm_api, "start_engine", start_engine)
    monkeypatch.delenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", raising=False)
    try:
        main.serve(config.load(None, [f"model.path={tmp_path}", f"server.port={free_port()}"]))
        after = [signal.getsignal(number) for number in main.SIGNALS]
    finally:
        for number, handler in zip(main.SIGNALS, before, strict=True):
            signal.signal(number, handler)
    assert after == [signal.default_int_handler, signal.SIG_DFL]
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "75"  # torch reads it before the first weight group
    assert capsys.readouterr().out.endswith("hocket: stopped\n")


class LosingEngine:
    """Stands for an engine that looks well, then is busy with a failed reload, then is gone."""

    def __init__(self, *reasons: str | None) -> None:
        self.reasons = list(reasons)
        self.llm = SimpleNamespace(last_words=Path("/nowhere"))

    def require_ready(self, *, admits: Collection[str] = ()) -> None:
        reason = self.reasons.pop(0)
        if reason is not None and reason not in admits:
            raise ApiError(503, reason, "the engine's process ended", "restart")


async def test_only_an_engine_that_no_reload_brings_back_ends_its_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waited: list[float] = []
    words, left = tmp_path / "words", list[object]()

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        if left and len(waited) == 3:
            words.write_text("CUDA error: device-side assert\n\nTraceback (most recent call last)\n")

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(main, "_children", lambda: left)
    engine: Any = LosingEngine(None, "reload_failed", "asleep", "engine_dead")
    error = await main._lost(engine)
    assert waited == [main.LOOK_S] * 3 + [main.GRACE_S]  # what is in flight ends with the reason meanwhile
    assert error.code == "engine_dead"
    assert str(error).startswith(
        "the engine's process ended: it was killed, perhaps for memory (dmesg); start the server"
    )
    engine = LosingEngine("engine_dead")
    engine.llm.last_words = words
    left.append("the engine, which is lost, but has not ended")
    waited.clear()
    said = f"ended: CUDA error: device-side assert (its traceback is in {tmp_path}/words); start the server again"
    assert said in str(await main._lost(engine))
    assert waited == [main.GRACE_S, 0.1, 0.1]
