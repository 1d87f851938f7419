"""Run a Python program that a model wrote without this machine's network, files and environment
(Linux).

In namespaces of the kernel the program sees Python, the system's libraries and a folder in memory.
Where namespaces can't be made (in most containers), Landlock shows it the same files, and it can
write none. A filter of system calls refuses the rest.
"""

import errno
import functools
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, NamedTuple

from hocket.common.processes import contained
from hocket.errors import ConfigError

MAX_PROCESSES, MAX_MIB, MAX_DISK_MIB = 32, 1024, 64  # for a program with all that it starts
MAX_OUTPUT = 1 << 20  # bytes of each stream that are kept
MAX_CODE = 100_000  # bytes: about what Linux takes as a single argument
KILL_TIMEOUT_S = 30
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_PYTHON = (os.path.realpath(sys.executable), "-I")
_PATHS = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom")
_SEEN = [path for path in (*_PATHS, os.path.realpath(sys.base_prefix)) if os.path.exists(path)]
_ENTER = f"""
set -e
mount -t tmpfs -o size={MAX_DISK_MIB}m,mode=755 none .
cd "$PWD"
mkdir -p old proc tmp etc dev
chmod 1777 tmp
for path in {" ".join(f"'{path}'" for path in _SEEN)}; do
  if [ -L "$path" ]; then cp -P "$path" ".$path"
  elif [ -d "$path" ]; then mkdir -p ".$path"; mount -o bind,ro "$path" ".$path"
  else : > ".$path"; mount --bind "$path" ".$path"
  fi
done
mount -t proc -o ro none proc
pivot_root . old
umount -l old
cd /tmp
exec "$@"
"""
_REFUSED = (
    "setns unshare add_key keyctl request_key memfd_create shmget shmat msgget msgsnd msgrcv semget semop mq_open "
    "socket io_uring_setup bpf perf_event_open userfaultfd ptrace process_vm_readv process_vm_writev pidfd_getfd"
)
# Refused where there are no namespaces: calls that reach other processes, and changes of files that
# Landlock lets pass.
_REFUSED_ALONE = (
    " kill tkill tgkill pidfd_send_signal rt_sigqueueinfo rt_tgsigqueueinfo setpriority ioprio_set sched_setaffinity"
    " sched_setscheduler sched_setparam sched_setattr shmctl msgctl semctl mq_unlink openat2"
    " truncate chmod fchmod fchmodat utime utimes futimesat utimensat chown fchown lchown fchownat"
    " setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr"
)
# memfd_secret, fchmodat2, setxattrat, removexattrat, file_setattr: libseccomp may not know the names
_LATER = (447, 452, 463, 466, 469)
# Refused for a value of an argument: the call, the argument's number, its mask and the value.
_REFUSED_IF = (
    ("clone", 0, 0x10000000, 0x10000000),  # a new user namespace
    # Shared memory without a file stays where no process has it, and counts nowhere.
    ("mmap", 3, 0x21, 0x21),
    ("socketpair", 1, 2, 2),  # datagrams, which go to any address
    # F_SETOWN and its kin have other processes signalled.
    ("fcntl", 1, 0xFFFFFFFF, 8),
    ("fcntl", 1, 0xFFFFFFFF, 15),
    ("ioctl", 1, 0xFFFFFFFF, 0x8901),
    ("ioctl", 1, 0xFFFFFFFF, 0x8902),
    ("ioctl", 1, 0xFFFFFFFF, 0x40086602),  # FS_IOC_SETFLAGS
    ("ioctl", 1, 0xFFFFFFFF, 0x401C5820),  # FS_IOC_FSSETXATTR
    # Before Linux 6.2 Landlock does not keep a program from emptying a file that it opens to read,
    # or neither to read nor to write.
    ("open", 1, 0o1003, 0o1000),
    ("openat", 2, 0o1003, 0o1000),
    ("open", 1, 3, 3),
    ("openat", 2, 3, 3),
)
_FIX = (
    "use Linux 5.13 or later with Landlock, or let the container make namespaces (docker run --cap-add=SYS_ADMIN "
    "--security-opt=seccomp=unconfined --security-opt=apparmor=unconfined), or serve the reward elsewhere "
    "(docs/how-to/reward_service.md); the reward code may run programs that you trust with "
    "rewards.functions.code.sandbox=limits_only"
)


class Ending(NamedTuple):
    """The end of a program, and what it wrote."""

    status: int | None  # 0: well; 128 + the signal that ended it; None: too late
    stdout: str
    stderr: str


