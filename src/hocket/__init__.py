"""GRPO with a vLLM generation server and a DeepSpeed trainer, in step over HTTP."""

import gc
import importlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.commands.runs import OnStep
    from hocket.config import Config

    Settings = str | Path | Mapping[str, Any] | Config

__version__ = "0.1.0"  # pyproject.toml, the images and CITATION.cff have it from here

COMMANDS = {  # name → what it does, for the help
    "quickstart": "start server and trainer on this machine; without CONFIG, train the small "
    "policy that ships here",
    "launch": "start the servers and trainer ranks of CONFIG on this machine, GPUs divided between "
    "them",
    "install": "make .venv, or bring it to the build and lock of this checkout",
    "test": "run the test-suite; further arguments go to pytest",
    "serve": "start the generation server (vLLM)",
    "train": "start the GRPO trainer (DeepSpeed), which finds the server over HTTP; one process "
    "per GPU under torchrun",
    "rollout": "play and score trainer.steps batches without a trainer; train on them by "
    "pipeline.replay",
    "generate": "ask a running server for completions",
    "eval": "measure held-out accuracy of a running server, or of model.path where none answers",
    "config": "check a config, or print every key",
}
EXTRA_COMMANDS = {  # name → (the module that registers it, what it does)
    "sft": (
        "hocket.extras.stages.commands",
        "fine-tune on demonstrations: conversations (messages), or prompts with responses",
    ),
    "rm": (
        "hocket.extras.stages.commands",
        "train a reward model on preferences, for the reward reward_model",
    ),
    "dpo": (
        "hocket.extras.stages.commands",
        "learn from preferences: prompts with a chosen and a rejected completion",
    ),
    "select": (
        "hocket.extras.select",
        "write the best rollouts of the run in folder RUN as demonstrations (rejection sampling), "
        "or preferences",
    ),
    "reward-test": (
        "hocket.extras.reward_test",
        "score the completions in a file with the rewards of CONFIG, without a model",
    ),
    "serve-reward": (
        "hocket.extras.http_reward.command",
        "serve the rewards of CONFIG over HTTP, for the reward http of a run elsewhere",
    ),
    "watch": (
        "hocket.extras.page.commands",
        "serve the page of the runs in folders RUN, also while another process writes them",
    ),
    "report": (
        "hocket.extras.page.commands",
        "write the report of the run in folder RUN, or of several over one another",
    ),
    "ledger": (
        "hocket.extras.ledger",
        "report the outcome of every prompt of the run in folder RUN",
    ),
    "export": (
        "hocket.extras.export",
        "turn a checkpoint, or a trained adapter (model.lora), into a Hugging Face model folder",
    ),
    "plan": (
        "hocket.extras.plan.command",
        "say what a run needs and takes on given GPUs, from the model's config.json alone",
    ),
    "new": (
        "hocket.extras.new",
        "make a project of your own: model, data, reward, and a test of the reward",
    ),
    "doctor": (
        "hocket.extras.doctor",
        "report on this machine: packages, GPUs, memory, disk",
    ),
}
_SOURCE = Path(__file__).parents[1]
# An extra whose file was deleted has no line in the help.
for _name, (_module, _description) in EXTRA_COMMANDS.items():
    if Path(_SOURCE, f"{_module.replace('.', '/')}.py").is_file():
        COMMANDS[_name] = _description


