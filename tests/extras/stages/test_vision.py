"""Pictures of demonstrations and preferences."""

from pathlib import Path
from typing import Any

import pytest
from tests.data.test_vision import BLUE, INLINE, PLACE, RED, Write, processed, seen, text

from hocket.common.vision import data_url
from hocket.config import DataConfig
from hocket.errors import DataError
from hocket.extras.stages.demonstrations import load_demonstrations
from hocket.extras.stages.preferences import load_preferences
from support.records import read_and_taught, says, user


def test_demonstrations_teach_answers_to_pictures_and_no_token_of_them(
    sighted: Any, write_jsonl: Write, folder: Path
) -> None:
    told = [seen(PLACE, text("What?")), says([text("red")])]
    again = [seen(text("And "), PLACE), says("blue")]
    rows = [
        {"prompt": "What?", "image": "red.png", "response": "red"},
        {"messages": told, "images": ["red.png"]},
        {"messages": [*told, *again], "images": ["red.png", "blue.png"]},
    ]
    one, same, two = load_demonstrations(DataConfig(source=write_jsonl(*rows)), sighted, 400)
    assert (one.token_ids, one.mask, one.images) == (same.token_ids, same.mask, same.images)
    said = "<|user|><image>What?<|end|><|assistant|>red<|end|><|user|>And <image><|end|><|assistant|>blue<|end|>"
    assert [*two.token_ids] == processed(sighted, said, RED, BLUE)
    assert sighted.decode(read_and_taught(two)[1]) == "red<|end|>blue<|end|>"
    assert [image.data for image in two.images] == [RED, BLUE]


def test_both_sides_of_a_preference_have_the_prompts_pictures(sighted: Any, write_jsonl: Write, folder: Path) -> None:
    red, blue = [says("red")], [says("blue")]
    asked = [seen(PLACE, text("What?"))]
    inline = [seen(INLINE, text("What?"))]
    rows = [
        {"prompt": "What?", "image": "red.png", "chosen": "red", "rejected": "blue"},
        {"prompt": asked, "image": "red.png", "chosen": red, "rejected": blue},
        {"chosen": asked + red, "rejected": asked + blue, "image": "red.png"},
        {"chosen": inline + red, "rejected": inline + blue},
        {"chosen": [user("What?"), *red], "image": "red.png"} | {"rejected": [user("What?"), *blue]},
    ]
    pairs = load_preferences(DataConfig(source=write_jsonl(*rows)), sighted, 400)
    for pair in pairs:
        for one, other in ((pair.chosen, pairs[0].chosen), (pair.rejected, pairs[0].rejected)):
            assert (one.token_ids, one.mask) == (other.token_ids, other.mask)
        assert [image.data for image in (*pair.chosen.images, *pair.rejected.images)] == [RED, RED]


def test_sides_of_a_preference_with_different_pictures_are_refused(sighted: Any, write_jsonl: Write) -> None:
    sides = [
        [seen({"type": "image", "image": data_url(one)}, text("What?")), says(word)]
        for one, word in ((RED, "red"), (BLUE, "blue"))
    ]
    source = write_jsonl({"chosen": sides[0], "rejected": sides[1]})
    with pytest.raises(DataError, match="have 'chosen' and 'rejected' begin alike"):
        load_preferences(DataConfig(source=source), sighted, 400)
