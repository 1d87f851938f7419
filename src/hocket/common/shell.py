"""Repair what this process inherits from its shell, for itself and for its children.

A program calls `begin` first, then `mend`, which hocket.train in a user's program calls, too. A
variable that can't be used here is deleted from os.environ, where libraries and children would read
it, and a sentence says so. Standard library only.
"""

import contextlib
import importlib.util
import io
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from hocket.errors import SetupError, pip

LOOPBACK = ("localhost", "127.0.0.1", "::1")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")  # programs read them in lower case, too
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
HUB = ("HF_ENDPOINT", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
RANK_NUMBERS = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}  # with defaults
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LEFT_OVER = f"if no launcher such as torchrun starts this: unset {' '.join(RANKS)}"
# Open files that this process may have. Not more: some programs go through all possible numbers.
MOST_FILES = 1 << 16
# Bytes of a folder's path that leave room, in the 107 bytes of a socket's path, for "/" and a UUID.
LONGEST_FOLDER = 107 - 37
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


def begin() -> list[str]:
    """Have Python run as libraries need it, before they are imported. Returns notes to print."""
    _restart()
    open_streams()
    shadowed = _search_packages_first()
    if not shadowed:
        return []
    return [
        f"PYTHONPATH has {', '.join(shadowed)}: not used, as Python or its environment has modules "
        "of these names"
    ]


def _restart() -> None:
    """Replace this process by a new one where Python was started in a way that can't be undone."""
    # PYTHONOPTIMIZE=2 strips docstrings, which transformers reads.
    lacks_docstrings = sys.flags.optimize > 1 and bool(os.environ.pop("PYTHONOPTIMIZE", ""))
    # With ASCII, files can't be opened whose names have an umlaut.
    lacks_names = sys.getfilesystemencoding() == "ascii"
    if lacks_names:
        os.environ["PYTHONUTF8"] = "1"
        os.environ.setdefault("PYTHONIOENCODING", "ascii")  # the terminal still has only ASCII
    if lacks_docstrings or lacks_names:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _search_packages_first() -> list[str]:
    """Have the folders of PYTHONPATH searched after Python's and this environment's.

    Returns the modules in these folders that are so shadowed by others.
    """
    # Folders that keep their place: Python's, the environment's, and that of hocket itself.
    places = sysconfig.get_paths()
    kept = set(places.values())
    kept.add(f"{places['platstdlib']}/lib-dynload")
    kept.add(str(Path(__file__).resolve().parents[2]))

    inherited = set()
    for path in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if path:
            inherited.add(os.path.abspath(path))
    inherited -= kept
    last = [path for path in sys.path if path in inherited]
    sys.path[:] = [path for path in sys.path if path not in inherited] + last

    shadowed: list[str] = []
    for path in last:
        files = [file for file in _modules(path) if _is_elsewhere(file.stem, before=path)]
        shadowed += map(str, files)
    return shadowed


def _modules(folder: str) -> Iterator[Path]:
    """Yield the modules and packages in a folder."""
    with contextlib.suppress(OSError):  # there is no such folder
        for file in sorted(Path(folder).iterdir()):
            is_module = file.suffix == ".py" and file.name != "__init__.py"
            if is_module or (file / "__init__.py").is_file():
                yield file


def _is_elsewhere(module: str, *, before: str) -> bool:
    """Check whether Python has a module of that name, or a folder that is searched `before`."""
    if module in sys.stdlib_module_names:
        return True
    for folder in map(Path, sys.path[: sys.path.index(before)]):
        if (folder / f"{module}.py").is_file() or (folder / module / "__init__.py").is_file():
            return True
    return False


def mend() -> list[str]:
    """Repair variables and limits. Returns a sentence for each that was set wrongly.

    Raises SetupError where no temporary folder can be written.
    """
    # Children replace characters that their output can't encode, unless the user has chosen.
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    os.environ["PYTHONIOENCODING"] = f"{encoding}:{errors or 'replace'}"
    bypass_proxies(LOOPBACK)
    _raise_file_limit()
    sentences = list(_drop_proxies())
    sentences += _drop_certificates()
    sentences += _drop_threads()
    sentences += _choose_tmpdir()
    return sentences


def open_streams() -> None:
    """Open standard streams that are closed, and replace characters that they can't encode."""
    # A file gets the lowest free number: one that is opened later must not become a stream.
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def bypass_proxies(hosts: Iterable[str]) -> None:
    """Have this process and its children connect to these hosts without a proxy.

    A proxy may not reach them.
    """
    values = {name: os.environ.get(name) for name in ("NO_PROXY", "no_proxy")}
    either = values["NO_PROXY"] or values["no_proxy"] or ""
    for name, value in values.items():
        # Some programs read only one of the two: what is set in the other holds for both.
        if value is None:
            value = either
        listed = [host.strip() for host in value.split(",") if host.strip()]
        if listed != ["*"]:  # "*" stands for all hosts
            listed += [host for host in hosts if host not in listed]
        os.environ[name] = ",".join(listed)


