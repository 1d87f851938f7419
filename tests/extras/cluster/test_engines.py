"""The files for SLURM, Ray and Kubernetes: compared with golden ones, and read by the engines' own checkers.

After a change of a template: HOCKET_GOLDEN=write python3 run.py test tests/extras/cluster, then read the difference.
"""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import jsonschema
import pytest
import yaml

from hocket import config
from hocket.commands import cli
from hocket.errors import ConfigError
from hocket.extras.cluster import engines
from hocket.extras.cluster.engines import lay_out
from support import fakes
from support.engines import asking, idle_engine, wrap
from support.processes import wait_for
from support.programs import write_program

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = Path(__file__).parent / "golden" / "engines"
SHARED = Path("/shared/hocket")  # the checkout, as nodes of a cluster see it
PYTHON = "/shared/hocket/.venv/bin/python"
EXAMPLE = "config/multi_node/math7b.yaml"
COMMANDS = re.findall(rf"launch {EXAMPLE} --engine (\w+)(.*)", (ROOT / EXAMPLE).read_text("utf-8").replace("\\\n#", ""))
CASES = {  # as its header says
    engine: (engine, [EXAMPLE, *more.replace("--gpus-per-node 4", "").split()]) for engine, more in COMMANDS
}
CASES["slurm_one_node"] = "slurm", [EXAMPLE, "run.dir=runs/one-node", "launch.servers=2", "launch.trainers=6"]


def render(engine: str, settings: list[str], gpus_per_node: int = 8) -> dict[str, str]:
    return engines.render(engine, settings, gpus_per_node, output=None, root=SHARED, python=PYTHON)[2]


def write(engine: str, settings: list[str], gpus_per_node: int, folder: Path, root: Path, python: str) -> None:
    """Writes the files into a folder, as of a checkout at `root`."""
    for name, text in engines.render(engine, settings, gpus_per_node, output=folder, root=root, python=python)[
        2
    ].items():
        (folder / name).write_text(text)


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"ray"}))  # that job is run below
def test_the_files_are_the_golden_ones(case: str) -> None:
    files, folder = render(*CASES[case]), GOLDEN / case
    if os.environ.get("HOCKET_GOLDEN") == "write":
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    assert files == {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


@pytest.mark.parametrize("case", CASES)
def test_the_written_config_loads_as_the_given_one_with_what_the_engine_adds(case: str, tmp_path: Path) -> None:
    engine, settings = CASES[case]
    (tmp_path / "config.yaml").write_text(render(engine, settings)["config.yaml"], encoding="utf-8")
    written, given = config.load(tmp_path / "config.yaml"), config.read_settings(settings)[0]
    added = {"checkpoint.resume", "run.dir", "server.host", "server.discover"}
    assert written.changes(given.as_dict()).keys() <= added
    assert written.checkpoint.resume
    assert written.run_dir.is_absolute()


def test_servers_and_ranks_have_nodes_of_their_own_unless_one_node_holds_both() -> None:
    # 4 servers x 2 GPUs fill a node of 8; 16 ranks fill two
    assert lay_out(4, 2, 16, 8)[3:] == (4, 1, 8, 2, 3)
    # 3 servers of 3 GPUs: 2 to a node of 8, so 2 nodes; 12 ranks on 2 nodes are 6 on each
    assert lay_out(3, 3, 12, 8)[3:] == (2, 2, 6, 2, 4)
    # 2 + 6 GPUs are one node of 8; one more is not
    assert lay_out(2, 1, 6, 8)[3:] == (2, 1, 6, 1, 1)
    assert lay_out(2, 1, 7, 8)[3:] == (2, 1, 7, 1, 2)
    # without GPUs there is nothing to count
    assert lay_out(5, 1, 9, 0)[3:] == (5, 1, 9, 1, 1)
    assert str(lay_out(4, 2, 16, 8)) == "4 servers of 2 GPUs on 1 node, 16 ranks on 2 nodes"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "set launch.servers and launch.trainers"),
        (["launch.servers=1"], "set launch.servers and launch.trainers"),
        # 17 ranks need 3 nodes of 8; 18 are 6 on each
        (["launch.servers=1", "launch.trainers=17"], "set launch.trainers=18"),
        (["launch.servers=1", "launch.trainers=8", "server.tensor_parallel_size=16"], "set it to 8 or less"),
        (["launch.servers=1", "launch.trainers=1", "launch.share_gpu=true"], "leave it out"),
        (["launch.servers=8", "launch.trainers=8", "server.urls=http://a:8000"], "leave one out"),
        (["launch.servers=8", "launch.trainers=8", "sync.root=/elsewhere"], "must lie under sync.root=/elsewhere"),
    ],
)
def test_what_no_engine_can_run_is_refused_with_what_to_change(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render("slurm", settings)


def test_fewer_gpus_per_node_than_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="--gpus-per-node=-1 must be 1 or more, or 0 for CPUs only"):
        render("slurm", CASES["slurm"][1], -1)


