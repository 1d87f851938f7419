"""What trainer.* chooses by name: hocket's own, a plugin's, or an error before a model is loaded."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hocket.algorithm.choices import KINDS, choose
from hocket.config import load
from hocket.errors import ConfigError
from hocket.trainer import choices, logprobs, objective
from hocket.trainer.choices import KERNELS, RECOMPUTATIONS, check, chosen_kernels, chosen_recomputation
from hocket.trainer.ranks import Ranks
from support.examples import plugged, shown
from support.training import make_groups, make_trainer, measured, state_of

HEAD = """
from contextlib import AbstractContextManager
from typing import Any

import torch

from hocket.trainer.choices import Kernels, Recomputation, kernels, recomputation
from hocket.trainer.flops import Shape

"""


@pytest.mark.parametrize("setting", ["kernels", "gradient_checkpointing"])
def test_a_name_that_nobody_has_registered_is_refused_with_those_that_are_known(setting: str) -> None:
    registry = {"kernels": KERNELS, "gradient_checkpointing": RECOMPUTATIONS}[setting]
    known = ", ".join(sorted(registry.names)) or "none, as files of hocket/extras were deleted"
    with pytest.raises(
        ConfigError, match=rf"trainer.{setting}: there is no {registry.kind} 'nothing'; known: {known};"
    ):
        check(load(None, [f"trainer.{setting}=nothing"]).trainer)


def test_a_plugin_s_kernels_are_chosen_with_their_options(tmp_path: Path) -> None:
    """The one that the documentation of Kernels shows."""
    with plugged(tmp_path, HEAD + shown(choices, '@kernels("whole")'), (KERNELS, "whole")):
        config = load(None, ["trainer.kernels={name: whole, mode: max-autotune}"]).trainer
        check(config)
        chosen_kernels(config.kernels).apply(model := Mock())
        model.compile.assert_called_once_with(mode="max-autotune")
        with pytest.raises(ConfigError, match=r"whole\(mode\) has no option 'fast'"):
            check(load(None, ["trainer.kernels={name: whole, fast: true}"]).trainer)


def test_a_plugin_s_recomputation_takes_the_same_step_and_counts_its_own_memory(
    ranks: Ranks, tied_model: str, tmp_path: Path
) -> None:
    """The one that the documentation of Recomputation shows."""
    code = HEAD + shown(choices, '@recomputation("inputs_on_cpu")')
    samples = make_groups(tied_model, prompt=9)
    with plugged(tmp_path, code, (RECOMPUTATIONS, "inputs_on_cpu")):
        shape: Any = SimpleNamespace(layers=3, hidden=5)
        assert chosen_recomputation("inputs_on_cpu").bytes_per_token(shape, 4, 100.0) == 100
        assert chosen_recomputation(True).bytes_per_token(shape, 4, 100.0) == 3 * 4 * 5 + 100
        states = []
        for how in ("true", "inputs_on_cpu"):
            with make_trainer(ranks, tied_model, f"trainer.gradient_checkpointing={how}") as trainer:
                trainer.step(measured(trainer, samples))
                states.append(state_of(trainer))
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_plugin_s_column_is_measured_for_the_advantage_that_needs_it(
    ranks: Ranks, tied_model: str, tmp_path: Path
) -> None:
    """The one that the documentation of `column` shows: A = the reward + 0.5 entropy, token by token."""
    head = (
        "from torch import Tensor\nfrom hocket.algorithm.choices import advantage, choose\n"
        "from hocket.config import Config\n"
        "from hocket.trainer.objective import Auxiliary, LoadingTrainer, Measure, column\n"
    )
    code = head + shown(objective, '@column("entropies")')
    names = ((objective.COLUMNS, "entropies"), (KINDS["advantage"], "curious"))
    chosen = ("algorithm.advantage={name: curious, bonus: 0.5}", "algorithm.scale=none", "algorithm.correction=none")
    samples = make_groups(tied_model, prompt=9)
    with plugged(tmp_path, code, *names), make_trainer(ranks, tied_model, *chosen) as trainer:
        (columns,) = trainer.measure([samples[0].sequence])
        expected = [own["entropy"] for own in trainer.numbers(samples[:1])]
        assert columns.keys() == {"entropies"}
        assert columns["entropies"] == pytest.approx(expected[0], rel=1e-5)  # the same pass, in a row of another length
        choice = choose("advantage", trainer._config.algorithm.advantage)
        assert choice(rewards_t=torch.tensor([0.0, 1.0]), entropies_t=torch.tensor([0.5, 2.0])).tolist() == [1.25, 2.0]


def test_a_plugin_s_statistics_of_tokens_are_metrics_of_the_step(ranks: Ranks, tied_model: str, tmp_path: Path) -> None:
    """Those that the documentation of `TokenStatistics` shows: how likely the likeliest tokens are."""
    head = (
        "from collections.abc import Sequence\nfrom torch import Tensor\nfrom hocket.config import Config\n"
        "from hocket.trainer.batching import TrainBatch\n"
        "from hocket.trainer.logprobs import TokenStatistics, token_statistics\n"
    )
    code = head + shown(logprobs, "class Highest(TokenStatistics):")
    samples = make_groups(tied_model, prompt=9)
    with plugged(tmp_path, code, (logprobs.TOKEN_STATISTICS, "highest")):
        with make_trainer(ranks, tied_model, "sync.check_share=0") as trainer:
            metrics = trainer.step(measured(trainer, samples))
        # A likeliest token has at least the mean probability of all.
        assert 1 / 512 < metrics["train/highest"] < 1
        if "draws" in logprobs.TOKEN_STATISTICS.names:  # an extra
            with pytest.raises(ConfigError, match="Draws and Highest both take statistics of tokens"):
                make_trainer(ranks, tied_model, "sync.check_share=0.5")
