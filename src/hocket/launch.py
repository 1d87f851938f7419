"""Start the servers and the trainer's ranks of a run on this machine, and end them."""

import contextlib
import errno
import functools
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

from hocket.common import environment, machine
from hocket.common.files import kind_of, last_lines, numbered, unused
from hocket.common.machine import family_of, holder, refuse_open, url_of
from hocket.common.processes import PARENT_VARIABLE, die_with_parent, first
from hocket.common.registry import Registry
from hocket.config import Config, LaunchConfig, ObserveConfig
from hocket.errors import ConfigError, ServerError, program
from hocket.formats import ROLLOUTS
from hocket.observe.rows import scan_rollouts
from hocket.trainer import checkpoints

ENGINES: Registry[Callable[..., None]] = Registry(
    "engine", **dict.fromkeys(("slurm", "ray", "kubernetes"), "hocket.extras.cluster.engines")
)
"""Register a function that runs a config on several nodes, for `launch --engine NAME`.

It is called with (settings, gpus_per_node, output, submit=, dry_run=), and writes the files of its
system to `output`.

Args:
    name: its name in `launch --engine`.

Example: a plugin file for `launch --engine pbs`.

    @ENGINES.register("pbs")
    def pbs(settings, gpus_per_node, output, *, submit, dry_run):
        output.write_text(f"python3 run.py launch {' '.join(settings)}")
"""
STOP_TIMEOUT_S = 15.0  # seconds that a process has to end before it is killed
LONGEST_PROMPT = 80  # characters of a prompt that a printed command shows
NUM_LINES = 15  # lines from the end of a server's log that an error shows


def die_with_launcher() -> bool:
    """Have the kernel end this process with the process of hocket that started it, if one did.

    Returns True if one did.
    """
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None:
        return False
    # `run_ranks` passes a Ctrl-C on as SIGUSR1. A shell has its background jobs ignore SIGINT.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler)
    die_with_parent(int(parent), signal.SIGTERM)
    return True


