"""The curl commands of docs/server.md and docs/python.md against a real server: each answers as it is shown."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from hocket.protocol import manifest
from support.processes import ROOT, START_S, Command, Process, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PAGE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```\n(curl.*?)```(?:\n```json\n(.*?)```)?", PAGE, re.DOTALL)
COMMANDS = [(line, answer) for block, answer in BLOCKS for line in block.strip().splitlines()]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("readme")
    version = folder / "runs" / "quickstart" / "weights" / "v000101"
    shutil.copytree(ROOT / "checkpoints" / "tiny-sort", version)
    manifest.write(version, 101, manifest.specs(manifest.tensors(version)))
    free = free_port()
    command = ["serve", "config/quickstart.yaml", f"server.port={free}", f"run.dir={folder}/runs/mine"]
    with Command(command, folder / "log") as server:
        server.wait_for(lambda: "ready on" in server.output(), "the server is ready")
        yield free
        server.end()


def shape(value: Any) -> Any:
    """What two answers of the same kind share: the names of their fields, at every depth."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list) and value:
        return [shape(value[0])]
    return None


@pytest.mark.parametrize(("command", "answer"), COMMANDS, ids=range(len(COMMANDS)))
def test_every_curl_command_answers_as_the_page_shows(command: str, answer: str, port: int) -> None:
    result = subprocess.run(
        ["bash", "-c", command.replace("localhost:8000", f"127.0.0.1:{port}")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout
    if answer:
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        assert [shape(line) for line in lines] == [shape(json.loads(line)) for line in answer.splitlines()]
    else:
        assert '"error":{' not in result.stdout.replace(" ", "")


def test_the_page_shows_every_route_that_hocket_adds_and_openais() -> None:
    shown = {re.search(r"localhost:8000(/\S*)", command)[1] for command, _ in COMMANDS}  # type: ignore[index]
    assert shown >= {"/generate", "/reload_weights", "/health", "/metrics"}
    assert shown >= {"/v1/models", "/v1/completions", "/v1/chat/completions"}


def test_an_unchanged_openai_client_chats_with_the_policy(port: int) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="checkpoints/tiny-sort", messages=[{"role": "user", "content": "Sort: dbca"}], temperature=0
        )
    assert answer.choices[0].message.content == "abcd"
    assert answer.choices[0].finish_reason == "stop"


NOTEBOOK = """
import asyncio, json, psutil, sys
async def main():
    names, me = {"__name__": "notebook"}, psutil.Process()
    for cell in json.load(open(sys.argv[1])):
        exec(cell, names)
        print("left:", len(me.children()), len(me.net_connections()), me.num_fds(), flush=True)
asyncio.run(main())
"""


def test_the_python_of_the_documentation_trains_in_a_running_loop_and_leaves_nothing(port: int, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    runs = httpx.get(f"http://127.0.0.1:{port}/health").json()["root"]
    cells = [code.replace('"runs/', f'"{runs}/') for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]
    ports = (free_port(), port)  # the first run starts a server of its own, the others find the one that is there
    cells = [
        cell.replace('{"run.dir"', f'{{"server.port": {one}, "eval.num_prompts": 64, "run.dir"')
        for cell, one in zip(cells, ports, strict=True)
    ]
    (tmp_path / "cells").write_text(json.dumps(cells))
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    command, program = [str(tmp_path / "cells")], [str(tmp_path / "notebook.py")]
    with Process(command, tmp_path / "log", program=program, PYTHONPATH=str(ROOT / "src")) as process:
        assert process.wait_end(START_S) == 0, process.output()
        process.assert_gone()
    out = process.output()
    assert out.count("no server answers") == 1
    (_, sockets, files), (children, sockets_then, files_then) = (
        map(int, line) for line in re.findall(r"^left: (\d+) (\d+) (\d+)", out, re.M)
    )
    assert (children, sockets_then <= sockets, files_then <= files + 2) == (0, True, True), out
    steps = Path(runs, "from_python/metrics.jsonl").read_text().splitlines()[1:]
    rewards = [json.loads(step)["reward/mean"] for step in steps]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5, out  # own task, own data, and the reward of a file
    (slow_steps, slow), (fast_steps, fast) = re.findall(r"^\S+ steps (\d+) reward (.*)$", out, re.M)
    assert float(fast) > float(slow) + 0.05, out
    assert slow_steps == "10"  # good_enough has ended the other one, which can be resumed
    assert Path(runs, f"rate_0.0005/checkpoints/step_{int(fast_steps):06d}/COMPLETE").exists()
