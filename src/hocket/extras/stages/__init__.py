"""What is trained without servers, each by the command of its name: a loss and a data source on the
trainer."""

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
"""Classes of `driver.Stage`, whose arguments are the keys that a section has beside those of
StageConfig."""


def stage_of(command: str, section: StageConfig) -> Any:
    return STAGES.bind(
        command, section.model_extra, section=command, keys=StageConfig.model_fields
    )()


def staged(config: Config) -> Any:
    """Return the objective of the stage whose section a config has; None without one."""
    named = sorted(STAGES.names & config.model_fields_set)
    if len(named) > 1:
        raise ConfigError(
            f"a plan is of one command: leave all but one of the sections {', '.join(named)} out"
        )
    return stage_of(named[0], getattr(config, named[0])).objective(config.model) if named else None


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
