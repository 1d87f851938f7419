import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hocket import config as config_module
from hocket.errors import SyncError
from hocket.extras.checks import sampling
from hocket.extras.checks.draws import DRAWN
from hocket.extras.checks.sampling import SamplingCheck, certain_odds, contradiction, equal_pairs, farthest
from hocket.rewards.base import REWARDS
from hocket.types import Prompt, Rollout, TokenSequence, TrainSample
from support import fakes

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
    """A trainer that measures `found` of all samples, and a verification whose bound is 3e-5."""

    def __init__(self, *found: float) -> None:
        self.found = found or (10, 1e-6, 0, 1, 0)
        self.asked: list[TrainSample] = []
        self.failed: list[str] = []
        self.stops = True
        self.trainer = self.publisher = self.versions = self.pool = self
        self.current, self.up = 3, [SimpleNamespace(dtype="float32")]

    def compare(self, samples: Sequence[TrainSample]) -> tuple[float, dict[str, float]]:
        self.asked += samples
        num_tokens, gap, *drawn = self.found
        return gap / num_tokens, dict(zip(DRAWN, drawn, strict=True))

    def bound(self, dtype: str) -> float:
        return {"float32": 3e-5}[dtype]

    def fail(self, message: str) -> None:
        self.failed.append(message)
        if self.stops:
            raise SyncError(message)

    def check(self, **known: Any) -> SamplingCheck:
        values: dict[str, Any] = {"share": 0.5, "group_size": 4, "history": []}
        values |= {"temperature": 1.0, "eval_temperature": 1.0}
        return SamplingCheck(self, **(values | known))  # type: ignore[arg-type]


def test_equal_rollouts_are_counted_by_pairs_and_expected_by_their_probability() -> None:
    # Of 5, 5 and 7 one pair is equal; (3 - 1) / 2 times their probabilities 1/2, 1/2 and 1/4 is 1.25.
    metrics = equal_pairs([[rollout(5), rollout(5), rollout(7, p=0.25)], [rollout(5)]])
    assert metrics == {"sampling/equal": 1.0, "sampling/equal_expected": pytest.approx(1.25)}
    seen = [(fakes.image(data),) for data in (b"red", b"blue")]
    assert equal_pairs([[rollout(5, images=one) for one in seen]])["sampling/equal"] == 0.0


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
    assert farthest([cold], 4) == {
        "sampling/z": pytest.approx(-9 / math.sqrt(18)),
        "sampling/colder": pytest.approx(1.0),
        "sampling/greedy_odds": 0.0,
        "sampling/equal_z": 0.0,
    }
    assert farthest([hot], 4)["sampling/z"] == pytest.approx(9 / math.sqrt(39))


def test_equal_z_counts_an_excess_of_equal_rollouts_alone() -> None:
    more, fewer = (
        farthest([{"sampling/equal": equal, "sampling/equal_expected": 11 - equal}], 4)["sampling/equal_z"]
        for equal in (10.0, 1.0)
    )
    assert (more, fewer) == (pytest.approx(9 / math.sqrt(4 * (0.5 + 3))), 0)


def test_what_begins_late_is_not_hidden_by_what_came_before() -> None:
    honest = {"sampling/surprise": 0.0, "sampling/variance": 100.0, "sampling/greedy": -7.0}
    cold = {"sampling/surprise": -40.0, "sampling/variance": 100.0}
    history: list[dict[str, float]] = [honest] * 60
    check = World().check(history=history)
    for _ in range(4):
        late = check.trained(cold | {"sampling/greedy": 6.0})
        history.append(cold | late)
    assert late["sampling/z"] == pytest.approx(-160 / math.sqrt(400 + 160))  # of the last four steps
    assert late["sampling/colder"] == pytest.approx(0.4)
    assert (late["sampling/greedy"], late["sampling/greedy_odds"]) == (6.0, pytest.approx(24))
    again = World().check(history=history[:-1])  # a run that was resumed
    assert again.trained(cold | {"sampling/greedy": 6.0}) == pytest.approx(late)
    assert World().check().trained({})["sampling/z"] == 0


