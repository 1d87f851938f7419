import contextlib
from typing import Any
from unittest.mock import Mock

import pytest

from hocket.errors import TrainerError
from hocket.trainer import ranks as ranks_module
from hocket.trainer.ranks import Ranks, Together, on_all_ranks
from support.examples import shown
from support.training import make_samples, make_trainer


def test_the_example_of_the_documentation_counts_the_ranks(ranks: Ranks) -> None:
    names: dict[str, Any] = {
        "Together": Together,
        "on_all_ranks": on_all_ranks,
        "contextlib": contextlib,
        "ranks": ranks,
    }
    exec(shown(ranks_module, "class Counter(Together):"), names)
    assert names["number"] == ranks.size == 1


def test_a_trainer_that_could_not_leave_with_the_others_is_closed(
    ranks: Ranks, tied_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(ranks, tied_model)
    monkeypatch.setattr(trainer, "_leave", Mock(side_effect=TrainerError("lost the other ranks")))
    with pytest.raises(TrainerError, match="lost the other ranks"):
        trainer.close()
    trainer.close()
    with pytest.raises(TrainerError, match="it is closed"):
        trainer.step(make_samples())
