"""Hostile programs, and what is left of them: nothing. Right programs after them get their due."""

import os
import socket
import tempfile
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pyseccomp
import pytest

from hocket.config import RewardSpec
from hocket.errors import ConfigError
from hocket.extras.code import sandbox
from hocket.extras.code.reward import code as code_reward
from hocket.extras.tools import tools
from hocket.rewards.base import REWARDS, bind

isolated = pytest.mark.skipif(sandbox.way()[0] != "unshare", reason="this machine lets this user make no namespaces")


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = {process.pid for process in psutil.process_iter()}
    yield
    left = [one for one in psutil.Process().children(recursive=True) if one.pid not in before]
    assert [process.cmdline() for process in left] == []
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def way_alone() -> list[str]:
    """What is left where the kernel refuses namespaces, as in a default container."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "_ENTER", "echo not today >&2; exit 1")
        sandbox.way.cache_clear()
        way = sandbox.way()
    sandbox.way.cache_clear()
    return way


@pytest.fixture
def alone(way_alone: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert way_alone[0] != "unshare"
    monkeypatch.setattr(sandbox, "way", lambda limits_only=False: way_alone)


def number(call: str) -> int:
    return pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, call)


CALL = "import ctypes, os\ncall = ctypes.CDLL(None).syscall\n"
OPENS = "import os\ntry: os.open('SECRET', {})\nexcept OSError as error: assert error.errno != 1"  # the filter's
HOSTILE = {
    # network
    "connects": "import socket; socket.create_connection(('127.0.0.1', PORT), 2)",
    "connects by IPv6": "import socket; socket.create_connection(('::1', PORT), 2)",
    "resolves": "import socket; socket.getaddrinfo('example.com', 80)",
    "abstract socket": "import socket; socket.socket(socket.AF_UNIX).connect('\\0LOCAL')",
    "raw socket": "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)",
    # the rest of the machine
    "reads a secret": "open('SECRET').read()",
    "writes beside it": "open('SECRET', 'w').write('x')",
    "reads passwords": "open('/etc/passwd').read()",
    "writes to Python": "import os; open(os.__file__, 'a').write('x')",
    "goes up": "import os; os.chdir('../' * 20 + 'FOLDER')",
    "old root": "import os; assert os.listdir('/old')",
    "mounts": "import ctypes; assert ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0",
    "leaves its root": "import os; os.mkdir('a'); os.chroot('a')",
    "becomes root": "import os; os.setuid(0) if os.getuid() else os.chown('/usr', 1, 1)",
    "makes a device": "import os; os.mknod('/tmp/disk', 0o660 | 0o060000, os.makedev(254, 0))",
    "sees processes": "import os; assert os.path.exists('/proc/PARENT')",
    "reads the parent's environment": "open('/proc/PARENT/environ').read()",
    "has an environment": "import os; assert set(os.environ) - {'LC_CTYPE'}",
    # signals
    "kills the parent": "import os; os.kill(PARENT, 9)",
    "kills its parent": "import os; assert os.getppid(); os.kill(os.getppid(), 9)",
    "traces the parent": "import ctypes; assert ctypes.CDLL(None).ptrace(16, PARENT, 0, 0) == 0",
    # limits
    "takes memory": "x = bytearray(10 << 30)",
    "fills the disk": "for i in range(100): open(f'/tmp/{i}', 'wb').write(bytes(8 << 20))",
    "one large file": "open('/tmp/x', 'wb').write(bytes(60 << 20))",
    "opens many files": "files = [open('/dev/null') for _ in range(10_000)]",
    "forks": "import os, time\nfor _ in range(600): os.fork() or time.sleep(600)",
    "starts threads": "import threading, time\n"
    "for _ in range(10_000): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "prints": "while True: print('x' * 10_000)",
    "segfaults": "import ctypes; ctypes.string_at(0)",
    # what namespaces and limits do not see
    "has a user namespace": "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "clones into one": f"{CALL}assert call({number('clone')}, 0x10000000 | 17, None, None, None, None) >= 0",
    "holds memory that others have filled": "import mmap; mmap.mmap(-1, 4096)",
    "holds memory without a page": "import os; os.memfd_create('x')",
    "shares memory": f"{CALL}assert call({number('shmget')}, 0, 4096, 0o1600) >= 0",
    "leaves a key": f"{CALL}assert call({number('add_key')}, b'user', b'hocket', b'data', 4, -4) >= 0",
    "talks to the host": "import socket; socket.socket(40, socket.SOCK_STREAM)",
    "sends datagrams": "import socket; socket.socketpair(type=socket.SOCK_DGRAM)",
    "has a pipe signal the parent": "import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, PARENT)",
    "has others killed where memory runs out": "open('/proc/self/oom_score_adj', 'w').write('-1000')",
    "limits the parent": "import resource; resource.prlimit(PARENT, resource.RLIMIT_CPU)",
    # in the memory, and in the files of others
    "reads the expected output": "open('/proc/PARENT/mem', 'rb')",
    "takes a file's rights": "import os; os.chmod('SECRET', 0o777)",
    "takes them by number": f"{CALL}assert call(452, -100, b'SECRET', 0o777, 0) == 0",
    "takes them by a list": "import os, struct\nentries = ((1, 7), (4, 7), (32, 7))\n"
    "acl = b''.join(struct.pack('<HHI', tag, may, 0xffffffff) for tag, may in entries)\n"
    "os.setxattr('SECRET', 'system.posix_acl_access', b'\\2\\0\\0\\0' + acl)",
    "takes a file's group": "import os; os.chown('SECRET', -1, os.getgid())",
    "flags a file": "import fcntl, os\nfile = open(os.__file__)\nfcntl.ioctl(file, 0x40086602, b'\\0' * 8)",
    "empties a file": "import os; os.truncate('SECRET', 0)",
    "empties it while it reads": OPENS.format("os.O_TRUNC"),
    "empties it while it does not even read": OPENS.format("os.O_TRUNC | 3"),
    "leaves a file": "import os; open('FOLDER/left', 'w')",
}
OTHERWISE_ALONE = {"goes up", "sees processes"}  # it sees names of files, but nothing of what they hold
LIMITS = (  # each in a run of its own
    *("kills its parent", "takes memory", "fills the disk", "one large file", "opens many files"),
    *("forks", "starts threads", "prints", "segfaults"),
)
TRIES_EACH = """
import os
for name, code in {programs}.items():
    child = os.fork()
    if child == 0:
        try:
            exec(code, {{}})
        except BaseException:
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        print(name)
"""
LATE = {
    "sleeps": "import time; time.sleep(600)",
    "computes": "while True: pass",
    "ignores signals": "import signal\nfor n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n"
    "  except (OSError, ValueError): pass\nwhile True: pass",
    "stops itself": "import os, signal, time; os.kill(os.getpid(), signal.SIGSTOP); time.sleep(600)",
}


@isolated
def test_hostile_programs_fail(tmp_path_factory: pytest.TempPathFactory) -> None:
    fail(HOSTILE.keys() - set(LIMITS), tmp_path_factory.mktemp("mine"))


@pytest.mark.usefixtures("alone")
def test_hostile_programs_fail_where_the_kernel_refuses_namespaces(tmp_path_factory: pytest.TempPathFactory) -> None:
    fail(HOSTILE.keys() - OTHERWISE_ALONE - set(LIMITS[1:]), tmp_path_factory.mktemp("mine"))


def fail(names: Collection[str], folder: Path) -> None:
    secret = folder / "secret"
    secret.write_text("token")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind("\0" + str(folder))
        local.listen()
        code = TRIES_EACH.format(programs={name: HOSTILE[name] for name in names})
        code = code.replace("PORT", str(server.getsockname()[1])).replace("PARENT", str(os.getpid()))
        code = code.replace("SECRET", str(secret)).replace("LOCAL", str(folder)).replace("FOLDER", str(folder))
        assert sandbox.run(code, timeout_s=60) == (0, "", "")
    assert secret.read_text() == "token"


@isolated
@pytest.mark.parametrize("name", LIMITS)
def test_a_program_that_takes_too_much_fails(name: str) -> None:
    outcome = sandbox.run(HOSTILE[name], timeout_s=20)
    assert outcome.status not in (0, None), outcome
    assert len(outcome.stdout) <= sandbox.MAX_OUTPUT


def test_programs_that_do_not_end_are_ended() -> None:
    with ThreadPoolExecutor() as pool:
        endings = list(pool.map(lambda code: sandbox.run(code, timeout_s=1.0), LATE.values()))
    assert [ending.status for ending in endings] == [None] * len(LATE)


OF_OTHERS = "ioprio_set sched_setparam shmctl msgctl semctl mq_unlink setxattr fsetxattr lsetxattr removexattr lchown"


@pytest.mark.usefixtures("alone")
def test_without_namespaces_no_call_reaches_what_is_not_the_program_s() -> None:
    numbers = [number(call) for call in OF_OTHERS.split()] + [463, 466, 469]
    code = "import ctypes\ncall = ctypes.CDLL(None, use_errno=True).syscall\n"
    code += f"for n in {numbers}: assert (call(n, -1, 0, 0, 0, 0), ctypes.get_errno()) == (-1, 1), n"
    assert sandbox.run(code) == (0, "", "")


@isolated
def test_what_a_program_leaves_running_ends_with_it() -> None:
    daemon = "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(600)\n  os._exit(0)"
    assert sandbox.run(daemon).status == 0  # the fixture looks for it


def test_a_program_is_as_long_as_an_argument_and_has_its_own_text() -> None:
    assert sandbox.run("#" * sandbox.MAX_CODE + "1").stderr == "the program has more than 100,000 bytes"
    assert sandbox.run("print('\udcff\0ü')", "ä").stdout == "?ü\n"


@pytest.mark.usefixtures("alone")
def test_a_program_without_namespaces_does_what_most_programs_do() -> None:
    code = "import asyncio, subprocess, threading\nt = threading.Thread(target=print, args=(1,))\nt.start()\nt.join()\n"
    code += "asyncio.run(asyncio.sleep(0))\nprint(subprocess.run(['true'], stdout=subprocess.DEVNULL).returncode)"
    assert sandbox.run(code) == (0, "1\n0\n", "")


def test_what_can_t_be_contained_is_refused_at_start_unless_limits_are_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sandbox.way.cache_clear()
    monkeypatch.setattr(sandbox, "_ENTER", "echo not today >&2; exit 1")
    monkeypatch.setattr(sandbox, "_SEEN", ["/nowhere"])
    spec = {"timeout_s": 5.0}
    with pytest.raises(ConfigError, match=r"here: not today; FileNotFound.*; use Linux.*code\.sandbox=limits_only"):
        bind("code", RewardSpec.model_validate(spec))
    with pytest.raises(ConfigError, match="can't be contained"):
        tools.Tools("hermes", ["python"])
    assert bind("code", RewardSpec.model_validate({**spec, "sandbox": "limits_only"})).options["sandbox"]
    for code, status in (("import os; assert not set(os.environ) - {'LC_CTYPE'}", 0), ("bytearray(10 << 30)", 1)):
        assert sandbox.run(code, limits_only=True).status == status
    score = code_reward("```\nprint(3)\n```", {"tests": PAIRS[:1]}, timeout_s=60.0, sandbox="limits_only")
    assert score.total == 1.0
    monkeypatch.undo()
    sandbox.way.cache_clear()


PAIRS = [{"input": "1 2", "output": "3"}, {"input": "5 6\n", "output": "11\n"}]
ASSERTS = ["assert f(1) == 2", "assert f(2) == 3"]
ADDS = "a, b = map(int, input().split())\nprint(a + b)"


def block(program: str) -> str:
    return f"<think>easy</think>First\n```python\nprint(0)\n```\nno:\n```python\n{program}\n```\nDone."


@pytest.mark.parametrize(
    ("completion", "tests", "partial", "total", "parts", "note"),
    [
        (block(ADDS), PAIRS, False, 1.0, {"passed": 1.0}, ""),
        (block("print(3)"), PAIRS, True, 0.5, {"passed": 0.5, "wrong": 0.5}, "test 2 of 2: wrong\nstdout: 3\n"),
        (block("print(3)"), PAIRS, False, 0.0, {"passed": 0.5, "wrong": 0.5}, "test 2 of 2: wrong\nstdout: 3\n"),
        (block("raise SystemExit(1)"), PAIRS, True, 0.0, {"failed": 1.0}, "test 1 of 2: failed\nstdout: \nstderr: "),
        (block("while True: pass"), PAIRS, True, 0.0, {"late": 0.5}, "test 1 of 2: late\n"),
        ("no program", PAIRS, True, 0.0, {}, "there is no program in a fenced block"),
        (block("def f(x): return x + 1"), ASSERTS, False, 1.0, {"passed": 1.0}, ""),
        (block("def f(x): return 2"), ASSERTS, True, 0.5, {"passed": 0.5, "failed": 0.5}, "test 2 of 2: failed\n"),
        (block("raise SystemExit(0)"), ASSERTS[:1], True, 0.0, {"wrong": 1.0}, "test 1 of 1: wrong"),
    ],
)
def test_code_runs_the_last_block_against_the_tests_of_the_row(
    completion: str, tests: list[object], partial: bool, total: float, parts: dict[str, float], note: str
) -> None:
    timeout_s = 1.0 if "late" in parts else 60.0
    score = code_reward(completion, {"tests": tests}, timeout_s=timeout_s, partial=partial)
    assert score.total == total
    assert {name: share for name, share in score.parts.items() if share} == parts
    assert score.note.startswith(note)
    assert bool(score.note) == bool(note)
    assert REWARDS.get("code").runs == "worker"


def test_the_tool_python_returns_what_a_program_prints_and_how_it_ended() -> None:
    assert tools.python("print(6 * 7)") == "42\n"
    said = tools.python("print('so far'); 1 / 0")
    assert said.startswith("so far\nit ended with status 1\nTraceback")
    assert said.endswith("ZeroDivisionError: division by zero\n")
