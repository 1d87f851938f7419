"""Write the files that run a config on SLURM, Ray or Kubernetes, and submit them.

From then on the files are the user's: those that have been edited are not written again.
"""

import functools
import json
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2

import hocket
from hocket.config import read_settings, to_yaml
from hocket.errors import ConfigError
from hocket.launch import ENGINES

SUBMIT = {  # command lines, in the folder of the files
    "slurm": ["sbatch job.sh"],
    "ray": ["ray job submit --no-wait -- python3 {folder}/ray_job.py"],
    "kubernetes": ["kubectl apply -f storage.yaml", "kubectl apply -k ."],
}
TOKEN_FILE = "token.env"  # becomes Kubernetes' secret
RECORD = ".written.json"  # files as hocket wrote them; one that differs has been edited
HEAD = "# The settings of this run, read by all of its processes; yours to edit.\n"


class Layout(NamedTuple):
    """The nodes of a run. Each has servers or ranks, unless a single node holds all."""

    servers: int
    gpus_per_server: int  # 0 without GPUs
    ranks: int  # with a GPU each
    servers_per_node: int  # the most
    server_nodes: int
    ranks_per_node: int
    rank_nodes: int
    num_nodes: int

    def __str__(self) -> str:
        servers = f"{_count(self.servers, 'server')} of {_count(self.gpus_per_server, 'GPU')}"
        ranks = _count(self.ranks, "rank")
        if self.num_nodes == 1:
            return f"{servers} and {ranks} on one node"
        server_nodes = _count(self.server_nodes, "node")
        rank_nodes = _count(self.rank_nodes, "node")
        return f"{servers} on {server_nodes}, {ranks} on {rank_nodes}"


