"""Mend what a shell hands on, for this process and those that it starts. Standard library only.

What can't be used here is dropped from os.environ, where libraries and children read it, and named.
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

from hocket.errors import SetupError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")  # lower case, too
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
HUB = ("HF_ENDPOINT", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LEFT_OVER = f"if no launcher such as torchrun starts this: unset {' '.join(RANKS)}"
MOST_FILES = 1 << 16  # of this process: some programs go through all that they might have
LONGEST_FOLDER = (
    107 - 37
)  # bytes of the path: those of a socket in it, without its name, "/" and a UUID
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


def begin() -> list[str]:
    """Have Python run as libraries need it, before they are imported; return notes."""
    _restart()
    open_streams()
    unused = _search_packages_first()
    if not unused:
        return []
    return [
        f"PYTHONPATH has {', '.join(unused)}: not used, as Python or its environment has modules of these names"
    ]


def _restart() -> None:
    """Start this command once more, with its id, where variables had Python begin otherwise."""
    lacks_docstrings = sys.flags.optimize > 1 and os.environ.pop(
        "PYTHONOPTIMIZE", ""
    )  # transformers reads them
    lacks_names = (
        sys.getfilesystemencoding() == "ascii"
    )  # of files: those with an umlaut could not be written down
    if lacks_names:
        os.environ["PYTHONUTF8"] = "1"
        os.environ.setdefault("PYTHONIOENCODING", "ascii")  # for the terminal, as before
    if lacks_docstrings or lacks_names:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _search_packages_first() -> list[str]:
    """Search PYTHONPATH after Python and this environment; return its modules that these have, too."""
    places = sysconfig.get_paths()
    kept = {
        str(Path(__file__).resolve().parents[2]),
        f"{places['platstdlib']}/lib-dynload",
        *places.values(),
    }
    inherited = {
        os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path
    } - kept
    behind = [path for path in sys.path if path in inherited]
    sys.path[:] = [path for path in sys.path if path not in behind] + behind
    return [
        str(file)
        for path in behind
        for file in _modules(path)
        if _is_elsewhere(file.stem, before=path)
    ]


def _modules(folder: str) -> Iterator[Path]:
    with contextlib.suppress(OSError):  # there is no such folder
        for file in sorted(Path(folder).iterdir()):
            is_module = file.suffix == ".py" and file.name != "__init__.py"
            if is_module or (file / "__init__.py").is_file():
                yield file


def _is_elsewhere(module: str, *, before: str) -> bool:
    """Check whether Python has a module of that name, or a folder that is searched before this one."""
    folders = map(Path, sys.path[: sys.path.index(before)])
    is_package = any(
        (folder / f"{module}.py").is_file() or (folder / module / "__init__.py").is_file()
        for folder in folders
    )
    return is_package or module in sys.stdlib_module_names


def mend() -> list[str]:
    """Mend variables and limits; return a sentence for each that was set wrongly.

    Raises SetupError where no temporary folder can be written.
    """
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    os.environ["PYTHONIOENCODING"] = f"{encoding}:{errors or 'replace'}"  # of children
    bypass_proxies(LOOPBACK)
    _raise_file_limit()
    return [*_drop_proxies(), *_drop_certificates(), *_drop_threads(), *_choose_tmpdir()]


def open_streams() -> None:
    """Open standard streams that are closed, and replace characters that they can't encode."""
    while (
        descriptor := os.open(os.devnull, os.O_RDWR)
    ) <= 2:  # else the next file would be written as one
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def bypass_proxies(hosts: Iterable[str]) -> None:
    """Have this process, and what it starts, ask these hosts without a proxy, which may not reach them."""
    names = ("NO_PROXY", "no_proxy")
    values = [os.environ.get(name) for name in names]
    for name, value in zip(names, values, strict=True):
        if value is None:  # programs read either, or one of them first
            value = next(filter(None, values), "")
        listed = [host.strip() for host in value.split(",") if host.strip()]
        if listed != ["*"]:
            listed += [host for host in hosts if host not in listed]
        os.environ[name] = ",".join(listed)


