"""Run parts are callbacks of the loop: they watch a run, keep something of it, or end it."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.client.member import Member
from hocket.client.pool import ServerPool
from hocket.common.registry import Registry
from hocket.config import Config
from hocket.errors import ConfigError
from hocket.observe.console import Console
from hocket.observe.run_folder import RunFolder
from hocket.sync.publish import Publisher
from hocket.trainer.checkpoints import Checkpoints
from hocket.types import Metrics, Prompt, Rollout, TrainSample

if TYPE_CHECKING:
    from hocket.trainer.trainer import Trainer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The run that a part joins, as the function gets it that makes the part."""

    config: Config  # all settings
    folder: RunFolder  # the run's files; `folder.path` is the folder
    servers: ServerPool  # the generation servers
    trainer: "Trainer"  # the policy and its optimizer
    publisher: Publisher  # sends weight versions to the servers
    prompts: Sequence[Prompt]  # the training prompts of the first source
    checkpoints: Checkpoints  # writes and keeps checkpoints
    console: Console  # `console.say` prints a line


class RunPart:
    """A part of a run: it watches the run, keeps something of it, or ends it.

    Its methods stand in the order in which a step calls them. By default none does anything. An
    exception in a method ends the run.

    Example: a plugin that ends a run as soon as a metric is high enough.

        @run_part("until")
        def until(run: Joined) -> RunPart:
            return Until()

        class Until(RunPart):
            def ends(self, step: int, metrics: Metrics) -> bool:
                return metrics.get("reward/mean", 0.0) >= 0.9
    """

    async def rolled_out(self, groups: Sequence[Sequence[Rollout]], trains: bool | None) -> Metrics:
        """Take a batch's rollouts, a sequence for each prompt, before the step learns from them.

        Args:
            groups: the rollouts of each prompt. Those of an evaluation are played by the current
                weights: first the greedy one, then those of eval.temperature.
            trains: whether the step learns from some of them; None for an evaluation.

        Returns more metrics.
        """
        return {}

    def max_gap(self) -> float:
        """Bound the train/logprob_gap of the rollouts that `rolled_out` took last.

        Above it the step raises before its update. The lowest bound of all parts counts.
        """
        return math.inf

    def samples(self, step: int, samples: Sequence[TrainSample]) -> None:
        """Take the samples that the step is about to train on. Called in a thread."""

    def trained(self, metrics: Metrics) -> Metrics:
        """Take the step's metrics between its update and the publishing of its weights.

        Returns more metrics.
        """
        return {}

    async def published(self, members: Sequence[Member], came: bool) -> Metrics:
        """Take the servers that have loaded a version.

        It is a new one or, for servers that `came` or came back, the current one. Returns more
        metrics.
        """
        return {}

    def checkpointed(self, folder: Path) -> None:
        """Take the folder of a complete checkpoint, which stays until this returns.

        Called in a thread, while the next steps run.
        """

    def evaluated(self, step: int, metrics: Metrics) -> Metrics:
        """Take the metrics of an evaluation, while the trainer still has the weights it measured.

        Returns more metrics. Called in a thread.
        """
        return {}

    def ends(self, step: int, metrics: Metrics) -> bool:
        """Decide whether the run ends with this step.

        All its metrics are there, except those of the evaluation that follows if it ends.
        """
        return False

    def recorded(self, step: int, metrics: Metrics) -> None:
        """Take a step that metrics.jsonl has now; step 0 is the evaluation before training."""

    def servers_changed(self) -> None:
        """Take note that a server was lost or came back, also within a step."""

    def summary(self) -> Mapping[str, Any]:
        """Return this part's entries of summary.json."""
        return {}

    def close(self) -> None:
        """Release the part's resources. Called once, however the run ended."""


RUN_PARTS: Registry[Callable[[Joined], RunPart | None]] = Registry(
    "run_part",
    checks="hocket.extras.checks.sampling",
    timeline="hocket.extras.timeline",
    tokens="hocket.extras.page.tokens",
    best="hocket.extras.best",
    copy_to="hocket.extras.copy_to",
)
run_part = RUN_PARTS.register
"""Register a function that makes a part of a run, or returns None if settings turn it off (decorator).

It is called with the run that the part joins. RunPart has an example.

Args:
    name: its name; no setting names it, as a part joins every run whose `plugins` has its file.
"""


# Parts whose files were deleted. A setting that asks for one must not be ignored in silence.

SETTINGS = {
    "checks": ("sync.check_every", "sync.check_share"),
    "timeline": ("observe.trace",),
    "tokens": ("observe.tokens",),
    "best": ("checkpoint.best",),
    "copy_to": ("checkpoint.copy_to",),
}
"""Part -> the settings that ask for it, which are not ignored where the part's file was deleted."""

DISPENSABLE = {
    "checks": "train/logprob_gap still stops a run whose servers compute with other weights"
}
"""Part that a run goes on without, as its settings are on by default -> what then still holds."""


def lacking(config: Config) -> dict[str, str]:
    """Name the parts that settings ask for and whose files were deleted, each with a sentence."""
    sentences = {}
    for name, settings in SETTINGS.items():
        asking = [setting for setting in settings if attrgetter(setting)(config)]
        if asking and name not in RUN_PARTS.names:
            names = " and ".join(asking)
            sentences[name] = (
                f"{names}: needs the run part {name!r}, whose file in hocket/extras was deleted"
            )
    return sentences


def check(config: Config) -> None:
    """Raise ConfigError for a setting that asks for a part whose file was deleted."""
    for name, sentence in lacking(config).items():
        if name not in DISPENSABLE:
            raise ConfigError(sentence)


def joining(run: Joined) -> Iterator[RunPart]:
    """Make the parts of a run one by one, so that those made are closed if a later one fails."""
    for name, sentence in lacking(run.config).items():
        if name in DISPENSABLE:
            run.console.say(f"{sentence}; {DISPENSABLE[name]}")
    for make in RUN_PARTS.each():
        part = make(run)
        if part is not None:
            yield part
