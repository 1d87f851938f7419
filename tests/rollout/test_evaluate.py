from collections.abc import AsyncIterator, Sequence

import pytest

from hocket import config as config_module
from hocket.errors import RewardError
from hocket.rollout.evaluate import evaluate, rewards_of_eval
from hocket.types import Completion, Prompt, Rollout, SamplingParams, Score

PROMPTS = [Prompt(id=f"p{i}", token_ids=(i + 1,)) for i in range(4)]


class FakeServer:
    async def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, n: int = 1, timeout_s: float
    ) -> AsyncIterator[tuple[int, int, Completion]]:
        self.sampling = sampling
        for i in reversed(range(len(prompts))):
            yield (
                i,
                0,
                Completion(
                    token_ids=(5,) * (i + 1),
                    logprobs=(-0.1,) * (i + 1),
                    finish_reason="length" if i == 3 else "stop",
                    versions=((1, 0, i + 1),),
                    text=str(i),
                ),
            )


class FakeScorer:
    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    async def score(self, rollout: Rollout) -> Score:
        if rollout.text in self.fails:
            return Score(total=0.0, error="broke")
        correct = float(rollout.text in "01")
        return Score(total=10 * correct, parts={"exact_match": correct})


async def test_accuracy_is_the_mean_of_the_one_reward_before_its_weight() -> None:
    metrics, groups = await evaluate(
        PROMPTS, server=FakeServer(), scorer=FakeScorer(), config=config_module.load(), label="eval"
    )
    # texts 0 and 1 of 0..3 are right; lengths 1, 2, 3, 4; one of four was cut
    assert metrics == {
        "eval/accuracy": 0.5,
        "eval/reward_errors": 0.0,
        "eval/length_mean": 2.5,
        "eval/truncated": 0.25,
    }
    assert [group.rollouts[0].text for group in groups] == ["0", "1", "2", "3"]


async def test_a_failed_score_is_left_out_of_the_accuracy() -> None:
    metrics, _ = await evaluate(
        PROMPTS, server=FakeServer(), scorer=FakeScorer(fails="3"), config=config_module.load(), label="eval"
    )
    assert metrics["eval/accuracy"] == pytest.approx(2 / 3)
    assert metrics["eval/reward_errors"] == 0.25


@pytest.mark.parametrize(("fails", "allowed"), [("0123", 1.0), ("012", 0.5)])
async def test_too_few_scores_are_an_error_with_the_cause(fails: str, allowed: float) -> None:
    config = config_module.load(None, [f"rewards.max_error_rate={allowed}"])
    with pytest.raises(RewardError, match=rf"{len(fails)} of 4 scores failed.*broke"):
        await evaluate(PROMPTS, server=FakeServer(), scorer=FakeScorer(fails=fails), config=config, label="eval")


async def test_every_evaluation_uses_the_same_random_numbers_and_its_own_temperature() -> None:
    first, second = FakeServer(), FakeServer()
    config = config_module.load(None, ["eval.temperature=0.3"])
    for server in (first, second):
        await evaluate(PROMPTS, server=server, scorer=FakeScorer(), config=config, label="eval")
    assert first.sampling == second.sampling
    assert first.sampling.temperature == 0.3


def test_the_judge_is_the_named_reward_with_its_own_options_or_the_first_one() -> None:
    config = config_module.load(None, ["rewards.functions={length: {weight: 2, target: 9}, random: 1.0}"])
    assert rewards_of_eval(config).functions == {"length": config.rewards.functions["length"]}
    named = config_module.load(None, ["rewards.functions={random: 1.0}", "eval.reward=exact_match"])
    assert list(rewards_of_eval(named).functions) == ["exact_match"]
