"""What this machine has, and who listens on its ports. Standard library only, but for psutil."""

import ctypes
import ipaddress
import math
import os
import socket
from contextlib import suppress
from pathlib import Path

from hocket.errors import ConfigError

SMALL_MODEL = 16 << 20  # bytes of weights
MALLOC = {-8: 1, -3: 128 << 20, -1: (1 << 31) - 1, -2: 64 << 20}
"""glibc's M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD (malloc.h)."""
KEPT_MEMORY = 2 << 30  # bytes; to get them anew in each step takes longer than the step


def cpu_threads(model: str, *, processes: int) -> int:
    """Return the threads of each of `processes`: all ranks, or all servers' workers, of this machine.

    Both use all cores at once: a waiting thread leaves its core to others (environment.prepare). A small model uses
    half of them: more cost more in waiting than they save.
    """
    cores = len(os.sched_getaffinity(0))
    folder = Path(model)
    is_small = 0 < sum(file.stat().st_size for file in folder.glob("*.safetensors")) < SMALL_MODEL
    return max(1, (cores // 2 if is_small else cores) // processes)


def bound_nccl(timeout_s: float) -> None:
    """Set the deadline of NCCL's connections; torch reads it once, at its first use of NCCL."""
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(timeout_s)))


def keep_freed_memory() -> None:
    """Have the C library use freed tensors again: pages that it gets anew are zeroed by the kernel.

    All threads share one heap, as others hold no large blocks; so call it before there are any.
    """
    with suppress(AttributeError):  # not glibc
        for option, value in MALLOC.items():
            ctypes.CDLL(None).mallopt(option, value)


def return_freed_memory() -> None:
    """Give back what the C library keeps, unless it would soon be needed again."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident > KEPT_MEMORY:
        with suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)


def free_memory() -> int:
    """Return the bytes left to this machine, or to this process's control group (Linux)."""
    info = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(info["MemAvailable"].split()[0]) << 10
    for folder, limit, used, cached in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        (
            "/sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        with suppress(OSError, ValueError):  # there is no such group, or its limit is "max"
            stat = dict(
                line.split() for line in Path(folder, "memory.stat").read_text().splitlines()
            )
            most, now = (int(Path(folder, name).read_text()) for name in (limit, used))
            free = min(free, most - now + int(stat[cached]))  # cached files can go
    return max(free, 0)


def is_here(host: str) -> bool:
    """Check whether a host is this machine: a socket can be bound to it."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:  # it is another machine's, or unknown
        return False
    return True


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_any(host: str) -> bool:
    """Check whether a host stands for all addresses of a machine, as only a server's can: 0.0.0.0 or ::."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def refuse_open(section: str, host: str, token: str | None) -> None:
    """Raise ConfigError for a section's host that lets other machines in without a token."""
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"{section}.host={host} lets other machines in: set server.token (or HOCKET_TOKEN) to at least 8 "
            f"characters, or keep {section}.host=127.0.0.1"
        )


def holder(number: int) -> str:
    """Return who listens on a port of this machine: "process 7 (python3 run.py serve)", or "another process"."""
    import psutil

    for each in psutil.net_connections(kind="tcp"):
        if each.status == psutil.CONN_LISTEN and each.laddr.port == number:
            with suppress(psutil.Error, TypeError):  # TypeError: None, of another user
                return (
                    f"process {each.pid} ({' '.join(psutil.Process(int(each.pid)).cmdline())[:90]})"
                )
            return "a process of another user"
    return "another process"
