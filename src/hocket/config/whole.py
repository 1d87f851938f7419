"""All sections: what must hold between them, and what follows from them."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pydantic

from hocket.common.machine import is_here, url_of
from hocket.common.redaction import secret
from hocket.common.registry import Registry
from hocket.config import deployment, sections, tasks
from hocket.config.algorithm import AlgorithmConfig, CriticConfig
from hocket.config.sections import Section
from hocket.errors import ConfigError

SETTING_READERS: Registry[Callable[[Mapping[str, Any]], Mapping[str, Any]]] = Registry(
    "reader of settings", deepspeed="hocket.extras.ds_config"
)
"""Readers of another program's settings.

Each takes the values of a config, and returns them with that program's settings as hocket's.
"""
setting_reader = SETTING_READERS.register


WHOLE_VERSIONS = ("auto", "disk", "nccl")  # transports that send all tensors of a version
RENAMED = {"algorithm.baseline": "algorithm.advantage", "algorithm.clip": "algorithm.objective"}
"""Former name of a setting -> its name now."""


class Config(Section):
    """All settings of a run.

    >>> config = Config.model_validate({"trainer": {"steps": 10}})
    >>> config.trainer.steps
    10
    >>> config.sources[""].eval_reward
    'exact_match'
    """

    # The run's folder and its model.
    run: sections.RunConfig = sections.RunConfig()
    model: sections.ModelConfig = sections.ModelConfig()
    # The task: which prompts are drawn, how they are played, and what scores them.
    data: tasks.TrainingDataConfig = tasks.TrainingDataConfig()
    curriculum: tasks.CurriculumConfig = tasks.CurriculumConfig()
    rollout: sections.RolloutConfig = sections.RolloutConfig()
    env: tasks.EnvConfig = tasks.EnvConfig()
    rewards: tasks.RewardsConfig = tasks.RewardsConfig()
    # Learning: from rewards to a loss, and from the loss to new weights.
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    trainer: sections.TrainerConfig = sections.TrainerConfig()
    # Stages before or beside RL, each a command of its own.
    sft: sections.StageConfig = sections.StageConfig()
    rm: sections.PairsConfig = sections.PairsConfig()
    dpo: sections.PairsConfig = sections.PairsConfig()
    # Two processes in step: batches ahead, weights to the servers, and the servers themselves.
    pipeline: deployment.PipelineConfig = deployment.PipelineConfig()
    sync: deployment.SyncConfig = deployment.SyncConfig()
    server: deployment.ServerConfig = deployment.ServerConfig()
    # What is measured, saved and shown, and where the processes run.
    eval: tasks.EvalConfig = tasks.EvalConfig()
    checkpoint: sections.CheckpointConfig = sections.CheckpointConfig()
    observe: sections.ObserveConfig = sections.ObserveConfig()
    launch: deployment.LaunchConfig = deployment.LaunchConfig()
    plugins: sections.Names = ()
    """Python files with your rewards, environments, tools, curricula."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _read_deepspeed(cls, values: Any) -> Any:
        trainer = values.get("trainer") if isinstance(values, Mapping) else None
        if isinstance(trainer, Mapping) and trainer.get("deepspeed"):  # a path, or its content
            return SETTING_READERS.get("deepspeed", "trainer.deepspeed: ")(values)
        return values

    def refuse(self) -> None:
        """Raise ValueError for settings that contradict each other, in the order of CHECKS."""
        for check in CHECKS:
            check(self)

    @property
    def sources(self) -> dict[str, tasks.SourceSettings]:
        """The settings of each source, by name; without data.sources there is one, named ""."""
        if not self.data.sources:
            return {"": self.default_source}
        settings = {}
        for entry in self.data.sources:
            name = entry.resolved_name
            settings[name] = self._settings_of(name, entry)
        return settings

    @property
    def default_source(self) -> tasks.SourceSettings:
        """The settings of a source that overrides none of the run's."""
        return self._settings_of("", tasks.SourceConfig(held_out=self.eval.data))

    def _settings_of(self, name: str, entry: tasks.SourceConfig) -> tasks.SourceSettings:
        """Join the settings of a source, where it has some, and the run's, where it has none."""
        data = self.data.of(entry)
        rewards = self.rewards
        if entry.rewards is not None:
            rewards = rewards.model_copy(update={"functions": entry.rewards})
        max_tokens = entry.max_tokens or self.rollout.max_tokens
        held_out = entry.held_out.with_rest_of(data) if self.eval.num_prompts else None
        return tasks.SourceSettings(
            name=name,
            weight=entry.weight,
            data=data,
            env=entry.env or self.env,
            curriculum=entry.curriculum or self.curriculum,
            rewards=rewards,
            max_tokens=max_tokens,
            held_out=held_out,
            eval_max_tokens=self.eval.max_tokens or max_tokens,
            eval_reward=self.eval.reward or rewards.first,
        )

    @property
    def sole_rewards(self) -> tasks.RewardsConfig:
        """The rewards of every source. Raises ConfigError where a source has rewards of its own."""
        for name, source in self.sources.items():
            if source.rewards != self.rewards:
                fact = f"the source {name} has rewards of its own"
                raise ConfigError(f"{fact}: add data.sources=[], and these as rewards.functions")
        return self.rewards

    def refuse_outside(self) -> None:
        """Raise ConfigError where servers could not find the versions of this run."""
        run_dir = self.run_dir.resolve()
        root = self.sync_root.resolve()
        # Outside the root the path begins with "..", and the root itself is ".": like the name of a
        # hidden folder, both begin with a dot.
        if re.search(r"(^|/)\.", os.path.relpath(run_dir, root)):
            fact = f"run.dir={run_dir} must lie under sync.root={root}"
            raise ConfigError(f"{fact}, in no hidden folder")

    def chosen(self, *, on_gpu: bool) -> "Config":
        """Copy the config with each `auto` replaced, except those that are measured on a GPU."""
        # With GPUs of their own, servers roll out while the trainer trains, and NCCL connects them.
        apart = on_gpu and self.gpus_apart
        pipeline = self.pipeline
        if pipeline.max_staleness == "auto":
            pipeline = pipeline.model_copy(update={"max_staleness": int(apart)})
        sync = self.sync
        if sync.backend == "auto":
            sync = sync.model_copy(update={"backend": "nccl" if apart else "disk"})
        trainer = self.trainer if on_gpu else self.trainer.unmeasured()
        return self.model_copy(update={"trainer": trainer, "pipeline": pipeline, "sync": sync})

    def as_dict(self) -> dict[str, Any]:
        """Return the config as values for JSON and YAML, without the token."""
        values = self.model_dump(mode="json", by_alias=True)
        values["server"]["token"] = None  # a run folder may be shared; a secret must not
        # A key that is unset here has the value of section data. Written out, it would be set when
        # the file is read again, and a `source` that is set names held-out rows.
        values["eval"]["data"] = self.eval.data.model_dump(mode="json", exclude_unset=True)
        values["data"]["sources"] = [
            source.model_dump(mode="json", exclude_unset=True) for source in self.data.sources
        ]
        return values

    def changes(self, before: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """List the settings in which an earlier `as_dict` differs: key -> (before, now).

        checkpoint.resume is left out: a run that resumes differs in it.
        """
        # A setting that is newer than the earlier values had its default then.
        old = _by_key(Config().as_dict()) | _by_key(before)
        new = _by_key(self.as_dict())
        keys = sorted((old.keys() | new.keys()) - {"checkpoint.resume"})
        return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}

    @property
    def run_dir(self) -> Path:
        """The folder that the run writes."""
        return Path(self.run.dir)

    @property
    def sync_root(self) -> Path:
        """The folder in which servers find versions; by default the one that holds run.dir."""
        return Path(self.sync.root) if self.sync.root is not None else self.run_dir.resolve().parent

    @property
    def gpus_apart(self) -> bool:
        """Whether trainer and servers have GPUs of their own.

        Where no setting says so, they have if no server is on this machine.
        """
        if self.launch.share_gpu:
            return False
        if self.launch.gpus_apart is not None:
            return self.launch.gpus_apart
        return not any(is_here(urlsplit(url).hostname or "") for url in self.server_urls)

    def url_at(self, port: int) -> str:
        """Make the URL of a server on server.host at a port."""
        return url_of(self.server.host, port)

    @property
    def own_url(self) -> str:
        """The URL of the server that this config starts."""
        return self.url_at(self.server.port)

    @property
    def names_servers(self) -> bool:
        """Whether a setting names the servers; else one is expected at `own_url`."""
        return bool(self.server.urls or self.server.discover)

    @property
    def server_urls(self) -> tuple[str, ...]:
        """The URLs of the servers; none where server.discover looks them up."""
        if self.server.discover:
            return ()
        return self.server.urls or (self.own_url,)

    @property
    def token(self) -> str | None:
        """The bearer token of config or environment. Raises ConfigError if it is too weak."""
        token = self.server.token or os.environ.get("HOCKET_TOKEN")
        if not token:
            return None
        return secret(token, "server.token, or $HOCKET_TOKEN,")


