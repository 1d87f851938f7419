"""What each curriculum plays, and in which order."""

from typing import Any

import pytest

from hocket.config import CurriculumConfig
from hocket.data.curriculum import CURRICULA, Candidates, PassRates, Shuffle, Sorted, bind
from hocket.data.stream import PromptStream
from hocket.errors import ConfigError, DataError
from hocket.types import Prompt, Prompts


def candidates(
    num: int,
    *,
    levels: dict[int, Any] | None = None,
    rates: dict[int, tuple[int, float]] | None = None,
    epoch: int = 0,
    retired: tuple[int, ...] = (),
) -> Candidates:
    """Prompts 0, 1, ..., num - 1; `members` is in falling order, where nothing sorts them. rates: (epoch, rate)."""
    measured = PassRates(num)
    for index, (when, rate) in (rates or {}).items():
        measured.record(index, when, rate)
    prompts = Prompts(Prompt(id=f"p{i}", token_ids=(1,), meta={"level": (levels or {}).get(i)}) for i in range(num))
    members = [i for i in reversed(range(num)) if i not in retired]
    return Candidates(epoch=epoch, prompts=prompts, members=members, measured=measured)


def test_shuffle_keeps_the_order_of_the_members_and_sorted_goes_from_easy_to_hard() -> None:
    assert list(Shuffle().plan(candidates(4, retired=(2,))).order) == [3, 1, 0]
    assert Sorted("level").plan(candidates(5, levels={0: 2, 1: 0.5, 2: 2.0, 3: 1, 4: -1.0})).order == [4, 1, 3, 2, 0]
    # 1 - pass rate: 0.5, 0, 0.5; prompt 1 is unknown
    assert Sorted().plan(candidates(4, rates={0: (0, 0.5), 2: (0, 1.0), 3: (0, 0.5)})).order == [2, 3, 0, 1]


def test_the_documented_window_plays_what_is_within_its_bounds_or_not_measured(window: Any) -> None:
    config = CurriculumConfig.model_validate({"name": "window", "low": 0.3, "rest": 2})
    plan = bind(config).plan(candidates(5, rates={0: (0, 0.0), 1: (0, 0.3), 2: (0, 0.8), 3: (0, 0.875)}, epoch=1))
    assert (list(plan.order), plan.why) == ([4, 2, 1], {3: "its pass rate was 0.875", 0: "its pass rate was 0"})
    window = CURRICULA.get("window")(low=0.3, rest=2)  # type: ignore[call-arg]
    assert list(window.plan(candidates(2, rates={0: (0, 0.0), 1: (1, 1.0)}, epoch=3)).order) == [0]  # once more
    assert list(window.plan(candidates(2, rates={0: (1, 0.0), 1: (1, 1.0)}, epoch=2)).order) == [1, 0]


@pytest.mark.parametrize("level", ["hard", None, float("nan")])
def test_a_difficulty_is_a_number_of_its_own_column(level: Any) -> None:
    said = f"difficulty_column=level must name a column of numbers: that of p1 is {level!r}"
    with pytest.raises(DataError, match=said):
        Sorted("level").plan(candidates(2, levels={0: 1, 1: level}))


def test_pass_rates_are_kept_where_something_depends_on_them_and_unknown_options_refused() -> None:
    for options, uses in (({}, False), ({"name": "sorted"}, True), ({"retire_after": 2}, True)):
        config = CurriculumConfig.model_validate(options)
        stream = PromptStream(candidates(1).prompts, bind(config), seed=0, retire_after=config.retire_after)
        assert stream.uses_pass_rates is uses
    with pytest.raises(ConfigError, match=r"has no option 'retire_afer' \(did you mean 'retire_after'\?\)"):
        bind(CurriculumConfig(**{"retire_afer": 1}))


def test_a_pass_rate_of_an_older_epoch_replaces_no_newer_one() -> None:
    measured = PassRates(1)
    measured.record(0, 4, 0.5)
    measured.record(0, 3, 1.0)
    assert (measured.rates, measured.epochs, measured.streaks) == ([0.5], [4], [1])
