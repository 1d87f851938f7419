"""Pictures of rows: where they may be, what they become, and what is said of 25 that can't be used."""

import functools
import json
import os
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoProcessor

from hocket.common.vision import data_url, decoded
from hocket.config import DataConfig
from hocket.data.prompts import load_prompts, renderer_of
from hocket.data.sources import TASKS
from hocket.errors import DataError
from hocket.types import Prompt
from support.eyes import picture
from support.records import user, write_rows

Write = Callable[..., str]
PLACE: dict[str, str] = {"type": "image"}
RED = picture(1)
BLUE = picture(2, 64, 20)


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def seen(*parts: Any) -> dict[str, Any]:
    return user([*parts])


def load(source: str, tokenizer: Any, **settings: Any) -> list[Prompt]:
    data = DataConfig(source=source, answer_column=None, **settings)
    return [*load_prompts(data, tokenizer, max_prompt_tokens=400)[0]]


@functools.cache
def processor_of(model: str) -> Any:
    return AutoProcessor.from_pretrained(model)


def processed(tokenizer: Any, words: str, *files: bytes) -> list[int]:
    """Returns what the model's own processor makes of a whole text with its pictures."""
    found: list[int] = processor_of(tokenizer.name_or_path)(
        text=[words], images=[[decoded(one) for one in files]] if files else None
    )["input_ids"]
    return list(found[0])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """That of `write_jsonl`, with two pictures."""
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "blue.png").write_bytes(BLUE)
    return tmp_path


INLINE = {"type": "image_url", "image_url": {"url": data_url(RED), "detail": "low"}}
FORMS: dict[str, dict[str, Any]] = {
    "a path": {"prompt": "What?", "image": "red.png"},
    "a list of paths": {"prompt": "What?", "images": ["red.png"]},
    "as datasets stores a file": {"prompt": "What?", "image": {"bytes": None, "path": "red.png"}},
    "a data URL": {"prompt": "What?", "images": [data_url(RED)]},
    "messages without a place": {"prompt": [user("What?")], "image": "red.png"},
    "messages with a place": {"prompt": [seen(PLACE, text("What?"))], "image": "red.png"},
    "a table's part": {"prompt": [seen({"type": "image", "text": None}, text("What?"))], "image": "red.png"},
    "OpenAI's part": {"prompt": [seen(INLINE, text("What?"))]},
    "a part with a path": {"prompt": [seen({"type": "image", "path": "red.png"}, text("What?"))]},
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_picture_gives_the_same_prompt(
    form: str, sighted: Any, write_jsonl: Write, folder: Path
) -> None:
    (prompt,) = load(write_jsonl(FORMS[form]), sighted)
    asked = "<|user|><image>What?<|end|><|assistant|>"
    assert [*prompt.token_ids] == processed(sighted, asked, RED)
    assert prompt.messages == (seen(PLACE, text("What?")),)
    assert (prompt.text, prompt.meta) == ("What?", {})
    (image,) = prompt.images
    assert (image.data, image.start, image.length) == (RED, 1, 7)
    assert image.placeholder == sighted.convert_tokens_to_ids("<image>")


def test_a_column_of_messages_has_its_pictures_within(sighted: Any, write_jsonl: Write) -> None:
    (prompt,) = load(write_jsonl({"messages": [seen(INLINE, text("What?"))]}), sighted, prompt_column="messages")
    assert [image.data for image in prompt.images] == [RED]


def test_a_picture_s_tokens_are_not_those_that_begin_a_text(sighted: Any, write_jsonl: Write, tmp_path: Path) -> None:
    renderer = renderer_of(DataConfig(), sighted)
    expected = renderer.insert_images([5, sighted.placeholder, 6], [RED])[0]
    renderer._processor.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|user|> $A", special_tokens=[("<|user|>", 3)]
    )
    assert renderer.insert_images([5, sighted.placeholder, 6], [RED])[0] == expected


