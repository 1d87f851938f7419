"""Start hocket's processes on this machine, servers and trainer ranks, and end them."""

import contextlib
import errno
import functools
import itertools
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hocket.common import environment
from hocket.common.files import kind_of, last_lines, numbered, unused
from hocket.common.machine import family_of, holder, refuse_open, url_of
from hocket.common.processes import PARENT_VARIABLE, die_with_parent, first
from hocket.common.registry import Registry
from hocket.config import Config, LaunchConfig, ObserveConfig
from hocket.errors import ConfigError, ServerError, door
from hocket.formats import ROLLOUTS
from hocket.observe.rows import scan_rollouts
from hocket.trainer import checkpoints

ENGINES: Registry[Callable[..., None]] = Registry(
    "engine", **dict.fromkeys(("slurm", "ray", "kubernetes"), "hocket.extras.cluster.engines")
)
"""What runs a config on several nodes: (settings, gpus_per_node, output, submit=, dry_run=) writes its files.

Example: `launch --engine pbs` of a plugin.

    @ENGINES.register("pbs")
    def pbs(settings, gpus_per_node, output, *, submit, dry_run):
        output.write_text(f"python3 run.py launch {' '.join(settings)}")
"""
STOP_TIMEOUT_S = 15.0
LONGEST_PROMPT = 80  # characters, in a command
NUM_LINES = 15  # of a server's log, in an error


