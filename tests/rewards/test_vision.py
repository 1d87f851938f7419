"""Rewards and judges see the pictures of a prompt."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.rewards.test_model import TEMPLATE, made

from hocket.common.vision import data_url
from hocket.rewards.base import reward
from hocket.types import Rollout, Score
from support import fakes
from support.episodes import Scorers, make_rollout
from support.eyes import picture
from support.service import Saying, completion, functions

PLUGIN = """
from hocket.rewards import reward

@reward("width")
def width(completion, images):
    return {"width": images[0].width, "mode": float(images[0].mode == "RGB"), "count": float(len(images))}
"""
RED, BLUE = picture(1), picture(2, 20, 30)


def seeing(rollout: Rollout, *files: bytes) -> Rollout:
    images = tuple(fakes.image(data, start=i) for i, data in enumerate(files))
    return dataclasses.replace(rollout, prompt=dataclasses.replace(rollout.prompt, images=images))


async def test_a_reward_in_a_worker_gets_pictures(plugin: Path, scorer_of: Scorers) -> None:
    score = await scorer_of({"width": 1.0}).score(seeing(make_rollout(), RED, BLUE))
    assert (score.error, score.parts["width/width"], score.parts["width/mode"]) == (None, 40, 1)
    assert score.parts["width/count"] == 2


async def test_pictures_are_decoded_only_for_rewards_that_name_them(scorer_of: Scorers) -> None:
    damaged = seeing(make_rollout("abcd"), b"no picture")
    assert (await scorer_of({"exact_match": 1.0}).score(damaged)).total == 1

    @reward("seeing", inline=True)
    def sees(images: Sequence[Any]) -> float:
        return len(images)

    scorer = scorer_of({"seeing": 1.0})
    assert "an image is no PNG" in str((await scorer.score(damaged)).error)
    assert (await scorer.score(make_rollout())).total == 0


@pytest.mark.parametrize("name", ["judge", "judge_ranking"])
async def test_judges_get_pictures_as_openai_has_them(name: str, scorer_of: Scorers, tmp_path: Path) -> None:
    said = '{"reason": "", "score": 5}' if name == "judge" else '{"reason": "", "ranking": [1, 2]}'
    async with Saying(completion(said)).open() as service:
        rewards = scorer_of(functions(service, name, cache=str(tmp_path / "cache.db")))

        async def ask(*files: bytes) -> Sequence[Score]:
            return await rewards.score_group([seeing(make_rollout(text), *files) for text in ("1", "2")])

        for files in ((RED, BLUE), (RED, BLUE), (BLUE, RED), ()):
            assert [score.error for score in await ask(*files)] == [None, None]
    calls = 2 if name == "judge" else 1
    assert len(service.bodies) == 3 * calls  # the second is in the cache; another order is another question
    first, text = (service.bodies[place]["messages"][0]["content"] for place in (0, -1))
    urls = [part["image_url"]["url"] for part in first if part["type"] == "image_url"]
    assert urls == [data_url(RED), data_url(BLUE)]
    assert isinstance(text, str)


async def test_a_reward_model_gives_no_score_where_there_is_an_image(scorer_of: Scorers, tmp_path: Path) -> None:
    scorer = scorer_of({"reward_model": {"path": made(tmp_path, "Qwen2", template=TEMPLATE)}})
    seen, read = await scorer.score_group([seeing(make_rollout(), RED), make_rollout()])
    assert "reads text alone, and the prompt has images: leave out rewards.functions.reward_model" in str(seen.error)
    assert read.error is None
