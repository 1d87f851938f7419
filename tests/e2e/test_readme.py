"""The README's curl commands against a real server: each answers, with the fields that the README shows."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from hocket import manifest
from processes import ROOT, Process, free_port

pytestmark = pytest.mark.e2e

SECTION = (ROOT / "README.md").read_text(encoding="utf-8").split("## Ask the server")[1].split("\n## ")[0]
BLOCKS = re.findall(r"```\n(curl.*?)```(?:\n```json\n(.*?)```)?", SECTION, re.DOTALL)
COMMANDS = [(line, answer) for block, answer in BLOCKS for line in block.strip().splitlines()]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("readme")
    version = folder / "runs" / "quickstart" / "weights" / "v000081"
    shutil.copytree(ROOT / "checkpoints" / "tiny-sort", version)
    manifest.write(version, 81, manifest.specs(manifest.tensors(version)))
    free = free_port()
    command = ["serve", "config/quickstart.yaml", f"server.port={free}", f"run.dir={folder}/runs/mine"]
    with Process(command, folder / "log") as server:
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
def test_every_curl_command_answers_as_the_readme_shows(command: str, answer: str, port: int) -> None:
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


def test_the_readme_shows_every_route_that_hocket_adds_and_openais() -> None:
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
