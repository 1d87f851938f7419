import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hocket.common.registry import load_plugins
from hocket.config import RewardsConfig
from hocket.rewards.base import REWARDS, reward
from hocket.types import Score
from support.batches import scorer_of_all
from support.episodes import Register, Scorers, Scores, make_rollout


@pytest.fixture(scope="module")
def plugin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Loads the module's PLUGIN."""
    file = tmp_path_factory.mktemp("plugins") / f"own_of_{request.module.__name__.rpartition('.')[2]}.py"
    file.write_text(request.module.PLUGIN, encoding="utf-8")
    load_plugins([str(file)])
    return file


@pytest.fixture
def scorer_of() -> Iterator[Scorers]:
    """Makes scorers from rewards.functions and closes them."""
    with contextlib.ExitStack() as stack:
        yield lambda functions, **settings: stack.enter_context(
            scorer_of_all(RewardsConfig.model_validate({"functions": functions, **settings}))
        )


@pytest.fixture
def scores_of(scorer_of: Scorers) -> Scores:
    """Scores texts as a group, by rewards.functions."""

    async def scores(
        functions: Any, *texts: str, answer: str | None = "abcd", timeout_s: float = 60
    ) -> Sequence[Score]:
        rollouts = [make_rollout(text, answer=answer, id=text) for text in texts]
        return await scorer_of(functions, timeout_s=timeout_s).score_group(rollouts)

    return scores


@pytest.fixture
def register() -> Iterator[Register]:
    """Registers rewards of one test, in this process if they are not async."""
    names = []

    def add(name: str, function: Callable[..., Any], **how: Any) -> None:
        reward(name, **{"inline": True} | how)(function)
        names.append(name)

    yield add
    for name in names:
        REWARDS.forget(name)


@pytest.fixture
def one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.rewards.workers.NUM_WORKERS", 1)
