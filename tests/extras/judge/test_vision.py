"""Judges see the pictures of a prompt."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.rewards.test_vision import BLUE, RED, seeing

from hocket.common.vision import data_url
from hocket.types import Score
from support.episodes import Scorers, make_rollout
from support.service import Saying, completion, functions


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
