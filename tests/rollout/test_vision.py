"""Pictures in episodes: of the prompt, of an environment that draws, and of agents' calls."""

import contextlib
import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image as Pictures

from hocket.client.batcher import Turn
from hocket.common.vision import decoded
from hocket.config import DataConfig
from hocket.data import tokenizer as tokenizers
from hocket.data.prompts import renderer_of
from hocket.data.renderer import Renderer
from hocket.envs import Environment, Observation, Step
from hocket.envs.base import SingleTurn
from hocket.protocol import AgentCall
from hocket.rollout.episode import Episode, TokenBudget
from hocket.types import Image, Prompt, Rollout
from support import fakes
from support.episodes import END, FakeEngine, Scripted, limits, slot, user
from support.eyes import make_idefics, picture

RED, BLUE = picture(1), picture(2, 64, 20)
PLACE = {"type": "image"}
SHOWN = ({"type": "image", "image": BLUE}, {"type": "text", "text": "or"}, {"type": "image", "image": RED})


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return renderer_of(DataConfig(), tokenizers.load(make_idefics(tmp_path_factory.mktemp("eyes"))))


@pytest.fixture(scope="module")
def prompt(renderer: Renderer) -> Prompt:
    chat = (*user([PLACE, {"type": "text", "text": "What?"}]),)
    ids, images = renderer.insert_images(renderer.encode([renderer.render(chat)])[0], [RED])
    return Prompt(id="p", token_ids=array("I", ids), messages=chat, text="What?", images=images)


def drawing(*parts: Any, first: Observation | None = None, **fields: Any) -> Callable[[], Environment]:
    """Shows a picture from Pillow at first, then these parts twice."""
    begin = first or Observation(messages=user([{"type": "image", "image": decoded(BLUE)}]))
    told = [{**user([*parts])[0], **fields}]
    return lambda: Scripted(Step(messages=told), Step(messages=told, done=True), first=begin)


async def play(
    make: Callable[[], Environment], prompt: Prompt, renderer: Renderer, token: int = END
) -> tuple[Rollout, list[Turn]]:
    """Returns an episode in which the model ends each turn with this token, and what it was asked."""
    engine = FakeEngine(lambda turn: fakes.completion(70, token, logprobs=(-0.5, -0.5), text="E"))
    rollout = await Episode(prompt, slot(), make, engine.ask, renderer, limits(), TokenBudget()).play()
    return rollout, [turn for turn, _ in engine.turns]


def check_places(images: tuple[Image, ...], token_ids: Any) -> None:
    """Checks that the ids have placeholders where images stand, and nowhere else."""
    inside = {place for one in images for place in range(one.start, one.start + one.length)}
    found = {place for place, token in enumerate(token_ids) if token == images[0].placeholder}
    assert found <= inside
    assert len(found) == 4 * len(images)


async def test_a_turn_carries_the_pictures_of_its_prompt(prompt: Prompt, renderer: Renderer) -> None:
    rollout, (turn,) = await play(SingleTurn, prompt, renderer)
    assert turn.images == rollout.sequences[0].images == prompt.images
    assert turn.token_ids == prompt.token_ids


async def test_what_an_environment_draws_is_read_at_its_place_and_never_trained(
    prompt: Prompt, renderer: Renderer
) -> None:
    rollout, turns = await play(drawing(*SHOWN), prompt, renderer)
    (sequence,) = rollout.sequences
    assert rollout.error is None
    assert [len(turn.images) for turn in turns] == [2, 4]
    seen = [decoded(image.data).tobytes() for image in sequence.images]
    assert seen == [decoded(one).tobytes() for one in (RED, BLUE, BLUE, RED)]
    check_places(sequence.images, sequence.token_ids)
    for turn in turns:
        assert turn.images == sequence.images[: len(turn.images)]
        assert turn.token_ids == sequence.token_ids[: len(turn.token_ids)]
    for image in sequence.images:
        assert not any(sequence.mask[image.start : image.start + image.length])
    said = [message["content"] for message in sequence.dialogue]
    assert said == [[PLACE], "E", [PLACE, {"type": "text", "text": "or"}, PLACE], "E"]  # no bytes