class Child(subprocess.Popen[bytes]):
    """A Python process that ends with this one. Without `log` it writes to this one's output."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path | None = None,
        sockets: Sequence[socket.socket] = (),
    ) -> None:
        self.log = log
        self.begin = 0  # byte of the log at which this process begins to write
        variables = dict(os.environ)
        variables.update(env)
        variables[PARENT_VARIABLE] = str(os.getpid())
        arguments = [sys.executable, "-P"]  # -P: no file of the current folder is a module
        arguments += command
        with contextlib.ExitStack() as stack:
            output = None
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(log.open("ab"))
                self.begin = output.tell()  # another launch may have written to it before
            super().__init__(
                arguments,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[sock.fileno() for sock in sockets],
                start_new_session=True,  # Ctrl-C reaches the parent alone, which stops its children
            )

    def last_words(self, name: str) -> str:
        """Describe how the process ended, with the last lines of its log."""
        sentence = f"{name} ended with status {self.poll()}"
        if self.log is None:
            return sentence
        with self.log.open("rb") as file:
            lines = last_lines(file, NUM_LINES, begin=self.begin, between="\n")
        return f"{sentence}; the end of {self.log}:\n{lines}"

    def refuse_dead(self) -> None:
        """Raise ServerError if the process, a server, has ended."""
        if self.poll() is not None:
            raise ServerError(self.last_words("the server"), code="unreachable")


def stop(children: Sequence[Child], signum: signal.Signals = signal.SIGTERM) -> None:
    """End processes together: send `signum`, and STOP_TIMEOUT_S later kill their groups."""
    for child in children:
        child.send_signal(signum)  # nothing happens if it has ended
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(child.pid, signal.SIGKILL)
        child.wait(STOP_TIMEOUT_S)


class Placement(NamedTuple):
    """The GPUs of each server and of all ranks, as CUDA_VISIBLE_DEVICES: "0,1", or "" for none."""

    servers: list[str]
    ranks: str
    num_ranks: int
    apart: bool  # no GPU has both a server and a rank


def launch(config: Config, arguments: Sequence[str], *, dry_run: bool = False) -> int:
    """Print what runs where, run it until the ranks end, and return their exit status.

    `arguments` are the config file and settings of the command line, passed on to each process. A
    dry run prints the commands for doing the same by hand, and starts nothing.
    """
    # Refuse what can't run before anything is started.
    logs = config.run_dir / "logs"
    gpus = visible_gpus()
    refuse_missing(gpus)
    config.refuse_outside()
    checkpoints.refuse_taken(config.run_dir, resume=config.checkpoint.resume)

    # Choose the GPUs and the ports, and make the commands.
    plan = place(config.launch, config.server.tensor_parallel_size, gpus)
    ports, claims = free_ports(config.server.host, config.server.port, len(plan.servers))
    serve, train = _commands(config, arguments, plan, ports)
    print(f"run folder {config.run_dir}, logs in {logs}")
    first_port = config.server.port
    if first_port not in ports:
        print(f"port {first_port} is in use by {holder(first_port)}; {ports[0]} is free")
    starts = []  # the log, command and variables of each server
    for number, (port, server_gpus) in enumerate(zip(ports, plan.servers, strict=True)):
        name = f"server_{number}" if len(ports) > 1 else "server"
        print(f"{name}: {config.url_at(port)} on {_where(server_gpus)}")
        command = serve.copy()
        command.append(f"server.port={port}")
        starts.append((logs / f"{name}.log", command, variables(server_gpus)))
    plural = "s" if plan.num_ranks > 1 else ""
    print(f"trainer: {plan.num_ranks} rank{plural} on {_where(plan.ranks)}", flush=True)
    if dry_run:
        claims.close()
        print("by hand:")
        for _, command, env in starts:
            print(_typed(command, env))
        print(_typed(train, variables(plan.ranks), plan.num_ranks))
        return 0

    # Start the page and the servers; then run the ranks, as long as one server lives.
    _interrupt_on_hangup()
    rank_variables = variables(plan.ranks)
    if not gpus:
        rank_variables[machine.FREE_VARIABLE] = str(machine.free_memory())
    servers: list[Child] = []
    pages: list[Child] = []
    try:
        if config.observe.page is not False:
            pages.append(page_of(config.run_dir, config.observe, config.token))
        for log, command, env in starts:
            servers.append(Child(command, env=env, log=log))
        # It removes ended servers from its list. That of `stop` keeps all: they may have children.
        check = functools.partial(refuse_all_dead, servers.copy())
        return run_ranks(train, plan.num_ranks, env=rank_variables, check=check, logs=logs)
    finally:
        stop(servers + pages)
        claims.close()


def _commands(
    config: Config, arguments: Sequence[str], plan: Placement, ports: Sequence[int]
) -> tuple[list[str], list[str]]:
    """Make the command of all servers, which lacks the port of each, and that of all ranks."""
    # The files of the run record what was decided here.
    decided = {"launch.servers": f"{len(ports)}", "launch.trainers": f"{plan.num_ranks}"}
    if plan.ranks and not config.launch.share_gpu:
        decided["launch.gpus_apart"] = str(plan.apart).lower()
    arguments = [word for word in arguments if word.partition("=")[0] not in decided]
    arguments += [f"{key}={value}" for key, value in decided.items()]
    urls = []
    for port in ports:
        url = config.url_at(port)
        urls.append(f"'{url}'" if "[" in url else url)  # quoted: in YAML's lists [] has a meaning
    serve = ["-m", "hocket", "serve"]
    serve += arguments
    train = ["-m", "hocket", "train"]
    train += arguments
    train += ["server.discover=null", f"server.urls=[{','.join(urls)}]"]
    if config.observe.page:  # `launch` starts the page itself
        train.append("observe.page=false")
    return serve, train


def _interrupt_on_hangup() -> None:
    """Have SIGTERM and SIGHUP interrupt this process as Ctrl-C does, which stops its children."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup has it ignored
        signal.signal(signal.SIGHUP, signal.default_int_handler)


def page_of(run_dir: Path, observe: ObserveConfig, token: str | None) -> Child:
    """Start the page of a run and print its URL. Its process reads the run folder, nothing else."""
    with listening(observe.host, observe.port, token) as sock:
        host, port = sock.getsockname()[:2]  # an IPv6 address has four parts
        print(f"page: {url_of(host, port)}/", flush=True)
        command = ["-m", "hocket", "watch", str(run_dir), f"--socket={sock.fileno()}"]
        env = {"HOCKET_TOKEN": token or ""}
        return Child(command, env=env, log=run_dir / "logs" / "page.log", sockets=[sock])


def listening(host: str, port: int, token: str | None) -> socket.socket:
    """Open the socket of a page: on `port`, or on a free one if that is taken.

    Raises ConfigError for a host that can't be used, or is open to others without a token.
    """
    refuse_open("observe", host, token)
    try:
        return socket.create_server((host, port), family=family_of(host))
    except OSError as error:
        if error.errno == errno.EADDRINUSE and port:
            return listening(host, 0, token)
        raise ConfigError(
            f"the page can't listen on {host}, port {port}: {error.strerror}; set another "
            "observe.host or observe.port"
        ) from error


