"""What a shell hands on, and how commands begin in odd ones."""

import http.server
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hocket.common import shell
from hocket.errors import SetupError
from support.parameters import long
from support.programs import run_code

ROOT = Path(__file__).parents[2]
PROXIES = [*shell.PROXIES, *map(str.lower, shell.PROXIES)]
NO_PROXY = ("NO_PROXY", "no_proxy")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes away what the shell of these tests may have set."""
    for name in (*PROXIES, *NO_PROXY, *shell.CERTIFICATES, *shell.HUB, *shell.RANKS, "TMPDIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def service() -> Iterator[str]:
    """The URL of a server on loopback that answers "here"."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"here")

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize(
    ("variables", "note"),
    [
        ({"HTTP_PROXY": "http://127.0.0.1:9"}, ""),
        ({"https_proxy": "127.0.0.1:9", "all_proxy": "http://127.0.0.1:9", "no_proxy": "example.org"}, ""),
        ({"ALL_PROXY": "socks5://me:word@127.0.0.1:9"}, "ALL_PROXY=socks5://127.0.0.1:9 can't be used without the pac"),
        ({"all_proxy": "socks://127.0.0.1:9"}, "all_proxy=socks://127.0.0.1:9 can't be used, as socks is none of http"),
        ({"HTTP_PROXY": "http://:3128"}, "HTTP_PROXY=http://:3128 is no URL of a proxy"),
        ({"http_proxy": "http://proxy:port"}, "http_proxy=http://proxy:port is no URL of a proxy"),
        ({"SSL_CERT_FILE": "/gone.pem"}, "SSL_CERT_FILE=/gone.pem is not there; the usual certificates are used"),
        ({"SSL_CERT_DIR": "/gone", "CURL_CA_BUNDLE": "/gone.pem"}, "SSL_CERT_DIR=/gone is not there"),
    ],
)
def test_a_client_of_any_library_reaches_this_machine_whatever_proxy_or_certificates_the_shell_names(
    service: str, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], note: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # no socksio
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    notes = shell.mend()
    assert any(sentence.startswith(note) for sentence in notes) if note else notes == []
    assert "word" not in "".join(notes)
    with httpx.Client() as client:  # as those of openai, of the hub and of judges, which read variables
        assert client.get(service).text == "here"
    assert shell.mend() == []  # it has been said


@pytest.mark.parametrize(
    ("upper", "lower", "expected"),
    [
        (None, None, ("HOSTS", "HOSTS")),
        ("a.org", None, ("a.org,HOSTS", "a.org,HOSTS")),  # most programs read the lower one alone, if it is set
        (None, " a.org , b.org", ("a.org,b.org,HOSTS", "a.org,b.org,HOSTS")),
        ("a.org", "127.0.0.1,b.org", ("a.org,HOSTS", "127.0.0.1,b.org,localhost,::1")),
        ("*", None, ("*", "*")),
    ],
)
def test_hosts_without_a_proxy_are_added_to_those_that_the_user_names(
    monkeypatch: pytest.MonkeyPatch, upper: str | None, lower: str | None, expected: tuple[str, str]
) -> None:
    for name, value in zip(NO_PROXY, (upper, lower), strict=True):
        if value is not None:
            monkeypatch.setenv(name, value)
    for _ in range(2):
        shell.bypass_proxies(shell.LOOPBACK)
    assert tuple(os.environ[name] for name in NO_PROXY) == tuple(
        value.replace("HOSTS", "localhost,127.0.0.1,::1") for value in expected
    )


def test_the_proxy_of_a_url_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shell.proxy_of("https://judge.org/v1") == shell.hub_variables() == ""
    monkeypatch.setenv("NO_PROXY", "near.org")
    monkeypatch.setenv("https_proxy", "http://me:word@p:1")
    assert shell.proxy_of("https://judge.org/v1") == "https_proxy=http://p:1"
    assert shell.proxy_of("https://near.org/v1") == shell.proxy_of("http://judge.org") == ""
    monkeypatch.setenv("ALL_PROXY", "q:2")
    assert shell.proxy_of("http://judge.org") == "ALL_PROXY=q:2"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert shell.hub_variables() == "; set here: HF_HUB_OFFLINE=1, https_proxy=http://p:1"


@pytest.mark.parametrize(("value", "kept"), [("4", True), ("4,2", True), ("0", False), ("abc", False), ("-1", False)])
def test_a_number_of_threads_that_is_none_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, value: str, kept: bool
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    notes = [] if kept else [f"OMP_NUM_THREADS={value} is no number of threads; hocket chooses one"]
    assert shell.mend() == notes
    assert os.environ.get("OMP_NUM_THREADS") == (value if kept else None)


