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

from pydantic import ValidationError

import hocket
from hocket import config as config_module
from hocket import launch
from hocket.commands.command import COMMANDS, DRY_RUN, SETTINGS, Command, Option, command, option
from hocket.common import environment, shell
from hocket.common.files import docs, make_unused
from hocket.common.processes import nobody_reads
from hocket.common.redaction import redacted
from hocket.common.registry import load_plugins
from hocket.config import Config, read_settings
from hocket.errors import (
    TRACEBACK,
    ConfigError,
    HocketError,
    program,
    remedy,
)
from hocket.observe import metrics, rows
from hocket.trainer import checkpoints

PROJECT = "config.yaml"  # the config of a folder that `new` has made
DEFAULTS = {"quickstart": "config/quickstart.yaml"}  # command -> config where there is no PROJECT
GPUS_PER_NODE = 8
WHOLE = (0, 3)  # exit statuses of a run that has taken all its steps; 3 is runs.NO_UPDATE
# Read as torch is imported. Segments that grow fit micro-batches, whose lengths differ.
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit status; print an error as one sentence."""
    launched = launch.die_with_launcher()
    try:
        parser = _parser(argv)
    except HocketError as error:  # argv names a file with a command, which can't be loaded
        print(redacted(f"error: {error}"), file=sys.stderr)
        return 1
    args, extra_words = parser.parse_known_args(argv)
    _refuse_unknown(parser, args, extra_words)
    entry: Command = args.entry
    if args.traceback:
        os.environ[TRACEBACK] = "1"  # child processes read it, too

    # Several processes of a run may end at once. One tells the user how to go on: the launcher or,
    # without it, rank 0.
    speaks = not launched
    try:
        shell.settle_ranks(launched=entry.trains)
        speaks = speaks and int(os.environ.get("RANK", "0")) == 0
        if "settings" in args:
            # argparse gives settings that stand behind an option back as unknown words.
            settings = args.settings + extra_words
            default = _default_config(args.command)
            args.config, args.arguments = read_settings(settings, default)
            if default == PROJECT and PROJECT in args.arguments and PROJECT not in settings:
                print(f"hocket: settings of {PROJECT} in this folder", file=sys.stderr)
            if entry.trains:
                os.environ.setdefault(ALLOCATOR, "expandable_segments:True")
            if entry.checkpoints:
                args.newest_before = _newest(args.config.run_dir)
        status = entry.run(args) or 0
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
        if isinstance(error, ConfigError):
            # If there is a new checkpoint, it is of another process, which owns the folder.
            return 1
        status = 1
    is_broken_off = status not in WHOLE and "newest_before" in args
    if is_broken_off and speaks:
        newest = _newest(args.config.run_dir)
        if newest not in (None, args.newest_before):
            print(redacted(f"checkpointed{_how_to_go_on(args)}"), file=sys.stderr)
    return status


def _default_config(command: str) -> str | None:
    """Choose the config of a command that names none."""
    return PROJECT if Path(PROJECT).is_file() else DEFAULTS.get(command)


def _refuse_unknown(
    parser: argparse.ArgumentParser, args: argparse.Namespace, words: Sequence[str]
) -> None:
    """Exit with the parser's error if some words are neither an option nor a setting."""
    takes_settings = "settings" in args
    unknown = [word for word in words if word.startswith("-") or not takes_settings]
    if unknown:
        advice = f"; {config_module.as_setting(unknown[0])}" if takes_settings else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{advice}")


def _newest(run_dir: Path) -> Path | None:
    """Find the newest complete checkpoint of a run."""
    return max(checkpoints.complete(run_dir / checkpoints.FOLDER), default=None)


def _how_to_go_on(args: argparse.Namespace) -> str:
    """Name the command that resumes the run, as the end of a sentence; "" before it has begun."""
    if "newest_before" not in args:  # the config was being read, or the command writes none
        return ""
    where = _newest(args.config.run_dir) or "the start, as there is no checkpoint yet"
    words = [word for word in args.arguments if not word.startswith("checkpoint.resume=")]
    typed = shlex.join(words)
    again = "the same launcher with" if os.environ.get("WORLD_SIZE", "1") != "1" else program()
    return f"; to go on from {where}: {again} {args.command} {typed} checkpoint.resume=true"