def place(settings: LaunchConfig, size: int, gpus: Sequence[str]) -> Placement:
    """Divide this machine's GPUs: the first are the servers', the next the ranks'.

    A single GPU is for both. By default servers of `size` GPUs get half of all GPUs. Raises
    ConfigError where there are too few.
    """
    num_servers = settings.servers or 1
    num_ranks = settings.trainers or 1
    if not gpus:
        return Placement([""] * num_servers, "", num_ranks, apart=False)
    apart = len(gpus) > 1 and not settings.share_gpu

    # The servers' GPUs. By default the ranks get as many as launch.trainers says, or the larger
    # half, and the servers the others.
    if apart and settings.servers is None:
        num_rank_gpus = settings.trainers or len(gpus) - len(gpus) // 2
        num_servers = max(1, (len(gpus) - num_rank_gpus) // size)
    num_needed = num_servers * size
    server_gpus = gpus[:num_needed]
    _refuse_too_few("launch.servers", num_servers, num_needed, len(server_gpus), len(gpus))

    # The ranks' GPUs: those behind, or the same ones.
    rank_gpus = gpus[num_needed:] if apart else gpus
    if apart and settings.trainers is None:
        num_ranks = max(1, len(rank_gpus))
    _refuse_too_few("launch.trainers", num_ranks, num_ranks, len(rank_gpus), len(gpus))

    servers = [",".join(server_gpus[i : i + size]) for i in range(0, num_needed, size)]
    return Placement(servers, ",".join(rank_gpus[:num_ranks]), num_ranks, apart)


def _refuse_too_few(setting: str, number: int, needed: int, available: int, num_gpus: int) -> None:
    """Raise ConfigError where one side, servers or ranks, needs more GPUs than it has."""
    if needed > available:
        raise ConfigError(
            f"{setting}={number} needs {needed} GPUs, and of {num_gpus} in all it has "
            f"{available}: take more, or lower it, server.tensor_parallel_size, or the number "
            "of the other side"
        )


def visible_gpus() -> list[str]:
    """List the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    # A machine without GPUs may share the variables of a user who has some elsewhere.
    if environment.builds()[0] == "cpu":
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return environment.nvidia_smi("index")
    gpus = []
    for gpu in re.findall(r"[^\s,]+", chosen):
        if gpu in ("-1", "NoDevFiles"):  # CUDA ignores what comes after these
            break
        gpus.append(gpu)
    return gpus


def refuse_missing(gpus: Sequence[str]) -> None:
    """Raise ConfigError for a name that is no GPU's, or is that of a GPU which does not exist."""
    shown = environment.nvidia_smi("index")  # empty where a container lacks the program
    unknown = [gpu for gpu in gpus if not re.match(r"\d+$|GPU-|MIG-", gpu)]
    missing = sorted({gpu for gpu in gpus if gpu.isdecimal() and gpu not in shown})
    if unknown:
        problem = f"{unknown[0]!r}, which is no GPU's number or UUID"
    elif shown and missing:
        problem = f"GPU {','.join(missing)}, which nvidia-smi does not show"
    else:
        return
    raise ConfigError(f"CUDA_VISIBLE_DEVICES names {problem}: correct it, or set HOCKET_DEVICE=cpu")


def run_ranks(
    command: Sequence[str],
    size: int,
    *,
    env: Mapping[str, str],
    check: Callable[[], None],
    logs: Path,
) -> int:
    """Run a command as `size` ranks of torch.distributed, and return their exit status.

    The status is 0 once all ranks have ended well, or that of the first rank that failed, after the
    others were stopped. torchrun does the same, but its workers outlive it where it is killed.

    `check` is called several times a second. An exception from it ends the ranks. The first Ctrl-C
    ends them with a checkpoint. Ranks above 0 write to rank_N.log in `logs`.
    """
    env = dict(env)
    env["WORLD_SIZE"] = env["LOCAL_WORLD_SIZE"] = str(size)
    env["MASTER_ADDR"] = "127.0.0.1"
    env["MASTER_PORT"] = str(free_port("127.0.0.1", 0))
    ranks: list[Child] = []
    try:
        for rank in range(size):
            rank_env = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            log = logs / f"rank_{rank}.log" if rank else None
            ranks.append(Child(command, env=rank_env, log=log))
        # At the first Ctrl-C rank 0 writes a checkpoint; the next one interrupts this process.
        with first(signal.SIGINT, functools.partial(ranks[0].send_signal, signal.SIGUSR1)):
            return _wait_for(ranks, check)
    finally:
        # Rank 0 goes first: it closes the run, and releases the others from waiting for it.
        stop(ranks[:1], signal.SIGINT)
        stop(ranks[1:])


def _wait_for(ranks: Sequence[Child], check: Callable[[], None]) -> int:
    """Wait until all ranks have ended well, or one has failed. Returns the exit status."""
    while True:
        statuses = [child.poll() for child in ranks]  # None while a rank runs
        for number, status in enumerate(statuses):
            if status == -signal.SIGUSR1:  # Ctrl-C before this rank could handle it
                raise KeyboardInterrupt
            if status:
                if number > 0:  # rank 0 has printed its error here
                    print(ranks[number].last_words(f"rank {number}"), file=sys.stderr)
                if status < 0:
                    return 128 - status  # a signal's number, as a shell has it
                return status
        if None not in statuses:
            return 0
        check()
        time.sleep(0.2)


def refuse_all_dead(servers: list[Child]) -> None:
    """Report servers that have ended, and remove them. Raises ServerError for the last one."""
    for server in list(servers):
        if server.poll() is None:
            continue
        servers.remove(server)
        if not servers:
            server.refuse_dead()
        report = server.last_words("the server")
        print(f"{report}\nservers that are left: {len(servers)}", flush=True)


def variables(gpus: str) -> dict[str, str]:
    """Make the environment variables that restrict a process to GPUs; "" restricts nothing."""
    return {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}


def _typed(command: Sequence[str], env: Mapping[str, str], num_ranks: int = 1) -> str:
    """Write a command as one types it in a shell."""
    arguments = [sys.executable]
    if num_ranks > 1:
        arguments += ["-m", "torch.distributed.run", "--standalone"]
        arguments.append(f"--nproc-per-node={num_ranks}")
    if Path(sys.argv[0]).name == "run.py":  # it finds hocket where `-m hocket` may not
        arguments.append(sys.argv[0])
        arguments += command[2:]
    else:
        arguments += command
    words = [f"{name}={value}" for name, value in env.items()]
    words.append(shlex.join(arguments))
    return " ".join(words)


def _where(gpus: str) -> str:
    return f"GPU {gpus}" if gpus else "the CPU"


def free_port(host: str, wanted: int) -> int:
    """Choose the port `wanted` if it is free, else another free one."""
    with socket.socket(family_of(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return free_port(host, 0)
            return wanted or 8000  # the server will explain what is wrong with the host
        return int(probe.getsockname()[1])


def free_ports(host: str, lowest: int, number: int) -> tuple[list[int], contextlib.ExitStack]:
    """Choose `number` ports from `lowest` on; free ones replace those that are in use.

    Returns the ports and their claims. A server takes a while until it listens. Until the claims
    are closed, no other launch on this machine gets these ports.
    """
    ports: list[int] = []
    claims = contextlib.ExitStack()
    while len(ports) < number:
        wanted = lowest + len(ports)
        port = free_port(host, wanted if wanted < 1 << 16 else 0)
        claim = _claim(port)
        while claim is None:
            port = free_port(host, 0)
            claim = _claim(port)
        claims.enter_context(claim)
        ports.append(port)
    return ports, claims


def _claim(port: int) -> socket.socket | None:
    """Bind a name that stands for a port. Returns None if another process has it.

    The kernel frees the name when this process ends.
    """
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0hocket/port/{port}")  # an abstract name of Linux, in no folder
    except OSError:
        claim.close()
        return None
    return claim


def what_next(run_dir: Path, arguments: Sequence[str]) -> str:
    """Write commands for after a run: the same run by hand, and the use of its newest version."""
    run = program()
    settings = [
        word for word in arguments if not word.startswith(("run.dir=", "checkpoint.resume="))
    ]
    model = list(numbered(run_dir / "weights", "v*").values())[-1]
    trained = [f"model.path={model}"]
    merge = ""
    if kind_of(model) == "adapter":
        merge = f"Merge adapter and base model:  {run} export {model} {run_dir}/model\n"
        trained = [f"model.path={run_dir / 'model'}", "model.lora=null"]

    def with_settings(*more: str) -> str:
        return shlex.join(settings + list(more))

    again = with_settings(f"run.dir={unused(run_dir)}")
    return f"""
The same in two terminals:     {run} serve {again}
                               {run} train {again}
{merge}Use the trained policy:        {run} serve {with_settings(*trained)}
                               {run} generate {with_settings("-p", _prompt_of(run_dir))}
"""


def _prompt_of(run_dir: Path) -> str:
    """Get the first prompt of the last step, or the word PROMPT where that does not fit a line."""
    files = list(numbered(run_dir / ROLLOUTS, "step_*.jsonl").values())
    if not files:
        return "PROMPT"
    first_row = next(scan_rollouts(files[-1]))
    prompt = first_row["prompt"]
    fits = 0 < len(prompt) <= LONGEST_PROMPT and prompt.isprintable()
    return prompt if fits else "PROMPT"
