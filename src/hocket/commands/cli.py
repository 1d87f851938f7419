"""The command line: one function per command, which imports what it needs."""

import argparse
import asyncio
import contextlib
import json
import os
import select
import shlex
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import hocket
from hocket import config as config_module
from hocket.cluster import launch
from hocket.commands import doctor
from hocket.common import shell
from hocket.common.files import make_unused
from hocket.common.processes import nobody_reads
from hocket.common.redaction import redacted
from hocket.config import Config, read_settings
from hocket.errors import TRACEBACK, ConfigError, HocketError, door, remedy
from hocket.observe import metrics
from hocket.stages import STAGES, staged
from hocket.trainer import checkpoints

DEFAULTS = {"quickstart": "config/quickstart.yaml"}  # command → config
GPUS_PER_NODE = 8
TRAINERS = ("train", *STAGES.names)
RUNS = ("quickstart", "launch", *TRAINERS)  # commands that make checkpoints
WHOLE = (0, 3)  # exit statuses of a whole run
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # read as torch is imported; micro-batches differ in length
Run = Callable[[argparse.Namespace], int | None]
Option = tuple[tuple[str, ...], dict[str, Any]]
_COMMANDS: dict[str, tuple[Run, tuple[Option, ...]]] = {}
SAMPLES = "JSONL of completions with their rows: {prompt: ..., completion: ..., answer: ...}, or a run's rollouts"
EPILOG = "Settings are read from CONFIG (YAML); section.key=value overrides one, e.g. trainer.steps=10 run.dir=runs/a."


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit status; an error is one sentence."""
    launched = launch.die_with_launcher()
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # Options may stand between settings.
    wrong = [arg for arg in rest if arg.startswith("-")] if "settings" in args else rest
    if wrong:
        how = f"; {config_module.as_setting(wrong[0])}" if "settings" in args else ""
        parser.error(f"unrecognized arguments: {' '.join(wrong)}{how}")
    if args.traceback:
        os.environ[TRACEBACK] = "1"  # for children, too
    speaks = not launched
    try:
        shell.settle_ranks(launched=args.command in TRAINERS)
        speaks = speaks and int(os.environ.get("RANK", "0")) == 0  # one rank, or the launcher
        if "settings" in args:
            args.config, args.arguments = read_settings([*args.settings, *rest], DEFAULTS.get(args.command))
            if args.command in TRAINERS:
                os.environ.setdefault(ALLOCATOR, "expandable_segments:True")
            if args.command in RUNS:
                args.newest = _newest(args.config.run_dir)
        status = args.run(args) or 0
    except KeyboardInterrupt:
        if speaks:
            print(redacted(f"interrupted{_how_to_go_on(args)}"), file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and nobody_reads():
            raise
        if TRACEBACK in os.environ:
            print(redacted(traceback.format_exc()), file=sys.stderr)
        print(redacted(f"error: {_sentence(error)}"), file=sys.stderr)
        if isinstance(error, ConfigError):  # a checkpoint that is new was made by the process that has the folder
            return 1
        status = 1
    if speaks and status not in WHOLE and "newest" in args and _newest(args.config.run_dir) not in (None, args.newest):
        print(redacted(f"checkpointed{_how_to_go_on(args)}"), file=sys.stderr)
    return status


def _newest(run_dir: Path) -> Path | None:
    return max(checkpoints.complete(run_dir / checkpoints.FOLDER), default=None)


def _how_to_go_on(args: argparse.Namespace) -> str:
    if "newest" not in args:  # the config was being read
        return ""
    where = _newest(args.config.run_dir) or "the start, as there is no checkpoint yet"
    typed = shlex.join(one for one in args.arguments if not one.startswith("checkpoint.resume="))
    again = "the same launcher with" if os.environ.get("WORLD_SIZE", "1") != "1" else door()
    return f"; to go on from {where}: {again} {args.command} {typed} checkpoint.resume=true"


def _sentence(error: Exception) -> str:
    """Say what went wrong; keep the traceback of what was not foreseen in a file."""
    if isinstance(error, HocketError):
        return str(error)
    fix = remedy(error)
    if fix and (isinstance(error, OSError) or "os error" in str(error)):  # of safetensors
        is_unnamed = fix.endswith("there") and getattr(error, "filename", None) is None
        where = " in run.dir, in TMPDIR, or where the output goes" if is_unnamed else ""
        return f"{error}{where}; {fix}"
    place = f"printed by --traceback (or {TRACEBACK}=1)"
    with contextlib.suppress(OSError):  # the disk is full, too
        with tempfile.NamedTemporaryFile("w", prefix="hocket-", suffix=".txt", delete=False, encoding="utf-8") as file:
            file.write(redacted(traceback.format_exc()))
        place = f"in {file.name}"
    return f"{type(error).__name__}: {error}. This was not foreseen; to report it, the traceback is {place}"


def _parser() -> argparse.ArgumentParser:
    prog = "hocket" if Path(sys.argv[0]).name == "hocket" else "run.py"
    parser = argparse.ArgumentParser(prog=prog, description=f"hocket: {hocket.__doc__}")
    # DeepSpeed's launcher gives it; the environment says the same.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (run, options) in _COMMANDS.items():
        text = hocket.COMMANDS[name]
        command = commands.add_parser(name, help=text, description=text)
        if SETTINGS in options:
            command.epilog = EPILOG
        for names, how in (*options, TRACEBACKS):
            command.add_argument(*names, **how)
        command.set_defaults(command=name, run=run)
    return parser


def _option(*names: str, **how: Any) -> Option:
    return names, how


def _page(name: str, content: Callable[[], str], **how: Any) -> Option:
    return _option(name, dest="page", action="store_const", const=content, **how)


def _command(*options: Option) -> Callable[[Run], Run]:
    """Add a command, named as its function."""

    def add(run: Run) -> Run:
        _COMMANDS[run.__name__.strip("_").replace("_", "-")] = run, options
        return run

    return add


SETTINGS = _option("settings", nargs="*", metavar="CONFIG | section.key=value")
TRACEBACKS = _option("--traceback", action="store_true", help="with an error, show where in the code it arose")


@_command(SETTINGS)
def _quickstart(args: argparse.Namespace) -> int:
    named = any(one.startswith("run.dir=") for one in args.arguments)  # if it is taken, that is said
    if named or args.config.checkpoint.resume:
        status = launch.launch(args.config, args.arguments)
    else:
        folder = make_unused(args.config.run_dir)
        args.config, args.arguments = read_settings([*args.arguments, f"run.dir={folder}"])
        try:
            status = launch.launch(args.config, args.arguments)
        finally:
            with contextlib.suppress(OSError):  # it holds a run
                folder.rmdir()
    if status == 0:
        print(launch.what_next(args.config.run_dir, args.arguments))
    return status


@_command(
    SETTINGS,
    _option("--dry-run", action="store_true", help="only say what would run where"),
    _option("--engine", choices=("slurm", "ray", "kubernetes"), help="write the files that a cluster runs"),
    _option("--gpus-per-node", type=int, default=GPUS_PER_NODE, metavar="N", help="default 8; 0: CPUs only"),
    _option("--output", type=Path, metavar="FOLDER", help="folder of these files; default RUN/launch/ENGINE"),
    _option("--submit", action="store_true", help="submit them, too"),
)
def _launch(args: argparse.Namespace) -> int:
    if args.engine:
        from hocket.cluster import engines

        engines.launch(
            args.engine, args.arguments, args.gpus_per_node, args.output, submit=args.submit, dry_run=args.dry_run
        )
        return 0
    if args.output or args.submit or args.gpus_per_node != GPUS_PER_NODE:
        raise ConfigError("--gpus-per-node, --output and --submit need an --engine: slurm, ray or kubernetes")
    return launch.launch(args.config, args.arguments, dry_run=args.dry_run)


@_command(SETTINGS)
def _serve(args: argparse.Namespace) -> None:
    from hocket.server.main import serve

    serve(args.config)


DRY_RUN = _option("--dry-run", action="store_true", help="check data, rewards, memory, server; take no step")


@_command(SETTINGS, DRY_RUN)
def _train(args: argparse.Namespace) -> int:
    from hocket.commands.runs import train

    return train(args.config, dry_run=args.dry_run)


@_command(SETTINGS)
def _rollout(args: argparse.Namespace) -> None:
    from hocket.commands.runs import roll_out

    roll_out(args.arguments)


def _stage(args: argparse.Namespace) -> None:
    from hocket.stages import driver

    driver.run(args.config, args.command, dry_run=args.dry_run)


for _name in hocket.COMMANDS:
    if _name in STAGES.names:
        _COMMANDS[_name] = _stage, (SETTINGS, DRY_RUN)


@_command(
    SETTINGS,
    _option("-p", "--prompt", action="append", help="a user message; repeatable; default: lines of stdin"),
    _option("-n", type=int, default=1, help="completions per prompt (default 1)"),
    _option("--max-tokens", type=int, help="of a completion; default: rollout.max_tokens, or what fits"),
    _option("--text", action="store_true", help="send the prompt as plain text, without chat template"),
    _option("--json", action="store_true", help="print the server's whole answer"),
)
def _generate(args: argparse.Namespace) -> None:
    from hocket.client.server import ServerClient
    from hocket.commands.parts import Servers
    from hocket.protocol import ChatMessage, GenerateRequest, GenerateResponse, PromptInput, SamplingParams

    config: Config = args.config
    prompts = args.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        raise ConfigError('nothing to generate: give -p "a prompt", or lines on standard input')
    inputs: list[PromptInput] = prompts if args.text else [[ChatMessage(role="user", content=one)] for one in prompts]
    most = config.rollout.max_tokens if args.max_tokens is None else args.max_tokens
    try:
        sampling = SamplingParams(temperature=config.rollout.temperature, max_tokens=most)
        request = GenerateRequest(prompts=inputs, sampling=sampling, n=args.n, fit=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{first['loc'][0]} can't be asked for: {first['msg']}") from error

    async def ask() -> GenerateResponse:
        url, *_ = await Servers(config).urls()
        async with ServerClient(url, token=config.token) as server:
            return await server.ask(request, timeout_s=config.rollout.timeout_s)

    answer = asyncio.run(ask())
    if args.json:
        print(answer.model_dump_json())
        return
    is_one = len(prompts) * args.n == 1
    for prompt, completions in zip(prompts, answer.completions, strict=True):
        for completion in completions:
            print(completion.text if is_one else f"{prompt}\t{completion.text}")


@_command(SETTINGS, _option("--json", action="store_true", help="print one JSON object"))
def _eval(args: argparse.Namespace) -> None:
    from hocket.commands.runs import evaluate_checkpoint

    found = evaluate_checkpoint(args.arguments)
    print(json.dumps(found) if args.json else "\n".join(f"{key:20} {value:.4f}" for key, value in found.items()))


@_command(SETTINGS)
def _serve_reward(args: argparse.Namespace) -> None:
    from hocket.server.rewards import serve

    serve(args.config)


@_command(
    SETTINGS,
    _option("--samples", type=Path, required=True, metavar="FILE", help=SAMPLES),
    _option("--against", metavar="REWARD", help="compare the total with this reward: ranks, and order of pairs"),
)
def _reward_test(args: argparse.Namespace) -> int:
    from hocket.commands.runs import score_samples

    return score_samples(args.config, args.samples, args.against)


@_command(
    SETTINGS,
    _option("--gpus", type=int, metavar="N", help="number of GPUs, 0: the CPU (default: what is here)"),
    _option("--gpu", metavar="SIZE", help="24GB, 48GB, 80GB or 141GB, H100 and the like (default: what is here)"),
)
def _plan(args: argparse.Namespace) -> int:
    from hocket.cluster import plan

    status = 0
    for line in plan.report(args.arguments, args.gpus, args.gpu, staged(args.config)):
        print(line, flush=True)
        status |= line.startswith("does not fit")
    return status


@_command(
    _option("FOLDER", type=Path, help="a checkpoint or adapter; where its first model has moved, add model.path=NEW"),
    _option("OUTPUT", type=Path),
    SETTINGS,
)
def _export(args: argparse.Namespace) -> None:
    from hocket.trainer.export import export

    export(args.FOLDER, args.OUTPUT, base=args.config.model.path if args.settings else None)
    print(f"wrote {args.OUTPUT}; serve it with: {door()} serve model.path={args.OUTPUT}")


@_command(
    _option("RUN", type=Path, nargs="+"),
    _option("--host", default="127.0.0.1", help="address of the page; any but loopback needs $HOCKET_TOKEN"),
    _option("--port", type=int, default=8090, help="default 8090, or another that is free"),
    _option("--socket", type=int, help=argparse.SUPPRESS),  # a launcher's, which has said where it listens
)
def _watch(args: argparse.Namespace) -> None:
    os.nice(10)  # a run comes first
    given = args.socket and socket.socket(fileno=args.socket)
    if given:
        select.select([given], [], [])  # while no browser looks, a run has the second and the memory of the import
    from hocket.server.watch import watch

    runs = [run if (run / "logs").exists() else _run(run) for run in args.RUN]  # a launch's begins later
    token = config_module.Config().token
    watch(runs, given or launch.listening(args.host, args.port, token), token)


def _run(folder: Path) -> Path:
    if not (folder / "config.yaml").exists():
        raise ConfigError(f"{folder} is no run: it has no config.yaml; give the run folder, such as runs/quickstart")
    return folder


@_command(
    _option("RUN", type=Path, nargs="+"),
    _option("--output", type=Path, metavar="FILE", help="default: RUN/report.html, of several runs comparison.html"),
    _option("--png", type=Path, metavar="FOLDER", help="also write each curve there as PNG, by Chromium"),
)
def _report(args: argparse.Namespace) -> None:
    from hocket.observe import page

    runs = [*map(_run, args.RUN)]
    output = args.output or (runs[0] / "report.html" if len(runs) == 1 else Path("comparison.html"))
    page.write_report(runs, output)
    print(f"wrote {output}")
    if args.png:
        page.write_pictures(output, args.png)
        print(f"wrote the curves to {args.png}")


@_command(_option("RUN", type=Path))
def _ledger(args: argparse.Namespace) -> int:
    from hocket.data import ledger
    from hocket.observe.rows import LEDGER, read_lines, reading

    rows = read_lines(args.RUN / LEDGER)
    if not rows or "num_prompts" not in rows[0]:
        raise ConfigError(f"{args.RUN} is no run with a ledger: train and quickstart write one, a replay draws nothing")
    kept = checkpoints.complete(args.RUN / checkpoints.FOLDER)
    stream = checkpoints.read(kept[-1], whole=False).parts["prompts"] if kept else None
    ended = (args.RUN / "summary.json").exists()
    with reading(args.RUN / LEDGER):
        found = [
            (name, ledger.accounts(mine, state, ended=ended)) for name, mine, state in ledger.by_source(rows, stream)
        ]
    for name, accounts in found:
        print(*filter(None, [name, ledger.table(accounts)]), sep="\n")
    return int(any(account.problems for _, accounts in found for account in accounts))


@_command(
    _option("RUN", type=Path),
    _option("OUTPUT", type=Path, nargs="?", help="file of the rows; default RUN/selected.jsonl, or RUN/pairs.jsonl"),
    _option("--pairs", action="store_true", help="write best and worst of each group as preferences"),
    _option("--min-reward", type=float, help="lowest reward; default: the mean of the run"),
    _option("--per-prompt", type=int, default=1, help="most rollouts of one prompt (default 1)"),
)
def _select(args: argparse.Namespace) -> None:
    from hocket.stages.select import select, select_pairs

    run = _run(args.RUN)
    if args.pairs:
        print(select_pairs(run, args.OUTPUT or run / "pairs.jsonl"))
        return
    output = args.OUTPUT or run / "selected.jsonl"
    print(select(run, output, min_reward=args.min_reward, per_prompt=args.per_prompt))


@_command(
    SETTINGS,
    _page("--reference", config_module.reference, help="print every key with default and meaning"),
    _page("--metrics", metrics.reference, help="print every metric with meaning and healthy range"),
    _page("--presets", config_module.preset_table, help="print the settings of every published algorithm"),
)
def _config(args: argparse.Namespace) -> None:
    print(args.page() if args.page else config_module.to_yaml(args.config.as_dict()).rstrip())


@_command()
def _doctor(args: argparse.Namespace) -> int:
    return doctor.run()
