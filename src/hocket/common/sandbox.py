"""Run a Python program that a model wrote: limited, without network, files or environment of this machine (Linux).

In namespaces of the kernel it sees Python, the system's libraries and a folder in memory. Where they can't be made (in
most containers), limits alone are left, and a warning says so.
"""

import functools
import logging
import math
import os
import subprocess
import sys
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, NamedTuple

from hocket.common.processes import kill_with_parent

MAX_PROCESSES, MAX_MIB, MAX_DISK_MIB = 32, 1024, 64  # of a program with all that it starts
MAX_OUTPUT = 1 << 20  # characters that are kept
MAX_CODE = 100_000  # bytes: what Linux takes as one argument
KILL_TIMEOUT_S = 30.0
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_SEEN = (
    "/usr",
    "/bin",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/dev/null",
    "/dev/urandom",
    os.path.realpath(sys.base_prefix),
)
_ENTER = f"""
set -e
mount -t tmpfs -o size={MAX_DISK_MIB}m,mode=755 none .
cd "$PWD"
mkdir old proc tmp
chmod 1777 tmp
for path in {" ".join(f"'{path}'" for path in _SEEN)}; do
  mkdir -p ".${{path%/*}}"
  if [ -L "$path" ]; then cp -P "$path" ".$path"
  elif [ -d "$path" ]; then mkdir -p ".$path"; mount --bind "$path" ".$path"; mount -o remount,bind,ro ".$path"
  elif [ -e "$path" ]; then touch ".$path"; mount --bind "$path" ".$path"
  fi
done
mount -t proc none proc
pivot_root . old
umount -l old
cd /tmp
exec "$@"
"""


class Ending(NamedTuple):
    """How a program ended, and what it wrote."""

    status: int | None  # 0: well; 128 + the signal that ended it; None: too late
    stdout: str
    stderr: str


def run(code: str, stdin: str = "", timeout_s: float = 10.0) -> Ending:
    """Run a program; when this returns, nothing of it is left."""
    source = code.replace("\0", "").encode("utf-8", "replace")
    if len(source) > MAX_CODE:
        return Ending(1, "", f"the program has more than {MAX_CODE:,} bytes")
    with TemporaryDirectory(prefix="hocket-") as folder, TemporaryFile() as given, TemporaryFile() as out:
        given.write(stdin.encode("utf-8", "replace"))
        given.seek(0)
        with TemporaryFile() as err:
            limits = [f"--cpu={math.ceil(timeout_s) + 1}", f"--as={MAX_MIB << 20}", f"--fsize={MAX_DISK_MIB << 18}"]
            limits += [f"--nproc={4 * MAX_PROCESSES}", "--nofile=256", "--core=0"]
            python = [os.path.realpath(sys.executable), "-I", "-c", source.decode()]
            command = [*_enter(), "prlimit", *limits, "env", "-i", *python]
            process = subprocess.Popen(
                kill_with_parent(command, MAX_PROCESSES, MAX_MIB),
                stdin=given,
                stdout=out,
                stderr=err,
                env={"PATH": _PATH},
                cwd=folder,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                process.terminate()
                process.wait(KILL_TIMEOUT_S)
            return Ending(status, _start_of(out), _start_of(err))


def _start_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MAX_OUTPUT).decode("utf-8", "replace")


@functools.cache
def _enter() -> list[str]:
    """Return the command that runs another in namespaces, without rights; [] if there is no way."""
    unshare = ["unshare", "-Urmpnui", "--kill-child"]
    setpriv = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
    if os.geteuid() == 0:
        unshare[1] = "-mpnui"
        setpriv += ["--reuid=65534", "--regid=65534", "--clear-groups"]
    command = [*unshare, "sh", "-c", _ENTER, "sandbox", *setpriv]
    with TemporaryDirectory(prefix="hocket-") as folder:
        python = [os.path.realpath(sys.executable), "-I", "-c", ""]
        try:
            tried = subprocess.run(
                [*command, *python],
                env={"PATH": _PATH},
                cwd=folder,
                capture_output=True,
                check=False,
                timeout=KILL_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:  # there is no unshare, or it hangs
            why = str(error)
        else:
            if tried.returncode == 0:
                return command
            why = tried.stderr.decode("utf-8", "replace").strip()
    logging.getLogger("hocket").warning("programs of the model run with limits alone, without namespaces: %s", why)
    return []
