"""The command line: one function per command, which imports what it needs."""

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import hocket
from hocket import config as config_module
from hocket import launch
from hocket.commands.command import COMMANDS, DRY_RUN, SETTINGS, Command, Option, command, option
from hocket.common import shell
from hocket.common.files import make_unused
from hocket.common.processes import nobody_reads
from hocket.common.redaction import redacted
from hocket.common.registry import load_plugins
from hocket.config import Config, read_settings
from hocket.errors import TRACEBACK, ConfigError, HocketError, program, remedy
from hocket.observe import metrics, rows
from hocket.trainer import checkpoints

DEFAULTS = {"quickstart": "config/quickstart.yaml"}  # command → config
GPUS_PER_NODE = 8
WHOLE = (0, 3)  # exit statuses of a whole run
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # read as torch is imported; micro-batches differ in length
SAMPLES = "JSONL of completions with their rows: {prompt: ..., completion: ..., answer: ...}, or a run's rollouts"
EPILOG = "Settings are read from CONFIG (YAML); section.key=value overrides one, e.g. trainer.steps=10 run.dir=runs/a."


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit status; an error is one sentence."""
    launched = launch.die_with_launcher()
    try:
        parser = _parser(argv)
    except HocketError as error:  # of a file with a command
        print(redacted(f"error: {error}"), file=sys.stderr)
        return 1
    args, rest = parser.parse_known_args(argv)
    asked: Command = args.asked
    # Options may stand between settings.
    wrong = [arg for arg in rest if arg.startswith("-")] if "settings" in args else rest
    if wrong:
        how = f"; {config_module.as_setting(wrong[0])}" if "settings" in args else ""
        parser.error(f"unrecognized arguments: {' '.join(wrong)}{how}")
    if args.traceback:
        os.environ[TRACEBACK] = "1"  # for children, too
    speaks = not launched
    try:
        shell.settle_ranks(launched=asked.trains)
        speaks = speaks and int(os.environ.get("RANK", "0")) == 0  # one rank, or the launcher
        if "settings" in args:
            args.config, args.arguments = read_settings(
                [*args.settings, *rest], DEFAULTS.get(args.command)
            )
            if asked.trains:
                os.environ.setdefault(ALLOCATOR, "expandable_segments:True")
            if asked.checkpoints:
                args.newest = _newest(args.config.run_dir)
        status = asked.run(args) or 0
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
        if isinstance(
            error, ConfigError
        ):  # a checkpoint that is new was made by the process that has the folder
            return 1
        status = 1
    if (
        speaks
        and status not in WHOLE
        and "newest" in args
        and _newest(args.config.run_dir) not in (None, args.newest)
    ):
        print(redacted(f"checkpointed{_how_to_go_on(args)}"), file=sys.stderr)
    return status


def _newest(run_dir: Path) -> Path | None:
    return max(checkpoints.complete(run_dir / checkpoints.FOLDER), default=None)


def _how_to_go_on(args: argparse.Namespace) -> str:
    if "newest" not in args:  # the config was being read
        return ""
    where = _newest(args.config.run_dir) or "the start, as there is no checkpoint yet"
    typed = shlex.join(one for one in args.arguments if not one.startswith("checkpoint.resume="))
    again = "the same launcher with" if os.environ.get("WORLD_SIZE", "1") != "1" else program()
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
        with tempfile.NamedTemporaryFile(
            "w", prefix="hocket-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(redacted(traceback.format_exc()))
        place = f"in {file.name}"
    return f"{type(error).__name__}: {error}. This was not foreseen; to report it, the traceback is {place}"


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of all commands, of which only the one in argv has its options: others are not imported."""
    prog = "hocket" if Path(sys.argv[0]).name == "hocket" else "run.py"
    parser = argparse.ArgumentParser(prog=prog, description=f"hocket: {hocket.__doc__}")
    # DeepSpeed's launcher gives it; the environment says the same.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    name = next((word for word in argv if word in COMMANDS.names or word.endswith(".py")), "")
    for known, text in hocket.COMMANDS.items():
        if known in COMMANDS.names:
            subparser = commands.add_parser(known, help=text, description=text)
            if known == name:
                _add_options(subparser, known)
    if name.endswith(".py"):
        _add_options(commands.add_parser(name), _own(name))
    return parser


def _add_options(parser: argparse.ArgumentParser, name: str) -> None:
    asked = COMMANDS.get(name)
    parser.description = parser.description or asked.run.__doc__
    if SETTINGS in asked.options:
        parser.epilog = EPILOG
    for names, how in (*asked.options, TRACEBACKS):
        parser.add_argument(*names, **how)
    parser.set_defaults(command=name, asked=asked)