def train(
    config: "Settings",
    overrides: Mapping[str, Any] | None = None,
    *,
    rewards: Mapping[str, Callable[..., Any]] | None = None,
    on_step: "OnStep" = None,
) -> dict[str, Any]:
    """Train as the command `train` does, and start a server if none answers.

    Args:
        config: a YAML file, a mapping as in `overrides`, or a Config.
        overrides: settings to change: {"section.key": value} or {"section": {"key": value}}.
        rewards: functions by name, called in this process. They replace `rewards.functions`, each
            with weight 1.
        on_step: a function of a step's number and metrics, called after the step. If it returns
            True, the run ends with a checkpoint.

    Returns:
        The content of summary.json, and the keys `run_dir`, `model` (folder of the newest weights)
        and `history` (the rows of metrics.jsonl).

    Raises:
        HocketError: a subclass, with cause and fix in its message.

    Example: two settings of a config are changed.

        import hocket

        settings = {"run.dir": "runs/short", "trainer.steps": 20}
        result = hocket.train("config/quickstart.yaml", settings)
        print(result["after"]["greedy"], result["model"])
    """
    from hocket.common import environment

    environment.prepare()  # before a package reads the variables that this sets
    from hocket.commands import runs as commands
    from hocket.common.files import numbered
    from hocket.errors import ConfigError
    from hocket.observe.rows import read_metrics, read_summary
    from hocket.rewards.base import REWARDS, reward

    if not isinstance(rewards, Mapping | None):
        raise ConfigError("rewards takes {name: function}, e.g. {'mine': f}")
    # The functions are registered under their names, as if a plugin had them, until the run ends.
    named = {"rewards.functions": dict.fromkeys(rewards, 1.0)} if rewards else {}
    loaded = _loaded(config, named, overrides or {})
    with ExitStack() as stack:
        stack.callback(_free)
        for name, function in (rewards or {}).items():
            reward(name, inline=True)(function)
            stack.callback(REWARDS.forget, name)
        commands.train(loaded, serve=True, on_step=on_step)
    folder = loaded.run_dir
    versions = numbered(folder / "weights", "v*")
    result = dict[str, Any](read_summary(folder))
    result["run_dir"] = folder
    result["model"] = list(versions.values())[-1]
    result["history"] = read_metrics(folder)
    return result


def sft(config: "Settings", overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Fine-tune on demonstrations, as the command `sft` does.

    Args:
        config: as of `train`.
        overrides: as of `train`.

    Returns:
        The keys `run_dir`, `model` (its folder) and `history` (the rows of metrics.jsonl).

    Example: the model that comes out is the start of a GRPO run.

        import hocket

        start = hocket.sft("config/stages/sft.yaml", {"run.dir": "runs/start"})
        hocket.train("config/quickstart.yaml", {"model.path": start["model"]})
    """
    return _run_stage("sft", config, overrides)


def rm(config: "Settings", overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Train a reward model on preferences, as the command `rm` does. Used like `sft`."""
    return _run_stage("rm", config, overrides)


def dpo(config: "Settings", overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Train a policy on preferences, as the command `dpo` does. Used like `sft`."""
    return _run_stage("dpo", config, overrides)


def _run_stage(
    command: str, config: "Settings", overrides: Mapping[str, Any] | None
) -> dict[str, Any]:
    from hocket.common import environment

    environment.prepare()
    from hocket.errors import ConfigError
    from hocket.observe.rows import read_metrics

    try:
        driver = importlib.import_module("hocket.extras.stages.driver")
    except ModuleNotFoundError as error:
        raise ConfigError(f"hocket.{command} needs {error.name}, which is not there") from error
    loaded = _loaded(config, overrides or {})
    try:
        driver.run(loaded, command)
    finally:
        _free()
    folder = loaded.run_dir
    return {"run_dir": folder, "model": folder / "model", "history": read_metrics(folder)}


def _loaded(config: "Settings", *overrides: Mapping[str, Any]) -> "Config":
    """Read a config. Each of `overrides` replaces values of the config and of those before it."""
    from hocket.config import Config, load

    file: str | Path | None = None
    values: dict[str, Any] = {}
    if isinstance(config, Config):
        values.update(config.model_dump(by_alias=True, exclude_unset=True))
    elif isinstance(config, Mapping):
        values.update(config)
    else:
        file = config
    for override in overrides:
        values.update(override)
    return load(file, values)


def _free() -> None:
    """Free a run's sockets and GPU memory, which cycles of references hold."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