def _by_key(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten the sections of `as_dict`, under the names that settings have now."""
    flat = {"plugins": values.get("plugins", [])}  # the only key outside a section
    for section in values.keys() - flat.keys():
        for key, value in values[section].items():
            flat[f"{section}.{key}"] = value
    return {RENAMED.get(key, key): value for key, value in flat.items()}


# Contradictions between sections: one function for each feature that they concern. Each raises
# ValueError, which pydantic turns into the errors that `load` prints.


def _check_reference(config: Config) -> None:
    reference = str(config.algorithm.reference)
    if "://" in reference:
        deployment.web_url(reference)
        if config.rollout.temperature != 1:
            fact = f"the server {reference} scores at temperature 1"
            raise ValueError(f"{fact}: set rollout.temperature=1")


def _check_sources(config: Config) -> None:
    if config.data.sources and config.eval.data.model_fields_set:
        raise ValueError("eval.data beside data.sources: each of these has its own held_out")
    for name, source in config.sources.items():
        try:
            for check in SOURCE_CHECKS:
                check(config, source)
        except ValueError as error:
            raise ValueError(f"data.sources, {name}: {error}" if name else str(error)) from error


def _check_thinking(config: Config, source: tasks.SourceSettings) -> None:
    share = config.algorithm.overlong_share
    if share and (source.env.model_extra or {}).get("thinking_tokens"):
        fact = "would punish the thoughts that env.thinking_tokens allows"
        raise ValueError(f"algorithm.overlong_share={share:g} {fact}: set 0")


def _check_credit(config: Config, source: tasks.SourceSettings) -> None:
    if not config.algorithm.by_turn:
        return
    env = source.rewards.functions.get("env")
    if env is None and source.env.name == "tools":
        return  # no turn has a reward: the credit of each comes from the rewards of the episode
    if env is None or env.gate or env.clip or env.normalize:
        needed = "rewards of turns as they are given"
        advice = "add rewards.functions.env, with a weight alone"
        raise ValueError(f"algorithm.credit={config.algorithm.credit} needs {needed}: {advice}")


def _check_held_out(config: Config, source: tasks.SourceSettings) -> None:
    if source.held_out is None:
        return
    try:
        source.held_out.refuse()
    except ValueError as error:
        raise ValueError(f"eval.data: {error}") from error


def _check_best(config: Config) -> None:
    """Raise ValueError unless checkpoint.best names a metric of the evaluation."""
    if config.checkpoint.best is None:
        return
    evaluated = [name for name, source in config.sources.items() if source.held_out]
    if not evaluated:
        fact = "checkpoint.best needs held-out rows"
        raise ValueError(f"{fact}: set eval.data, or held_out of data.sources")

    # The names of all metrics, as rollout/evaluate.py makes them. Each source has its own means.
    means = ["greedy"]
    if config.eval.temperature != 0:
        means.append("sampled")
        means += [f"pass@{2**power}" for power in range(config.eval.samples.bit_length())]
    names = list(means)
    names += ["zero_or_one", "reward_errors", "length_mean", "truncated"]
    for source_name in evaluated:
        if source_name:
            names += [f"{source_name}/{mean}" for mean in means]
    metrics = [f"eval/{name}" for name in names]
    best = config.checkpoint.best.name
    if best not in metrics:
        fact = f"checkpoint.best={best} is no metric of this evaluation"
        raise ValueError(f"{fact}, which has {', '.join(metrics)}")
    if config.checkpoint.best.patience and config.eval.every_steps == 0:
        fact = "checkpoint.best.patience has no effect, as only the last step is evaluated"
        raise ValueError(f"{fact}: set eval.every_steps")


def _check_transport(config: Config) -> None:
    transport = config.sync.transport
    if transport not in WHOLE_VERSIONS and config.model.lora is not None:
        fact = f"sync.backend={transport} has no effect with model.lora, whose adapters are small"
        raise ValueError(f"{fact}: set sync.backend=disk")


def _check_quantized(config: Config) -> None:
    if config.model.quantizes and config.trainer.spreads_weights:
        fact = "trainer.zero_stage=3, the default to offload, can't spread quantized weights"
        raise ValueError(f"{fact}; set stage 2")


def _check_critic(config: Config) -> None:
    warmup = config.critic.warmup_steps
    steps = config.trainer.steps
    if warmup >= steps:
        fact = f"critic.warmup_steps={warmup} leaves no step of trainer.steps={steps}"
        raise ValueError(f"{fact} for the policy")


def _check_replay(config: Config) -> None:
    if config.pipeline.replay is None:
        return
    if config.pipeline.max_staleness not in ("auto", 0) or config.launch.share_gpu:
        advice = "leave pipeline.max_staleness and launch.share_gpu out"
        raise ValueError(f"pipeline.replay has no server: {advice}")
    if Path(config.pipeline.replay).resolve() == config.run_dir.resolve():
        raise ValueError("pipeline.replay is this run's own folder; choose another run.dir")


def _check_share_gpu(config: Config) -> None:
    launch = config.launch
    if not launch.share_gpu:
        return

    transport = config.sync.transport
    is_ahead = config.pipeline.max_staleness not in ("auto", 0)
    discover = config.server.discover
    has_several = len(config.server_urls) > 1 or (launch.servers or 1) > 1
    contradictions = {
        "needs pipeline.max_staleness=0: both take turns": is_ahead,
        "needs sync.backend=disk: NCCL can't connect two processes on one GPU": transport == "nccl",
        "needs sync.backend=disk: whole versions are written": transport not in WHOLE_VERSIONS,
        "is for one server that server.urls names: leave server.discover out": discover,
        "is for one server; give several GPUs of their own": has_several,
        "contradicts launch.gpus_apart=true": launch.gpus_apart,
    }
    for reason, contradicts in contradictions.items():
        if contradicts:
            raise ValueError(f"launch.share_gpu {reason}")


def _check_token(config: Config) -> None:
    _ = config.token  # raises for a weak token


CHECKS: Sequence[Callable[[Config], None]] = (
    _check_reference,
    _check_sources,
    _check_best,
    _check_transport,
    _check_quantized,
    _check_critic,
    _check_replay,
    _check_share_gpu,
    _check_token,
)
SOURCE_CHECKS: Sequence[Callable[[Config, tasks.SourceSettings], None]] = (
    _check_thinking,
    _check_credit,
    _check_held_out,
)
