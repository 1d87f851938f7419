"""What is trained without servers, each by the command of its name: a loss and a data source on the trainer."""

from typing import Any

from hocket.common.registry import Registry
from hocket.config import Config, StageConfig
from hocket.errors import ConfigError

STAGES: Registry[Any] = Registry(
    "stage", sft="hocket.extras.stages.sft", rm="hocket.extras.stages.rm", dpo="hocket.extras.stages.dpo"
)
"""Classes of `driver.Stage`, whose arguments are the keys that a section has beside those of StageConfig."""


def stage_of(command: str, section: StageConfig) -> Any:
    return STAGES.bind(command, section.model_extra, section=command, keys=StageConfig.model_fields)()


def staged(config: Config) -> Any:
    """Return the objective of the stage whose section a config has; None without one."""
    named = sorted(STAGES.names & config.model_fields_set)
    if len(named) > 1:
        raise ConfigError(f"a plan is of one command: leave all but one of the sections {', '.join(named)} out")
    return stage_of(named[0], getattr(config, named[0])).objective(config.model) if named else None
