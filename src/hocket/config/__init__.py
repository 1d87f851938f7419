"""The whole configuration: one YAML file, overridden by `section.key=value`, validated once, frozen, global nowhere.

Each class is a section and each attribute's description is its documentation; `python run.py config --reference`
prints them all. This package imports no engine and no torch, so that a mistake is answered within a second.
"""

from hocket.config.algorithm import AlgorithmConfig, CriticConfig
from hocket.config.loading import as_dict, changes, dump, load, reference
from hocket.config.sections import (
    CheckpointConfig,
    CurriculumConfig,
    DataConfig,
    EnvConfig,
    EvalConfig,
    LaunchConfig,
    LoraConfig,
    ModelConfig,
    ObserveConfig,
    PipelineConfig,
    RewardsConfig,
    RewardSpec,
    RolloutConfig,
    RunConfig,
    Section,
    ServerConfig,
    SftConfig,
    SyncConfig,
    TrainerConfig,
)
from hocket.config.whole import Config

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "CriticConfig",
    "CurriculumConfig",
    "DataConfig",
    "EnvConfig",
    "EvalConfig",
    "LaunchConfig",
    "LoraConfig",
    "ModelConfig",
    "ObserveConfig",
    "PipelineConfig",
    "RewardSpec",
    "RewardsConfig",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "ServerConfig",
    "SftConfig",
    "SyncConfig",
    "TrainerConfig",
    "as_dict",
    "changes",
    "dump",
    "load",
    "reference",
]