def _sentence(error: Exception) -> str:
    """Describe an error in one sentence; write the traceback of an unforeseen one to a file."""
    if isinstance(error, HocketError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "").partition(".")[0]
        if name in environment.ENGINES:
            return f"this command needs {name}: {environment.EXTRAS}"

    # An error of the disk. safetensors raises its own, which name "os error".
    fix = remedy(error)
    if fix and (isinstance(error, OSError) or "os error" in str(error)):
        is_unnamed = fix.endswith("there") and getattr(error, "filename", None) is None
        where = " in run.dir, in TMPDIR, or where the output goes" if is_unnamed else ""
        return f"{error}{where}; {fix}"

    place = f"printed by --traceback (or {TRACEBACK}=1)"
    with contextlib.suppress(OSError):  # the disk may be full, too
        with tempfile.NamedTemporaryFile(
            "w", prefix="hocket-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(redacted(traceback.format_exc()))
        place = f"in {file.name}"
    advice = f"This was not foreseen; to report it, the traceback is {place}"
    return f"{type(error).__name__}: {error}. {advice}"


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Make the parser of all commands.

    Only the command that argv names gets its options: the modules of the others are not imported.
    Raises ConfigError where argv names a file that does not register a command.
    """
    prog = "hocket" if Path(sys.argv[0]).name == "hocket" else "run.py"
    parser = argparse.ArgumentParser(
        prog=prog, description=f"hocket: {hocket.__doc__}", epilog=f"docs: {docs()}"
    )
    version = f"hocket {hocket.__version__}"
    parser.add_argument("--version", action="version", version=version)
    # DeepSpeed's launcher adds this option; the environment has the same number.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    # The command that was typed; options may stand before it. A .py file is a user's command.
    typed = next((word for word in argv if word in COMMANDS.names or word.endswith(".py")), "")
    # hocket.COMMANDS is the help, COMMANDS the registry; run.py itself has install and test.
    for name, text in hocket.COMMANDS.items():
        if name in COMMANDS.names:
            subparser = commands.add_parser(name, help=text, description=text)
            if name == typed:
                _add_options(subparser, name)
    if typed.endswith(".py"):
        _add_options(commands.add_parser(typed), _command_of_file(typed))
    return parser


def _add_options(parser: argparse.ArgumentParser, name: str) -> None:
    """Add a command's options to its parser, which gets the command's docstring, too."""
    entry = COMMANDS.get(name)
    parser.description = parser.description or entry.run.__doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _epilog(name, entry, parser.prog)
    for names, keywords in entry.options:
        parser.add_argument(*names, **keywords)
    advice = "with an error, show where in the code it arose"
    parser.add_argument("--traceback", action="store_true", help=advice)
    parser.set_defaults(command=name, entry=entry)


def _epilog(name: str, entry: Command, prog: str) -> str:
    """Write what stands below the options of a command's help."""
    parts = []
    if entry.examples:
        lines = "\n".join(f"  {prog} {words}".rstrip() for words in entry.examples)
        parts.append(f"examples:\n{lines}")
    if SETTINGS in entry.options:
        default = DEFAULTS.get(name, "the defaults of all settings")
        parts.append(
            f"CONFIG is a YAML file. Without one: {PROJECT} of this folder or, if there is none,\n"
            f"{default}. section.key=value overrides one setting of it."
        )
    if entry.page:
        parts.append(f"docs: {docs(entry.page)}")
    return "\n\n".join(parts)


def _command_of_file(path: str) -> str:
    """Load a user's file and return the name of the command that it registers."""
    names_before = COMMANDS.names
    load_plugins([path])
    added = sorted(COMMANDS.names - names_before)
    if len(added) != 1:
        fact = f"registers {len(added)} commands" if added else "registers no command"
        advice = "mark one function with @command (hocket.commands.command)"
        raise ConfigError(f"{path} {fact}: {advice}")
    return added[0]


def _page(name: str, content: Callable[[], str], help: str) -> Option:
    """Describe an option of `config`, which then prints a page in place of the settings."""
    return option(name, dest="page", action="store_const", const=content, help=help)


@command(
    "quickstart",
    SETTINGS,
    checkpoints=True,
    examples=("", "examples/own_everything/config.yaml trainer.steps=20"),
    page="tutorials/quickstart.md",
)
def _quickstart(args: argparse.Namespace) -> int:
    environment.require("quickstart")
    # A newcomer types this command again and again: each run gets a folder of its own.
    is_named = any(argument.startswith("run.dir=") for argument in args.arguments)
    if is_named or args.config.checkpoint.resume:
        # The user has named the run: if its folder is taken, the launch says so.
        status = launch.launch(args.config, args.arguments)
    else:
        folder = make_unused(args.config.run_dir)
        settings = list(args.arguments)
        settings.append(f"run.dir={folder}")
        args.config, args.arguments = read_settings(settings)
        try:
            status = launch.launch(args.config, args.arguments)
        finally:
            # Remove the folder if nothing was written there; one that holds a run stays.
            with contextlib.suppress(OSError):
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
    examples=(
        "--dry-run config/quickstart.yaml",
        "config/multi_node/math7b.yaml --engine slurm --gpus-per-node 8",
    ),
    page="how-to/one_node.md",
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
        options = "--gpus-per-node, --output and --submit"
        raise ConfigError(f"{options} need an --engine: slurm, ray or kubernetes")
    if not args.dry_run:
        environment.require("launch")
    return launch.launch(args.config, args.arguments, dry_run=args.dry_run)


@command(
    "serve",
    SETTINGS,
    examples=("config/quickstart.yaml", "model.path=runs/quickstart server.port=8001"),
    page="reference/http_api.md",
)
def _serve(args: argparse.Namespace) -> None:
    environment.require("serve", environment.SERVER_ENGINES)  # its image has no deepspeed
    from hocket.server.main import serve

    serve(args.config)


@command(
    "train",
    SETTINGS,
    DRY_RUN,
    trains=True,
    examples=(
        "--dry-run config/quickstart.yaml run.dir=runs/short",
        "config/quickstart.yaml run.dir=runs/short trainer.steps=20",
    ),
    page="how-to/one_node.md",
)
def _train(args: argparse.Namespace) -> int:
    from hocket.commands.runs import train

    return train(args.config, dry_run=args.dry_run)


@command(
    "rollout",
    SETTINGS,
    examples=(
        "config/quickstart.yaml run.dir=runs/batches trainer.steps=2",
        "config/quickstart.yaml run.dir=runs/hot rollout.temperature=1.2 trainer.steps=1",
    ),
    page="explanation/staleness.md",
)
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
        help="a user message, sent after data.system_prompt; repeatable; default: lines of stdin",
    ),
    option("-n", type=int, default=1, help="completions per prompt (default 1)"),
    option(
        "--max-tokens", type=int, help="of a completion; default: rollout.max_tokens, or what fits"
    ),
    option(
        "--text", action="store_true", help="send the prompt as plain text, without chat template"
    ),
    option("--json", action="store_true", help="print the server's whole answer"),
    examples=(
        "config/quickstart.yaml -p 'Sort: cab'",
        "config/quickstart.yaml -n 4 --json < prompts.txt",
    ),
    page="how-to/use_the_model.md",
)
def _generate(args: argparse.Namespace) -> None:
    from hocket.client.server import ServerClient
    from hocket.commands.servers import Servers
    from hocket.protocol import (
        ChatMessage,
        GenerateRequest,
        GenerateResponse,
        PromptInput,
        SamplingParams,
    )

    config: Config = args.config
    # The prompts of the command line or of standard input, as chats or as plain text.
    prompts: list[str] = args.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        raise ConfigError('nothing to generate: give -p "a prompt", or lines on standard input')
    system: list[ChatMessage] = []
    if config.data.system_prompt is not None:  # as the prompts of the training have it
        system = [ChatMessage(role="system", content=config.data.system_prompt)]
    inputs: list[PromptInput] = []
    for prompt in prompts:
        if args.text:
            inputs.append(prompt)
        else:
            inputs.append([*system, ChatMessage(role="user", content=prompt)])
    # With fit=True the server lowers max_tokens to what the context leaves.
    max_tokens = config.rollout.max_tokens if args.max_tokens is None else args.max_tokens
    try:
        sampling = SamplingParams(temperature=config.rollout.temperature, max_tokens=max_tokens)
        request = GenerateRequest(prompts=inputs, sampling=sampling, n=args.n, fit=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{first['loc'][0]} can't be asked for: {first['msg']}") from error

    async def generate() -> GenerateResponse:
        urls = await Servers(config).urls()
        async with ServerClient(urls[0], token=config.token) as server:
            return await server.ask(request, timeout_s=config.rollout.timeout_s)

    response = asyncio.run(generate())
    is_other = Path(response.model).resolve() != Path(config.model.path).resolve()
    if is_other and not config.names_servers:
        fact = f"answered by {response.model}, version {response.version}"
        print(f"hocket: {fact}, not by model.path={config.model.path}", file=sys.stderr)
    if args.json:
        print(response.model_dump_json())
        return
    # A single completion is printed alone, several with their prompts.
    is_single = len(prompts) * args.n == 1
    for prompt, completions in zip(prompts, response.completions, strict=True):
        for completion in completions:
            print(completion.text if is_single else f"{prompt}\t{completion.text}")


@command(
    "eval",
    SETTINGS,
    option("--json", action="store_true", help="print one JSON object"),
    examples=(
        "config/quickstart.yaml model.path=runs/quickstart",
        "config/quickstart.yaml eval.samples=8 --json",
    ),
    page="tutorials/first_model.md",
)
def _eval(args: argparse.Namespace) -> None:
    from hocket.commands.runs import evaluate_checkpoint

    values = evaluate_checkpoint(args.arguments)
    if args.json:
        print(json.dumps(values))
        return
    for name, value in values.items():
        print(f"{name:20} {value:.4f}")


@command(
    "config",
    SETTINGS,
    _page("--reference", config_module.reference, "print every key with default and meaning"),
    _page("--metrics", metrics.reference, "print every metric with meaning and healthy range"),
    _page("--files", rows.reference, "print every key of a run folder's files"),
    _page(
        "--presets", config_module.preset_table, "print the settings of every published algorithm"
    ),
    examples=("config/quickstart.yaml trainer.steps=20", "--reference"),
    page="reference/settings.md",
)
def _config(args: argparse.Namespace) -> None:
    if args.page:
        print(args.page())
    else:
        print(config_module.to_yaml(args.config.as_dict()).rstrip())