def proxy_of(url: str) -> str:
    """Return the variable that has a URL asked through a proxy, as "HTTP_PROXY=http://...", or nothing."""
    from urllib.parse import urlsplit
    from urllib.request import getproxies_environment, proxy_bypass

    parts = urlsplit(url)
    proxies = getproxies_environment()
    if proxy_bypass(parts.hostname or "", proxies):
        return ""
    for kind in (parts.scheme, "all"):
        if kind in proxies:
            name = next(
                name for name in (f"{kind}_proxy", f"{kind}_proxy".upper()) if name in os.environ
            )
            return f"{name}={_without_password(proxies[kind])}"
    return ""


def hub_variables() -> str:
    """Return the variables that decide how the hub is asked, as "; set here: HF_HUB_OFFLINE=1", or nothing."""
    values = [f"{name}={os.environ[name]}" for name in HUB if os.environ.get(name)]
    if proxy := proxy_of(os.environ.get("HF_ENDPOINT") or "https://huggingface.co"):
        values.append(proxy)
    return f"; set here: {', '.join(values)}" if values else ""


def socket_folder() -> str | None:
    """Return a folder for sockets where the temporary one's path is too long for them. Raises SetupError."""
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
    """Drop what a launcher left in the shell, unless the command is one that it may have started.

    Raises SetupError where that says which rank this is, but not rightly.
    """
    if not launched:
        for name in RANKS:
            os.environ.pop(name, None)
        return
    numbers = dict[str, int]()
    for name in RANKS[:4]:
        value = os.environ.get(name, "").strip()
        if value and not value.isdecimal():
            raise SetupError(f"{name}={value} is no number; {LEFT_OVER}")
        numbers[name] = int(value or name.endswith("SIZE"))
    rank, _, size, _ = numbers.values()
    if rank >= size:
        raise SetupError(f"RANK={rank} needs a higher WORLD_SIZE than {size}; {LEFT_OVER}")
    if size == 1:
        return
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise SetupError(f"WORLD_SIZE={size} needs {name}, which is not set; {LEFT_OVER}")


def _raise_file_limit() -> None:
    import resource  # not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _drop_proxies() -> Iterator[str]:
    dropped = dict[str, str]()
    for name in (*PROXIES, *map(str.lower, PROXIES)):
        value = os.environ.get(name)
        if value and (cause := _unusable(value)):
            del os.environ[name]
            dropped.setdefault(value, f"{name}={_without_password(value)} {cause}")
    for sentence in dropped.values():
        yield f"{sentence}; other machines are asked without this proxy"


def _unusable(proxy: str) -> str:
    """Return why httpx could not begin with a proxy in the environment, or nothing."""
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
        return "can't be used without the package socksio (.venv/bin/python -m pip install socksio)"
    return ""


def _without_password(url: str) -> str:
    return re.sub(r"(?<=//)[^/@\s]*@", "", url)


def _drop_certificates() -> Iterator[str]:
    for name in CERTIFICATES:
        path = os.environ.get(name)
        if path and not os.path.exists(path):
            del os.environ[name]
            yield f"{name}={path} is not there; the usual certificates are used"


def _drop_threads() -> Iterator[str]:
    value = os.environ.get("OMP_NUM_THREADS")
    if value is not None and not re.fullmatch(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*)*", value):
        del os.environ["OMP_NUM_THREADS"]
        if value.strip():
            yield f"OMP_NUM_THREADS={value} is no number of threads; hocket chooses one"


def _choose_tmpdir() -> Iterator[str]:
    import tempfile

    asked = os.environ.get("TMPDIR")
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise SetupError(
            f"no temporary folder can be written: {error.strerror}; free space, or set TMPDIR"
        ) from error
    if asked and os.path.abspath(asked) != os.path.abspath(folder):
        os.environ["TMPDIR"] = folder
        yield f"TMPDIR={asked} is no folder that can be written; {folder} is used"
