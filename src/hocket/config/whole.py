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
"""Readers of another program's settings: each takes a config's values, and returns them with these as hocket's."""
setting_reader = SETTING_READERS.register


RENAMED = {"algorithm.baseline": "algorithm.advantage", "algorithm.clip": "algorithm.objective"}
"""Former name of a setting -> its name."""


class Config(Section):
    run: sections.RunConfig = sections.RunConfig()
    model: sections.ModelConfig = sections.ModelConfig()
    data: tasks.TrainingDataConfig = tasks.TrainingDataConfig()
    curriculum: tasks.CurriculumConfig = tasks.CurriculumConfig()
    rollout: sections.RolloutConfig = sections.RolloutConfig()
    env: tasks.EnvConfig = tasks.EnvConfig()
    rewards: tasks.RewardsConfig = tasks.RewardsConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    trainer: sections.TrainerConfig = sections.TrainerConfig()
    sft: sections.StageConfig = sections.StageConfig()
    rm: sections.PairsConfig = sections.PairsConfig()
    dpo: sections.PairsConfig = sections.PairsConfig()
    pipeline: deployment.PipelineConfig = deployment.PipelineConfig()
    sync: deployment.SyncConfig = deployment.SyncConfig()
    server: deployment.ServerConfig = deployment.ServerConfig()
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
        if isinstance(trainer, Mapping) and trainer.get("deepspeed"):
            return SETTING_READERS.get("deepspeed", "trainer.deepspeed: ")(values)
        return values

    def refuse(self) -> None:
        """Raise ValueError for settings that contradict each other, in the order of CHECKS."""
        for check in CHECKS:
            check(self)

    @property
    def sources(self) -> dict[str, tasks.SourceSettings]:
        """The settings of each source, by name; without data.sources there is one, of name ""."""
        if not self.data.sources:
            return {"": self.default_source}
        return {entry.called: self._source(entry.called, entry) for entry in self.data.sources}

    @property
    def default_source(self) -> tasks.SourceSettings:
        """What a source has that sets nothing by itself."""
        return self._source("", tasks.SourceConfig(held_out=self.eval.data))

    def _source(self, name: str, entry: tasks.SourceConfig) -> tasks.SourceSettings:
        data = self.data.of(entry)
        rewards = self.rewards
        if entry.rewards is not None:
            rewards = rewards.model_copy(update={"functions": entry.rewards})
        max_tokens = entry.max_tokens or self.rollout.max_tokens
        return tasks.SourceSettings(
            name=name,
            weight=entry.weight,
            data=data,
            env=entry.env or self.env,
            curriculum=entry.curriculum or self.curriculum,
            rewards=rewards,
            max_tokens=max_tokens,
            held_out=entry.held_out.with_rest_of(data) if self.eval.num_prompts else None,
            eval_max_tokens=self.eval.max_tokens or max_tokens,
            eval_reward=self.eval.reward or rewards.first,
        )

    @property
    def sole_rewards(self) -> tasks.RewardsConfig:
        """The rewards of every source. Raise ConfigError where one has others."""
        for name, source in self.sources.items():
            if source.rewards != self.rewards:
                fact = f"the source {name} has rewards of its own"
                raise ConfigError(f"{fact}: add data.sources=[], and these as rewards.functions")
        return self.rewards

    def refuse_outside(self) -> None:
        """Raise ConfigError where servers could not find the versions of this run."""
        run_dir = self.run_dir.resolve()
        root = self.sync_root.resolve()
        if re.search(r"(^|/)\.", os.path.relpath(run_dir, root)):  # outside it is .., the same is .
            raise ConfigError(
                f"run.dir={run_dir} must lie under sync.root={root}, in no hidden folder"
            )

    def chosen(self, *, on_gpu: bool) -> "Config":
        """Return the config with each `auto` replaced, but those that are measured on a GPU."""
        apart = on_gpu and self.gpus_apart
        pipeline = {"max_staleness": int(apart)} if self.pipeline.max_staleness == "auto" else {}
        sync = {"backend": "nccl" if apart else "disk"} if self.sync.backend == "auto" else {}
        changed = {
            "trainer": self.trainer if on_gpu else self.trainer.unmeasured(),
            "pipeline": self.pipeline.model_copy(update=pipeline),
            "sync": self.sync.model_copy(update=sync),
        }
        return self.model_copy(update=changed)

    def as_dict(self) -> dict[str, Any]:
        """Return the config for JSON and YAML, without the token."""
        values = self.model_dump(mode="json", by_alias=True)
        values["server"]["token"] = None  # a run folder is shared; a secret is not
        # Unset is as in data; a source of its own would be held-out rows.
        values["eval"]["data"] = self.eval.data.model_dump(mode="json", exclude_unset=True)
        values["data"]["sources"] = [
            one.model_dump(mode="json", exclude_unset=True) for one in self.data.sources
        ]
        return values

    def changes(self, before: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return key → (before, now) of what an earlier `as_dict` had otherwise, but checkpoint.resume."""
        old = _by_key(Config().as_dict()) | _by_key(before)  # a new setting had its default
        new = _by_key(self.as_dict())
        keys = (old.keys() | new.keys()) - {"checkpoint.resume"}
        return {
            key: (old.get(key), new.get(key))
            for key in sorted(keys)
            if old.get(key) != new.get(key)
        }

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir)

    @property
    def sync_root(self) -> Path:
        return Path(self.sync.root) if self.sync.root is not None else self.run_dir.resolve().parent

    @property
    def gpus_apart(self) -> bool:
        if self.launch.share_gpu:
            return False
        if self.launch.gpus_apart is not None:
            return self.launch.gpus_apart
        return not any(is_here(urlsplit(url).hostname or "") for url in self.server_urls)

    def url_at(self, port: int) -> str:
        return url_of(self.server.host, port)

    @property
    def own_url(self) -> str:
        return self.url_at(self.server.port)

    @property
    def names_servers(self) -> bool:
        return bool(self.server.urls or self.server.discover)

    @property
    def server_urls(self) -> tuple[str, ...]:
        """URLs of the servers; none where server.discover finds them."""
        if self.server.discover:
            return ()
        return self.server.urls or (self.own_url,)

    @property
    def token(self) -> str | None:
        """Bearer token of config or environment. Raise ConfigError if it is too weak."""
        token = self.server.token or os.environ.get("HOCKET_TOKEN") or None
        return token and secret(token, "server.token, or $HOCKET_TOKEN,")


def _by_key(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {"plugins": values.get("plugins", [])}
    for section in values.keys() - found.keys():
        found |= {f"{section}.{key}": value for key, value in values[section].items()}
    return {RENAMED.get(key, key): value for key, value in found.items()}


# Contradictions between sections: one function for each feature that they concern.


def _check_reference(config: Config) -> None:
    reference = str(config.algorithm.reference)
    if "://" in reference:
        deployment.web_url(reference)
        if config.rollout.temperature != 1:
            raise ValueError(
                f"the server {reference} scores at temperature 1: set rollout.temperature=1"
            )


def _check_sources(config: Config) -> None:
    if config.data.sources and config.eval.data.model_fields_set:
        raise ValueError("eval.data beside data.sources: each of these has its own held_out")
    for name, source in config.sources.items():
        try:
            for check in OF_EACH_SOURCE:
                check(config, source)
        except ValueError as error:
            raise ValueError(f"data.sources, {name}: {error}" if name else str(error)) from error


def _check_thinking(config: Config, source: tasks.SourceSettings) -> None:
    share = config.algorithm.overlong_share
    if share and (source.env.model_extra or {}).get("thinking_tokens"):
        raise ValueError(
            f"algorithm.overlong_share={share:g} would punish the thoughts that env.thinking_tokens allows: set 0"
        )


def _check_credit(config: Config, source: tasks.SourceSettings) -> None:
    env = source.rewards.functions.get("env")
    if env is None and source.env.name == "tools":
        return  # no turn has a reward: credit is of what other rewards make of all
    is_changed = env is None or env.gate or env.clip or env.normalize
    if config.algorithm.by_turn and is_changed:
        needed = (
            "rewards of turns as they are given: add rewards.functions.env, with a weight alone"
        )
        raise ValueError(f"algorithm.credit={config.algorithm.credit} needs {needed}")


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
    sets = [name for name, source in config.sources.items() if source.held_out]
    if not sets:
        raise ValueError(
            "checkpoint.best needs held-out rows: set eval.data, or held_out of data.sources"
        )
    means = ["greedy"]
    if config.eval.temperature != 0:
        means.append("sampled")
        means += [f"pass@{1 << power}" for power in range(config.eval.samples.bit_length())]
    names = [*means, "zero_or_one", "reward_errors", "length_mean", "truncated"]
    for name in sets:
        if name:
            names += [f"{name}/{mean}" for mean in means]
    known = [f"eval/{name}" for name in names]
    best = config.checkpoint.best.name
    if best not in known:
        raise ValueError(
            f"checkpoint.best={best} is no metric of this evaluation, which has {', '.join(known)}"
        )


def _check_transport(config: Config) -> None:
    if config.sync.transport not in ("auto", "disk", "nccl") and config.model.lora is not None:
        raise ValueError(
            f"sync.backend={config.sync.transport} has no effect with model.lora, whose adapters are small: set "
            "sync.backend=disk"
        )


def _check_quantized(config: Config) -> None:
    if config.model.quantizes and config.trainer.spreads_weights:
        raise ValueError(
            "trainer.zero_stage=3, the default to offload, can't spread quantized weights; set stage 2"
        )


def _check_critic(config: Config) -> None:
    warmup = config.critic.warmup_steps
    if warmup >= config.trainer.steps:
        raise ValueError(
            f"critic.warmup_steps={warmup} leaves no step of trainer.steps={config.trainer.steps} for the policy"
        )


def _check_replay(config: Config) -> None:
    if config.pipeline.replay is None:
        return
    if config.pipeline.max_staleness not in ("auto", 0) or config.launch.share_gpu:
        raise ValueError(
            "pipeline.replay has no server: leave pipeline.max_staleness and launch.share_gpu out"
        )
    if Path(config.pipeline.replay).resolve() == config.run_dir.resolve():
        raise ValueError("pipeline.replay is this run's own folder; choose another run.dir")


def _check_share_gpu(config: Config) -> None:
    if not config.launch.share_gpu:
        return
    transport = config.sync.transport
    several = len(config.server_urls) > 1 or (config.launch.servers or 1) > 1
    for contradicts, says in (
        (
            config.pipeline.max_staleness not in ("auto", 0),
            "needs pipeline.max_staleness=0: both take turns",
        ),
        (
            transport == "nccl",
            "needs sync.backend=disk: NCCL can't connect two processes on one GPU",
        ),
        (
            transport not in ("auto", "disk", "nccl"),
            "needs sync.backend=disk: whole versions are written",
        ),
        (
            config.server.discover,
            "is for one server that server.urls names: leave server.discover out",
        ),
        (several, "is for one server; give several GPUs of their own"),
        (config.launch.gpus_apart, "contradicts launch.gpus_apart=true"),
    ):
        if contradicts:
            raise ValueError(f"launch.share_gpu {says}")


def _check_token(config: Config) -> None:
    _ = config.token  # a weak one is refused now


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
OF_EACH_SOURCE: Sequence[Callable[[Config, tasks.SourceSettings], None]] = (
    _check_thinking,
    _check_credit,
    _check_held_out,
)