def prompts(count: int, size: int = 4) -> list[list[Rollout]]:
    return [[rollout(index + 2, id_=f"step 1/{group}/{index}") for index in range(size)] for group in range(count)]


UNBIASED = {"sampling/surprise": -3.0, "sampling/variance": 4.0, "sampling/greedy": 5.0}  # as training has them


@pytest.mark.parametrize(("fair", "stale", "counted"), [(True, [], -3), (False, [], -1), (True, [2], -1)])
async def test_the_lot_counts_where_trained_samples_are_biased(fair: bool, stale: list[int], counted: float) -> None:
    world = World(4, 8e-6, -1, 2, 0)
    check = world.check(share=1.0, fair=fair)
    metrics = await check.rolled_out([*prompts(8), [rollout(9, version=one, id_="step 1/8/0") for one in stale]], True)
    assert {sample.sequence.version_min for sample in world.asked} <= {3}
    assert metrics["sampling/logprob_gap"] == pytest.approx(2e-6)
    assert check.max_gap() == (math.inf if stale else 3e-5)
    assert metrics["time/check"] > 0
    assert check.trained(UNBIASED)["sampling/surprise"] == counted


async def test_where_all_rollouts_are_stale_only_answers_that_are_surely_greedy_count() -> None:
    check = World().check()
    await check.rolled_out([[rollout(9, version=2, p=0.6)]], True)
    found = check.trained(UNBIASED)
    assert found["sampling/z"] == 0
    assert found["sampling/greedy"] == certain_odds(rollout(9, p=0.6).sequences)


@pytest.mark.parametrize(
    ("setting", "of_group", "fair"),
    [
        ("algorithm.minibatches=2", False, True),
        ("algorithm.mask_truncated=true", False, False),
        ("algorithm.reward_range=[.1,.9]", False, False),
        ("algorithm.minibatches=2", True, False),  # a reward of all answers has those before one depend on it
    ],
)
def test_samples_are_unbiased_where_answers_have_no_say_in_what_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, of_group: bool, fair: bool
) -> None:
    monkeypatch.setattr(sampling.tokenizers, "end_ids", lambda path, tokenizer: ())
    config = config_module.load(None, [f"run.dir={tmp_path}/runs/a", setting])
    (name,) = config.rewards.functions
    monkeypatch.setitem(REWARDS.items, name, dataclasses.replace(REWARDS.get(name), of_group=of_group))
    run: Any = SimpleNamespace(
        config=config.chosen(on_gpu=False),
        publisher=None,
        prompts=[PROMPT],
        trainer=SimpleNamespace(tokenizer=SimpleNamespace(decode=decode)),
        console=SimpleNamespace(alarmed=()),
        folder=SimpleNamespace(history=[]),
    )
    check = sampling.checks(run)
    assert isinstance(check, SamplingCheck)
    assert check.fair is fair


@pytest.mark.parametrize(
    ("trains", "fair", "least", "expected"), [(True, True, 0, 100), (False, True, 1, 200), (True, False, 1, 200)]
)
async def test_a_lot_has_its_share_on_average_and_one_prompt_where_training_is_no_check(
    trains: bool, fair: bool, least: int, expected: int
) -> None:
    world = World()
    sizes = []
    for step in range(200):
        groups = [[rollout(2, id_=f"step {step}/{place}/0")] for place in range(8)]
        world.asked.clear()
        await world.check(share=0.0625, fair=fair).rolled_out(groups, trains)
        sizes.append(len(world.asked))
    assert (min(sizes), max(sizes)) == (least, 1)
    assert abs(sum(sizes) - expected) <= 30


