"""The files of docker/ as a table of facts; `docker compose config` where there is such a command."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hocket import config, environment

ROOT = Path(__file__).parents[1]
COMPOSE, GPU = (ROOT / "docker" / name for name in ("compose.yaml", "compose.gpu.yaml"))
VARIABLE = re.compile(r"\$\{\w+:([-+])([^}]*)\}")


def services(path: Path) -> dict[str, dict[str, Any]]:
    """Return the services with nothing set in the environment."""
    text = VARIABLE.sub(lambda match: match[2] if match[1] == "-" else "", path.read_text(encoding="utf-8"))
    assert "$" not in re.sub(r"#.*|\$\$", "", text)  # each variable has a default; $$ is the shell's
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return found


@pytest.mark.parametrize("name", ["server", "trainer"])
def test_each_process_has_an_image_of_its_own_that_is_pinned_unprivileged_and_starts_hocket(name: str) -> None:
    text = (ROOT / "docker" / f"{name}.Dockerfile").read_text(encoding="utf-8")
    assert "ARG BASE=python:3.11-slim\n" in text
    assert re.findall(r"(?m)^FROM (.*)", text) == ["scratch AS wheels", "${BASE}"]
    assert re.findall(r"(?m)^USER (.*)", text) == ["1000:1000"]
    assert 'ENTRYPOINT ["hocket"]' in text
    assert ("'/health'" in text.partition("HEALTHCHECK")[2]) == (name == "server")
    assert not re.search("(?i)token|latest", text)


@pytest.mark.parametrize(
    ("name", "file", "has", "lacks"),
    [
        ("server", "requirements.txt", "vllm==", "deepspeed"),
        ("server", "requirements-cpu.txt", "fastapi", "deepspeed"),
        ("trainer", "requirements.txt", "deepspeed==", "vllm"),
        ("trainer", "requirements-cpu.txt", "deepspeed==", "fastapi"),
    ],
)
def test_an_image_leaves_out_what_only_the_other_process_needs(name: str, file: str, has: str, lacks: str) -> None:
    script = re.findall("sed '(.*?)'", (ROOT / "docker" / f"{name}.Dockerfile").read_text(encoding="utf-8"))
    kept = subprocess.run(["sed", *script, ROOT / file], capture_output=True, text=True, check=True).stdout
    lines = {line for line in kept.splitlines() if not line.startswith("#")}
    assert any(line.startswith(has) for line in lines)
    assert not any(line.startswith(lacks) for line in lines)
    assert {"torch==2.13.0", "httpx", "pyarrow"} <= lines
    assert environment.SERVER_ALONE in (ROOT / "requirements-cpu-engine.txt").read_text(encoding="utf-8")


def test_compose_starts_the_quickstart_with_nothing_set_and_opens_no_port_to_other_machines() -> None:
    found = services(COMPOSE)
    settings = {name: config.read_settings(shlex.split(each["command"])[1:])[0] for name, each in found.items()}
    assert {each.run.dir for each in settings.values()} == {"runs/docker"}
    assert settings["server"].server.port == 8000
    assert settings["trainer"].checkpoint.resume
    assert found["trainer"]["depends_on"] == {"server": {"condition": "service_healthy"}}
    assert [each.get("ports", []) for each in found.values()] == [["127.0.0.1:8000:8000"], []]
    tokens = {each["environment"]["HOCKET_TOKEN"] for each in found.values()}
    assert len(tokens) == 1
    for name, each in found.items():
        assert (each["user"], each["volumes"], each["cap_drop"]) == ("1000:1000", ["..:/hocket"], ["ALL"])
        assert (ROOT / each["build"]["dockerfile"]).name == f"{name}.Dockerfile"
        gpus = services(GPU)[name]["deploy"]["resources"]["reservations"]["devices"]
        assert gpus == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]


def test_no_run_no_history_and_no_environment_file_is_in_the_build() -> None:
    first, *others = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert first == "*"
    assert not any(re.match(r"!(\.|runs|\*)", line) for line in others)


def test_compose_itself_reads_the_files() -> None:
    if subprocess.run("docker compose version", shell=True, capture_output=True).returncode != 0:
        pytest.skip("there is no docker with compose here")
    subprocess.run(["docker", "compose", "-f", COMPOSE, "-f", GPU, "config", "--quiet"], check=True, timeout=60)
