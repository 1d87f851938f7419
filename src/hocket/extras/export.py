"""The command export: write a model folder, and upload it to the Hugging Face hub."""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

import yaml

import hocket
from hocket.commands.command import SETTINGS, command, option
from hocket.common.shell import hub_variables
from hocket.errors import ConfigError, program

CARD = """\
---
library_name: transformers
{base_line}tags: [hocket, grpo, reinforcement-learning]
---

# {title}

Trained with hocket {version}{origin}.

```python
from transformers import pipeline

chat = pipeline("text-generation", "{name}")
print(chat([{{"role": "user", "content": "..."}}]))
```
"""


@command(
    "export",
    option(
        "FOLDER",
        type=Path,
        help="a run, a checkpoint, weights or an adapter; where its first model has moved, add "
        "model.path=NEW",
    ),
    option("OUTPUT", type=Path, help="folder to make"),
    option("--push-to-hub", metavar="NAME", help="upload it as USER/MODEL, with a model card"),
    option("--private", action="store_true", help="make the repository on the hub a private one"),
    SETTINGS,
    examples=(
        "runs/lora/weights/v000101 merged",
        "runs/quickstart quickstart-model --push-to-hub me/sorts-letters --private",
    ),
    page="how-to/use_the_model.md",
)
def export_model(args: argparse.Namespace) -> None:
    if args.private and not args.push_to_hub:
        raise ConfigError("--private is about the hub: it needs --push-to-hub NAME")
    if args.push_to_hub:
        check_login(args.push_to_hub)  # before a large model is read and written
    from hocket.trainer.state import export

    export(args.FOLDER, args.OUTPUT, base=args.config.model.path if args.settings else None)
    print(f"wrote {args.OUTPUT}; serve it with: {program()} serve model.path={args.OUTPUT}")
    if args.push_to_hub:
        write_card(args.OUTPUT, args.push_to_hub, base_of(args.FOLDER))
        print(f"uploaded to {push(args.OUTPUT, args.push_to_hub, private=args.private)}")


def check_login(name: str) -> None:
    """Raise ConfigError unless the hub knows this user, and `name` can be a repository's."""
    from huggingface_hub import HfApi

    with _refusing(name):
        HfApi().whoami()
        HfApi().repo_exists(name)  # refuses what can't be a name


def base_of(folder: Path) -> str:
    """Find the name of the model that a run began with; "" where the run is not there."""
    for parent in (folder, *folder.parents[:2]):
        config = parent / "config.yaml"
        if config.is_file():
            model = yaml.safe_load(config.read_text("utf-8")).get("model", {})
            return str(model.get("path", ""))
    return ""


def write_card(folder: Path, name: str, base: str) -> None:
    """Write the model card, unless the folder has a README.md."""
    card = folder / "README.md"
    if card.exists():
        return
    is_on_hub = bool(base) and not Path(base).exists()
    text = CARD.format(
        base_line=f"base_model: {base}\n" if is_on_hub else "",
        origin=f" from {base}" if is_on_hub else "",
        title=name.rpartition("/")[2],
        name=name,
        version=hocket.__version__,
    )
    card.write_text(text, "utf-8")


def push(folder: Path, name: str, *, private: bool) -> str:
    """Upload a model folder to the hub, and return its address.

    Files that are there already are replaced. Raises ConfigError if the hub refuses.
    """
    from huggingface_hub import HfApi

    with _refusing(name):
        address = HfApi().create_repo(name, private=private, exist_ok=True)
        HfApi().upload_folder(
            folder_path=folder,
            repo_id=name,
            ignore_patterns=["manifest.json", "COMPLETE"],  # hocket's own
            commit_message=f"Upload from hocket {hocket.__version__}",
        )
    return str(address)


@contextlib.contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Turn errors of the hub into a ConfigError with the likely cause."""
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError

    setting = f"--push-to-hub {name}"
    try:
        yield
    except HFValidationError as error:
        raise ConfigError(f"{setting}: {error}; a name is USER/MODEL") from error
    except LocalTokenNotFoundError as error:
        advice = "log in with `hf auth login`, or set HF_TOKEN"
        raise ConfigError(f"{setting}: the hub needs a token: {advice}") from error
    except Exception as error:  # the hub's own, the network's, the disk's
        advice = "check the network, the name, and that the token may write"
        raise ConfigError(f"{setting}: {error}{hub_variables()}; {advice}") from error