async def test_of_a_small_evaluation_all_rollouts_are_compared_and_no_step_counts() -> None:
    before = {"sampling/surprise": -50.0, "sampling/variance": 1.0}
    groups = [[rollout(index, id_=f"eval 1/0/{index}") for index in range(4)]]
    world = World(4, 8e-6, -9, 9, 0)
    metrics = await world.check(history=[before]).rolled_out([*groups, []], None)
    assert len(world.asked) == 4
    assert metrics == {"eval/logprob_gap": pytest.approx(2e-6), "eval/z": pytest.approx(-9 / math.sqrt(18))}


@pytest.mark.parametrize(("answer_tokens", "p", "compared"), [(64, 0.5, 16), (16, 0.9, 60), (64, 0.99, 32)])
async def test_of_a_large_evaluation_16_greedy_answers_and_draws_of_100_nats_or_2048_tokens_are_compared(
    answer_tokens: int, p: float, compared: int
) -> None:
    """Of prompts with a greedy and a sampled answer, whose texts are all checked.

    60 · 16 · -log .9 = 101.1 nats, 32 · 64 = 2,048 tokens.
    """
    claimed: list[int] = []
    chosen = []
    for step in (1, 1, 2):
        world = World()
        claimed.clear()
        groups = [
            [rollout(*[token] * answer_tokens, p=p, id_=f"eval {step}/{place}/{token}") for token in (5, 6)]
            for place in range(64)
        ]
        check = world.check(claim=lambda sequence: claimed.append(sequence.token_ids[1]) or "")
        await check.rolled_out(groups, None)
        assert (claimed.count(5), claimed.count(6)) == (64, 64)
        assert [sample.sequence.token_ids[1] for sample in world.asked] == [5] * 16 + [6] * compared
        places = {id(one[0].sequences[0]): place for place, one in enumerate(groups)}
        chosen.append([places[id(sample.sequence)] for sample in world.asked[:16]])
    assert chosen[0] == chosen[1] != chosen[2]  # another part in each evaluation
    assert chosen[0] != list(range(16))


@pytest.mark.parametrize(
    ("temperature", "of_training", "compared"),
    [(1.0, 1.0, [0, 1]), (0.3, 0.3, [1]), (0.3, 1.0, [0]), (0.0, 1.0, [0]), (0.0, 0.3, [])],
)
async def test_answers_whose_logprobs_are_of_the_trainers_temperature_are_compared(
    temperature: float, of_training: float, compared: list[int]
) -> None:
    world = World()
    check = world.check(eval_temperature=temperature, temperature=of_training)
    greedy_and_sampled = [rollout(5, id_="eval 1/0/0"), rollout(6, id_="eval 1/0/1")]
    metrics = await check.rolled_out([greedy_and_sampled], None)
    assert [sample.sequence.token_ids[1] - 5 for sample in world.asked] == compared
    assert ("eval/logprob_gap" in metrics, "eval/z" in metrics) == (bool(compared), 1 in compared)


async def test_of_an_evaluation_the_larger_gap_counts_and_the_draw_of_the_sampled_answers_alone() -> None:
    world = World()
    gaps = iter([2e-5, 1e-5])
    world.compare = lambda samples: (next(gaps), dict(zip(DRAWN, (3.0, 0.0, 0.0), strict=True)))  # type: ignore[method-assign]
    metrics = await world.check().rolled_out([[rollout(5), rollout(6)]], None)
    assert metrics["eval/logprob_gap"] == 2e-5
    stale = [rollout(5), rollout(6, version=2)]
    world.compare = lambda samples: (1e-5, dict(zip(DRAWN, (9.0, 0.0, 0.0), strict=True)))  # type: ignore[method-assign]
    assert await world.check().rolled_out([stale], None) == {"eval/logprob_gap": 1e-5}


async def test_a_version_that_was_never_published_fails_whoever_is_compared() -> None:
    world = World()
    with pytest.raises(SyncError, match="a server says that version 4 sampled a rollout, but 3 is the newest"):
        await world.check(share=0.0).rolled_out([[rollout(5, version=4)]], False)


