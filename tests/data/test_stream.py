import doctest
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import pytest

import hocket.data.mixture
import hocket.data.text  # noqa: F401 - its example is run
from hocket.data.curriculum import CURRICULA, Candidates, Curriculum, EpochPlan, Shuffle, Sorted
from hocket.data.stream import PromptOutcome, PromptStream
from hocket.errors import DataError
from hocket.types import Prompt, Prompts
from support.records import prompts, saved

TRAINED = PromptOutcome(state="trained")


def new_stream(
    rows: Prompts, seed: int, curriculum: Curriculum | None = None, *, retire_after: int = 0
) -> PromptStream:
    return PromptStream(rows, curriculum or Shuffle(), seed=seed, retire_after=retire_after, prompts_per_step=4)


def ids(taken: dict[int, Prompt]) -> list[str]:
    return [prompt.id for prompt in taken.values()]


def solved(rate: float) -> PromptOutcome:
    return PromptOutcome(state="trained", pass_rate=rate)


@pytest.mark.parametrize("name", ["stream", "curriculum", "mixture", "text"])
def test_the_examples_of_streams_and_curricula_hold(name: str) -> None:
    results = doctest.testmod(sys.modules[f"hocket.data.{name}"])
    if name == "curriculum":
        CURRICULA.forget("shortest")
    assert results.failed == 0
    assert results.attempted > 0


def test_every_epoch_has_each_prompt_once_in_the_order_of_a_generator_seeded_by_seed_and_epoch() -> None:
    stream = new_stream(prompts(10), seed=3)
    draws = {number: prompt for _ in range(10) for number, prompt in stream.take(3).items()}  # takes cross the epochs
    assert list(draws) == list(range(30))
    assert [draw["epoch"] for draw in stream.state()["in_flight"]] == [0] * 10 + [1] * 10 + [2] * 10
    for epoch in range(3):
        order = list(range(10))
        random.Random(f"3:{epoch}").shuffle(order)
        assert ids(draws)[epoch * 10 : epoch * 10 + 10] == [f"rows:{i}" for i in order]
    assert ids(new_stream(prompts(10), seed=3).take(30)) == ids(draws)  # one take may be longer than an epoch


def test_what_was_in_flight_comes_first_after_a_restore_with_its_numbers_and_epochs() -> None:
    stream = new_stream(prompts(5), seed=0)
    taken = stream.take(4) | stream.take(4)  # two batches; the second crosses into epoch 1
    for draw in (2, 4):
        stream.settle(draw, TRAINED)
    restored = new_stream(prompts(5), seed=0)
    restored.restore(saved(stream))
    assert list(restored.take(3).items()) == [(number, taken[number]) for number in (0, 1, 3)]
    restored.restore(saved(restored))  # killed once more, before anything is settled
    expected = {number: taken[number] for number in (0, 1, 3, 5, 6, 7)} | stream.take(2)
    assert list(restored.take(8).items()) == list(expected.items())


def test_a_draw_is_settled_once_and_recorded_once() -> None:
    stream = new_stream(prompts(3), seed=0)
    a, b, c = ids(stream.take(3))
    before = stream.state()
    stream.settle(1, PromptOutcome(state="filtered", why="every reward is 1", pass_rate=1.0))
    stream.settle(0, solved(0.5))
    with pytest.raises(KeyError):
        stream.settle(1, TRAINED)
    assert before["entries"] == []  # a checkpoint that is written later stays what it was
    assert saved(stream)["entries"] == stream.entries() == [
        {"draw": 1, "epoch": 0, "prompt": b, "state": "filtered", "why": "every reward is 1", "pass_rate": 1.0},
        {"draw": 0, "epoch": 0, "prompt": a, "state": "trained", "pass_rate": 0.5},
    ]  # fmt: skip
    stream.settle(2, PromptOutcome(state="failed", why="no score"))
    assert stream.entries() == [{"draw": 2, "epoch": 0, "prompt": c, "state": "failed", "why": "no score"}]


def test_a_prompt_that_was_solved_in_a_row_is_retired_and_what_stays_out_is_told_once() -> None:
    stream = new_stream(prompts(3), seed=0, retire_after=2)
    rates = {"rows:0": [1.0, 1.0], "rows:1": [1.0, 0.5, 1.0, 1.0], "rows:2": [0.0] * 4}
    played = []
    for epoch in range(4):
        draws = stream.take(3 if epoch < 2 else 2)
        played.append(sorted(ids(draws)))
        for draw, prompt in draws.items():
            stream.settle(draw, solved(rates[prompt.id][epoch]))
    assert played == [["rows:0", "rows:1", "rows:2"]] * 2 + [["rows:1", "rows:2"]] * 2
    assert ids(stream.take(2)) == ["rows:2"] * 2  # alone in epochs 4 and 5
    why = "solved 2 times in a row"
    assert [entry for entry in stream.entries() if "draw" not in entry] == [
        {"epoch": 2, "prompt": "rows:0", "state": "retired", "why": why},
        {"epoch": 4, "prompt": "rows:1", "state": "retired", "why": why},
    ]


