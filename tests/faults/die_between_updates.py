"""A plugin of the drills: the trainer is killed between two updates of its second step."""

import itertools
import os
import signal
from typing import Any

from hocket.trainer import trainer

KILLED_BEFORE = 7  # the third of four updates
numbers = itertools.count(1)
update = trainer.update


def deadly_update(*args: Any) -> Any:
    if next(numbers) == KILLED_BEFORE:
        os.kill(os.getpid(), signal.SIGKILL)
    return update(*args)


trainer.update = deadly_update