def run(
    code: str, stdin: str = "", timeout_s: float = 10.0, *, limits_only: bool = False
) -> Ending:
    """Run a program, and end all that it has started.

    `limits_only`: contain it no further than is possible here. Raise ConfigError where it can't be
    contained.
    """
    source = code.replace("\0", "").encode("utf-8", "replace")
    if len(source) > MAX_CODE:
        return Ending(1, "", f"the program has more than {MAX_CODE:,} bytes")
    limits = [
        f"--cpu={math.ceil(timeout_s) + 1}",
        f"--as={MAX_MIB << 20}",
        f"--fsize={MAX_DISK_MIB << 18}",
    ]
    limits += ["--nofile=256", "--core=0"]
    command = way(limits_only) + limits + list(_PYTHON)
    command += ["-c", source.decode()]
    status = None
    temporary = TemporaryDirectory(prefix="hocket-")
    with (
        temporary as folder,
        TemporaryFile() as input_file,
        TemporaryFile() as out,
        TemporaryFile() as err,
    ):
        input_file.write(stdin.encode("utf-8", "replace"))
        input_file.seek(0)
        process = subprocess.Popen(
            _with_priority() + list(contained(command, MAX_PROCESSES, MAX_MIB)),
            stdin=input_file,
            stdout=out,
            stderr=err,
            env={"PATH": _PATH},
            cwd=folder,
            start_new_session=True,
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout_s)
        finally:
            process.terminate()
            process.wait(KILL_TIMEOUT_S)
        return Ending(status, _start_of(out), _start_of(err))


def _start_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MAX_OUTPUT).decode("utf-8", "replace")


@functools.cache
def _with_priority() -> list[str]:
    """Return the prefix of a command for real-time priority; [] where this process may not set it.

    The process that kills a program must run, however many processes that has started.
    """
    chrt = ["chrt", "--reset-on-fork", "--fifo", "1"]
    with suppress(FileNotFoundError):
        if subprocess.run([*chrt, "true"], capture_output=True, check=False).returncode == 0:
            return chrt
    return []


@functools.cache
def way(limits_only: bool = False) -> list[str]:
    """Return the prefix of a command that contains a program, up to prlimit.

    `limits_only`: it only drops the rights that can be dropped. Raise ConfigError if none works
    here.
    """
    unshare = ["unshare", "-Urmpnui", "--kill-child", "sh", "-c", _ENTER, "sandbox"]
    drop = ["setpriv", "--inh-caps=-all", "--no-new-privs"]
    users = [drop]
    if os.geteuid() == 0:
        unshare[1] = "-mpnui"
        nobody = [*drop, "--reuid=65534", "--regid=65534", "--clear-groups"]
        # Where root alone can read Python: root without its rights.
        powerless_root = [*drop, "--bounding-set=-all"]
        users = [nobody, powerless_root]
    if limits_only:
        users.append([])
        return _first_that_works([[*user, "env", "-i", "prlimit"] for user in users])
    namespaces = unshare + users[0] + ["--bounding-set=-all"] + _confine(_REFUSED)
    ways = [[*namespaces, "prlimit", f"--nproc={4 * MAX_PROCESSES}"]]
    alone = _confine(_REFUSED + _REFUSED_ALONE, _SEEN)
    ways += [user + alone + ["prlimit"] for user in users]
    return _first_that_works(ways)


def _first_that_works(ways: Sequence[list[str]]) -> list[str]:
    """Return the first prefix with which Python starts. Raise ConfigError if there is none."""
    problems = ""
    with TemporaryDirectory(prefix="hocket-") as folder:
        for prefix in ways:
            command = ["timeout", str(KILL_TIMEOUT_S), *prefix, *_PYTHON, "-c", ""]
            tried = subprocess.run(
                command, env={"PATH": _PATH}, cwd=folder, capture_output=True, check=False
            )
            if tried.returncode == 0:
                return prefix
            problems += tried.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2] + "; "
    raise ConfigError(f"programs of the model can't be contained here: {problems}{_FIX}")


def _confine(refused: str, seen: Sequence[str] = ()) -> list[str]:
    """Return the prefix of a command that refuses it these system calls, and all files but the
    `seen`."""
    try:
        import pyseccomp as seccomp
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"no libseccomp ({error}): apt-get install libseccomp2; or {_FIX}"
        ) from error
    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    no = seccomp.ERRNO(errno.EPERM)
    calls: list[str | int] = list(refused.split())
    calls += _LATER
    for call in calls:
        rules.add_rule(no, call)
    for call, argument, mask, value in _REFUSED_IF:
        rules.add_rule(no, call, seccomp.Arg(argument, seccomp.MASKED_EQ, mask, value))
    # A filter can't see the flags of clone3; without it libraries take clone.
    rules.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
    rules.add_rule(no, "prlimit64", seccomp.Arg(0, seccomp.NE, 0))  # limits of another process
    with TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        code = file.read().hex()
    number = str(seccomp.resolve_syscall(seccomp.Arch.NATIVE, "seccomp"))
    program = Path(__file__).with_name("confine.py").read_text("utf-8")
    return [*_PYTHON, "-S", "-c", program, number, code, ":".join(seen)]
