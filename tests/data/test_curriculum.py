"""What each curriculum plays, in which order, and why the rest sits out."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from hocket import config as config_module
from hocket.config import CurriculumConfig
from hocket.data import Candidates, EpochPlan, PromptStream
from hocket.data.curriculum import NUM_RECENT, Curriculum, PassRates, Shuffle, Sorted, Staged, Window, bind
from hocket.data.stream import Outcome
from hocket.errors import ConfigError
from hocket.registry import load_plugins
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


def epoch_of(stream: PromptStream, number: int) -> int:
    return next(draw["epoch"] for draw in stream.state()["in_flight"] if draw["draw"] == number)


def test_shuffle_keeps_the_order_of_the_members_and_sorted_goes_from_easy_to_hard() -> None:
    assert list(Shuffle().plan(candidates(4, retired=(2,))).order) == [3, 1, 0]
    assert Sorted().plan(candidates(5, difficulties={0: 2.0, 1: 0.5, 2: 2.0, 3: 1.0, 4: -1.0})).order == [4, 1, 3, 2, 0]
    # 1 - pass rate: 0.5, 0, 0.5; prompt 1 is unknown
    assert Sorted().plan(candidates(4, rates={0: (0, 0.5), 2: (0, 1.0), 3: (0, 0.5)})).order == [2, 3, 0, 1]


def test_window_plays_what_is_within_its_bounds_or_not_measured_and_says_why_not() -> None:
    rates = {0: (0, 0.0), 1: (0, 0.2), 2: (0, 0.8), 3: (0, 0.875)}
    plan = Window().plan(candidates(5, rates=rates, epoch=1))
    assert plan == EpochPlan(
        order=[4, 2, 1], why={0: "too hard: pass rate below 0.2", 3: "too easy: pass rate above 0.8"}
    )
    # measured again after long enough:
    rates = {0: (0, 0.0), 1: (1, 1.0), 2: (1, 0.5)}
    played = [Window(rest=2).plan(candidates(3, rates=rates, epoch=epoch)).order for epoch in (1, 2, 3, 4)]
    assert played == [[2], [2], [2, 0], [2, 1, 0]]
    # where nothing is within the bounds, those that have sat out for longest:
    plan = Window(rest=9).plan(candidates(4, rates={0: (3, 0.0), 1: (2, 1.0), 2: (2, 0.0), 3: (3, 1.0)}, epoch=4))
    assert plan.order == [2, 1]
    assert sorted(plan.why) == [0, 3]


def test_stages_are_cut_at_their_bounds_and_added_to_the_candidates() -> None:
    staged = Staged([1, 2], steps=10)
    levels = {0: 1.0, 1: 1.5, 2: 2.0, 3: 2.5, 4: 0.5}
    second, third = "stage 2 has not begun", "stage 3 has not begun"
    assert staged.plan(candidates(5, difficulties=levels)) == EpochPlan(
        order=[4, 0], why={1: second, 2: second, 3: third}
    )
    assert [staged.moves_on(step) for step in (9, 10, 10, 19)] == [False, True, False, False]
    assert staged.plan(candidates(5, difficulties=levels)).order == [4, 2, 1, 0]
    assert staged.moves_on(20)
    assert staged.plan(candidates(5, difficulties=levels)) == EpochPlan(order=[4, 3, 2, 1, 0])
    assert not staged.moves_on(99)


def test_a_stage_is_over_once_its_own_prompts_are_solved_often_enough() -> None:
    staged = Staged([1], pass_rate=0.75)
    staged.plan(candidates(4, difficulties={0: 1.0, 1: 1.0, 2: 2.0, 3: 2.0}))
    staged.measured(2, 1.0)  # of a later stage
    staged.measured(0, 1.0)
    assert not staged.moves_on(0)  # only one of its two prompts
    staged.measured(1, 0.25)
    assert not staged.moves_on(0)  # mean 0.625
    staged.measured(0, 1.0)
    assert not staged.moves_on(0)  # of the latest two still 0.625
    staged.measured(1, 0.5)
    assert staged.moves_on(0)  # (1 + 0.5) / 2


def test_of_a_large_stage_the_latest_64_pass_rates_count() -> None:
    assert NUM_RECENT == 64
    for rates, over in (
        ([1.0] * 63, False),
        ([1.0] * 64, True),
        ([0.0] * 50 + [1.0] * 57, False),  # 57 / 64 = 0.89
        ([0.0] * 50 + [1.0] * 58, True),  # 58 / 64 = 0.91
    ):
        staged = Staged([1], pass_rate=0.9)
        staged.plan(candidates(200, difficulties=dict.fromkeys(range(200), 0.0)))
        for rate in rates:
            staged.measured(0, rate)
        assert staged.moves_on(0) is over


def test_a_stage_without_prompts_is_passed_over_and_unknown_ones_are_played_first() -> None:
    staged = Staged([1, 2], pass_rate=0.5)
    assert staged.plan(candidates(2, difficulties={0: 1.5, 1: 3.0})).order == [0]
    staged = Staged([1, 2, 3], steps=10)  # none of the prompts has a difficulty from 1 to 2
    levels = {0: 1.0, 1: 2.5, 2: 3.5}
    assert staged.plan(candidates(3, difficulties=levels)).order == [0]
    assert staged.moves_on(10)
    assert staged.plan(candidates(3, difficulties=levels)).order == [1, 0]
    assert staged.moves_on(20)
    assert staged.plan(candidates(3, difficulties=levels)).order == [2, 1, 0]
    # by pass rates: difficulties 0.25 and 0.75, the third is not measured yet
    staged = Staged([0.5], pass_rate=0.5)
    assert staged.plan(candidates(3)).order == [2, 1, 0]
    assert staged.plan(candidates(3, rates={0: (0, 0.75), 1: (0, 0.25)})).order == [2, 0]


def test_a_pool_that_grows_ends_the_epoch_and_the_rest_is_accounted_for() -> None:
    levels = [0.0, 0.0, 0.0, 1.0]
    prompts = [Prompt(id=str(i), token_ids=(1,), difficulty=level) for i, level in enumerate(levels)]
    stream = PromptStream(prompts, 0, Staged([0], steps=2), prompts_per_step=1)
    draws = stream.take(6)
    assert [epoch_of(stream, draw) for draw in draws] == [0, 0, 1, 1, 1, 1]
    (late,) = {"0", "1", "2"} - {draws[0].id, draws[1].id}
    assert [(entry["epoch"], entry["prompt"], entry["state"], entry.get("why")) for entry in stream.entries()] == [
        (0, "3", "skipped", "stage 2 has not begun"),
        (0, late, "skipped", "the curriculum moved on before its turn"),
        (1, "3", "back", None),
        (1, late, "back", None),
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "windw"}, r"no curriculum 'windw' \(did you mean 'window'\?\).*shuffle, sorted"),
        ({"name": "window", "lo": 0.1}, r"curriculum window\(.*\) has no option 'lo'"),
        ({"name": "shuffle", "retire_afer": 1}, r"did you mean 'retire_after'"),
        ({"name": "window", "low": 0.8, "high": 0.2}, "low=0.8 and high=0.2 must be pass rates"),
        ({"name": "window", "rest": -1}, "rest=-1 must be a number of epochs"),
        ({"name": "staged"}, r"set curriculum\.bounds"),
        ({"name": "staged", "bounds": [2, 1], "steps": 1}, "each higher than the one before"),
        ({"name": "staged", "bounds": [1]}, "nothing would ever end a stage"),
        ({"name": "staged", "bounds": [1], "pass_rate": 1.5}, "pass_rate above 0 and at most 1"),
        ({"name": "staged", "bounds": 3, "steps": 1}, "change the section curriculum"),
    ],
)
def test_wrong_names_and_options_are_refused_with_the_fix(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        bind(CurriculumConfig(**options))


def test_one_of_your_own_comes_from_a_plugin(tmp_path: Path) -> None:
    code = (Path(__file__).parents[2] / "docs" / "curriculum.md").read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "my_curriculum.py").write_text(code)
    load_plugins([str(tmp_path / "my_curriculum.py")])
    config = config_module.load(None, ["curriculum={name: short_first, longest: 3}"])
    made = bind(config.curriculum)
    assert isinstance(made, Curriculum)
    prompts = [Prompt(id=str(i), token_ids=(1,) * i) for i in (3, 1, 4, 2)]
    stream = PromptStream(prompts, 0, made)
    assert [prompt.id for prompt in stream.take(6).values()] == ["1", "2", "3", "1", "2", "3"]
    assert [entry["prompt"] for entry in stream.entries()] == ["4"]


def test_pass_rates_come_back_as_they_were_and_cost_nothing_until_there_are_some() -> None:
    measured = PassRates(300)
    assert measured.state() == {}
    assert vars(PassRates(300, {})) == vars(measured)
    rng = random.Random(0)
    for _ in range(1000):
        measured.record(rng.randrange(300), rng.randrange(9), rng.choice([0.0, 1 / 3, 1.0]))
    state = json.loads(json.dumps(measured.state()))
    assert vars(PassRates(300, state)) == vars(measured)
    late = PassRates(1)
    late.record(0, 4, 0.5)
    late.record(0, 3, 1.0)  # of an older epoch: it replaces no newer one
    assert (late.rates, late.epochs, late.streaks) == ([0.5], [4], [1])


def test_a_curriculum_may_hand_out_its_own_state_and_plan_with_any_kind_of_number() -> None:
    import numpy

    class Counting(Curriculum):
        uses_pass_rates = True

        def __init__(self) -> None:
            self.times = [0] * 6

        def plan(self, candidates: Candidates) -> EpochPlan:
            return EpochPlan(
                order=list(numpy.array(sorted(candidates.members, key=lambda i: (self.times[i], i)))), why={}
            )

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
