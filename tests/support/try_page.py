"""Try every config and command of a page in a folder that is a copy of a checkout; print what fails.

    python tests/support/try_page.py PAGE FOLDER

Commands that train are run with --dry-run, unless they need what only an earlier run or the hub has. Of these, and of
commands that ask a server, the options, the config and the plugins are checked; of other programs, the files they name.
"""

import contextlib
import io
import itertools
import json
import os
import re
import shutil
import sys
from pathlib import Path

from support import pages
from support.pages import ROOT
from support.processes import free_port

COPIED = ("config", "examples", "docker", "benchmarks", "tests", "requirements")
DRY = ("train", "sft", "rm", "dpo", "launch", "quickstart")
# Programs whose options nothing here can try: only the files that their commands name are looked for.
OUTSIDE = re.compile(
    "git|cd|pip|uvx?|conda|micromamba|export|source|mkdir|cp|rm|cat|tail|head|tee|kill|ls|less|grep|echo|printf|sed|python3|jq|df|sleep|watch"
    "|docker|kubectl|sbatch|squeue|scancel|srun|salloc|ray|ssh|scp|rsync|nvidia-smi|vllm|python|pytest|hf|wandb|tensorboard"
    "|mlflow|trackio|mkdocs|uvicorn|sudo|apt-get|for|do|done|unset|time|trl|which|pre-commit|ruff|mypy|shellcheck"
)
FILE = re.compile(r"(?:config|examples|docker|benchmarks|tests|requirements|checkpoints)/[\w./-]+")
MISSING = ("needs the package", "can't be imported")


def main(page: Path, folder: Path) -> int:
    """Try a page; returns the number of faults."""
    text = page.read_text(encoding="utf-8")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [ROOT / "checkpoints", *ROOT.glob("*.py"), *ROOT.glob("*.txt")]:
        (folder / path.name).symlink_to(path)
    os.chdir(folder)
    faults = []
    for block in pages.blocks(text):
        suffix = Path(block.title).suffix
        if suffix and " " not in block.title:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.code, encoding="utf-8")
        if block.language == "yaml" and (suffix or not block.title):
            faults += attempt(f"yaml {block.title}", lambda code=block.code: load(code))
    for block in pages.blocks(text):
        if block.language == "sh":
            for command in pages.commands(block.code):
                faults += attempt(" ".join(command), lambda words=command: run(words))
    for fault in faults:
        print(fault)
    return len(faults)


def attempt(label, action) -> list[str]:
    """Returns what an action printed and raised, if it failed."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            status = action()
    except SystemExit as end:
        status = end.code
    except Exception as error:  # noqa: BLE001 - it is reported
        status = f"{type(error).__name__}: {error}"
    said = output.getvalue()
    if not status or any(word in f"{status} {said}" for word in MISSING):
        return []
    return [f"FAULT {label}\n  {status} {said[-600:]}"]


def load(code: str) -> None:
    """Load a config."""
    from hocket import config

    Path("block.yaml").write_text(code, encoding="utf-8")
    config.load("block.yaml")


def run(words: list[str]) -> int | str:
    """Try a command; returns 0 or what is wrong."""
    while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0]):
        name, _, value = words[0].partition("=")
        if name.startswith("HOCKET_TOKEN"):
            os.environ[name] = value
        words = words[1:]
    if "<" in words:
        words = words[: words.index("<")]
    if ">" in words:
        words = words[: words.index(">")]
    if not words:
        return 0
    for index, word in enumerate(words):
        if word.endswith("run.py") or (word == "hocket" and index == 0):
            return ours(words[index + 1 :])
    head = Path(words[0]).name
    if head == "python" and len(words) > 1 and words[1].startswith("benchmarks/"):
        return script(words[1], words[2:])
    missing = [name for name in FILE.findall(" ".join(words)) if not Path(name.rstrip(".")).exists()]
    if missing:
        return f"{missing} are not there"
    if head == "curl":
        return curl(words)
    if head in ("torchrun", "deepspeed", "accelerate"):
        return f"{head} starts no run.py"
    return 0 if OUTSIDE.fullmatch(head) else f"no way to try {head}"


def ours(words: list[str]) -> int | str:
    """Try a command of hocket."""
    import hocket
    from hocket.commands import cli
    from hocket.common.registry import load_plugins

    name = next((word for word in words if not word.startswith("-")), "")
    if not name or name in ("test", "install"):
        if name == "test":
            import suite

            suite.parser().parse_known_args([word for word in words if word != "test"])
        return 0
    if name.endswith(".py"):
        return 0 if Path(name).exists() else f"{name} is not there"
    if name not in hocket.COMMANDS:
        return f"there is no command {name}"
    parser = cli._parser(words)
    args, extra = parser.parse_known_args(words)
    cli._refuse_unknown(parser, args, extra)
    if "settings" not in args or args.__dict__.get("page"):
        return 0
    loaded, arguments = cli.read_settings(args.settings + extra, cli._default_config(name))
    needs = [loaded.model.path, *sources(loaded.model_dump(mode="json"))]
    needs += [loaded.pipeline.replay] if loaded.pipeline.replay else []
    absent = [path for path in needs if not Path(path).expanduser().exists()]
    if name in DRY and not absent and "--submit" not in words and "--engine" not in words:
        command = "launch" if name == "quickstart" else name
        rest = [word for word in words if word not in (name, "--dry-run")] or arguments
        # A dry run asks the server of its port, and port 8000 may be another test's.
        port = [] if any(word.startswith("server.port=") for word in rest) else [f"server.port={free_port()}"]
        return cli.main([command, "--dry-run", *rest, *port])
    load_plugins(loaded.plugins)
    return 0


def sources(values: object) -> list[str]:
    """Lists files and data sets of others that a config names."""
    if isinstance(values, dict):
        found = [
            value
            for key, value in values.items()
            if key == "source" and isinstance(value, str) and not value.startswith("task:")
        ]
        return found + [path for value in values.values() for path in sources(value)]
    if isinstance(values, list):
        return [path for value in values for path in sources(value)]
    return []


def script(path: str, words: list[str]) -> int | str:
    """Check that a script has the options of a command."""
    import subprocess

    if not Path(path).exists():
        return f"{path} is not there"
    shown = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True, timeout=300, cwd=ROOT)
    subcommands = [word for word in words if re.fullmatch("[a-z_]+", word) and f"{word}" in shown.stdout]
    for word in subcommands[:1]:
        more = subprocess.run(
            [sys.executable, path, word, "--help"], capture_output=True, text=True, timeout=300, cwd=ROOT
        )
        shown.stdout += more.stdout
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    return shown.returncode or ", ".join(option for option in options if f"{option}" not in shown.stdout)


def curl(words: list[str]) -> int | str:
    """Check that the body of a request is JSON."""
    for option, value in itertools.pairwise(words):
        if option in ("-d", "--data", "--json") and not value.startswith("@"):
            json.loads(value)
    return 0


if __name__ == "__main__":
    sys.exit(min(main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()), 99))
