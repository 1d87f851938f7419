"""How the suite is shared out where it runs in several processes (`run.py test` does so)."""

import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hocket.server.vllm_arguments import is_cpu_build
from support import rules
from support.processes import start_fork_server, use_fork_server

ROOT = Path(__file__).parent
LONGEST = (
    *("server/", "extras/delta/test_deltas", "extras/agents/", "sync/test_lies", "test_optional", "extras/test_core"),
    *("faults/", "e2e/", "extras/e2e/", "extras/page/test_live", "extras/stages/", "trainer/", "extras/test_kernels"),
    *("extras/test_long_rows", "extras/test_ulysses", "benchmarks/"),
)
"""What is begun first, so that no process is left with something long at the end."""
TOGETHER = (
    ("tests/server/", "tests/extras/delta/test_deltas", "tests/extras/agents/test_sessions"),
    ("tests/trainer/test_ranks",),
)
"""What files that share engines or ranks, which take long to start, begin with."""
LEFT_OUT: set[str] = set()
"""Long tests that are not run."""

# For all that a test starts, too. Several threads that wait for each other in busy loops, where other processes want
# the same cores, take ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell has what it starts in the background ignore this, and that has what it starts: no Ctrl-C would end a run.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hocket")
    group.addoption("--seed", type=int, default=0, metavar="N", help="what random tests draw from (default: 0)")
    group.addoption("--shuffle", action="store_true", help="run the tests in an order that the seed decides")


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed} (--seed N for another one; --shuffle for another order)"


def pytest_configure(config: pytest.Config) -> None:
    """Hides GPUs from tests that mean the CPU: all but `-m gpu`. Uses the fork server of `pytest_configure_node`."""
    if address := getattr(config, "workerinput", {}).get("fork_server"):
        use_fork_server(address)
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Has the processes of a suite with engines use one fork server, whose imports take 12 s of processor time."""
    if "not e2e" not in node.config.option.markexpr:
        node.workerinput["fork_server"] = start_fork_server()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    LEFT_OUT.update(item.nodeid for item in items if item.get_closest_marker("long"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Has the process that began the others know what they leave out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = sorted(LEFT_OUT)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    LEFT_OUT.update(getattr(node, "workeroutput", {}).get("left_out", ()))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if LEFT_OUT and "not long" in config.option.markexpr:
        terminalreporter.write_line(f"{len(LEFT_OUT)} long tests were left out: python3 run.py test --rest")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keeps the tests of a file, or of a folder with costly fixtures, in one process."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return next((starts[0] for starts in TOGETHER if path.startswith(starts)), path)

    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begins with what takes longest, or in an order that the seed decides; holds the rule of support/rules.py.

    The CUDA build of vLLM can't do without a GPU: its tests are those marked gpu.
    """
    if getattr(config, "workerinput", {}).get("workerid") in (None, "gw0"):  # one look is enough
        rules.check(items)
    if not is_cpu_build():
        on_gpu = pytest.mark.skip(reason="means vLLM's CPU build: HOCKET_DEVICE=cpu python3 run.py test runs it")
        for item in items:
            if {"engine", "e2e"} & {mark.name for mark in item.iter_markers()} and not item.get_closest_marker("gpu"):
                item.add_marker(on_gpu)

    def rank(item: pytest.Item) -> int:
        path = str(item.path.relative_to(ROOT))
        return next((place for place, start in enumerate(LONGEST) if path.startswith(start)), len(LONGEST))

    if config.option.shuffle:
        drawn = random.Random(config.option.seed)
        files = {item.path: drawn.random() for item in items}  # a file's tests share fixtures that take long
        items.sort(key=lambda item: (files[item.path], drawn.random()))
    elif hasattr(config, "workerinput"):  # in one of several processes
        items.sort(key=rank)


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """What a random test draws from: the suite's --seed, which its first lines say."""
    return int(request.config.option.seed)


@pytest.fixture
def rng(seed: int) -> random.Random:
    """Random numbers that --seed decides."""
    return random.Random(seed)


@pytest.fixture(autouse=True)
def seeded(seed: int) -> None:
    """Has libraries that draw from a generator of their own draw alike each time."""
    random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


@pytest.fixture(autouse=True)
def same_variables() -> Iterator[None]:
    """Has no test see the environment variables that a command in this process has set for what it starts."""
    before = {**os.environ}
    yield
    for name in {*os.environ} - {*before}:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def tiny_vlm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a random Idefics3, which vLLM's CPU build serves."""
    from support.eyes import make_idefics

    return make_idefics(tmp_path_factory.mktemp("models") / "idefics")


@pytest.fixture(scope="session")
def tiny_qwen_vl(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a random Qwen2.5-VL, for the trainer alone."""
    from support.eyes import make_qwen

    return make_qwen(tmp_path_factory.mktemp("models") / "qwen_vl")
