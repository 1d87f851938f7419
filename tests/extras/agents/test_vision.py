"""Pictures in the calls of agents."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.extras.agents.servers import FakeServers, FakeSession
from tests.rollout.test_vision import BLUE, PLACE, RED

from hocket.common.vision import data_url
from hocket.envs import Task
from hocket.extras.agents.play import join, with_images
from hocket.observe.rows import rollout_of, write_rollouts
from hocket.protocol import AgentCall
from hocket.types import Group, Image, Prompt, Score
from support import fakes
from support.episodes import slot, user


def test_messages_show_their_pictures_in_order_as_openai_has_them() -> None:
    content = [PLACE, {"type": "text", "text": "or"}, PLACE]
    system = {"role": "system", "content": "Look."}
    shown = list(with_images([system, *user(content)], [RED, BLUE]))
    assert shown[0] == system
    urls = [part["image_url"]["url"] for part in shown[1]["content"] if part["type"] == "image_url"]
    assert urls == [data_url(RED), data_url(BLUE)]


@pytest.mark.parametrize("asks", [True, False])
async def test_an_agent_that_fails_leaves_the_pictures_that_it_has_shown(asks: bool, tmp_path: Path) -> None:
    seen = tuple(fakes.image(data, start=1 + i) for i, data in enumerate((RED, BLUE)))
    chat = (*user([PLACE, {"type": "text", "text": "What?"}]),)
    prompt = Prompt(id="p", token_ids=(5, 9, 6), messages=chat, images=seen[:1])
    done = fakes.completion(7, logprobs=(-0.5,), text="E")
    given: list[Any] = []

    async def plays(task: Task, session: FakeSession) -> float:
        given.append(task.messages[0]["content"][0])
        if asks:
            session.calls.append(AgentCall(prompt_token_ids=(5, 9, 9, 6), images=seen, completion=done))
        raise ValueError("no")

    rollout = await FakeServers().agents(plays).play(prompt, slot("step 1/0/0"))
    assert rollout.error == "agent: it raised ValueError: no"
    assert given == [{"type": "image_url", "image_url": {"url": data_url(RED)}}]
    score = Score(total=math.nan, error=rollout.error)
    path = write_rollouts(tmp_path, "step_000001", [Group(id="g", rollouts=(rollout,), scores=(score,))])
    assert rollout_of(json.loads(path.read_text()), folder=tmp_path).sequences[0].images == seen[: 1 + asks]


def test_calls_of_an_agent_go_on_from_each_other_only_with_the_same_pictures() -> None:
    red, blue = (fakes.image(data, start=1, length=2) for data in (RED, BLUE))
    fresh = itertools.count(100)

    def call(asked: list[int], *images: Image) -> AgentCall:
        done = fakes.completion(next(fresh), logprobs=(-0.5,), text="x")
        return AgentCall(prompt_token_ids=tuple(asked), images=images, completion=done)

    def answered(one: AgentCall) -> list[int]:
        assert one.completion is not None
        return [*one.prompt_token_ids, *one.completion.token_ids]

    first = call([5, 9, 9, 6], red)
    later = fakes.image(BLUE, start=6, length=2)
    goes_on = call([*answered(first), 7, 9, 9, 8], red, later)
    other = call([*answered(goes_on), 4], blue, later)  # the same tokens, another picture
    kept, new = (one.sequence() for one in join([first, goes_on, other], decode=str))
    assert (kept.turns, kept.images) == (2, (red, later))
    assert [*kept.token_ids[later.start : later.start + 2]] == [9, 9]
    assert (new.turns, new.images) == (1, (blue, later))
    assert AgentCall.model_validate_json(goes_on.model_dump_json()) == goes_on
