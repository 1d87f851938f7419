"""The commands of the pages HTTP API and Python against a real server: each answers as it is shown."""

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

PAGE = (ROOT / "docs" / "reference" / "http_api.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"```sh\n(curl.*?)```\n\n```(json|text)\n(.*?)```", PAGE, re.DOTALL)
OF_VLLM = re.compile(r"/(v1/.*|(de)?tokenize|load|version)")  # the page shows the main fields of these answers


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


def has(shown: Any, answer: Any) -> bool:
    """Tells whether an answer has every field that is shown, at every depth."""
    if isinstance(shown, dict):
        return isinstance(answer, dict) and all(key in answer and has(shown[key], answer[key]) for key in shown)
    if isinstance(shown, list) and shown:
        return isinstance(answer, list) and bool(answer) and has(shown[0], answer[0])
    return True


def route(command: str) -> str:
    return re.search(r"localhost:8000(/\S*)", command)[1]  # type: ignore[index]


@pytest.mark.parametrize(("command", "language", "answer"), COMMANDS, ids=range(len(COMMANDS)))
def test_every_curl_command_answers_as_the_page_shows(command: str, language: str, answer: str, port: int) -> None:
    result = subprocess.run(
        ["bash", "-c", command.replace("localhost:8000", f"127.0.0.1:{port}")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout
    if language == "text":  # metrics
        assert [line.split()[0] for line in result.stdout.splitlines()] == re.findall(r"^\S+", answer, re.M)
        return
    shown = [json.loads(text) for text in ([answer] if answer.startswith("{\n") else answer.splitlines())]
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [list(one) == ["error"] for one in answers] == [list(one) == ["error"] for one in shown]
    if OF_VLLM.fullmatch(route(command)):
        assert has(shown, answers), result.stdout
    else:
        assert list(map(shape, answers)) == list(map(shape, shown))


def test_the_page_shows_every_route_that_hocket_adds_and_openais() -> None:
    shown = {route(command) for command, _, _ in COMMANDS}
    assert len(COMMANDS) == PAGE.count("\ncurl ")  # each with its answer
    assert shown >= {"/generate", "/reload_weights", "/health", "/metrics", "/heartbeat", "/sleep", "/sessions"}
    assert shown >= {"/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"}


def test_the_page_names_every_route_of_the_server(port: int) -> None:
    paths = httpx.get(f"http://127.0.0.1:{port}/openapi.json").json()["paths"]
    assert len(paths) > 20
    assert [path for path in paths if not re.search(f"{re.sub(r'{.*?}', '[A-Z]+', path)}`", PAGE)] == []


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
    page = (ROOT / "docs" / "how-to" / "python.md").read_text(encoding="utf-8")
    runs = httpx.get(f"http://127.0.0.1:{port}/health").json()["root"]
    cells = [code.replace('"runs/', f'"{runs}/') for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]
    # The first run starts a server of its own, the others find the one that is there.
    training = [number for number, cell in enumerate(cells) if '{"run.dir"' in cell]
    for number, one in zip(training, (free_port(), port), strict=True):
        settings = f'{{"server.port": {one}, "eval.num_prompts": 64, "run.dir"'
        cells[number] = cells[number].replace('{"run.dir"', settings)
    (tmp_path / "cells").write_text(json.dumps(cells))
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    command, program = [str(tmp_path / "cells")], [str(tmp_path / "notebook.py")]
    with Process(command, tmp_path / "log", program=program, PYTHONPATH=str(ROOT / "src")) as process:
        assert process.wait_end(START_S) == 0, process.output()
        process.assert_gone()
    out = process.output()
    assert out.count("no server answers") == 1
    left = [tuple(map(int, line)) for line in re.findall(r"^left: (\d+) (\d+) (\d+)", out, re.M)]
    assert len(left) == len(cells)
    (_, sockets, files), (children, sockets_then, files_then) = left[0], left[-1]
    assert (children, sockets_then <= sockets, files_then <= files + 2) == (0, True, True), out
    assert re.search(r"^\s+step\s+reward/mean\s+train/entropy\s+time/step$", out, re.M)
    assert page.split("```text\n")[1].split("```")[0] in out  # the error
    steps = Path(runs, "from_python/metrics.jsonl").read_text().splitlines()[1:]
    rewards = [json.loads(step)["reward/mean"] for step in steps]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5, out  # own task, own data, and the reward of a file
    (slow_steps, slow), (fast_steps, fast) = re.findall(r"^\S+ steps (\d+) reward (.*)$", out, re.M)
    assert float(fast) > float(slow) + 0.05, out
    assert slow_steps == "10"  # good_enough has ended the other one, which can be resumed
    assert Path(runs, f"rate_0.0005/checkpoints/step_{int(fast_steps):06d}/COMPLETE").exists()
