"""The command new: make a project of one's own."""

import argparse
import shlex
import sys
from pathlib import Path

from hocket.commands.command import command, option
from hocket.common.files import shipped
from hocket.errors import ConfigError, program

EXAMPLE = "examples/own_everything"
IGNORED = "runs/\n__pycache__/\n.venv/\n"
FILES = {
    "config.yaml": "model, data, reward, and how long to train",
    "reward.py": "the reward, a function",
    "test_reward.py": "answers whose reward you know",
    "train.jsonl": "prompts and answers to train on",
    "test.jsonl": "held-out ones",
    ".gitignore": "leaves out runs/",
}


@command(
    "new",
    option("folder", type=Path, metavar="NAME", help="folder of the project"),
    examples=("mine", "~/projects/mine"),
    page="tutorials/first_model.md",
)
def _new(args: argparse.Namespace) -> None:
    make_project(args.folder)
    print(f"{args.folder} trains as it is; replace what you like:\n")
    for name, content in FILES.items():
        print(f"  {name:<16}{content}")
    run, test = program(), "python test_reward.py"
    if run != "hocket":  # run.py of a checkout, whose folder the user leaves
        script = Path(sys.argv[0]).resolve()
        run = f"python3 {shlex.quote(str(script))}"
        source = shlex.quote(str(script.parent / "src"))
        test = f"PYTHONPATH={source} {shlex.quote(sys.executable)} test_reward.py"
    print(f"""
cd {shlex.quote(str(args.folder))}

# test the reward; check all of it without training; train with this folder's config.yaml
{test}
{run} train --dry-run config.yaml
{run} quickstart""")


def make_project(folder: Path) -> None:
    """Copy the example with a model, data and reward of its own into a new folder.

    Raises ConfigError if something is there.

    Example:
        >>> make_project(tmp / "mine")
        >>> (tmp / "mine" / "config.yaml").read_text().splitlines()[3]
        '  dir: runs/mine'
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there and not empty: name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    example = Path(shipped(EXAMPLE))
    for name in FILES:
        if name == ".gitignore":
            text = IGNORED
        else:
            text = (example / name).read_text("utf-8")
        # Paths in the project are relative to its folder.
        text = text.replace(f"{EXAMPLE}/", "")
        text = text.replace("runs/own_everything", f"runs/{folder.resolve().name}")
        (folder / name).write_text(text, "utf-8")
