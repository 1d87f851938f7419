import dataclasses
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from hocket.errors import SyncError
from hocket.sync.sampling import SamplingCheck, contradiction, equal_pairs, over_run
from hocket.types import Prompt, Rollout, TokenSequence, TrainSample

PROMPT = Prompt(id="p", token_ids=(1,))


def rollout(*token_ids: int, p: float = 0.5, id_: str = "step 1/0/0", version: int = 3, **known: Any) -> Rollout:
    """Returns a rollout whose tokens have the same probability."""
    sequence = TokenSequence(
        token_ids=(1, *token_ids),
        mask=(False, *(True for _ in token_ids)),
        logprobs=(0.0, *(math.log(p) for _ in token_ids)),
        version_min=version,
        version_max=version,
        **known,
    )
    return Rollout(id=id_, prompt=PROMPT, sequences=(sequence,))


class World:
    """A trainer that measures `found` of all samples, and a proof whose bound is 3e-5."""

    def __init__(self, found: Sequence[float] = (10, 1e-6, 0, 1)) -> None:
        self.found = found
        self.asked: list[TrainSample] = []
        self.failed: list[str] = []
        self.stops = True
        self.trainer = self.publisher = self.versions = self.pool = self
        self.current, self.up = 3, [SimpleNamespace(dtype="float32")]

    def surprise(self, samples: Sequence[TrainSample]) -> Sequence[float]:
        self.asked += samples
        return self.found

    def bound(self, dtype: str) -> float:
        return {"float32": 3e-5}[dtype]

    def fail(self, message: str) -> None:
        self.failed.append(message)
        if self.stops:
            raise SyncError(message)

    def check(self, **known: Any) -> SamplingCheck:
        values: dict[str, Any] = {"share": 0.5, "group_size": 4, "history": []}
        return SamplingCheck(self, **(values | known))  # type: ignore[arg-type]


def test_equal_rollouts_are_counted_by_pairs_and_expected_by_their_probability() -> None:
    # Of 5, 5 and 7 one pair is equal; (3 - 1) / 2 times their probabilities 1/2, 1/2 and 1/4 is 1.25.
    metrics = equal_pairs([[rollout(5), rollout(5), rollout(7, p=0.25)], [rollout(5)]])
    assert metrics == {"sampling/equal": 1.0, "sampling/equal_expected": pytest.approx(1.25)}


def test_the_expected_number_of_equal_rollouts_is_right_on_average() -> None:
    chances = {5: 0.5, 6: 0.3, 7: 0.2}
    equal = expected = 0.0
    for one, p in chances.items():
        for other, q in chances.items():
            metrics = equal_pairs([[rollout(one, p=p), rollout(other, p=q)]])
            equal += p * q * metrics["sampling/equal"]
            expected += p * q * metrics["sampling/equal_expected"]
    assert equal == pytest.approx(expected) == pytest.approx(0.5**2 + 0.3**2 + 0.2**2)


def test_z_is_bernsteins_and_colder_the_share_of_the_temperature() -> None:
    # -9 / sqrt(9 + 9 * 3 / 3) where tokens surprise too little, 9 / sqrt(9 + 9 * 10 / 3) where they do too much
    cold, hot = ({"sampling/surprise": value, "sampling/variance": 9.0} for value in (-9.0, 9.0))
    assert over_run([cold], 4) == {
        "sampling/z": pytest.approx(-9 / math.sqrt(18)),
        "sampling/colder": pytest.approx(1.0),
        "sampling/equal_z": 0.0,
    }
    assert over_run([hot], 4)["sampling/z"] == pytest.approx(9 / math.sqrt(39))


def test_equal_z_counts_an_excess_of_equal_rollouts_alone() -> None:
    rows = [{"sampling/equal": 10.0, "sampling/equal_expected": 1.0}]
    assert over_run(rows, 4)["sampling/equal_z"] == pytest.approx(9 / math.sqrt(4 * (0.5 + 3)))
    assert over_run([{"sampling/equal": 1.0, "sampling/equal_expected": 10.0}], 4)["sampling/equal_z"] == 0


def test_what_begins_late_is_not_hidden_by_what_came_before() -> None:
    honest = {"sampling/surprise": 0.0, "sampling/variance": 100.0}
    cold = {"sampling/surprise": -40.0, "sampling/variance": 100.0}
    late = over_run([honest] * 60 + [cold] * 4, 4)
    assert late["sampling/z"] == pytest.approx(-160 / math.sqrt(400 + 160))  # of the last four steps
    assert late["sampling/colder"] == pytest.approx(0.4)
    assert over_run([], 4) == {"sampling/z": 0.0, "sampling/colder": 0.0, "sampling/equal_z": 0.0}


