"""The receiving half of weight hand-over, inside the engine's processes, and their tie to the server's life.

vLLM mixes `WorkerExtension` into its worker class; its methods are called through `collective_rpc`. Importing this
module in a process that the server has started ties it to the server.
"""

import atexit
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
    """Ends this process as soon as the server is gone, even if that was killed.

    vLLM's own engine process would outlive it, and keep its memory.
    """
    server_pid = int(os.environ.get(SERVER_PID, "0"))
    if server_pid in (0, os.getpid()) or not hasattr(os, "pidfd_open"):
        return
    try:
        server = os.pidfd_open(server_pid)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_wait_and_die, args=(server,), name="die_with_server", daemon=True).start()


def _wait_and_die(server: int) -> None:
    select.select([server], [], [])  # ends when the server does: that is the wait's whole purpose
    os.kill(os.getpid(), signal.SIGKILL)


die_with_server()
# At its end Python would search all of vLLM and torch for garbage once more, for seconds.
atexit.register(gc.freeze)
