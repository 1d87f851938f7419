"""Make rows of the data set of an environment of the package verifiers (docs/how-to/hubs.md)."""

import functools
import json
import signal
from collections.abc import Iterator, Mapping
from typing import Any

from hocket.common.registry import need
from hocket.config import DataConfig
from hocket.data.sources import source
from hocket.errors import ConfigError

NO_ANSWER = "what the rubric takes"


@source("verifiers")
def rows(data: DataConfig) -> Iterator[dict[str, Any]]:
    """Yield a chat, an answer, and all that the environment's rubric reads; `data.options` are its
    arguments."""
    environment = loaded(data.source.removeprefix("verifiers:"), data.options)
    is_train = data.split == "train"
    dataset = environment.get_dataset() if is_train else environment.get_eval_dataset()
    for row in dataset:
        columns = {data.prompt_column: row.pop("prompt"), "verifiers": row}
        if data.answer_column is not None:
            columns[data.answer_column] = row.get("answer") or NO_ANSWER
        yield columns


def loaded(name: str, arguments: Mapping[str, Any]) -> Any:
    """Load an environment, once in a process. Raise ConfigError where that fails."""
    need(f"verifiers:{name}", "verifiers")
    return _loaded(name, json.dumps(arguments, sort_keys=True))


@functools.cache
def _loaded(name: str, arguments: str) -> Any:
    # The package takes over these signals as it is imported; they go back to who had them.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        from verifiers import load_environment

        return load_environment(name, **json.loads(arguments))
    except Exception as error:  # whatever its code raises
        advice = (
            "it needs verifiers from 0.1.14 to 0.3, and the environment as a module, "
            "installed or on PYTHONPATH"
        )
        raise ConfigError(f"verifiers:{name} can't be loaded: {error}; {advice}") from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
