import doctest
import itertools
from array import array
from typing import Any

import pytest

from hocket import config as config_module
from hocket.errors import ConfigError, RewardError
from hocket.protocol import SamplingParams
from hocket.rollout import evaluate
from hocket.rollout.collect import Slot
from hocket.rollout.evaluate import Evaluation, pass_at_k
from hocket.types import Prompt, Rollout, Score
from support.batches import played, scoring

PROMPTS = [Prompt(id=f"p{i}", token_ids=array("I", (i + 1,))) for i in range(4)]
RIGHT = {"0a": 1.0, "1a": 1.0, "2a": 0.0, "3a": 0.0}


def evaluation(
    marks: dict[str, float] = RIGHT,  # of texts; what is not there has failed
    slots: list[Slot] | None = None,
    prompts: list[Prompt] = PROMPTS,
    **changes: Any,
) -> Evaluation:
    """Of a policy that says the prompt's number, and a letter for each of its answers: a is greedy."""

    async def play(prompt: Prompt, slot: Slot) -> Rollout:
        if slots is not None:
            slots.append(slot)
        number = prompt.token_ids[0] - 1
        text, finish = f"{number}{'abcdefgh'[int(slot.id[-1])]}", "length" if number == 3 else "stop"
        return played(prompt, slot.id, text, sampled=number + 1, finish=finish)

    async def score(rollout: Rollout) -> Score:
        mark = marks.get(rollout.text)
        return Score(total=0.0, error="broke") if mark is None else Score(total=10 * mark, parts={"exact_match": mark})

    values: dict[str, Any] = {"rewards": {"": "exact_match"}, "samples": 1, "timeout_s": 9.0, "max_error_rate": 0.5}
    values |= {"threshold": 1.0, "sampling": SamplingParams(temperature=0.0, seed=1)}
    return Evaluation(prompts=prompts, play=play, scorer=scoring(score), **(values | changes))


async def test_greedy_alone_is_the_mean_of_the_one_reward_before_its_weight() -> None:
    metrics, groups = await evaluation().run("eval")
    # texts 0 and 1 of 0..3 are right; lengths 1, 2, 3, 4; one of four was cut
    assert metrics == {
        "eval/greedy": 0.5,
        "eval/greedy_stderr": pytest.approx((1 / 12) ** 0.5),  # variance 1/3 of four prompts
        "eval/zero_or_one": 1.0,
        "eval/reward_errors": 0.0,
        "eval/length_mean": 2.5,
        "eval/truncated": 0.25,
    }
    assert [group.rollouts[0].text for group in groups] == ["0a", "1a", "2a", "3a"]


@pytest.mark.parametrize(("marks", "allowed"), [({}, 1.0), ({"3a": 0.0}, 0.5)])
async def test_too_few_scores_are_an_error_with_the_cause(marks: dict[str, float], allowed: float) -> None:
    with pytest.raises(RewardError, match=rf"{4 - len(marks)} of 4 scores failed.*broke"):
        await evaluation(marks, max_error_rate=allowed).run("eval")


async def test_every_evaluation_uses_the_same_random_numbers_and_its_own_time() -> None:
    slots: list[Slot] = []
    for label in ("eval 1", "eval 2"):
        await evaluation(slots=slots, sampling=SamplingParams(temperature=0.3, seed=5)).run(label)
    first, second = slots[:8], slots[8:]
    assert [(slot.number, slot.sampling) for slot in first] == [(slot.number, slot.sampling) for slot in second]
    assert [slot.sampling.temperature for slot in first] == [0.0, 0.3] * 4  # greedy first, then the sample
    assert {slot.deadline.seconds for slot in slots} == {9.0}
    assert first[0].deadline is not second[0].deadline


def test_the_judge_is_the_named_reward_with_its_own_options_or_the_first_one() -> None:
    config = config_module.load(None, ["rewards.functions={length: {weight: 2, target: 9}, random: 1.0}"])
    assert (config.default_source.eval_reward, config.rewards.spec("length").model_extra) == ("length", {"target": 9})
    named = config_module.load(None, ["rewards.functions={random: 1.0}", "eval.reward=exact_match"])
    assert (named.default_source.eval_reward, named.rewards.spec("exact_match").weight) == ("exact_match", 1.0)
    gated = config_module.load(None, ["rewards.functions={think_format: {gate: true}, math: 1}"])
    assert gated.default_source.eval_reward == "math" == gated.default_source.pass_reward  # a gate has no weight


def test_the_example_in_the_docstring_runs() -> None:
    results = doctest.testmod(evaluate)
    assert results.failed == 0
    assert results.attempted > 0


def test_pass_at_k_is_the_share_of_all_choices_that_have_one_that_passes() -> None:
    for n in range(1, 8):
        for passed in range(n + 1):
            for k in range(1, n + 1):
                choices = list(itertools.combinations([i < passed for i in range(n)], k))
                assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize(("threshold", "second"), [(1.0, 0.0), (0.5, 1.0)])  # half a mark is no pass, or one
async def test_greedy_and_samples_are_apart_and_each_prompt_counts_the_same(threshold: float, second: float) -> None:
    marks = {f"0{j}": 1.0 for j in "bc"} | {"0d": 0.0, "0e": 0.0} | {f"1{j}": 0.5 for j in "bcde"} | {"2b": 1.0}
    marks |= {"0a": 0.0, "1a": 1.0}
    changes = {"samples": 4, "sampling": SamplingParams(seed=1), "threshold": threshold}
    metrics, _ = await evaluation(marks, prompts=PROMPTS[:3], **changes).run("eval")
    assert metrics["eval/greedy"] == 0.5  # of the two prompts with a score
    assert metrics["eval/greedy_stderr"] == 0.5  # variance 1/2 of two
    assert metrics["eval/sampled"] == pytest.approx((0.5 + 0.5 + 1.0) / 3)
    assert metrics["eval/sampled_stderr"] == pytest.approx((1 / 12 / 3) ** 0.5)
    assert metrics["eval/zero_or_one"] == pytest.approx(7 / 11)
    assert metrics["eval/pass@1"] == pytest.approx((0.5 + second + 1.0) / 3)
    assert metrics["eval/pass@2"] == pytest.approx((1 - 1 / 6 + second) / 2)  # of the prompts with two scores
    assert metrics["eval/pass@4"] == pytest.approx((1.0 + second) / 2)
    assert metrics["eval/reward_errors"] == pytest.approx(4 / 15)


def test_what_would_measure_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="samples the same every time"):
        config_module.load(None, ["eval.samples=4", "eval.temperature=0"])
