"""Tie the engine's processes to the life of the server; prepare them for its processor."""

import atexit
import gc
import os
import select
import signal
import threading

SERVER_PID = "HOCKET_SERVER_PID"
"""Environment variable with the pid of the server: when it ends, this process is killed."""


def die_with_server() -> None:
    """Kill this process as soon as the server is gone, even if that was killed itself.

    vLLM's own engine process would outlive it and keep its memory.
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
    select.select([server], [], [])  # returns when the server has ended
    os.kill(os.getpid(), signal.SIGKILL)


def allow_amx() -> None:
    """Ask the kernel to let this process use AMX, where the CPU has it.

    vLLM's attention in bfloat16 uses it without asking, and would be killed at its first token.
    """
    import torch

    if not torch.cpu._init_amx():
        torch.cpu._is_amx_tile_supported = lambda: False  # where vLLM asks


# Without this, Python searches all of vLLM and torch for garbage once more at its end, for seconds.
atexit.register(gc.freeze)
