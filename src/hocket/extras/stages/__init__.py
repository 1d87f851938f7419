"""Stages train without servers, each by the command of its name: sft, rm and dpo.

A stage gives the trainer a loss and rows (driver.py).
"""

from typing import Any

from hocket.common.registry import Registry
from hocket.config import Config, StageConfig
from hocket.errors import ConfigError
from hocket.observe.metrics import Metric, metric_table

STAGES: Registry[Any] = Registry(
    "stage",
    sft="hocket.extras.stages.sft",
    rm="hocket.extras.stages.rm",
    dpo="hocket.extras.stages.dpo",
)
"""Subclasses of `driver.Stage`; their arguments are the keys of a section beyond StageConfig's."""


def stage_of(command: str, section: StageConfig) -> Any:
    """Make the stage of a command from the keys of its section."""
    return STAGES.bind(
        command, section.model_extra, section=command, keys=StageConfig.model_fields
    )()


def staged(config: Config) -> Any:
    """Return the objective of the stage whose section a config has; None without a section.

    Raise ConfigError for the sections of several stages.
    """
    commands = sorted(STAGES.names & config.model_fields_set)
    if not commands:
        return None
    if len(commands) > 1:
        sections = ", ".join(commands)
        raise ConfigError(
            f"a plan is of one command: leave all but one of the sections {sections} out"
        )
    (command,) = commands
    return stage_of(command, getattr(config, command)).objective(config.model)


metric_table("stages")(
    (
        Metric(
            "eval/loss",
            "held-out rows: sft: mean cross-entropy of taught tokens, in nats; rm, dpo: loss",
        ),
        Metric("eval/rewards/accuracies", "rm, dpo: rewards/accuracies of held-out pairs"),
        Metric("eval/rewards/margins", "rm, dpo: rewards/margins of held-out pairs"),
        Metric(
            "rewards/chosen",
            "chosen completions: rm: mean score; dpo: mean of beta · log(policy / reference)",
        ),
        Metric("rewards/rejected", "the same of rejected completions"),
        Metric("rewards/margins", "rewards/chosen − rewards/rejected"),
        Metric("rewards/accuracies", "share of pairs whose chosen one has the higher reward"),
        Metric("logps/chosen", "dpo: mean log-prob of chosen completions"),
        Metric("logps/rejected", "dpo: of rejected ones"),
    )
)
