"""hocket on Ray: 4 servers of 2 GPUs on 2 nodes, 8 ranks on 2 nodes.

Written by `run.py launch --engine ray`, and yours to edit. $RAY_ADDRESS is the cluster's dashboard, http://HEAD:8265.

    ray job submit --no-wait -- python3 ray_job.py    with the whole path; python3 is the Python that has Ray
    ray job logs -f JOB                               what the trainer says; LOGS has every process
    ray job stop JOB                                  end servers and ranks

Submitted again, the run goes on from its newest checkpoint. All nodes see ROOT and the run folder under the same path.
"""

import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

ROOT = "/shared/hocket"
PYTHON = "/shared/hocket/.venv/bin/python"  # has hocket's packages
CONFIG = "/shared/hocket/runs/math7b/launch/ray/config.yaml"
LOGS = Path("/shared/hocket/runs/math7b/logs")
URLS = Path("/shared/hocket/runs/math7b/launch/ray/servers.txt")  # server.discover: the trainer reads it

GPUS = True
NUM_SERVERS, GPUS_PER_SERVER, FIRST_PORT = 4, 2, 8000
NUM_NODES, RANKS_PER_NODE = 2, 4  # of the trainer
ROOM_TIMEOUT_S = 1800.0  # for the cluster to have room for all of it
NUM_RETRIES = 10  # of the trainer, where Ray lost one of its nodes


def run(command: list[str], token: str, log: Path, *, show: bool = False) -> int:
    """Run a program of hocket's, with all that it starts no longer than this process; return its exit status."""
    env = {**os.environ, "HOCKET_TOKEN": token, "PYTHONUNBUFFERED": "1"}
    env.pop("OMP_NUM_THREADS", None)  # Ray sets it to num_cpus
    contain = [sys.executable, "-I", f"{ROOT}/src/hocket/processes.py", str(os.getpid()), "0", "0"]  # no limits
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    text = {"encoding": "utf-8", "errors": "replace"}  # a library may print anything
    options = {"cwd": ROOT, "env": env, **text, **pipes}
    with log.open("a", **text) as file, subprocess.Popen([*contain, PYTHON, *command], **options) as child:
        for line in child.stdout:
            file.write(line)
            file.flush()
            if show:
                print(line, end="", flush=True)
    return child.returncode


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class UrlFile:
    """Write the file of server URLs; no one else does."""

    def put(self, url: str) -> None:
        """Say where a server is (now); its port is its own among all servers of the job."""
        others = [other for other in URLS.read_text().split() if other.rpartition(":")[2] != url.rpartition(":")[2]]
        new = URLS.with_suffix(".new")
        new.write_text("".join(f"{each}\n" for each in [*others, url]))
        new.replace(URLS)


@ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=-1)
class Server:
    """Keep one server running. Where its process or node is lost, Ray makes this actor again, and calls it again."""

    def serve(self, number: int, url_file: ray.actor.ActorHandle, token: str) -> None:
        """Serve until the job ends; start the server again if it dies."""
        port = FIRST_PORT + number
        ray.get(url_file.put.remote(f"http://{ray.util.get_node_ip_address()}:{port}"))
        command = ["run.py", "serve", CONFIG, f"server.port={port}"]
        while run(command, token, LOGS / f"server_{number}.log"):
            time.sleep(5)


@ray.remote(num_cpus=1, max_retries=0)
def rendezvous() -> tuple[str, int]:
    """Return an address and a free port of this node."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


@ray.remote(num_cpus=1, max_retries=0)
def train(node: int, address: str, port: int, token: str) -> int:
    """Run the ranks of one node; return torchrun's exit status."""
    nodes = [f"--nnodes={NUM_NODES}", f"--node-rank={node}", f"--nproc-per-node={RANKS_PER_NODE}"]
    torchrun = ["-m", "torch.distributed.run", *nodes, f"--master-addr={address}", f"--master-port={port}"]
    return run([*torchrun, "run.py", "train", CONFIG], token, LOGS / f"trainer_{node}.log", show=node == 0)


def main() -> int:
    """Place servers and ranks, run the trainer, return its exit status; with this process Ray ends the actors."""
    ray.init()
    LOGS.mkdir(parents=True, exist_ok=True)
    URLS.write_text("")
    sizes = [GPUS_PER_SERVER] * NUM_SERVERS + [RANKS_PER_NODE] * NUM_NODES
    group = placement_group([{"CPU": 1, "GPU": size} if GPUS else {"CPU": 1} for size in sizes], strategy="PACK")
    if not group.wait(ROOM_TIMEOUT_S):
        sys.exit(f"no room for bundles of {sizes} GPUs after {ROOM_TIMEOUT_S:g} s; there are {ray.cluster_resources()}")

    def place(bundle: int) -> dict[str, object]:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        return {"num_gpus": sizes[bundle] if GPUS else 0, "scheduling_strategy": strategy}

    token, url_file = secrets.token_hex(16), UrlFile.remote()
    servers = [Server.options(**place(number)).remote() for number in range(NUM_SERVERS)]
    for number, server in enumerate(servers):
        server.serve.remote(number, url_file, token)
    for _ in range(1 + NUM_RETRIES):
        where = ray.get(rendezvous.options(**place(NUM_SERVERS)).remote(), timeout=ROOM_TIMEOUT_S)
        running = [train.options(**place(NUM_SERVERS + n)).remote(n, *where, token) for n in range(NUM_NODES)]
        status, lost = 0, False
        while running and not (status or lost):
            (ended,), running = ray.wait(running)
            try:
                status = ray.get(ended)
            except ray.exceptions.RayError as error:
                lost = True
                print(f"ray_job.py: a node of the trainer is lost: {error}", file=sys.stderr, flush=True)
        if running and not lost:  # most end by themselves and say why
            _, running = ray.wait(running, num_returns=len(running), timeout=60)
        for node in running:  # or they would wait for the lost one until trainer.collective_timeout_s
            ray.cancel(node, force=True)
        if not lost:
            return status
    return 1


if __name__ == "__main__":
    sys.exit(main())