def test_bytes_and_pictures_come_from_parquet_json_datasets_and_tasks(sighted: Any, folder: Path) -> None:
    stored = {"bytes": RED, "path": "any.png"}
    rows = [{"prompt": "What?", "image": stored}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    (folder / "rows.json").write_text(json.dumps([{"prompt": "What?", "image": "red.png"}]))
    features = datasets.Features(prompt=datasets.Value("string"), image=datasets.Image())
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(folder / "saved"))
    TASKS.register("drawn")(lambda split, seed: iter([{"prompt": "What?", "images": [decoded(RED)]}]))
    sources = [str(folder / "rows.parquet"), str(folder / "rows.json"), f"hf:{folder / 'saved'}", "task:drawn"]
    prompts = [load(source, sighted)[0] for source in sources]
    TASKS.forget("drawn")
    assert len({tuple(prompt.token_ids) for prompt in prompts}) == 1
    assert [prompt.images[0].data for prompt in prompts[:3]] == [RED] * 3
    assert decoded(prompts[3].images[0].data).tobytes() == decoded(RED).tobytes()


def test_token_ids_are_the_processors_for_200_rows_with_up_to_four_pictures(
    sighted: Any, write_jsonl: Write, tmp_path: Path, rng: random.Random
) -> None:
    files = [picture(number, rng.randint(5, 90), rng.randint(5, 90)) for number in range(8)]
    for number, data in enumerate(files):
        (tmp_path / f"{number}.png").write_bytes(data)
    rows, wanted = [], []
    for _ in range(200):
        chosen = rng.choices(range(8), k=rng.randint(0, 4))
        words = ["".join(rng.choices("ab c.\n", k=rng.randint(0, 9))) for _ in range(len(chosen) + 1)]
        parts = [text(words[0] + "?"), *(part for word in words[1:] for part in (PLACE, text(word)))]
        rows.append({"prompt": [seen(*parts)], "images": [f"{number}.png" for number in chosen]})
        asked = f"<|user|>{'<image>'.join([words[0] + '?', *words[1:]])}<|end|><|assistant|>"
        wanted.append((processed(sighted, asked, *(files[number] for number in chosen)), [files[n] for n in chosen]))
    prompts = load(write_jsonl(*rows), sighted)
    assert [([*one.token_ids], [image.data for image in one.images]) for one in prompts] == wanted
    for prompt in prompts:
        for image in prompt.images:
            span = prompt.token_ids[image.start : image.start + image.length]
            assert span.count(image.placeholder) == 4


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"prompt": "a", "image": "none.png"}, "can't be read: .*No such file.*paths are relative to"),
    "outside": ({"prompt": "a", "image": "../red.png"}, "'../red.png' is outside .*: put the data file above"),
    "absolute": ({"prompt": "a", "image": "/etc/passwd"}, "'/etc/passwd' is outside"),
    "around": ({"prompt": "a", "image": "sub/../../red.png"}, "is outside"),
    "a folder": ({"prompt": "a", "image": "."}, "is no file"),
    "a device": ({"prompt": "a", "image": {"bytes": None, "path": "/dev/zero"}}, "is outside"),
    "no picture": ({"prompt": "a", "image": "rows.jsonl"}, "no PNG, JPEG or WebP: it begins with b'{"),
    "truncated": ({"prompt": "a", "image": "truncated.png"}, "an image is damaged"),
    "bomb": ({"prompt": "a", "image": "bomb.png"}, "more than 33,554,432 pixels: make it smaller"),
    "heavy": ({"prompt": "a", "image": "heavy.png"}, "more than 20,971,520: make it smaller"),
    "a number": ({"prompt": "a", "image": 7}, "must be a path, a data URL, bytes or of Pillow, got 7"),
    "a wrong object": ({"prompt": "a", "image": {"src": "red.png"}}, r"must be a path, .* got \{'src'"),
    "an empty object": ({"prompt": "a", "image": {"bytes": None, "path": None}}, "must be a path"),
    "no base64": ({"prompt": "a", "image": "data:image/png;base64,???"}, "no base64"),
    "base64 of text": ({"prompt": "a", "image": "data:image/png;base64,aGVsbG8="}, "begins with b'hello'"),
    "a remote one": (
        {"prompt": "a", "image": "https://example.org/a.png"},
        r"allow it by data\.image_hosts: \[example",
    ),
    "of this machine": ({"prompt": "a", "image": "http://127.0.0.1/a.png"}, "whose host is not allowed"),
    "a file URL": ({"prompt": "a", "image": "file:///etc/passwd"}, "whose host is not allowed"),
    "too few": ({"prompt": [seen(PLACE, PLACE)], "image": "red.png"}, "1 images for 2 places"),
    "too many": ({"prompt": [seen(PLACE)], "images": ["red.png"] * 2}, "2 images for 1 places"),
    "none": ({"prompt": [seen(PLACE)]}, "0 images for 1 places"),
    "a word": ({"prompt": "an <image> here", "image": "red.png"}, "<image> within a text must not be"),
    "both": ({"prompt": [seen(INLINE)], "image": "red.png"}, "it has several lists of images: leave one"),
    "a video": ({"prompt": [seen({"type": "video", "video": "a.mp4"})]}, "must be of type text, image or image_url"),
    "a part that is text": ({"prompt": [seen("red.png")]}, "must be of type text, image or image_url, got 'red.png'"),
    "no messages": ({"prompt": [{"role": "user"}], "image": "red.png"}, "must be {'role': text, 'content': text}"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_picture_or_row_is_named_with_what_is_wrong(
    name: str, sighted: Any, write_jsonl: Write, folder: Path
) -> None:
    row, message = BAD[name]
    (folder / "truncated.png").write_bytes(RED[:-40])
    (folder / "heavy.png").write_bytes(RED)
    os.truncate(folder / "heavy.png", (20 << 20) + 1)
    header = b"IHDR" + struct.pack(">II", 65535, 65535) + RED[24:29]
    (folder / "bomb.png").write_bytes(RED[:12] + header + struct.pack(">I", zlib.crc32(header)) + RED[33:])
    source = write_jsonl({"prompt": "good", "image": "red.png"}, row)
    with pytest.raises(DataError, match=rf"1 of 2 rows of .*; repair or remove them \(line\):\n  .*:2: .*{message}"):
        load(source, sighted)


def test_a_link_in_the_datas_folder_may_lead_out_of_it(sighted: Any, folder: Path) -> None:
    rows = write_rows(folder / "data/rows.jsonl", {"prompt": "a", "image": "pictures/red.png"})
    (folder / "data/pictures").symlink_to(folder)
    assert load(str(rows), sighted)[0].images[0].data == RED


def test_a_template_that_leaves_pictures_out_is_refused(sighted: Any, write_jsonl: Write, folder: Path) -> None:
    blind = AutoProcessor.from_pretrained(sighted.name_or_path).tokenizer
    blind.chat_template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    blind.placeholder = sighted.placeholder
    source = write_jsonl({"prompt": "a", "image": "red.png"})
    with pytest.raises(DataError, match="1 images for 0 places in the text as the chat template writes it"):
        load(source, blind)
    with pytest.raises(DataError, match=r"images need data\.chat_template: true"):
        load(source, sighted, chat_template=False)


@pytest.mark.parametrize("none", [{"image": None}, {"images": []}, {"images": [None]}])
def test_a_model_that_sees_no_pictures_takes_rows_that_have_none(
    tokenizer: Any, write_jsonl: Write, none: dict[str, Any]
) -> None:
    (prompt,) = load(write_jsonl({"prompt": "a", **none}), tokenizer)
    assert (prompt.meta, prompt.images) == (none, ())


def test_a_system_prompt_comes_before_the_picture(sighted: Any, write_jsonl: Write, folder: Path) -> None:
    (prompt,) = load(write_jsonl({"prompt": "a", "image": "red.png"}), sighted, system_prompt="Look.")
    assert [*prompt.token_ids] == processed(sighted, "<|system|>Look.<|end|><|user|><image>a<|end|><|assistant|>", RED)


def test_what_an_environment_shows_is_read_in_each_form(sighted: Any, tmp_path: Path) -> None:
    renderer = renderer_of(DataConfig(source=str(tmp_path / "rows.jsonl")), sighted)
    parts = [{"type": "image", "image": decoded(RED)}, {"type": "image", "image": BLUE}, INLINE]
    told, pictures = renderer.split_images({"messages": [seen(*parts, text("Now?"))]})
    ids = renderer.following(told["messages"], ended=None)
    expanded, images = renderer.insert_images(ids, pictures)
    assert [decoded(image.data) for image in images] == [decoded(one) for one in (RED, BLUE, RED)]
    assert len(expanded) == len(ids) + 3 * 6
    assert json.dumps(told) == json.dumps({"messages": [seen(PLACE, PLACE, PLACE, text("Now?"))]})