async def test_a_share_of_the_rollouts_is_compared_and_stale_ones_are_left_out() -> None:
    world = World((4, 8e-6, -1, 2))
    groups = [[rollout(index, id_=f"step 1/{group}/{index}") for index in range(2, 6)] for group in range(2)]
    await world.check().check(groups, False)
    assert len(world.asked) == 4  # half of eight
    groups.append([rollout(9, version=2, id_="step 1/2/0")])
    metrics = await world.check(share=1.0).check([*groups, []], False)
    assert len(world.asked) == 4 + 8
    assert {sample.sequence.version_min for sample in world.asked} == {3}
    assert metrics["sampling/logprob_gap"] == pytest.approx(2e-6)
    assert (metrics["sync/max_gap"], metrics["sampling/surprise"], metrics["sampling/variance"]) == (3e-5, -1, 2)
    assert metrics["time/check"] > 0


async def test_of_an_evaluation_all_rollouts_are_compared_and_no_step_counts() -> None:
    before = {"sampling/surprise": -50.0, "sampling/variance": 1.0}
    groups = [[rollout(index, id_=f"eval 1/0/{index}") for index in range(4)]]
    world = World((4, 8e-6, -9, 9))
    metrics = await world.check(history=[before]).check(groups, True)
    assert len(world.asked) == 4
    assert metrics["sampling/z"] == pytest.approx(-9 / math.sqrt(18))


async def test_a_version_that_was_never_published_fails_whoever_is_compared() -> None:
    world = World()
    with pytest.raises(SyncError, match="a server says that version 4 sampled a rollout, but 3 is the newest"):
        await world.check(share=0.0).check([[rollout(5, version=4)]], False)


async def test_the_lot_depends_on_the_prompts_name_alone() -> None:
    chosen = []
    for reward in (0.0, 1.0):
        world = World()
        rollouts = [rollout(index, id_=f"step 7/0/{index}") for index in range(16)]
        await world.check().check([[dataclasses.replace(one, reward=reward) for one in rollouts]], False)
        chosen.append([sample.sequence.token_ids[1] for sample in world.asked])
    assert chosen[0] == chosen[1] != list(range(8))


@pytest.mark.parametrize("gap", [3.1e-4, math.nan])
async def test_a_gap_beyond_the_bound_fails_before_anything_is_trained(gap: float) -> None:
    world = World((10, gap, 0, 1))
    with pytest.raises(SyncError, match=r"mean \|Δ log-prob\| .* is more than 3e-05 .*Nothing was trained on them"):
        await world.check().check([[rollout(5)]], False)
    world.stops = False
    assert (await world.check().check([[rollout(5)]], False))["sync/max_gap"] == 3e-5
    assert len(world.failed) == 2


async def test_an_answer_that_contradicts_its_tokens_fails() -> None:
    world = World()
    with pytest.raises(SyncError, match="contradicts its tokens: no"):
        await world.check(claim=lambda sequence: "no" if sequence.token_ids[1] == 5 else "").check(
            [[rollout(5)]], False
        )


def decode(token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Returns letters: 2 is b; 0 ends an answer."""
    assert skip_special_tokens
    return "".join(chr(96 + token) for token in token_ids if token)


@pytest.mark.parametrize(
    ("token_ids", "text", "finish", "stop", "said"),
    [
        ((2, 3, 0), "bc", "stop", (), ""),
        ((2, 3), "bc", "length", (), ""),
        ((2, 3, 0), "bc", "length", (), ""),  # the end token was the last that fitted
        ((2, 3, 4), "b", "stop", ("cd",), ""),
        ((2, 3), "b", "stop", ("cd",), "it stopped by itself, but its last token, 3, ends no answer"),
        ((2, 3), "bc", "stop", (), "it stopped by itself, but its last token, 3, ends no answer"),
        ((2, 3, 0), "bd", "stop", (), "its text is 'bd', its tokens are 'bc'"),
        ((2, 3, 0), "b", "stop", (), "its text is 'b', its tokens are 'bc'"),
        ((2, 3, 4), "bd", "stop", ("cd",), "its text is 'bd', its tokens are 'bcd'"),
    ],
)
def test_what_an_answer_says_of_its_tokens_must_be_so(
    token_ids: tuple[int, ...], text: str, finish: Any, stop: tuple[str, ...], said: str
) -> None:
    sequence = rollout(*token_ids, text=text, finish_reason=finish).sequences[0]
    assert contradiction(sequence, decode=decode, ends={0}, stop=stop) == said