def die_with_launcher() -> bool:
    """Have the kernel end this process with the one of hocket that started it, if one did."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is not None:
        for number in (signal.SIGINT, signal.SIGUSR1):  # background jobs ignore the first
            signal.signal(number, signal.default_int_handler)
        die_with_parent(int(parent), signal.SIGTERM)
    return parent is not None


class Child(subprocess.Popen[bytes]):
    """Run a command in a process that ends with this one; without `log` it shares the output."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path | None = None,
        sockets: Sequence[socket.socket] = (),
    ) -> None:
        self.log = log
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") if log else contextlib.nullcontext() as output:
            self.begin = output.tell() if output else 0  # of its words: another launch may have written before
            super().__init__(
                [sys.executable, "-P", *command],  # no file of this folder is a module
                env={**os.environ, **env, PARENT_VARIABLE: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[sock.fileno() for sock in sockets],
                start_new_session=True,  # Ctrl-C reaches the parent alone, which stops its children
            )

    def last_words(self, name: str) -> str:
        said = f"{name} ended with status {self.poll()}"
        if self.log is None:
            return said
        with self.log.open("rb") as file:
            words = last_lines(file, NUM_LINES, begin=self.begin, between="\n")
        return f"{said}; the end of {self.log}:\n{words}"

    def refuse_dead(self) -> None:
        if self.poll() is not None:
            raise ServerError(self.last_words("the server"), code="unreachable")


def stop(children: Sequence[Child], first: signal.Signals = signal.SIGTERM) -> None:
    """End processes together: send `first`, and STOP_TIMEOUT_S later kill their groups."""
    for child in children:
        child.send_signal(first)  # nothing if it has ended
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(child.pid, signal.SIGKILL)
        child.wait(STOP_TIMEOUT_S)


class Placement(NamedTuple):
    """Say which GPUs ("0,1"; "": none) each server and all ranks use."""

    servers: list[str]
    ranks: str
    num_ranks: int
    apart: bool  # no GPU has a server and a rank


def launch(config: Config, arguments: Sequence[str], *, dry_run: bool = False) -> int:
    """Say what runs where; but for `dry_run`, run it until the ranks end, and return their exit status."""
    logs = config.run_dir / "logs"
    gpus = visible_gpus()
    refuse_missing(gpus)
    config.refuse_outside()
    checkpoints.refuse_taken(config.run_dir, resume=config.checkpoint.resume)
    plan = place(config.launch, config.server.tensor_parallel_size, gpus)
    ports, taken = free_ports(config.server.host, config.server.port, len(plan.servers))
    urls = ",".join(f"'{url}'" if "[" in url else url for url in map(config.url_at, ports))  # YAML's lists have []
    arguments = [*arguments, f"launch.servers={len(ports)}", f"launch.trainers={plan.num_ranks}"]  # for the run's files
    if plan.ranks and not config.launch.share_gpu:
        arguments.append(f"launch.gpus_apart={str(plan.apart).lower()}")
    serve = ["-m", "hocket", "serve", *arguments]
    train = ["-m", "hocket", "train", *arguments, "server.discover=null", f"server.urls=[{urls}]"]
    if config.observe.page:  # it is started here
        train.append("observe.page=false")
    print(f"run folder {config.run_dir}, logs in {logs}")
    port = config.server.port
    if port not in ports:
        print(f"port {port} is in use by {holder(port)}; {ports[0]} is free")
    commands = []
    for number, (port, own) in enumerate(zip(ports, plan.servers, strict=True)):
        name = f"server_{number}" if len(ports) > 1 else "server"
        print(f"{name}: {config.url_at(port)} on {_where(own)}")
        commands.append((logs / f"{name}.log", [*serve, f"server.port={port}"], variables(own)))
    print(f"trainer: {plan.num_ranks} rank{'s' * (plan.num_ranks > 1)} on {_where(plan.ranks)}", flush=True)
    if dry_run:
        taken.close()
        print("by hand:", *(_typed(command, env) for _, command, env in commands), sep="\n")
        print(_typed(train, variables(plan.ranks), plan.num_ranks))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: it stops children, too
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup's
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    servers: list[Child] = []
    pages: list[Child] = []
    try:
        if config.observe.page is not False:
            pages.append(page_of(config.run_dir, config.observe, config.token))
        for log, command, env in commands:
            servers.append(Child(command, env=env, log=log))
        check = functools.partial(refuse_all_dead, [*servers])
        return run_ranks(train, plan.num_ranks, env=variables(plan.ranks), check=check, logs=logs)
    finally:
        stop([*servers, *pages])
        taken.close()


def page_of(run_dir: Path, observe: ObserveConfig, token: str | None) -> Child:
    """Start the page of a run, in a process that reads its folder alone; say where it is."""
    with listening(observe.host, observe.port, token) as sock:
        print(f"page: {url_of(*sock.getsockname()[:2])}/", flush=True)
        command = ["-m", "hocket", "watch", str(run_dir), f"--socket={sock.fileno()}"]
        env = {"HOCKET_TOKEN": token or ""}
        return Child(command, env=env, log=run_dir / "logs" / "page.log", sockets=[sock])


def listening(host: str, port: int, token: str | None) -> socket.socket:
    """Take the port of a page, or a free one if it is taken. Raise ConfigError where there is none."""
    refuse_open("observe", host, token)
    try:
        return socket.create_server((host, port), family=family_of(host))
    except OSError as error:
        if error.errno == errno.EADDRINUSE and port:
            return listening(host, 0, token)
        why = f"the page can't listen on {host}, port {port}: {error.strerror}"
        raise ConfigError(f"{why}; set another observe.host or observe.port") from error


def place(settings: LaunchConfig, size: int, gpus: Sequence[str]) -> Placement:
    """Divide this machine's GPUs: first come the servers', then the ranks'; a single one is for both.

    By default servers of `size` GPUs get half of them. Raise ConfigError where they are too few.
    """
    num_servers = settings.servers or 1
    num_ranks = settings.trainers or 1
    if not gpus:
        return Placement([""] * num_servers, "", num_ranks, apart=False)
    apart = len(gpus) > 1 and not settings.share_gpu
    theirs = gpus
    if apart:
        kept = settings.trainers or len(gpus) - len(gpus) // 2
        num_servers = settings.servers or max(1, (len(gpus) - kept) // size)
        theirs = gpus[num_servers * size :]
        num_ranks = settings.trainers or max(1, len(theirs))
    for what, number, each, found in (
        ("launch.servers", num_servers, size, gpus[: num_servers * size]),
        ("launch.trainers", num_ranks, 1, theirs),
    ):
        if number * each > len(found):
            raise ConfigError(
                f"{what}={number} needs {number * each} GPUs, and of {len(gpus)} in all it has {len(found)}: take "
                "more, or lower it, server.tensor_parallel_size, or the number of the other side"
            )
    servers = [",".join(gpus[first : first + size]) for first in range(0, num_servers * size, size)]
    return Placement(servers, ",".join(theirs[:num_ranks]), num_ranks, apart)


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if environment.builds()[0] == "cpu":  # a machine without them may share its user's variables
        return []
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        gpus = re.findall(r"[^\s,]+", chosen)
        return [*itertools.takewhile(lambda gpu: gpu not in ("-1", "NoDevFiles"), gpus)]  # as CUDA reads it
    return environment.nvidia_smi("index")


def refuse_missing(gpus: Sequence[str]) -> None:
    """Raise ConfigError for what names no GPU, or one that is not there."""
    unknown = [gpu for gpu in gpus if not re.match(r"\d+$|GPU-|MIG-", gpu)]
    if unknown:
        which = f"{unknown[0]!r}, which is no GPU's number or UUID"
        raise ConfigError(f"CUDA_VISIBLE_DEVICES names {which}: correct it, or set HOCKET_DEVICE=cpu")
    shown = environment.nvidia_smi("index")  # none where a container lacks it
    missing = ",".join(sorted(set(filter(str.isdecimal, gpus)).difference(shown)))
    if shown and missing:
        which = f"GPU {missing}, which nvidia-smi does not show"
        raise ConfigError(f"CUDA_VISIBLE_DEVICES names {which}: correct it, or set HOCKET_DEVICE=cpu")


def run_ranks(
    command: Sequence[str], size: int, *, env: Mapping[str, str], check: Callable[[], None], logs: Path
) -> int:
    """Run a command as `size` ranks, as torchrun would (whose workers outlive it where it is killed).

    Return 0 once all have ended well, or the first failed rank's exit status, after the others are stopped. `check` is
    called several times a second; an error from it ends the ranks, the first Ctrl-C with a checkpoint. Ranks above 0
    write to rank_N.log in `logs`.
    """
    number = str(size)
    port = str(free_port("127.0.0.1", 0))
    env = {**env, "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks: list[Child] = []
    try:
        for rank in range(size):
            own = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(Child(command, env=own, log=logs / f"rank_{rank}.log" if rank else None))
        with first(signal.SIGINT, functools.partial(ranks[0].send_signal, signal.SIGUSR1)):
            return _status_of(ranks, check)
    finally:
        stop(ranks[:1], signal.SIGINT)  # it closes the run and releases the others
        stop(ranks[1:])


def _status_of(ranks: Sequence[Child], check: Callable[[], None]) -> int:
    while True:
        statuses = [child.poll() for child in ranks]
        for number, child in enumerate(ranks):
            if child.returncode == -signal.SIGUSR1:  # Ctrl-C before this rank could take it
                raise KeyboardInterrupt
            if child.returncode:
                if child.log is not None:  # others print here
                    print(child.last_words(f"rank {number}"), file=sys.stderr)
                return child.returncode if child.returncode > 0 else 128 - child.returncode  # as a shell says it
        if None not in statuses:
            return 0
        check()
        time.sleep(0.2)


def refuse_all_dead(servers: list[Child]) -> None:
    """Report servers that have ended, and remove them; raise ServerError for the last one."""
    for server in [server for server in servers if server.poll() is not None]:
        servers.remove(server)
        if not servers:
            server.refuse_dead()
        print(f"{server.last_words('the server')}\nservers that are left: {len(servers)}", flush=True)


def variables(gpus: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}


def _typed(command: Sequence[str], env: Mapping[str, str], num_ranks: int = 1) -> str:
    program = [sys.argv[0], *command[2:]] if Path(sys.argv[0]).name == "run.py" else command  # it finds hocket
    if num_ranks > 1:
        program = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", *program]
    return " ".join([*(f"{name}={value}" for name, value in env.items()), shlex.join([sys.executable, *program])])


def _where(gpus: str) -> str:
    return f"GPU {gpus}" if gpus else "the CPU"


def free_port(host: str, wanted: int) -> int:
    with socket.socket(family_of(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted))
        except OSError as error:  # another error the server will explain
            return free_port(host, 0) if error.errno == errno.EADDRINUSE else wanted or 8000
        return int(probe.getsockname()[1])


def free_ports(host: str, first: int, number: int) -> tuple[list[int], contextlib.ExitStack]:
    """Return `number` ports from `first` on, where free ones replace those that are taken, and what ends the claims.

    A server needs a while until it listens: until the end of a claim, no other launch of this machine gets the port.
    """
    ports: list[int] = []
    claims = contextlib.ExitStack()
    while len(ports) < number:
        wanted = first + len(ports)
        port = free_port(host, wanted if wanted < 1 << 16 else 0)
        while not (claim := _claim(port)):
            port = free_port(host, 0)
        claims.enter_context(claim)
        ports.append(port)
    return ports, claims


def _claim(port: int) -> socket.socket | None:
    """Bind a name for a port, which the kernel frees with this process; return None if another has."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0hocket/port/{port}")  # Linux: in no folder
    except OSError:
        claim.close()
        return None
    return claim


def what_next(run_dir: Path, arguments: Sequence[str]) -> str:
    """Return commands: the same run by hand, and the use of its newest version."""
    run = door()
    given = [one for one in arguments if not one.startswith(("run.dir=", "checkpoint.resume="))]
    *_, model = numbered(run_dir / "weights", "v*").values()
    more = list[str]()
    merge = ""
    if kind_of(model) == "adapter":
        merge = f"Merge adapter and base model:  {run} export {model} {run_dir}/model\n"
        model = run_dir / "model"
        more = ["model.lora=null"]
    rollouts = [*numbered(run_dir / ROLLOUTS, "step_*.jsonl").values()]
    prompt = next(scan_rollouts(rollouts[-1]))["prompt"] if rollouts else ""
    prompt = prompt if 0 < len(prompt) <= LONGEST_PROMPT and prompt.isprintable() else "PROMPT"
    again = shlex.join([*given, f"run.dir={unused(run_dir)}"])
    use = shlex.join([*given, f"model.path={model}", *more])
    return f"""
The same in two terminals:     {run} serve {again}
                               {run} train {again}
{merge}Use the trained policy:        {run} serve {use}
                               {run} generate {shlex.join([*given, "-p", prompt])}
"""