def _own(path: str) -> str:
    """Return the name of the command that a user's file registers."""
    before = COMMANDS.names
    load_plugins([path])
    added = sorted(COMMANDS.names - before)
    if len(added) != 1:
        many = f"registers {len(added)} commands" if added else "registers no command"
        raise ConfigError(
            f"{path} {many}: mark one function with @command (hocket.commands.command)"
        )
    return added[0]


def _page(name: str, content: Callable[[], str], **how: Any) -> Option:
    return option(name, dest="page", action="store_const", const=content, **how)


TRACEBACKS = option(
    "--traceback", action="store_true", help="with an error, show where in the code it arose"
)


@command("quickstart", SETTINGS, checkpoints=True)
def _quickstart(args: argparse.Namespace) -> int:
    named = any(
        one.startswith("run.dir=") for one in args.arguments
    )  # if it is taken, that is said
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


@command(
    "launch",
    SETTINGS,
    option("--dry-run", action="store_true", help="only say what would run where"),
    option(
        "--engine",
        metavar="NAME",
        help="write the files that a cluster runs: slurm, ray, kubernetes, or your own",
    ),
    option(
        "--gpus-per-node",
        type=int,
        default=GPUS_PER_NODE,
        metavar="N",
        help="default 8; 0: CPUs only",
    ),
    option(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="folder of these files; default RUN/launch/ENGINE",
    ),
    option("--submit", action="store_true", help="submit them, too"),
    checkpoints=True,
)
def _launch(args: argparse.Namespace) -> int:
    if args.engine:
        load_plugins(args.config.plugins)
        write = launch.ENGINES.get(args.engine, "--engine: ")
        write(
            args.arguments,
            args.gpus_per_node,
            args.output,
            submit=args.submit,
            dry_run=args.dry_run,
        )
        return 0
    if args.output or args.submit or args.gpus_per_node != GPUS_PER_NODE:
        raise ConfigError(
            "--gpus-per-node, --output and --submit need an --engine: slurm, ray or kubernetes"
        )
    return launch.launch(args.config, args.arguments, dry_run=args.dry_run)


@command("serve", SETTINGS)
def _serve(args: argparse.Namespace) -> None:
    from hocket.server.main import serve

    serve(args.config)


@command("train", SETTINGS, DRY_RUN, trains=True)
def _train(args: argparse.Namespace) -> int:
    from hocket.commands.runs import train

    return train(args.config, dry_run=args.dry_run)


@command("rollout", SETTINGS)
def _rollout(args: argparse.Namespace) -> None:
    from hocket.commands.runs import roll_out

    roll_out(args.arguments)


@command(
    "generate",
    SETTINGS,
    option(
        "-p",
        "--prompt",
        action="append",
        help="a user message; repeatable; default: lines of stdin",
    ),
    option("-n", type=int, default=1, help="completions per prompt (default 1)"),
    option(
        "--max-tokens", type=int, help="of a completion; default: rollout.max_tokens, or what fits"
    ),
    option(
        "--text", action="store_true", help="send the prompt as plain text, without chat template"
    ),
    option("--json", action="store_true", help="print the server's whole answer"),
)
def _generate(args: argparse.Namespace) -> None:
    from hocket.client.server import ServerClient
    from hocket.commands.parts import Servers
    from hocket.protocol import (
        ChatMessage,
        GenerateRequest,
        GenerateResponse,
        PromptInput,
        SamplingParams,
    )

    config: Config = args.config
    prompts = args.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        raise ConfigError('nothing to generate: give -p "a prompt", or lines on standard input')
    inputs: list[PromptInput] = (
        prompts if args.text else [[ChatMessage(role="user", content=one)] for one in prompts]
    )
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


@command("eval", SETTINGS, option("--json", action="store_true", help="print one JSON object"))
def _eval(args: argparse.Namespace) -> None:
    from hocket.commands.runs import evaluate_checkpoint

    found = evaluate_checkpoint(args.arguments)
    print(
        json.dumps(found)
        if args.json
        else "\n".join(f"{key:20} {value:.4f}" for key, value in found.items())
    )


@command(
    "reward-test",
    SETTINGS,
    option("--samples", type=Path, required=True, metavar="FILE", help=SAMPLES),
    option(
        "--against",
        metavar="REWARD",
        help="compare the total with this reward: ranks, and order of pairs",
    ),
)
def _reward_test(args: argparse.Namespace) -> int:
    from hocket.commands.runs import score_samples

    return score_samples(args.config, args.samples, args.against)


@command(
    "config",
    SETTINGS,
    _page("--reference", config_module.reference, help="print every key with default and meaning"),
    _page("--metrics", metrics.reference, help="print every metric with meaning and healthy range"),
    _page("--files", rows.reference, help="print every key of a run folder's files"),
    _page(
        "--presets",
        config_module.preset_table,
        help="print the settings of every published algorithm",
    ),
)
def _config(args: argparse.Namespace) -> None:
    print(args.page() if args.page else config_module.to_yaml(args.config.as_dict()).rstrip())
