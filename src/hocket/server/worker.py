"""The receiving half of weight hand-over, inside the engine's worker processes, and their tie to the server's life.

vLLM mixes `WorkerExtension` into its worker class; its methods are called through `collective_rpc`.
"""

import atexit
import contextlib
import gc
import os
import select
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SERVER_PID = "HOCKET_SERVER_PID"
"""Environment variable with the process whose end must end this one."""


class WorkerExtension:
    """Methods that hocket adds to vLLM's worker."""

    def hocket_load_disk(self, folder: str) -> dict[str, Any]:
        """Loads every tensor of the folder into the model, in place.

        The caller has paused the engine and verified the folder. When this raises, the model is unusable until a later
        call succeeds.

        Returns:
            `checksum` of the tensors as they went into the model and `num_tensors`.
        """
        from hocket import manifest
        from hocket.server import vllm_api

        specs = {}

        def passing() -> Iterator[tuple[str, Any]]:
            for name, tensor in manifest.tensors(Path(folder)):
                specs[name] = manifest.spec(tensor)
                yield name, tensor

        vllm_api.reload_worker(self, passing())
        return {"checksum": manifest.total_checksum(specs), "num_tensors": len(specs)}


def die_with_server() -> None:
    """Ends this process, and an engine process between it and the server, as soon as the server is gone.

    vLLM's engine process outlives a server that was killed, and keeps its memory.
    """
    server_pid = int(os.environ.get(SERVER_PID, "0"))
    if server_pid in (0, os.getpid()) or not hasattr(os, "pidfd_open"):
        return
    parent_pid = os.getppid()
    try:
        server = os.pidfd_open(server_pid)
        engine = os.pidfd_open(parent_pid) if parent_pid != server_pid else None
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_wait_and_die, args=(server, engine), name="die_with_server", daemon=True).start()


def _wait_and_die(server: int, engine: int | None) -> None:
    select.select([server], [], [])  # ends when the server does: that is the wait's whole purpose
    if engine is not None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(engine, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


die_with_server()
# At its end Python would search all of vLLM and torch for garbage once more, for seconds.
atexit.register(gc.freeze)