async def test_an_episode_with_more_images_than_a_prompt_may_have_fails_alone(
    prompt: Prompt, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.common.vision.MAX_IMAGES", 3)
    rollout, _ = await play(drawing(*SHOWN), prompt, renderer)
    assert "4 images have" in str(rollout.error)
    assert rollout.sequences[0].turns == 1


async def test_states_with_other_pictures_are_other_states(prompt: Prompt, renderer: Renderer) -> None:
    shown, other_way = drawing(*SHOWN), drawing(*reversed(SHOWN))
    first, same, other = [(await play(make, prompt, renderer))[0].sequences[0] for make in (shown, shown, other_way)]
    states = [[turn.state for turn in one.turn_rewards] for one in (first, same, other)]
    assert [*first.token_ids] == [*other.token_ids]
    assert states[0] == states[1]
    assert [a == b for a, b in zip(states[0], states[2], strict=True)] == [True, False]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image", "image": b"GIF89a"}, "no PNG, JPEG or WebP"),
        ({"type": "image", "image": BLUE[:60]}, "damaged"),
        ({"type": "image"}, "0 images for 1 places"),
        ({"type": "image", "image": "/etc/passwd"}, "is outside"),
        ({"type": "video"}, "must be of type text, image or image_url"),
    ],
)
async def test_a_bad_picture_of_an_environment_ends_its_episode_alone(
    part: Any, message: str, prompt: Prompt, renderer: Renderer
) -> None:
    rollout, _ = await play(drawing(part), prompt, renderer)
    assert message in str(rollout.error)
    assert len(rollout.sequences[0].images) == 2  # as far as it came


async def test_the_word_for_an_image_is_text_in_what_an_environment_says(prompt: Prompt, renderer: Renderer) -> None:
    says = drawing({"type": "text", "text": "no <image> here"}, first=Observation(text="<image>?"))
    rollout, _ = await play(says, prompt, renderer)
    (sequence,) = rollout.sequences
    assert rollout.error is None
    check_places(sequence.images, sequence.token_ids)
    said = [message["content"] for message in sequence.dialogue]
    assert said == ["< image>?", "E", "no < image> here", "E"]


async def test_an_environment_s_messages_may_have_fields_of_any_kind(prompt: Prompt, renderer: Renderer) -> None:
    rollout, _ = await play(drawing(*SHOWN, tags=["a", 1], more={"b": None}), prompt, renderer)
    assert rollout.error is None


async def test_an_episode_ends_as_truncated_where_the_policy_says_the_image_token(
    prompt: Prompt, renderer: Renderer
) -> None:
    rollout, _ = await play(drawing(*SHOWN), prompt, renderer, prompt.images[0].placeholder)
    (sequence,) = rollout.sequences
    assert (rollout.error, sequence.turns, sequence.finish_reason) == (None, 1, "length")


def test_a_server_s_record_names_no_file_of_this_machine() -> None:
    image = {"name": "a.png", "start": 0, "length": 1, "placeholder": 9}
    for file, known in (("YQ==", True), ("/etc/passwd.png", False)):
        with contextlib.nullcontext() if known else pytest.raises(ValueError, match="images"):
            told = {"prompt_token_ids": [9], "completion": None, "images": [{**image, "file": file}]}
            assert AgentCall.model_validate_json(json.dumps(told)).images[0].data == b"a"


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1"])
def test_pictures_from_pillow_have_any_mode(mode: str, renderer: Renderer) -> None:
    part = {"type": "image", "image": Pictures.new(mode, (8, 8))}
    told, pictures = renderer.split_images({"messages": user([part])})
    _, images = renderer.insert_images(renderer.following(told["messages"], ended=None), pictures)
    assert decoded(images[0].data).size == (8, 8)
