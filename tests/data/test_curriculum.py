"""What each curriculum plays, and in which order."""

import json
import random
from typing import Any

import numpy
import pytest

from hocket.config import CurriculumConfig
from hocket.data import Candidates, Curriculum, EpochPlan, PromptStream
from hocket.data.curriculum import PassRates, Shuffle, Sorted, bind
from hocket.data.stream import Outcome
from hocket.errors import ConfigError
from hocket.types import Prompt


def candidates(
    num: int,
    *,
    difficulties: dict[int, float] | None = None,
    rates: dict[int, tuple[int, float]] | None = None,
    epoch: int = 0,
    retired: tuple[int, ...] = (),
) -> Candidates:
    """Prompts 0, 1, ..., num - 1; `members` is in falling order, where nothing sorts them. rates: (epoch, rate)."""
    measured = PassRates(num)
    for index, (when, rate) in (rates or {}).items():
        measured.record(index, when, rate)
    prompts = [Prompt(id=f"p{i}", token_ids=(1,), difficulty=(difficulties or {}).get(i)) for i in range(num)]
    members = [i for i in reversed(range(num)) if i not in retired]
    return Candidates(epoch=epoch, prompts=prompts, members=members, measured=measured)


def test_shuffle_keeps_the_order_of_the_members_and_sorted_goes_from_easy_to_hard() -> None:
    assert list(Shuffle().plan(candidates(4, retired=(2,))).order) == [3, 1, 0]
    assert Sorted().plan(candidates(5, difficulties={0: 2.0, 1: 0.5, 2: 2.0, 3: 1.0, 4: -1.0})).order == [4, 1, 3, 2, 0]
    # 1 - pass rate: 0.5, 0, 0.5; prompt 1 is unknown
    assert Sorted().plan(candidates(4, rates={0: (0, 0.5), 2: (0, 1.0), 3: (0, 0.5)})).order == [2, 3, 0, 1]


def test_the_documented_window_plays_what_is_within_its_bounds_or_not_measured(window: Any) -> None:
    config = CurriculumConfig.model_validate({"name": "window", "low": 0.3, "rest": 2})
    assert isinstance(bind(config), Curriculum)
    rates = {0: (0, 0.0), 1: (0, 0.3), 2: (0, 0.8), 3: (0, 0.875)}
    plan = bind(config).plan(candidates(5, rates=rates, epoch=1))
    assert (list(plan.order), sorted(plan.why)) == ([4, 2, 1], [0, 3])
    assert list(bind(config).plan(candidates(2, rates={0: (0, 0.0), 1: (1, 1.0)}, epoch=3)).order) == [0]  # once more
    assert list(bind(config).plan(candidates(2, rates={0: (1, 0.0), 1: (1, 1.0)}, epoch=2)).order) == [1, 0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "sortd"}, r"no curriculum 'sortd' \(did you mean 'sorted'\?\).*shuffle, sorted"),
        ({"name": "shuffle", "retire_afer": 1}, r"has no option 'retire_afer' \(did you mean 'retire_after'\?\)"),
    ],
)
def test_wrong_names_and_options_are_refused_with_the_fix(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        bind(CurriculumConfig(**options))


def test_pass_rates_come_back_as_they_were_and_cost_nothing_until_there_are_some() -> None:
    measured = PassRates(300)
    assert measured.state() == {}
    rng = random.Random(0)
    for _ in range(1000):
        measured.record(rng.randrange(300), rng.randrange(9), rng.choice([0.0, 1 / 3, 1.0]))
    assert vars(PassRates(300, json.loads(json.dumps(measured.state())))) == vars(measured)
    late = PassRates(1)
    late.record(0, 4, 0.5)
    late.record(0, 3, 1.0)  # of an older epoch: it replaces no newer one
    assert (late.rates, late.epochs, late.streaks) == ([0.5], [4], [1])


def test_a_curriculum_may_hand_out_its_own_state_and_plan_with_any_kind_of_number() -> None:
    class Counting(Curriculum):
        def __init__(self) -> None:
            self.times = [0] * 6

        def plan(self, candidates: Candidates) -> EpochPlan:
            return EpochPlan(order=list(numpy.array(sorted(candidates.members, key=lambda i: (self.times[i], i)))))

        def measured(self, index: int, pass_rate: float) -> None:
            self.times[index] += int(pass_rate)

        def state(self) -> dict[str, Any]:
            return {"times": self.times}  # the very list that `measured` changes

        def restore(self, state: Any) -> None:
            self.times = list(state["times"])

    prompts = [Prompt(id=f"p{i}", token_ids=(1,)) for i in range(6)]
    stream, again = (PromptStream(prompts, seed=0, curriculum=Counting()) for _ in range(2))
    for number, draw in enumerate(stream.take(9)):
        stream.settle(draw, Outcome(state="trained", pass_rate=float(number % 2)))
    again.restore(json.loads(json.dumps(stream.state())))
    assert list(again.take(20).values()) == list(stream.take(20).values())
