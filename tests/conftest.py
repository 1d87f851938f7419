"""How the suite is shared out where it runs in several processes (`run.py test` does so)."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from hocket.server.vllm_arguments import is_cpu_build
from processes import start_fork_server, use_fork_server

ROOT = Path(__file__).parent
LONGEST = ("server", "faults", "e2e", "trainer")
"""Folders that are begun first, so that no process is left with a long one at the end."""
TOGETHER = ("tests/server/", "tests/trainer/test_ranks")
"""What files that share engines or ranks, which take long to start, begin with."""

# For all that a test starts, too. Several threads that wait for each other in busy loops, where other processes want
# the same cores, take ten times as long.
os.environ["OMP_NUM_THREADS"] = "1"
# A shell has what it starts in the background ignore this, and that has what it starts: no Ctrl-C would end a run.
signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keeps the tests of a file, or of a folder with costly fixtures, in one process."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return next((start for start in TOGETHER if path.startswith(start)), path)

    return ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begins with what takes longest. The CUDA build of vLLM can't do without a GPU: its tests are those marked gpu."""
    if not is_cpu_build():
        on_gpu = pytest.mark.skip(reason="means vLLM's CPU build: HOCKET_DEVICE=cpu python3 run.py test runs it")
        for item in items:
            if {"engine", "e2e"} & {mark.name for mark in item.iter_markers()} and not item.get_closest_marker("gpu"):
                item.add_marker(on_gpu)

    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(ROOT).parts[0]
        return LONGEST.index(folder) if folder in LONGEST else len(LONGEST)

    if hasattr(config, "workerinput"):  # in one of several processes
        items.sort(key=rank)


@pytest.fixture(scope="session")
def tiny_vlm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a random Idefics3, which vLLM's CPU build serves."""
    from eyes import make_idefics

    return make_idefics(tmp_path_factory.mktemp("models") / "idefics")


@pytest.fixture(scope="session")
def tiny_qwen_vl(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a random Qwen2.5-VL, for the trainer alone."""
    from eyes import make_qwen

    return make_qwen(tmp_path_factory.mktemp("models") / "qwen_vl")