async def test_the_lot_depends_on_the_prompts_name_alone() -> None:
    chosen = []
    for reward in (0.0, 1.0):
        world = World()
        groups = [[dataclasses.replace(one, reward=reward) for one in rollouts] for rollouts in prompts(16, 1)]
        numbered = [
            [dataclasses.replace(one, sequences=rollout(place).sequences)] for place, (one,) in enumerate(groups)
        ]
        await world.check().rolled_out(numbered, False)
        chosen.append([sample.sequence.token_ids[1] for sample in world.asked])
    assert chosen[0] == chosen[1] != list(range(8))


@pytest.mark.parametrize("gap", [3.1e-4, math.nan])
async def test_a_gap_beyond_the_bound_fails_before_anything_is_trained(gap: float) -> None:
    world = World(10, gap, 0, 1, 0)
    with pytest.raises(SyncError, match=r"mean \|Δ log-prob\| .* is more than 3e-05 .*Nothing was trained on them"):
        await world.check().rolled_out([[rollout(5)]], False)
    world.stops = False
    check = world.check()
    await check.rolled_out([[rollout(5)]], False)
    assert check.max_gap() == 3e-5
    assert len(world.failed) == 2


def test_odds_of_greedy_answers_are_one_on_average_and_rise_with_them() -> None:
    # p(a) = .6, p(b) = .4: (7/8 + 1/8 / .6) * .6 + 7/8 * .4 = 1
    likely, other = (certain_odds(rollout(5, p=p).sequences) for p in (0.6, 0.4))
    assert math.exp(likely) * 0.6 + math.exp(other) * 0.4 == pytest.approx(1.0)
    assert likely == pytest.approx(math.log(7 / 8 + 1 / 8 / 0.6))
    assert certain_odds([*rollout(5, 6, p=0.6).sequences] * 2) == pytest.approx(2 * math.log(7 / 8 + 1 / 8 / 0.36))


async def test_an_answer_that_contradicts_its_tokens_fails() -> None:
    world = World()
    with pytest.raises(SyncError, match="contradicts its tokens: no"):
        await world.check(claim=lambda sequence: "no" if sequence.token_ids[1] == 5 else "").rolled_out(
            [[rollout(5)]], True
        )


def decode(token_ids: Sequence[int], skip_special_tokens: bool = False, **spaces: bool) -> str:
    """Returns letters: 2 is b; 0 ends an answer, and is <end> where special tokens are wanted."""
    return "".join(chr(96 + token) if token else "<end>" * (not skip_special_tokens) for token in token_ids)


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
        ((2, 0, 3), "b", "stop", ("<end>c",), ""),  # special tokens stop it, too
        ((2, 3, 4), "bcd", "length", ("x",), ""),
        ((2, 3, 4), "bc", "length", ("x",), "its text is 'bc', its tokens are 'bcd'"),
    ],
)
def test_what_an_answer_says_of_its_tokens_must_be_so(
    token_ids: tuple[int, ...], text: str, finish: Any, stop: tuple[str, ...], said: str
) -> None:
    sequence = rollout(*token_ids, text=text, finish_reason=finish).sequences[0]
    assert contradiction(sequence, decode=decode, ends={0}, stop=stop) == said


@pytest.mark.parametrize(
    ("text", "finish", "contradicts"),
    [
        ("bc|de", "stop", False),
        ("bc|dd", "stop", True),
        ("bc|d", "length", True),
        ("bc|d", "stop", True),
        ("e", "stop", True),
    ],
)
def test_of_an_answer_whose_thought_was_closed_the_part_after_it_must_be_so(
    text: str, finish: Any, contradicts: bool
) -> None:
    """Tokens 9, 9 close it, and are a "|" to the environment that wrote them."""
    sequence = rollout(2, 3, 9, 9, 4, 5, 0, text=text, finish_reason=finish).sequences[0]
    sequence = dataclasses.replace(sequence, mask=(False, True, True, False, False, True, True, True))
    assert bool(contradiction(sequence, decode=decode, ends={0}, stop=())) == contradicts