def lay_out(servers: int, gpus_per_server: int, ranks: int, gpus_per_node: int) -> Layout:
    """Divide a run among nodes of `gpus_per_node` GPUs; 0: a single node without GPUs.

    Raise ConfigError where a server, or an equal share of the ranks, fits on no node.
    """
    if gpus_per_node < 0:
        raise ConfigError(f"--gpus-per-node={gpus_per_node} must be 1 or more, or 0 for CPUs only")
    if gpus_per_node == 0 or servers * gpus_per_server + ranks <= gpus_per_node:
        gpus = gpus_per_server if gpus_per_node else 0
        return Layout(servers, gpus, ranks, servers, 1, ranks, 1, 1)
    per_node = gpus_per_node // gpus_per_server
    rank_nodes = -(-ranks // gpus_per_node)
    if per_node == 0:
        raise ConfigError(
            f"server.tensor_parallel_size={gpus_per_server} exceeds --gpus-per-node={gpus_per_node}, and a server "
            f"can't span nodes: set it to {gpus_per_node} or less"
        )
    if ranks % rank_nodes:
        even = ranks + -ranks % rank_nodes
        raise ConfigError(
            f"launch.trainers={ranks} can't be divided equally between the {rank_nodes} nodes that they need with "
            f"--gpus-per-node={gpus_per_node}: set launch.trainers={even}"
        )
    nodes = -(-servers // per_node)
    sizes = (min(servers, per_node), nodes, ranks // rank_nodes, rank_nodes, nodes + rank_nodes)
    return Layout(servers, gpus_per_server, ranks, *sizes)


def render(
    engine: str,
    settings: Sequence[str],
    gpus_per_node: int,
    *,
    output: Path | None,
    root: Path,
    python: str,
) -> tuple[Layout, Path, dict[str, str]]:
    """Render the files of a run; returns its layout, their folder, and their texts by name.

    The folder is `output`, or launch/ENGINE in the run folder. The files run in `root`, hocket's
    checkout, with the interpreter `python`. Raise ConfigError where no engine can run the config.
    """
    config, _ = read_settings(settings)
    size = config.launch
    if size.servers is None or size.trainers is None:
        raise ConfigError(
            "this machine's GPUs don't say how large the cluster is: set launch.servers and "
            f"launch.trainers, and give --gpus-per-node if its nodes don't have {gpus_per_node}"
        )
    if size.share_gpu:
        raise ConfigError(
            "launch.share_gpu is for one machine: leave it out, or leave --engine out"
        )
    layout = lay_out(size.servers, config.server.tensor_parallel_size, size.trainers, gpus_per_node)
    folder = root / (output or config.run_dir / "launch" / engine)
    slug = re.sub("[^a-z0-9]+", "-", config.run_dir.name.lower()).strip("-")
    name = "hocket-" + slug[:40].rstrip("-")  # as Kubernetes takes names

    # The settings that the cluster adds to the user's.
    in_pods = engine == "kubernetes"
    run_dir = Path("/hocket/runs", config.run_dir.name) if in_pods else root / config.run_dir
    added = [f"run.dir={run_dir}", "checkpoint.resume=true"]
    if engine != "slurm" or layout.num_nodes > 1:
        place = f"{name}-servers:{config.server.port}" if in_pods else f"{folder}/servers.txt"
        added += ["server.host=0.0.0.0", f"server.discover={place}"]
    config, _ = read_settings(list(settings) + added)  # refuses now what the job would refuse
    config.refuse_outside()

    values = config.model_dump(mode="json", by_alias=True, exclude_unset=True)
    values.get("server", {}).pop("token", None)  # the files make another
    variables = {
        "layout": layout,
        "config": config,
        "folder": folder,
        "name": name,
        "python": python,
        "root": root,
        "run_dir": run_dir,
        "gpus_per_node": gpus_per_node,
        "version": hocket.__version__,
    }
    files = {"config.yaml": HEAD + to_yaml(values)}
    templates = _templates()
    for template in templates.list_templates():
        if template.startswith(f"{engine}/"):
            text = templates.get_template(template).render(variables)
            files[Path(template).stem] = text
    return layout, folder, files


def _templates() -> jinja2.Environment:
    """Load the templates; their filters `sh` and `text` quote for a shell and for YAML."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("hocket.extras.cluster"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["sh"] = lambda value: shlex.quote(str(value))
    templates.filters["text"] = lambda value: json.dumps(str(value))
    return templates


def launch(
    engine: str,
    settings: Sequence[str],
    gpus_per_node: int,
    output: Path | None,
    *,
    submit: bool,
    dry_run: bool,
) -> None:
    """Write a run's files, except those that the user has edited, and submit them or print how."""
    if not Path("run.py").exists():
        raise ConfigError(
            "type this in hocket's checkout, which all nodes see: the job runs run.py there"
        )
    layout, folder, files = render(
        engine, settings, gpus_per_node, output=output, root=Path.cwd(), python=sys.executable
    )
    print(f"{layout}\nfiles: {folder}: {' '.join(sorted(files))}")
    if dry_run:
        return
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / RECORD
    written = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    edited = []
    for name, text in files.items():
        path = folder / name
        if path.exists() and path.read_text(encoding="utf-8") not in (text, written.get(name)):
            edited.append(name)
        else:
            path.write_text(text, encoding="utf-8")
    record.write_text(json.dumps(files), encoding="utf-8")
    if edited:
        print(
            f"kept as you have edited it: {' '.join(edited)}; for a fresh one delete it, or name "
            "another --output"
        )
    token = folder / TOKEN_FILE
    if engine == "kubernetes" and not token.exists():
        token.touch(mode=0o600)
        others = "# HF_TOKEN=hf_... for models and data that ask for it\n"
        token.write_text(f"HOCKET_TOKEN={secrets.token_hex(16)}\n{others}", encoding="utf-8")
        (folder / ".gitignore").write_text(f"{TOKEN_FILE}\n", encoding="utf-8")
    lines = [line.format(folder=shlex.quote(str(folder))) for line in SUBMIT[engine]]
    if not submit:
        print("read and edit them, then submit:", f"cd {folder}", *lines, sep="\n  ")
        return
    for line in lines:
        print(f"$ {line}", flush=True)
        try:
            subprocess.run(shlex.split(line), cwd=folder, check=True)
        except FileNotFoundError as error:
            raise ConfigError(
                f"{error.filename} is not installed here: submit from a machine that has it"
            ) from error
        except subprocess.CalledProcessError as error:
            status = error.returncode
            raise ConfigError(
                f"`{line}` in {folder} ended with status {status}, for the reason above"
            ) from error


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


for _name in ("slurm", "ray", "kubernetes"):
    ENGINES.register(_name)(functools.partial(launch, _name))
