"""All sections together: what must hold between them, and what follows from several of them."""

import os
from pathlib import Path

import pydantic
from pydantic import Field

from hocket.config.algorithm import AlgorithmConfig, CriticConfig
from hocket.config.sections import (
    CheckpointConfig,
    CurriculumConfig,
    DataConfig,
    EnvConfig,
    EvalConfig,
    LaunchConfig,
    ModelConfig,
    ObserveConfig,
    PipelineConfig,
    RewardsConfig,
    RolloutConfig,
    RunConfig,
    Section,
    ServerConfig,
    SftConfig,
    SyncConfig,
    TrainerConfig,
)
from hocket.errors import ConfigError

MIN_TOKEN_LENGTH = 8


class Config(Section):
    """Every section of a run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    rollout: RolloutConfig = RolloutConfig()
    env: EnvConfig = EnvConfig()
    rewards: RewardsConfig = RewardsConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    trainer: TrainerConfig = TrainerConfig()
    sft: SftConfig = SftConfig()
    pipeline: PipelineConfig = PipelineConfig()
    sync: SyncConfig = SyncConfig()
    server: ServerConfig = ServerConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()
    launch: LaunchConfig = LaunchConfig()
    plugins: tuple[str, ...] = Field(
        (), description="Python files with rewards, environments, tools and curricula of your own."
    )

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> "Config":
        if self.model.max_length is not None and self.rollout.max_tokens >= self.model.max_length:
            raise ValueError(
                f"rollout.max_tokens={self.rollout.max_tokens} leaves no room for a prompt in "
                f"model.max_length={self.model.max_length}"
            )
        if self.rollout.group_size == 1 and self.algorithm.baseline in ("mean", "leave_one_out"):
            raise ValueError(
                f"rollout.group_size=1 leaves nothing to compare a reward with under "
                f"algorithm.baseline={self.algorithm.baseline}: set it to 2 or more, or the baseline to none or critic"
            )
        run_dir, root = self.run_dir.resolve(), self.sync_root.resolve()
        if not run_dir.is_relative_to(root) or run_dir == root:
            raise ValueError(f"run.dir={run_dir} must lie under sync.root={root}, where the server looks")
        if any(part.startswith(".") for part in run_dir.relative_to(root).parts):
            raise ValueError(f"run.dir={self.run.dir}: no folder name below sync.root may begin with a dot")
        if self.sync.delta and self.sync.backend != "disk":
            raise ValueError("sync.delta=true needs sync.backend=disk: from memory, all weights are sent")
        if self.sync.delta and self.model.lora is not None:
            raise ValueError("sync.delta=true has nothing to save with model.lora: an adapter is small already")
        if self.trainer.zero_stage == 3 and self.model.lora is not None and self.model.lora.quantize is not None:
            raise ValueError("trainer.zero_stage=3 can't spread the 4-bit weights of model.lora.quantize; set stage 2")
        self._has_its_reference()
        if 3 * self.sync.timeout_s >= self.trainer.collective_timeout_s:
            raise ValueError(
                f"trainer.collective_timeout_s must exceed 3 · sync.timeout_s = {3 * self.sync.timeout_s:g}: the other "
                "ranks may wait that long, for a hand-over, its repetition by disk and a canary"
            )
        if self.algorithm.baseline == "critic" and self.critic.warmup_steps >= self.trainer.steps:
            raise ValueError(
                f"critic.warmup_steps={self.critic.warmup_steps} leaves no step of trainer.steps={self.trainer.steps} "
                "for the policy"
            )
        if self.launch.share_gpu:
            self._can_share_gpu()
        if self.pipeline.replay is not None and (self.pipeline.max_staleness or self.launch.share_gpu):
            raise ValueError("pipeline.replay has no server: leave pipeline.max_staleness and launch.share_gpu out")
        if self.pipeline.replay is not None and Path(self.pipeline.replay).resolve() == self.run_dir.resolve():
            raise ValueError(
                "pipeline.replay is this run's own folder, which it would write to; choose another run.dir"
            )
        best, every = self.checkpoint.best or "", self.eval.every_steps
        if best.startswith("eval/") and (every == 0 or self.checkpoint.every_steps % every):
            raise ValueError(
                f"checkpoint.best={best} is not measured at every checkpoint; set checkpoint.every_steps to "
                "eval.every_steps, or a multiple of it"
            )
        _ = self.token  # a weak one is refused now
        return self

    def _has_its_reference(self) -> None:
        algorithm = self.algorithm
        if algorithm.kl == "off" and algorithm.reference_reset_every:
            raise ValueError("algorithm.reference_reset_every has no effect with algorithm.kl=off; set kl=k2")
        if algorithm.reference_reset_every and self.model.lora is not None:
            raise ValueError(
                "algorithm.reference_reset_every can't copy an adapter into its own base; merge what was trained with "
                "`python3 run.py export` and start the next run from it as model.path"
            )

    def _can_share_gpu(self) -> None:
        if self.pipeline.max_staleness:
            raise ValueError("launch.share_gpu needs pipeline.max_staleness=0: server and trainer take turns")
        if self.sync.backend != "disk":
            raise ValueError(
                "launch.share_gpu needs sync.backend=disk: NCCL can't connect two processes on one GPU, and the "
                "trainer is off it while the server loads"
            )
        if self.sync.delta:
            raise ValueError("launch.share_gpu does not go with sync.delta: whole versions are written")
        if len(self.server_urls) > 1:
            raise ValueError("launch.share_gpu is for one server; give several servers GPUs of their own")
        if self.launch.server_gpus != self.launch.trainer_gpus:
            raise ValueError("with launch.share_gpu, launch.server_gpus and launch.trainer_gpus must be the same")

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return Path(self.run.dir)

    @property
    def pass_reward(self) -> str:
        """Reward function whose mean is a prompt's pass rate: eval.reward if it is trained, else the first one."""
        functions = self.rewards.functions
        reward = self.eval.reward
        return reward if reward is not None and reward in functions else next(iter(functions))

    @property
    def uses_pass_rates(self) -> bool:
        """Whether the choice of prompts depends on pass rates."""
        return self.curriculum.name != "shuffle" or self.curriculum.retire_after > 0

    @property
    def sync_root(self) -> Path:
        """Folder under which the server accepts published versions."""
        return Path(self.sync.root) if self.sync.root is not None else self.run_dir.resolve().parent

    @property
    def own_url(self) -> str:
        """Base URL of the server that this config starts, without a slash at the end."""
        host = f"[{self.server.host}]" if ":" in self.server.host else self.server.host
        return f"http://{host}:{self.server.port}"

    @property
    def server_urls(self) -> tuple[str, ...]:
        """Base URLs of the generation servers that the trainer uses."""
        return self.server.urls or (self.own_url,)

    @property
    def token(self) -> str | None:
        """Bearer token of the server, from the config or the environment. Raises ConfigError where it is too weak."""
        token = self.server.token or os.environ.get("HOCKET_TOKEN") or None
        if token is not None and (len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable()):
            raise ConfigError(
                f"server.token, or $HOCKET_TOKEN, needs at least {MIN_TOKEN_LENGTH} plain ASCII characters"
            )
        return token