def proxy_of(url: str) -> str:
    """Find the variable that sets the proxy of a URL.

    Returns it as "HTTP_PROXY=http://...", without a password, or "" if no proxy is used.
    """
    from urllib.parse import urlsplit
    from urllib.request import getproxies_environment, proxy_bypass

    parts = urlsplit(url)
    proxies = getproxies_environment()
    if proxy_bypass(parts.hostname or "", proxies):
        return ""
    for kind in (parts.scheme, "all"):
        if kind in proxies:
            name = f"{kind}_proxy"  # read before the same name in upper case
            if name not in os.environ:
                name = name.upper()
            return f"{name}={_without_password(proxies[kind])}"
    return ""


def hub_variables() -> str:
    """List the variables that decide how the hub is reached, for an error about it.

    Returns them as "; set here: HF_HUB_OFFLINE=1", or "" if none is set.
    """
    values = [f"{name}={os.environ[name]}" for name in HUB if os.environ.get(name)]
    proxy = proxy_of(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if proxy:
        values.append(proxy)
    return f"; set here: {', '.join(values)}" if values else ""


def socket_folder() -> str | None:
    """Choose a folder for sockets if the path of the temporary folder is too long for them.

    Returns None if it is not. Raises SetupError where no other folder can be written.
    """
    import tempfile

    size = len(os.fsencode(tempfile.gettempdir()))
    if size <= LONGEST_FOLDER:
        return None
    for folder in SHORT_FOLDERS:
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise SetupError(
        f"TMPDIR has {size} bytes, too many for sockets: set a folder of at most {LONGEST_FOLDER}"
    )


def settle_ranks(*, launched: bool) -> None:
    """Delete the variables of a launcher, unless it may have started this command (`launched`).

    Raises SetupError where they contradict each other, or one of them is missing.
    """
    if not launched:
        for name in RANKS:
            os.environ.pop(name, None)
        return
    numbers = {}
    for name, default in RANK_NUMBERS.items():
        value = os.environ.get(name, "").strip()
        if value and not value.isdecimal():
            raise SetupError(f"{name}={value} is no number; {LEFT_OVER}")
        numbers[name] = int(value or default)
    rank, size = numbers["RANK"], numbers["WORLD_SIZE"]
    if rank >= size:
        raise SetupError(f"RANK={rank} needs a higher WORLD_SIZE than {size}; {LEFT_OVER}")
    if size == 1:
        return
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise SetupError(f"WORLD_SIZE={size} needs {name}, which is not set; {LEFT_OVER}")


def _raise_file_limit() -> None:
    """Let this process open as many files as it may, up to MOST_FILES."""
    import resource  # not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _drop_proxies() -> Iterator[str]:
    """Delete variables with a proxy that can't be used; yield one sentence for each such proxy."""
    sentences = dict[str, str]()  # by the variable's value
    for name in PROXIES + tuple(map(str.lower, PROXIES)):
        value = os.environ.get(name)
        cause = _unusable(value) if value else ""
        if value and cause:
            del os.environ[name]
            sentences.setdefault(value, f"{name}={_without_password(value)} {cause}")
    for sentence in sentences.values():
        yield f"{sentence}; other machines are asked without this proxy"


def _unusable(proxy: str) -> str:
    """Say why httpx would raise for a proxy in the environment; "" if it would not."""
    from urllib.parse import urlsplit

    url = proxy if "://" in proxy else f"http://{proxy}"
    try:
        parts = urlsplit(url)
        is_url = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        return "is no URL of a proxy, such as http://HOST:PORT"
    if parts.scheme in ("http", "https"):
        return ""
    if parts.scheme not in ("socks5", "socks5h"):
        return f"can't be used, as {parts.scheme} is none of http, https and socks5"
    if importlib.util.find_spec("socksio") is None:
        return f"can't be used without the package socksio ({pip()} install socksio)"
    return ""


def _without_password(url: str) -> str:
    return re.sub(r"(?<=//)[^/@\s]*@", "", url)


def _drop_certificates() -> Iterator[str]:
    """Delete variables with certificates that do not exist; yield a sentence for each."""
    for name in CERTIFICATES:
        path = os.environ.get(name)
        if path and not os.path.exists(path):
            del os.environ[name]
            yield f"{name}={path} is not there; the usual certificates are used"


def _drop_threads() -> Iterator[str]:
    """Delete a number of threads that OpenMP can't read: it may be a list, one per level."""
    value = os.environ.get("OMP_NUM_THREADS")
    if value is not None and not re.fullmatch(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*)*", value):
        del os.environ["OMP_NUM_THREADS"]
        if value.strip():
            yield f"OMP_NUM_THREADS={value} is no number of threads; hocket chooses one"


def _choose_tmpdir() -> Iterator[str]:
    """Set TMPDIR to the folder that Python uses, if that is another one."""
    import tempfile

    chosen = os.environ.get("TMPDIR")
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise SetupError(
            f"no temporary folder can be written: {error.strerror}; free space, or set TMPDIR"
        ) from error
    if chosen and os.path.abspath(chosen) != os.path.abspath(folder):
        os.environ["TMPDIR"] = folder
        yield f"TMPDIR={chosen} is no folder that can be written; {folder} is used"