def test_a_temporary_folder_that_is_not_there_is_replaced_and_one_too_long_for_sockets_is_kept_for_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    (note,) = shell.mend()
    assert note.startswith(f"TMPDIR={tmp_path}/gone is no folder that can be written; {os.environ['TMPDIR']} is used")
    assert shell.socket_folder() is None
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(long))
    assert shell.mend() == []
    assert tempfile.gettempdir() == str(long)
    assert shell.socket_folder() in shell.SHORT_FOLDERS
    monkeypatch.setattr(shell, "SHORT_FOLDERS", ("/gone",))
    with pytest.raises(SetupError, match=r"TMPDIR has \d+ bytes, too many for sockets: set a folder of at most 70"):
        shell.socket_folder()
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 69)  # with "/" and the 36 characters of a UUID: 107
    assert shell.socket_folder() is None


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, None),
        (
            {"RANK": "abc"},
            "RANK=abc is no number; if no launcher such as torchrun starts this: unset RANK LOCAL_RANK W",
        ),
        ({"RANK": "2"}, "RANK=2 needs a higher WORLD_SIZE than 1; if no"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 needs RANK, which is not set; if no"),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "1"}, "WORLD_SIZE=4 needs MASTER_ADDR, which is not set; if"),
    ],
)
def test_what_a_launcher_left_in_the_shell_is_dropped_or_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], problem: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if problem is None:
        shell.settle_ranks(launched=True)
        assert variables.items() <= os.environ.items()
    else:
        with pytest.raises(SetupError) as refused:
            shell.settle_ranks(launched=True)
        assert str(refused.value).startswith(problem)
    shell.settle_ranks(launched=False)  # a server, say
    assert not os.environ.keys() & {*shell.RANKS}


def test_the_limit_of_open_files_is_raised_as_far_as_the_shell_lets_it() -> None:
    code = """
import resource
from hocket.common import shell
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 300))
shell.mend()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    assert run_code(code).stdout == "(300, 300)\n"


def run(*arguments: str, streams: str = "", **variables: str) -> "subprocess.CompletedProcess[str]":
    """Runs run.py below a shell, as people do; returns its status and what it wrote."""
    words = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, str(ROOT / "run.py"), *arguments]
    there = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(words, env=there, capture_output=True, encoding="utf-8", timeout=600, check=False)


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "l?ufe ??"),
        *long(
            ({"LC_ALL": "xx_YY.ISO-8859-1"}, "läufe 日本"),  # it is not installed: Python takes UTF-8
            ({"PYTHONIOENCODING": "ascii"}, "l?ufe ??"),
            ({"PYTHONOPTIMIZE": "2", "PYTHONWARNINGS": "error"}, "läufe 日本"),
            ({"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "1"}, "läufe 日本"),
        ),
    ],
)
def test_a_command_runs_in_any_locale_and_replaces_what_the_terminal_can_not_show(
    tmp_path: Path, variables: dict[str, str], shown: str
) -> None:
    file = tmp_path / "läufe 日本.py"
    lines = ["from hocket.commands.command import command", '@command("say")', "def say(args): print('läufe 日本')"]
    file.write_text("\n".join(lines), encoding="utf-8")
    answer = run(str(file), **variables)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, f"{shown}\n", "")


@pytest.mark.parametrize(
    ("streams", "error"),
    [(">&-", ""), ("<&- >&- 2>&-", ""), (">/dev/full", "error: the output can't be written: No space left on device")],
)
def test_a_command_ends_well_or_says_why_where_its_output_is_closed_or_full(streams: str, error: str) -> None:
    answer = run("config", "--help", streams=streams)
    assert answer.returncode == bool(error)
    assert answer.stderr.startswith(error)
    assert "Traceback" not in answer.stderr


def test_modules_on_the_pythonpath_are_there_but_replace_none_of_this_environment(tmp_path: Path) -> None:
    for name in ("yaml.py", "secrets.py", "mine.py"):
        (tmp_path / name).write_text("raise SystemExit('foreign')")
    (tmp_path / "pydantic").mkdir()
    (tmp_path / "pydantic/__init__.py").touch()
    (tmp_path / "rich").mkdir()  # no package
    answer = run("config", "trainer.steps=3", PYTHONPATH=f"{tmp_path}{os.pathsep}{tmp_path / 'gone'}")
    assert (answer.returncode, "steps: 3" in answer.stdout) == (0, True)
    unused = ", ".join(f"{tmp_path}/{name}" for name in ("pydantic", "secrets.py", "yaml.py"))
    why = "not used, as Python or its environment has modules of these names"
    assert answer.stderr == f"hocket: PYTHONPATH has {unused}: {why}\n"
    code = "from hocket.common import shell; shell.begin(); import mine"
    assert run_code(code, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT / 'src'}").stderr == "foreign\n"  # it is imported
