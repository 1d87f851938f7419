"""What joins a training run beside the loop: it watches the run, keeps something of it, or ends it."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """The run that a part joins."""

    config: Config
    folder: RunFolder
    servers: ServerPool
    trainer: "Trainer"
    publisher: Publisher
    prompts: Sequence[Prompt]  # for training, of the first source
    checkpoints: Checkpoints
    console: Console


class RunPart:
    """A part of a run. Its methods are called in the order in which they stand here; by default none does anything.

    What a method raises ends the run.

    Example: a plugin that ends a run as soon as a metric is high enough.

        @run_part("until")
        def until(run: Joined) -> RunPart:
            return Until()

        class Until(RunPart):
            def ends(self, step: int, metrics: Metrics) -> bool:
                return metrics.get("reward/total", 0.0) >= 0.9
    """

    async def rolled_out(self, groups: Sequence[Sequence[Rollout]], trains: bool | None) -> Metrics:
        """Take the rollouts of a batch's prompts before a step learns from some (`trains`) or, if False, from none.

        None: an evaluation's, which the current weights played: of each prompt first the greedy rollout, then those of
        eval.temperature. Returns more metrics.
        """
        return {}

    def max_gap(self) -> float:
        """Return the highest train/logprob_gap of the step that learns from what `rolled_out` took last.

        Above it the step stops before its update; of all parts the lowest counts.
        """
        return math.inf

    def samples(self, step: int, samples: Sequence[TrainSample]) -> None:
        """Take what a step trains on, before it does; in a thread."""

    def trained(self, metrics: Metrics) -> Metrics:
        """Take a step's metrics after its update and before its weights are published; return more of them."""
        return {}

    async def published(self, members: Sequence[Member], came: bool) -> Metrics:
        """Take the servers that have loaded a new version or, if they `came` just now, the current one.

        Returns more metrics.
        """
        return {}

    def checkpointed(self, folder: Path) -> None:
        """Take the folder of a complete checkpoint, in a thread beside the next steps; it stays until this returns."""

    def evaluated(self, step: int, metrics: Metrics) -> Metrics:
        """Take the metrics of an evaluation and return more of them; in a thread, with the weights that it measured."""
        return {}

    def ends(self, step: int, metrics: Metrics) -> bool:
        """Say whether the run ends with this step. Its metrics are whole, but for an evaluation that then follows."""
        return False

    def recorded(self, step: int, metrics: Metrics) -> None:
        """Take a step that is in metrics.jsonl; of step 0 the evaluation before training."""

    def servers_changed(self) -> None:
        """Hear that a server was lost or came back; within a step, too."""

    def summary(self) -> Mapping[str, Any]:
        """Return this part's entries of summary.json."""
        return {}

    def close(self) -> None:
        """Release what the part holds; called once, however the run ended."""


RUN_PARTS: Registry[Callable[[Joined], RunPart | None]] = Registry(
    "run_part",
    checks="hocket.extras.checks.sampling",
    timeline="hocket.extras.timeline",
    tokens="hocket.extras.page.tokens",
    best="hocket.extras.best",
    copy_to="hocket.extras.copy_to",
)
run_part = RUN_PARTS.register
"""Decorator of a function that makes a part for a run, or returns None where its settings turn it off."""


SETTINGS = {
    "checks": ("sync.check_every", "sync.check_share"),
    "timeline": ("observe.trace",),
    "tokens": ("observe.tokens",),
    "best": ("checkpoint.best",),
    "copy_to": ("checkpoint.copy_to",),
}
"""Part → the settings that ask for it."""
DISPENSABLE = {"checks": "train/logprob_gap still stops a run whose servers compute with other weights"}
"""Part that a run goes on without, as its settings are on by default → what is left of it."""


def lacking(config: Config) -> dict[str, str]:
    """Return the parts that settings ask for and whose files were deleted, each with a sentence."""
    sentences = {}
    for name, settings in SETTINGS.items():
        asking = []
        for setting in settings:
            section, _, key = setting.partition(".")
            if getattr(getattr(config, section), key):
                asking.append(setting)
        if asking and name not in RUN_PARTS.names:
            names = " and ".join(asking)
            sentences[name] = f"{names}: needs the run part {name!r}, whose file in hocket/extras was deleted"
    return sentences


def check(config: Config) -> None:
    """Raise ConfigError for a setting that asks for a part whose file was deleted."""
    for name, sentence in lacking(config).items():
        if name not in DISPENSABLE:
            raise ConfigError(sentence)


def joining(run: Joined) -> Iterator[RunPart]:
    """Make the parts of a run one by one: those that are made can be closed where a later one fails."""
    for name, sentence in lacking(run.config).items():
        if name in DISPENSABLE:
            run.console.say(f"{sentence}; {DISPENSABLE[name]}")
    for make in RUN_PARTS.each():
        part = make(run)
        if part is not None:
            yield part