def test_a_stream_whose_prompts_are_all_retired_stays_balanced_and_comes_back_if_a_late_one_fails() -> None:
    stream = new_stream(prompts(3), seed=0, retire_after=2)
    *early, late = [*stream.take(5), *stream.take(1)]  # three of them of epoch 1
    for draw in early:
        stream.settle(draw, solved(1.0))
    again = new_stream(prompts(3), seed=0, retire_after=2)
    again.restore(saved(stream))
    stream.settle(late, solved(1.0))
    assert stream.take(2) == {}
    stream.restore(saved(stream))
    assert stream.take(2) == {}
    assert places(stream.entries(), stream.state()) == [{"rows:0": 1, "rows:1": 1, "rows:2": 1}] * 2
    assert list(again.take(1)) == [late]
    again.settle(late, solved(0.5))
    assert (list(again.take(1)), again.state()["epoch"]) == ([6], 2)


def test_a_plan_that_makes_no_sense_names_its_curriculum() -> None:
    class Odd(Curriculum):
        def __init__(self, *order: int) -> None:
            self.order = order

        def plan(self, candidates: Candidates) -> EpochPlan:
            return EpochPlan(order=self.order)

    twice, none = "plans a prompt twice, or one that is no member", "leaves out every prompt of epoch 0"
    for order, said in (((0, 0), twice), ((0, 7), twice), ((), none)):
        with pytest.raises(DataError, match=f"the curriculum Odd {said}"):
            new_stream(prompts(2), seed=0, curriculum=Odd(*order))
    stream = new_stream(prompts(2), seed=0, curriculum=Odd(1))
    assert stream.entries() == [{"epoch": 0, "prompt": "rows:0", "state": "skipped", "why": "left out by Odd"}]


def test_the_default_stream_keeps_nothing_per_prompt() -> None:
    stream = new_stream(prompts(1000), seed=0)
    for draw in stream.take(900):
        stream.settle(draw, solved(0.5))
    stream.entries()
    assert len(json.dumps(stream.state())) < 400


class Growing(Curriculum):
    """The easy half of the prompts until two of it were solved, from then on all; it waits four steps at most."""

    def __init__(self) -> None:
        self.num_solved, self.grown = 0, False

    def plan(self, candidates: Candidates) -> EpochPlan:
        easy = [i for i in candidates.members if candidates.prompts[i].meta.get("level", 0.0) <= 0.5]
        order = candidates.members if self.grown else easy or candidates.members
        return EpochPlan(order=list(numpy.array(order)))  # a plugin may plan with any kind of number

    def moves_on(self, step: int) -> bool:
        moves = not self.grown and (step >= 4 or self.num_solved >= 2)
        self.grown |= moves
        return moves

    def measured(self, index: int, pass_rate: float) -> None:
        self.num_solved += pass_rate == 1

    def state(self) -> dict[str, Any]:
        return vars(self)  # the very dict that `measured` changes

    def restore(self, state: Any) -> None:
        vars(self).update(state)


def test_a_curriculum_that_moves_on_ends_the_epoch_and_the_rest_is_accounted_for() -> None:
    levels = enumerate([0.0, 0.0, 0.0, 1.0])
    rows = Prompts(Prompt(id=str(i), token_ids=(1,), meta={"level": level}) for i, level in levels)
    stream = PromptStream(rows, Growing(), seed=0)
    draws = stream.take(2)
    for draw in draws:
        stream.settle(draw, solved(1.0))
    draws |= stream.take(4)
    assert [draw["epoch"] for draw in stream.state()["in_flight"]] == [1, 1, 1, 1]
    (late,) = {"0", "1", "2"} - {draws[0].id, draws[1].id}
    assert [entry for entry in stream.entries() if "draw" not in entry] == [
        {"epoch": 0, "prompt": "3", "state": "skipped", "why": "left out by Growing"},
        {"epoch": 0, "prompt": late, "state": "skipped", "why": "the curriculum moved on before its turn"},
        {"epoch": 1, "prompt": late, "state": "back"},
        {"epoch": 1, "prompt": "3", "state": "back"},
    ]


def test_a_curriculum_is_asked_by_steps_and_not_by_draws() -> None:
    class Asked(Shuffle):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def moves_on(self, step: int) -> bool:
            self.steps.append(step)
            return False

    fours, ones = Asked(), Asked()
    new_stream(prompts(20), seed=0, curriculum=fours).take(9)  # four to a step
    assert fours.steps == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    PromptStream(prompts(20), ones, seed=0).take(3)  # each a step, if nothing is said
    assert ones.steps == [0, 1, 2]


def windowed() -> Curriculum:
    return CURRICULA.get("window")(0.3, 0.7, rest=1)  # type: ignore[call-arg]


PLANS: dict[str, tuple[Callable[[], Curriculum | None], int]] = {  # a curriculum, and retire_after
    "shuffle": (lambda: None, 0),
    "retire": (lambda: None, 2),
    "sorted": (Sorted, 0),
    "window": (windowed, 3),
    "growing": (Growing, 2),
}


