"""Measure and adjust what this machine has: cores, memory, addresses and ports.

Standard library only, but for psutil.
"""

import ctypes
import ipaddress
import math
import os
import socket
from contextlib import suppress
from pathlib import Path

from hocket.errors import ConfigError

SMALL_MODEL = 16 << 20  # a model with fewer bytes of weights is small
MALLOC = {
    -8: 1,  # M_ARENA_MAX: all threads share one heap
    -3: 128 << 20,  # M_MMAP_THRESHOLD
    -1: (1 << 31) - 1,  # M_TRIM_THRESHOLD
    -2: 64 << 20,  # M_TOP_PAD
}
"""Options of glibc's mallopt (malloc.h), and the values that `keep_freed_memory` sets."""
# Bytes that a process may keep: getting them anew in each step would take longer than the step.
KEPT_MEMORY = 2 << 30
# Environment variable by which a launch tells its ranks the bytes that were free before it started
# servers, which are about to take theirs.
FREE_VARIABLE = "HOCKET_FREE_MEMORY"


def cpu_threads(model: str, *, processes: int) -> int:
    """Choose the number of CPU threads of each process.

    `processes` is the number of all ranks on this machine, or of all workers of its servers. Ranks
    and workers both use all cores: a thread that waits leaves its core to others
    (environment.prepare). A small model uses half of them, because further threads cost more in
    waiting than they save.
    """
    cores = len(os.sched_getaffinity(0))
    folder = Path(model)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if 0 < size < SMALL_MODEL:
        cores //= 2
    return max(1, cores // processes)


def bound_nccl(timeout_s: float) -> None:
    """Set the deadline of NCCL's connections; torch reads it once, at its first use of NCCL."""
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(timeout_s)))


def keep_freed_memory() -> None:
    """Have the C library keep the memory of freed tensors for new ones.

    New pages would cost more: the kernel fills them with zeros. Only the main heap holds large
    blocks, so all threads share it. Call this before there are other threads.
    """
    with suppress(AttributeError):  # not glibc
        for option, value in MALLOC.items():
            ctypes.CDLL(None).mallopt(option, value)


def return_freed_memory() -> None:
    """Return the memory that the C library keeps to the system, if it is more than KEPT_MEMORY."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident > KEPT_MEMORY:
        with suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)


def free_before_servers() -> int:
    """Measure the bytes that are free; where a launch started the servers, those before that."""
    before = os.environ.get(FREE_VARIABLE)
    return free_memory() if before is None else int(before)


def free_memory() -> int:
    """Measure the bytes that this machine, or this process's control group, has left (Linux)."""
    info = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(info["MemAvailable"].split()[0]) << 10
    group = Path("/sys/fs/cgroup")
    old = group / "memory"  # of version 1 of control groups
    for limit, used, cached in (
        (group / "memory.max", group / "memory.current", "inactive_file"),
        (old / "memory.limit_in_bytes", old / "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError):  # there is no such group, or its limit is "max"
            lines = limit.with_name("memory.stat").read_text().splitlines()
            statistics = dict(line.split() for line in lines)
            # The kernel drops cached files when memory is needed.
            used_bytes = int(used.read_text()) - int(statistics[cached])
            free = min(free, int(limit.read_text()) - used_bytes)
    return max(free, 0)


def is_here(host: str) -> bool:
    """Check whether a host is this machine, by binding a socket to it."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:  # the address is another machine's, or unknown
        return False
    return True


def url_of(host: str, port: int) -> str:
    """Write the URL of a host, which may be an IPv6 address, and a port."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def family_of(host: str) -> socket.AddressFamily:
    """Choose IPv6 for a host that is such an address, else IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_loopback(host: str) -> bool:
    """Check whether only this machine can connect to a host. Names but localhost count as open."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_any(host: str) -> bool:
    """Check whether a host stands for all addresses of a machine: 0.0.0.0 or ::.

    A server can listen on it, but nobody can connect to it.
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def refuse_open(section: str, host: str, token: str | None) -> None:
    """Raise ConfigError if a section's host lets other machines in without a token."""
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"{section}.host={host} lets other machines in: set server.token (or HOCKET_TOKEN) to "
            f"at least 8 characters, or keep {section}.host=127.0.0.1"
        )


def holder(number: int) -> str:
    """Name the process that listens on a port: "process 7 (python3 run.py serve)", or less."""
    import psutil

    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == number:
            pid = connection.pid  # None for a process of another user
            if pid is not None:
                with suppress(psutil.Error):
                    command = " ".join(psutil.Process(pid).cmdline())
                    return f"process {pid} ({command[:90]})"
            return "a process of another user"
    return "another process"
