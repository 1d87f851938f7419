"""Copy complete checkpoints to another folder or mount, and compare the copies."""

import filecmp
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hocket.common.files import atomic_folder, remove_folder
from hocket.config import Config
from hocket.run_part import Joined, RunPart, run_part
from hocket.trainer.checkpoints import complete


@run_part("copy_to")
def joined(run: Joined) -> RunPart | None:
    for copy in copying(run.config, run.console.say):
        return CopyTo(copy)
    return None


class CopyTo(RunPart):
    """Copies each complete checkpoint of a run."""

    def __init__(self, copy: Callable[[Path], None]) -> None:
        self._copy = copy

    def checkpointed(self, folder: Path) -> None:
        self._copy(folder)


def copying(config: Config, say: Callable[[str], None]) -> list[Callable[[Path], None]]:
    """Return a list with the function that copies a checkpoint to checkpoint.copy_to; [] if that
    is not set."""
    if config.checkpoint.copy_to is None:
        return []
    target = Path(config.checkpoint.copy_to, config.run_dir.name)
    return [partial(copy_to, target, config.checkpoint.keep, say)]


def copy_to(target: Path, keep: int, say: Callable[[str], None], folder: Path) -> None:
    """Copy a checkpoint into `target`, where the newest `keep` stay. A failure only warns."""
    try:
        with atomic_folder(target / folder.name) as partial:
            for file in folder.iterdir():
                shutil.copyfile(file, partial / file.name)
                if not filecmp.cmp(file, partial / file.name, shallow=False):
                    raise OSError(f"{file.name} did not arrive as it was")
        for old in complete(target)[:-keep]:
            remove_folder(old)
    except OSError as error:
        say(
            f"WARNING: {folder} was not copied to {target}, which is tried again with the next "
            f"one: {error}"
        )
