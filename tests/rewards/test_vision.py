"""Rewards see the pictures of a prompt."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hocket.rewards.base import reward
from hocket.types import Rollout
from support import fakes
from support.episodes import Scorers, make_rollout
from support.eyes import picture

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
