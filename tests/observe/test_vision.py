"""Pictures of rollouts are kept in the run folder once, come back in a replay, and are shown small."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pictures

from hocket.common.vision import file_name, png
from hocket.observe.rows import groups_of, rollout_of, write_rollouts
from hocket.rollout.replay import Replay
from hocket.types import Group, Prompt
from support import fakes
from support.eyes import picture
from support.records import group, sequence, write_rows

RED, BLUE = picture(1), picture(2)
LARGE = png(Pictures.new("RGB", (900, 300), "red"))


def seen(*of_environment: bytes) -> Group:
    """Two rollouts of a prompt with a picture, and one that has seen more."""
    first = fakes.image(RED, start=1, length=2)
    more = tuple(fakes.image(data, start=5 + i) for i, data in enumerate(of_environment))
    ids = (3, 9, 9, 4, 70, *[9] * len(more), 71)
    mask = (False, False, False, False, True, *[False] * len(more), True)
    pictures = {"images": (first, *more), "text": "red", "turns": 2}
    played = sequence(*ids[4:], told=ids[:4], mask=mask, logprobs=(0.0,) * len(ids), **pictures)
    chat = ({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},)
    prompt = Prompt(id="p", token_ids=ids[:4], messages=chat, text="What?", answer="red", images=(first,))
    return group(prompt, [played] * 2, (1.0, 0.0))


def test_a_replay_has_the_pictures_that_a_run_has_kept_once(tmp_path: Path) -> None:
    played = seen(BLUE)
    path = write_rollouts(tmp_path, "step_000001", [played])
    files = sorted((tmp_path / "images").iterdir())
    assert [file.name for file in files] == sorted(map(file_name, (RED, BLUE)))
    assert {file.read_bytes() for file in files} == {RED, BLUE}
    before = [file.stat().st_mtime_ns for file in files]
    write_rollouts(tmp_path, "step_000002", [played])
    assert [file.stat().st_mtime_ns for file in files] == before
    (read,) = groups_of(path.read_text().splitlines(), path)
    for ours, theirs in zip(played.rollouts, read.rollouts, strict=True):
        for found, kept in ((theirs.sequences[0], ours.sequences[0]), (theirs.prompt, ours.prompt)):
            assert found.images == kept.images
            assert [one.data for one in found.images] == [one.data for one in kept.images]
        assert theirs.prompt.messages == ours.prompt.messages
        assert theirs.prompt.text == "What?"


async def test_a_replay_without_its_pictures_says_which_is_missing(tmp_path: Path) -> None:
    write_rollouts(tmp_path, "step_000001", [seen()])
    assert (await Replay(tmp_path).batch(1)).groups[0].rollouts[0].prompt.images[0].data == RED
    (tmp_path / "images" / file_name(RED)).unlink()
    with pytest.raises(Exception, match=rf"no rollouts of step 1 in .*{file_name(RED)}"):
        await Replay(tmp_path).batch(1)


@pytest.mark.parametrize("name", ["../secret.png", "/etc/passwd", "a" * 64 + ".svg", f"x/../{'a' * 64}.png", 7, None])
def test_a_row_that_names_no_picture_of_the_run_reads_none(name: Any, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(RED)
    run = tmp_path / "run"
    path = write_rollouts(run, "step_000001", [seen()])
    (row, *_) = map(json.loads, path.read_text().splitlines())
    row["images"][0]["file"] = name
    write_rows(path, row)
    with pytest.raises((ValueError, TypeError), match="is no picture of a run"):
        rollout_of(row, folder=run)


def test_a_sample_of_the_reward_http_has_its_pictures_as_data_urls() -> None:
    from hocket.rewards.base import arguments_as_json

    told = json.loads(json.dumps(arguments_as_json(seen().rollouts[0])))
    (image,) = rollout_of({"completion": "red", **told}).prompt.images
    assert image.data == RED
    with pytest.raises(ValueError, match="no run's folder has it: send a data URL"):
        rollout_of({"completion": "red", "images": [{"file": file_name(RED)}]})
