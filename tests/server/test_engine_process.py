"""How the engine's process starts, with a small package in vLLM's place."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STUBS = {
    "../torch/__init__.py": """
class cpu:
    _init_amx = staticmethod(lambda: True)
""",
    "engine/arg_utils.py": """
class AsyncEngineArgs:
    @classmethod
    def from_cli_args(cls, args):
        return cls()

    def create_engine_config(self):
        return None
""",
    "v1/engine/utils.py": """
import multiprocessing
import os

def get_mp_context():
    return multiprocessing.get_context(os.environ["METHOD"])
""",
    "v1/engine/core.py": """
import os
import threading

class EngineCoreProc:
    @staticmethod
    def run_engine_core(*args, dp_rank=0, **kwargs):
        kwargs["answer"].send({
            "kwargs": [dp_rank, kwargs["log_stats"]],
            "own_group": os.getpgid(0) == os.getpid(),
            "tied": any(thread.name == "die_with_server" for thread in threading.enumerate()),
        })
""",
    "v1/engine/async_llm.py": """
from vllm.v1.engine import utils
from vllm.v1.engine.core import EngineCoreProc

class AsyncLLM:
    @classmethod
    def from_vllm_config(cls, config):
        context = utils.get_mp_context()
        receiver, sender = context.Pipe(duplex=False)
        target = EngineCoreProc.run_engine_core
        process = context.Process(target=target, kwargs={"answer": sender, "log_stats": True, "dp_rank": 3})
        process.start()
        sender.close()
        try:
            return receiver.recv() if receiver.poll(60) else None
        except EOFError:
            return None
        finally:
            process.kill()
            process.join(60)
""",
}
SCRIPT = """
import json
import os

from hocket.server import vllm_api

if __name__ == "__main__":
    os.environ[vllm_api.SERVER_PID] = str(os.getpid())
    print(json.dumps([vllm_api.start_engine(None), vllm_api.start_engine(None)]))
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_engine_runs_vllm_s_function_once_however_its_process_starts(kit: Any, tmp_path: Path, method: str) -> None:
    for name, text in STUBS.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / "v1" / "__init__.py").touch()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(kit.SOURCE)]), "METHOD": method},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    started = {"kwargs": [3, True], "own_group": True, "tied": True}
    assert json.loads(done.stdout) == [started, started], done.stderr[-3000:]
