"""Requests made from the server's own description by schemathesis, where that is installed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.engines import make_model
from support.tiny_server import TinyServer

# A value of a valid type is not yet a valid value (a prompt may be too long, a version unknown), and vLLM's pydantic
# takes "1" for 1.
LEFT_OUT = "positive_data_acceptance,negative_data_rejection"
LONGEST_S = 1800  # it took more than ten minutes on two cores that others used, too


@pytest.fixture
def schemathesis() -> list[str]:
    """What its command line begins with."""
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed")
    return [sys.executable, "-m", "schemathesis.cli", "run"]


@pytest.mark.engine
@pytest.mark.long
def test_every_route_answers_as_the_server_s_description_says(schemathesis: list[str], tmp_path: Path) -> None:
    # A server of its own, whose GPU no trainer shares: that one would be sent to sleep, and refuse all that follows.
    server = TinyServer(tmp_path, make_model(seed=0), "model.dtype=float32")
    command = [*schemathesis, f"{server.client.base_url}/openapi.json"]
    command += ["--max-examples", "25", "--seed", "1", "--generation-allow-x00", "false"]
    command += ["--exclude-checks", LEFT_OUT, "--request-timeout", "20"]
    variables = os.environ | {"PYTHONIOENCODING": "utf-8"}  # it can't read hocket's own value
    with server:
        done = subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=LONGEST_S, check=False
        )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