def killed(
    make: Callable[[], Curriculum | None], retire_after: int, seed: int, trial: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the ledger of 37 prompts over eight epochs and some kills, and the state at its end.

    Up to four batches are in flight and end in any order; a kill forgets what came after the newest checkpoint.
    """
    rng = random.Random(f"{seed}:{trial}")
    rows = prompts(37)

    def new() -> PromptStream:
        return new_stream(rows, 4 * seed + trial, make(), retire_after=retire_after)

    def outcome(draw: int) -> PromptOutcome:  # decided by the draw, so that a resumed run may be compared with this one
        chance = random.Random(f"{seed}:{trial}:{draw}")
        state = chance.choice(["trained", "trained", "filtered", "failed"])
        rate = None if state == "failed" else chance.choice([0.0, 0.25, 0.5, 0.75, 1.0])
        return PromptOutcome(state=state, why="" if state == "trained" else "because", pass_rate=rate)

    stream, ledger, kills = new(), list[dict[str, Any]](), 0
    checkpoint = (saved(stream), 0)
    batches: list[list[int]] = []
    while stream.state()["epoch"] < 8 or not kills:
        what = rng.random()
        if what < 0.45 and len(batches) < 4:
            batches.append(list(stream.take(rng.randint(1, 6))))
        elif what < 0.85 and batches:
            batch = batches.pop(rng.randrange(len(batches)))
            for draw in rng.sample(batch, len(batch)):
                stream.settle(draw, outcome(draw))
            if rng.random() < 0.7:  # else they are recorded with a later batch
                ledger += json.loads(json.dumps(stream.entries()))
        elif what < 0.95:
            checkpoint = (saved(stream), len(ledger))
        elif what > 0.97:
            stream, batches, kills = new(), [], kills + 1
            stream.restore(checkpoint[0])
            del ledger[checkpoint[1] :]
    end = saved(stream)
    return [*ledger, *stream.entries()], end


def places(entries: Sequence[Mapping[str, Any]], state: Mapping[str, Any]) -> list[Counter[str]]:
    """Returns by epoch how often each prompt is settled, in flight or left out, which lasts until it is back."""
    out: set[str] = set()
    found = []
    for epoch in range(state["epoch"] + 1):
        of = [row for row in [*entries, *state["in_flight"]] if row["epoch"] == epoch]
        changes = [row for row in of if "draw" not in row]
        out -= {row["prompt"] for row in changes if row["state"] == "back"}
        out |= {row["prompt"] for row in changes if row["state"] != "back"}
        found.append(Counter([*out, *(row["prompt"] for row in of if "draw" in row)]))
    return found


@pytest.mark.usefixtures("window")
@pytest.mark.parametrize(("make", "retire_after"), PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("trial", range(4))
def test_over_any_number_of_kills_each_prompt_of_an_epoch_is_settled_exactly_once(
    make: Callable[[], Curriculum | None], retire_after: int, seed: int, trial: int
) -> None:
    ledger, end = killed(make, retire_after, seed, trial)
    numbers = [line["draw"] for line in ledger if "draw" in line] + [draw["draw"] for draw in end["in_flight"]]
    assert sorted(numbers) == list(range(end["num_drawn"]))
    *finished, newest = places(ledger, end)
    assert finished == [{prompt.id: 1 for prompt in prompts(37)}] * end["epoch"]
    assert {*newest.values()} <= {1}


@pytest.mark.usefixtures("window")
@pytest.mark.parametrize("make", [lambda: None, Sorted, windowed, Growing])
def test_a_stream_that_is_restored_at_every_draw_draws_the_same(
    make: Callable[[], Curriculum | None], seed: int
) -> None:
    rows = prompts(23)

    def new() -> PromptStream:
        return new_stream(rows, seed, make(), retire_after=3)

    straight, restored = new(), new()
    for _ in range(23 * 8):
        taken = straight.take(1)  # none once all are retired
        state = saved(restored)
        restored = new()
        restored.restore(state)
        assert restored.take(1) == taken
        for draw in taken:
            rate = random.Random(f"{seed}:{draw}").choice([0.0, 0.5, 1.0, 1.0])
            for stream in (straight, restored):
                stream.settle(draw, solved(rate))
        assert restored.state() == straight.state()
        assert restored.entries() == straight.entries()


def test_a_position_among_other_prompts_is_refused() -> None:
    state = new_stream(prompts(10), seed=0).state()
    for rows, seed, said in (
        (prompts(10), 1, "seed of the prompts was 0 and is 1 now"),
        (prompts(9), 0, "num_prompts of the prompts was 10 and is 9 now"),
        (prompts(10, answer="y"), 0, "fingerprint of the prompts"),
    ):
        with pytest.raises(DataError, match=said):
            new_stream(rows, seed).restore(state)
    with pytest.raises(DataError, match=r"data\.max_prompt_tokens"):
        new_stream(Prompts(), seed=0)