@pytest.mark.long
def test_shellcheck_finds_nothing_in_the_batch_scripts_and_in_tests_deploy() -> None:
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shellcheck = shutil.which("shellcheck", path=programs)
    assert shellcheck, "run `python3 run.py test` once: it installs requirements/dev.txt"
    scripts = [*GOLDEN.glob("slurm*/job.sh"), *ROOT.glob("tests/deploy/*.sh"), *ROOT.glob("docker/*.sh")]
    assert len(scripts) > 6
    meant = "--exclude=SC2016"  # "$" in single quotes is for an inner shell
    found = subprocess.run([shellcheck, meant, *scripts], stdout=subprocess.PIPE, text=True, timeout=60)
    assert (found.stdout, found.returncode) == ("", 0)


FAKE_SRUN = """#!/usr/bin/env bash
echo "${#HOCKET_TOKEN} $*" >> "$CALLS"
[[ $* != *" train "* ]] || exit 7
"""


def test_the_batch_script_gives_every_server_gpus_and_a_url_and_ends_as_the_trainer_does(tmp_path: Path) -> None:
    # nodes of 4 GPUs: servers of 2 GPUs, so 2 + 1 on 2 nodes; 8 ranks on 2 nodes
    sizes = ["launch.servers=3", "server.tensor_parallel_size=2", "launch.trainers=8"]
    write("slurm", [EXAMPLE, f"run.dir={tmp_path}/run", *sizes], 4, tmp_path, tmp_path, "python3")
    for name, text in (("srun", FAKE_SRUN), ("scontrol", "#!/usr/bin/env bash\nprintf 'n%s\\n' 1 2 3 4\n")):
        write_program(tmp_path / name, text)
    calls = tmp_path / "calls"
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls)}
    env |= {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n[1-4]"}
    assert subprocess.run(["bash", tmp_path / "job.sh"], env=env, timeout=60).returncode == 7
    assert (tmp_path / "servers.txt").read_text().split() == ["http://n1:8000", "http://n1:8001", "http://n2:8000"]
    wait_for(lambda: len(calls.read_text().splitlines()) == 4, "all steps have been started")
    steps = sorted(calls.read_text().splitlines(), key=lambda step: ("train" in step, step.partition("server_")[2]))
    assert all(step.startswith("32 --export=ALL ") for step in steps)  # each has the token, whatever sbatch exports
    nodes_and_gpus = [re.search(r"--nodelist=(\S+) .*CUDA_VISIBLE_DEVICES=(\S+)", step) for step in steps[:3]]
    assert [found and found.groups() for found in nodes_and_gpus] == [("n1", "0,1"), ("n1", "2,3"), ("n2", "0,1")]
    assert "--nodes=2 --ntasks=2 --nodelist=n3,n4" in steps[3]
    assert "--nnodes=2 --nproc-per-node=4" in steps[3]
    assert "--rdzv-endpoint=n3:20042" in steps[3]


@pytest.mark.parametrize(("own", "length"), [({}, 32), ({"HOCKET_TOKEN": "of-my-own"}, 9)])
def test_a_batch_script_for_one_node_has_a_token_too(own: dict[str, str], length: int, tmp_path: Path) -> None:
    settings = [*CASES["slurm_one_node"][1], "server.token=never-in-a-file"]
    write("slurm", settings, 8, tmp_path, tmp_path, f"{tmp_path}/python")
    assert not any("never-in-a-file" in path.read_text() for path in tmp_path.iterdir())
    write_program(tmp_path / "python", "#!/usr/bin/env bash\necho ${#HOCKET_TOKEN} $*\n")
    env = {"PATH": os.environ["PATH"], **own}
    said = subprocess.run(["bash", tmp_path / "job.sh"], env=env, stdout=subprocess.PIPE, text=True, timeout=60).stdout
    assert said == f"{length} run.py launch {tmp_path}/config.yaml\n"


@pytest.mark.long
def test_kubernetes_objects_have_the_fields_of_its_schemas() -> None:
    schemas = json.loads((GOLDEN.parent / "kubernetes_1.30.json").read_text(encoding="utf-8"))
    kinds = []
    for name in ("servers.yaml", "trainer.yaml", "storage.yaml"):
        for thing in yaml.safe_load_all((GOLDEN / "kubernetes" / name).read_text(encoding="utf-8")):
            schema = {"$ref": f"#/$defs/{schemas['kinds'][thing['kind']]}", "$defs": schemas["$defs"]}
            jsonschema.validate(thing, schema, jsonschema.Draft202012Validator)
            kinds.append(thing["kind"])
    assert sorted(kinds) == ["Deployment", "Job", "PersistentVolumeClaim", "Service", "Service"]


@pytest.mark.parametrize(
    ("status", "code", "killed"),
    [
        *[("ready", None, 0), ("updating", None, 0), ("failed", "engine_dead", 1)],
        *[("failed", "reload_failed", 0), ("failed", "not_resumed", 0)],
    ],
)
async def test_the_liveness_probe_ends_a_server_whose_engine_is_lost_and_no_other(
    status: str, code: str | None, killed: int
) -> None:
    server = idle_engine()
    error = code and {"code": code, "message": "m", "hint": "h"}
    server.health = lambda: fakes.health(status=status, error=error)
    _, deployment = yaml.safe_load_all(render("kubernetes", CASES["kubernetes"][1])["servers.yaml"])
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    probe = container["livenessProbe"]["httpGet"]
    assert probe["port"] == container["ports"][0]["name"]
    async with asking(wrap(server, token="t")) as http:  # Kubernetes takes 200 to 399 for alive, and has no token
        answer = await http.get(probe["path"], headers={"host": "10.1.2.3:8000"})
    assert answer.status_code == (503 if killed else 200)


class NodeDiedError(Exception):
    pass


def fake_ray(ends: Sequence[tuple[int, object]] = ()) -> MagicMock:
    """Returns a Ray in which the trainer's nodes end one after the other, each with a status or an error, or hang."""
    ray, left, outcomes = MagicMock(), iter(ends), dict[int, object]()
    ray.exceptions.RayError = NodeDiedError
    # Whatever is decorated gives as its reference the first argument of the call: of `train`, the node.
    ray.remote.return_value.return_value.options.return_value.remote = lambda *given: given[0] if given else MagicMock()

    def wait(nodes: list[int], *, timeout: float = 0.0, **_: int) -> tuple[list[int], list[int]]:
        if timeout:
            return [], nodes
        node, outcomes[node] = next(left)
        return [node], [other for other in nodes if other != node]

    def get(reference: object, timeout: float = 0.0) -> object:
        found = outcomes[reference] if isinstance(reference, int) else ("10.0.0.1", 29500)
        if isinstance(found, Exception):
            raise found
        return found

    ray.wait, ray.get = wait, get
    return ray


def job_of(ray: MagicMock, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names of a Ray job that runs in this checkout, and writes into a folder."""
    write("ray", [*CASES["ray"][1], f"run.dir={folder}/run"], 4, folder, ROOT, sys.executable)
    for name in ("ray", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, ray)
    job: dict[str, Any] = {"__name__": "job"}
    exec(compile((folder / "ray_job.py").read_text(), "ray_job.py", "exec"), job)
    return job


@pytest.mark.parametrize(
    ("ends", "status", "cancelled"),
    [
        ([(1, 0), (0, 0)], 0, []),
        ([(1, 3)], 3, [0]),
        ([(1, NodeDiedError("node died")), (0, 0), (1, 0)], 0, [0]),  # all once more
    ],
)
def test_the_ray_job_starts_all_ranks_again_as_soon_as_one_node_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Any, status: int, cancelled: list[int]
) -> None:
    ray = fake_ray(ends)
    job = job_of(ray, tmp_path, monkeypatch)
    sizes = ("NUM_SERVERS", "GPUS_PER_SERVER", "FIRST_PORT", "NUM_NODES", "RANKS_PER_NODE")
    assert [job[size] for size in sizes] == [4, 2, 8000, 2, 4]
    assert job["main"]() == status
    assert ray.cancel.mock_calls == [call(node, force=True) for node in cancelled]  # with what their workers run


def test_the_ray_job_places_servers_and_ranks_and_tells_torchrun_where_to_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = fake_ray([(0, 0), (1, 0)])
    job = job_of(ray, tmp_path, monkeypatch)
    for_ever = {"max_restarts": -1, "max_task_retries": -1}
    once = call(num_cpus=1, max_retries=0)  # main() starts the trainer again, with all of its nodes
    assert ray.remote.call_args_list == [call(num_cpus=0, **for_ever), call(num_cpus=1, **for_ever), once, once]
    written = {thing.args[0].__name__: thing.args[0] for thing in ray.remote.return_value.call_args_list}
    job["main"]()
    # 4 servers of 2 GPUs, 2 nodes with 4 ranks each; the ranks meet on the first of them
    bundles = [{"CPU": 1, "GPU": size} for size in (2, 2, 2, 2, 4, 4)]
    ray.placement_group.assert_called_once_with(bundles, strategy="PACK")
    options = ray.remote.return_value.return_value.options.call_args_list
    assert [one.kwargs["num_gpus"] for one in options] == [2, 2, 2, 2, 4, 4, 4]
    places = [one.kwargs["placement_group_bundle_index"] for one in ray.PlacementGroupSchedulingStrategy.call_args_list]
    assert places == [0, 1, 2, 3, 4, 4, 5]
    ran = job["run"] = MagicMock(return_value=0)
    written["train"](1, "10.0.0.1", 29500, "t0ken")
    ranks = ["--nnodes=2", "--node-rank=1", "--nproc-per-node=4", "--master-addr=10.0.0.1", "--master-port=29500"]
    command = ["-m", "torch.distributed.run", *ranks, "run.py", "train", job["CONFIG"]]
    ran.assert_called_once_with(command, "t0ken", tmp_path / "run/logs/trainer_1.log", show=False)
    file = MagicMock()
    ray.util.get_node_ip_address.return_value = "10.0.0.2"
    written["Server"]().serve(3, file, "t0ken")
    file.put.remote.assert_called_once_with("http://10.0.0.2:8003")
    ran.assert_called_with(
        ["run.py", "serve", job["CONFIG"], "server.port=8003"], "t0ken", tmp_path / "run/logs/server_3.log"
    )


def test_the_ray_job_keeps_and_shows_whatever_a_program_prints_and_returns_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import os, sys; os.write(1, os.environb[b'HOCKET_TOKEN'] + b' \\xff\\n'); sys.exit(3)"
    run = job_of(fake_ray(), tmp_path, monkeypatch)["run"]
    assert run(["-c", code], "t0ken", tmp_path / "log", show=True) == 3
    assert (tmp_path / "log").read_text(encoding="utf-8") == capsys.readouterr().out == "t0ken \ufffd\n"


def test_launch_writes_files_keeps_what_was_edited_and_makes_one_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(*more: str) -> int:
        return cli.main(["launch", *CASES["kubernetes"][1], *more, "--engine", "kubernetes", f"--output={tmp_path}"])

    assert launch("server.token=never-in-a-file") == 0
    printed = capsys.readouterr().out
    assert "4 servers of 1 GPU on 1 node, 8 ranks on 1 node" in printed
    assert "kubectl apply -k ." in printed
    token = tmp_path / "token.env"
    secret = token.read_text()
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(secret.partition("\n")[0].removeprefix("HOCKET_TOKEN=")) == 32
    assert (tmp_path / ".gitignore").read_text() == "token.env\n"
    assert not any(
        word in path.read_text() for path in tmp_path.glob("*.yaml") for word in (secret[20:45], "never-in-a")
    )
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    assert launch() == 0  # once more: the same bytes, and the same token
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    (tmp_path / "storage.yaml").write_text("# mine\n")
    capsys.readouterr()
    for _ in range(2):
        assert launch("trainer.steps=7") == 0  # the others are written anew, as they are not edited
        assert "kept as you have edited it: storage.yaml; for a fresh one delete it" in capsys.readouterr().out
        assert (tmp_path / "storage.yaml").read_text() == "# mine\n"
        assert yaml.safe_load((tmp_path / "config.yaml").read_text())["trainer"]["steps"] == 7
    (tmp_path / "storage.yaml").unlink()
    assert launch() == 0
    assert "kept" not in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_submit_runs_the_engines_command_in_the_folder_and_reports_its_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["launch", EXAMPLE, "--engine=slurm", "--submit", f"--output={tmp_path / 'job'}"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(arguments) == 1
    assert "sbatch is not installed here" in capsys.readouterr().err
    sbatch = tmp_path / "sbatch"
    write_program(
        sbatch, f"#!{sys.executable}\nimport sys\nsys.exit(0 if '# mine' in open(sys.argv[1]).read() else 3)\n"
    )
    assert cli.main(arguments) == 1
    with (tmp_path / "job" / "job.sh").open("a") as job:
        job.write("# mine\n")
    assert cli.main(arguments) == 0  # what was edited is what is submitted
    assert "kept as you have edited it: job.sh;" in capsys.readouterr().out
    sbatch.write_text(f"#!{sys.executable}\nraise SystemExit(3)\n")
    assert cli.main(arguments) == 1
    assert "`sbatch job.sh`" in capsys.readouterr().err
