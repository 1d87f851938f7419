#!/usr/bin/env python3
"""The one door: `python3 run.py COMMAND ...`. Finds or makes an environment, then hands over to hocket.cli.

Only the standard library is needed to start. This file is kept parsable by old Pythons, so that they get a reason
instead of a syntax error, and importing it does nothing: vLLM's and DeepSpeed's child processes do so.
"""

from __future__ import annotations

import os
import sys

ROOT = os.path.dirname(os.path.abspath(__file__))
COMMANDS = {
    "quickstart": "train the small policy that ships here, from nothing, and show before and after",
    "test": "run the test-suite; further arguments go to pytest",
    "serve": "start the generation server (vLLM)",
    "train": "start the GRPO trainer (DeepSpeed); it finds the server over HTTP",
    "rollout": "play and score batches with what a server holds, without a trainer",
    "sft": "fine-tune on demonstrations",
    "generate": "ask a running server for completions",
    "eval": "measure accuracy on held-out prompts",
    "ledger": "say what became of every prompt of a run",
    "export": "make a model of its own of a checkpoint or a trained adapter (model.lora)",
    "config": "check a config, or print every key",
    "doctor": "look at this machine: packages, GPUs, ports, leftovers",
}
DEFAULTS = {
    "TOKENIZERS_PARALLELISM": "false",  # its threads don't survive the forks of data loading
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def main(argv: list[str]) -> int:
    """Runs one command and returns its exit status."""
    # not just argv[0]: DeepSpeed's launcher puts --local_rank=N before it
    command = next((word for word in argv if not word.startswith("-")), argv[0] if argv else "--help")
    if command in ("-h", "--help", "help"):
        print(_help())
        return 0
    if command not in COMMANDS:
        print(f"run.py: there is no command {command!r}{_nearest(command)}\n\n{_help()}", file=sys.stderr)
        return 2
    if sys.version_info < (3, 11):  # noqa: UP036 - whoever starts it with an older one is told why
        print(_too_old(), file=sys.stderr)
        return 1
    _prepare()
    asks_for_help = "-h" in argv or "--help" in argv
    if command == "test" and asks_for_help:
        print(f"usage: run.py test [pytest arguments]\n\n{COMMANDS['test']}\n\n{_test_help()}")
        return 0

    from hocket import environment
    from hocket.errors import SetupError

    try:
        environment.ensure(command, install=not asks_for_help)
    except (SetupError, OSError) as error:
        print(f"run.py: {error}", file=sys.stderr)
        if command != "doctor":
            return 1
    if command == "doctor" and not asks_for_help:
        from hocket import doctor

        return doctor.run()
    if command == "test":
        os.chdir(ROOT)
        chosen = any(argument.startswith("tests") for argument in argv[1:])
        parallel = [] if chosen else ["-n", "2", "--no-loadscope-reorder"]  # tests/conftest.py says what stays together
        from hocket.processes import contain

        return contain([sys.executable, "-m", "pytest", "-m", "not gpu", *parallel, *argv[1:]])
    return _dispatch(argv, asks_for_help)


def _dispatch(argv: list[str], asks_for_help: bool) -> int:
    try:
        from hocket import cli
    except ModuleNotFoundError as error:
        if not asks_for_help or (error.name or "").startswith("hocket"):
            raise
        print(f"{_help()}\n\nThe options of `{argv[0]}` can be shown once the packages are installed: run.py doctor")
        return 0
    return cli.main(argv)


def _prepare() -> None:
    """Makes src/ importable here and in child processes, and the environment's own programs (ninja) callable."""
    source = os.path.join(ROOT, "src")
    if source not in sys.path:
        sys.path.insert(0, source)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([source, *(path for path in inherited if path and path != source)])
    programs = os.path.join(sys.prefix, "bin")
    searched = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if sys.prefix != sys.base_prefix and searched[0] != programs:
        os.environ["PATH"] = os.pathsep.join([programs, *searched])
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def _help() -> str:
    lines = "\n".join(f"  {name:<12}{text}" for name, text in COMMANDS.items())
    return (
        "usage: python3 run.py COMMAND [config.yaml] [section.key=value ...]\n\n"
        "hocket: GRPO with a vLLM server and a DeepSpeed trainer, in step over HTTP\n\n"
        f"{lines}\n\n"
        "`run.py COMMAND --help` says more. The first command installs what is missing into .venv;\n"
        "HOCKET_DEVICE=cpu or cuda chooses the build."
    )


def _test_help() -> str:
    return (
        "Without arguments: everything that needs no GPU. Some of it starts real engines and takes minutes;\n"
        '`run.py test -m "not engine and not ranks and not e2e and not gpu"` is done in seconds,\n'
        "`run.py test -m gpu` needs a GPU."
    )


def _nearest(command: str) -> str:
    import difflib

    close = difflib.get_close_matches(command, COMMANDS, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _too_old() -> str:
    import subprocess

    def runs(name: str) -> bool:
        try:
            return subprocess.call([name, "-c", ""], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0
        except OSError:
            return False

    newer = [name for name in ("python3.13", "python3.12", "python3.11") if runs(name)]
    fix = f"use `{newer[0]} run.py ...`" if newer else "install Python 3.11 or newer"
    return f"run.py: vLLM needs Python 3.11 or newer, this is {sys.version.split()[0]} ({sys.executable}); {fix}"


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("\nrun.py: interrupted", file=sys.stderr)
        sys.exit(130)
