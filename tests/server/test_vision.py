"""Prompts with images: which tokens the engine reads, what it makes of them, what it refuses, under which weights."""

import base64
import copy
import io
import math
import random
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import openai
import pytest
from PIL import Image as Pictures

from hocket.client.server import prompt_input
from hocket.common.vision import MAX_PIXELS, data_url, decoded
from hocket.protocol import ReloadResponse
from hocket.server.errors import ApiError
from hocket.server.generate import Sampler
from hocket.server.vision import _image_urls
from hocket.types import Image
from support import eyes, fakes
from support.engines import MATRICES, MovingModel, error_of, make_adapter, tolerance
from support.tiny_server import Altering

LOOK = "<|user|>Look: <image> and <image>?<|end|>"
GOOD = eyes.picture(0)


class Seeing(Altering):
    """A server of a tiny model that sees, and its processor."""

    def __init__(self, folder: Path, path: str) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.processor = AutoProcessor.from_pretrained(path)
        base = AutoModelForImageTextToText.from_pretrained(path).eval()
        settings = ["data.image_hosts=[localhost]", "model.dtype=float32", "model.lora.rank=8"]
        super().__init__(folder, base, *settings, tokenizer=self.processor)

    def expanded(self, text: str, files: Sequence[bytes]) -> tuple[list[int], tuple[Image, ...]]:
        """What the processor makes of a text with images, and where these stand."""
        whole = self.processor(text=[text], images=[list(map(decoded, files))] if files else None)["input_ids"][0]
        images, start = list[Image](), 0
        for data, before in zip(files, text.split("<image>"), strict=False):
            start += len(self.processor.tokenizer(before, add_special_tokens=False)["input_ids"])
            images.append(fakes.image(data, start=start, length=7, placeholder=self.processor.image_token_id))
            start += 7
        return whole, tuple(images)

    def deltas(self, prompt: Sequence[int], images: Sequence[Image], done: Any, model: Any) -> list[float]:
        """|Δ log-prob| of the engine's tokens and transformers', to which a sampled placeholder is an image."""
        import torch

        ids_t = torch.tensor([*prompt, *done["token_ids"]])
        is_image_t = torch.zeros(len(ids_t), dtype=torch.bool)
        for image in images:
            is_image_t[image.start : image.start + image.length] = True
        is_image_t &= ids_t == self.processor.image_token_id
        pixels = self.processor.image_processor([[decoded(image.data) for image in images]], return_tensors="pt")
        with torch.no_grad():
            embedded_th = model.get_input_embeddings()(ids_t)
            embedded_th[is_image_t] = torch.cat(list(model.base_model.get_image_features(**pixels).pooler_output))
            hidden_bth = model.base_model.text_model(inputs_embeds=embedded_th[None])[0]
            logits = model.lm_head(hidden_bth)[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, ids_t[len(prompt) :, None])[:, 0].tolist()
        return [abs(a - b) for a, b in zip(done["logprobs"], expected, strict=True)]

    def tolerance(self) -> float:
        """Log-probs of what is seen lie this far apart at most: as many sums again lead through the eyes."""
        return tolerance(self.model) * math.sqrt(2)

    def worst(self, model: Any) -> float:
        files = [eyes.picture(1), eyes.picture(2)]
        token_ids, images = self.expanded(LOOK, files)
        answer = self.generate(prompts=[prompt_input(token_ids, images)], n=4, sampling={"max_tokens": 12, "seed": 5})
        return max(max(self.deltas(token_ids, images, done, model)) for done in answer["completions"][0])

    def assert_sees_as(self, model: Any, *others: Any) -> None:
        """Samples as the model does from pictures, and clearly not as others do."""
        assert self.worst(model) < self.tolerance()
        assert all(self.worst(other) > 2 * self.tolerance() for other in others)


@pytest.fixture(scope="module")
def seeing(tiny_vlm: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    server = Seeing(tmp_path_factory.mktemp("seeing"), tiny_vlm)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def remote() -> Iterator[str]:
    """A host with an image at /good, and a redirect to it at /moved."""

    class Files(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302 if self.path == "/moved" else 200)
            self.send_header("Location", "/good")
            self.end_headers()
            self.wfile.write(GOOD)

    with HTTPServer(("localhost", 0), Files) as files:
        threading.Thread(target=files.serve_forever, daemon=True).start()
        yield f"http://localhost:{files.server_port}"
        files.shutdown()


def text_with(rng: random.Random, count: int) -> str:
    words = ["7 3", "sort: ", "a", "", "-1 ", "<|user|>"]
    return "<image>".join("".join(rng.choices(words, k=2)) for _ in range(count + 1)) + "?"


@pytest.mark.engine
@pytest.mark.long
def test_the_engine_reads_what_the_processor_makes_of_200_prompts(seeing: Seeing, rng: random.Random) -> None:
    made = []
    for number in range(200):
        files = [eyes.picture(rng.randrange(20), rng.randint(9, 99), rng.randint(9, 99)) for _ in range(number % 5)]
        made.append(seeing.expanded(text_with(rng, len(files)), files))
    answer = seeing.generate(prompts=[prompt_input(*one) for one in made], sampling={"max_tokens": 1})
    for (token_ids, images), (done,) in zip(made, answer["completions"], strict=True):
        assert done.get("prompt_token_ids") == (token_ids if images else None)


@pytest.mark.engine
@pytest.mark.long
def test_an_adapter_of_the_language_model_is_used_with_images(seeing: Seeing) -> None:
    base = seeing.model
    ends = tuple(f".{name}" for name in MATRICES)
    targets = [name for name, _ in base.named_modules() if "text_model" in name and name.endswith(ends)]
    seeing.assert_sees_as(base)
    adapter = make_adapter(base, seed=1, targets=targets)
    seeing.load_adapter(adapter)
    seeing.assert_sees_as(adapter.model.base_model.model, base)
    seeing.publish_and_load(base)


def test_a_template_that_takes_no_text_but_in_parts_gets_parts() -> None:
    tokenizer = eyes.make_tokenizer()
    tokenizer.placeholder = tokenizer.convert_tokens_to_ids("<image>")
    tokenizer.chat_template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    llm = Mock()
    llm.model_config.max_model_len = llm.vllm_config.scheduler_config.max_num_seqs = 64
    sampler = Sampler(llm, tokenizer, lambda: None, {})
    _, (job,) = sampler.parse(b'{"prompts": [[{"role": "user", "content": "7 3"}]], "sampling": {"max_tokens": 1}}')
    assert tokenizer.decode(job.token_ids) == "7 3"


@pytest.mark.engine
@pytest.mark.long
def test_ids_that_are_expanded_already_are_refused_with_the_fix(seeing: Seeing) -> None:
    token_ids, images = seeing.expanded(LOOK, [GOOD, GOOD])
    prompt = {**prompt_input(token_ids, images), "token_ids": token_ids}
    answer = seeing.client.post("/generate", json={"prompts": [prompt]})
    assert error_of(answer) == (422, "wrong_placeholders")
    error = answer.json()["error"]
    assert f"8 placeholders (token {images[0].placeholder}) for 2 images" in error["message"]
    assert "one placeholder for each image" in error["hint"]


@pytest.mark.engine
@pytest.mark.long
def test_ids_beyond_the_vocabulary_and_too_many_pixels_together_are_refused(seeing: Seeing) -> None:
    placeholder = seeing.processor.image_token_id
    prompt = {"token_ids": [5, placeholder, 10**6], "images": [coded(GOOD)]}
    answer = seeing.client.post("/generate", json={"prompts": [prompt]})
    assert error_of(answer) == (422, "refused_by_engine"), answer.json()
    large = coded(saved("PNG", Pictures.new("L", (8192, 4096))))
    prompt = {"token_ids": [5, *[placeholder] * 5], "images": [large] * 5}
    answer = seeing.client.post("/generate", json={"prompts": [prompt]})
    assert error_of(answer) == (400, "bad_image")
    assert "number 4 of its images: 5 images have" in answer.json()["error"]["message"]


@pytest.mark.engine
@pytest.mark.long
def test_the_image_token_ends_an_answer_and_is_refused_in_an_agent_s_texts(seeing: Seeing) -> None:
    placeholder = seeing.processor.image_token_id
    sampling = {"max_tokens": 60, "seed": 1, "temperature": 2.0}
    answer = seeing.generate(prompts=[[5, 6, 7]] * 8, n=64, sampling=sampling)
    for done in (done for prompt in answer["completions"] for done in prompt):
        assert placeholder not in done["token_ids"][:-1]
    _, agent = seeing.open_session(max_calls=8, max_tokens=6, seed=3)
    with pytest.raises(openai.UnprocessableEntityError, match="stands for an image, and the prompt has it without one"):
        agent.chat.completions.create(model="x", messages=[{"role": "user", "content": "an <image> here"}])


@pytest.mark.engine
@pytest.mark.long
def test_new_weights_amid_a_request_see_its_images_anew(seeing: Seeing) -> None:
    files = [eyes.picture(1), eyes.picture(2)]
    token_ids, images = seeing.expanded(LOOK, files)
    body = {"prompts": [prompt_input(token_ids, images)], "n": 64, "sampling": {"max_tokens": 300}}
    for scale in (1.3, 0.8, 1.2, 0.7):
        old = seeing.model
        new = copy.deepcopy(old)
        new.base_model.vision_model.post_layernorm.weight.data.mul_(scale)
        answer = seeing.in_flight(**body)
        version = seeing.publish_and_load(new).version
        models = {version: new, version - 1: old}
        both = [done for done in answer.result().json()["completions"][0] if len(done["versions"]) == 2]
        for done in both[:3]:
            for number, start, end in done["versions"]:
                assert max(seeing.deltas(token_ids, images, done, models[number])[start:end]) < seeing.tolerance()
        if both:
            return
    pytest.fail("no request was ever in flight when new weights came")


@pytest.mark.engine
@pytest.mark.long
def test_images_are_seen_by_the_weights_that_are_loaded_and_each_of_these_is_compared(seeing: Seeing) -> None:
    old = seeing.model
    seeing.assert_sees_as(old)
    new = copy.deepcopy(old)
    seen = [name for name, _ in new.named_parameters() if "vision_model" in name or "connector" in name]
    for name, parameter in new.named_parameters():
        if name in seen:
            parameter.data.mul_(1.5)
    version = seeing.publish_and_load(new).version  # of the same prompt, nothing that was computed before may be left
    seeing.assert_sees_as(new, old)
    seeing.assert_holds(version)
    for name in [one for one in seen if "layers.0" not in one]:
        seeing.find(version, name, "changed", found_by="comparison")
        seeing.find(version, name, "missing", found_by="load")
    seeing.assert_holds(version)
    seeing.assert_sees_as(new)


@pytest.mark.engine
@pytest.mark.long
async def test_changes_alone_bring_the_weights_that_see(seeing: Seeing) -> None:
    trainer = MovingModel(seeing.model)
    disk = trainer.deltas(f"run.dir={seeing.root}/b")
    async with seeing.trainer_client() as http:
        for _ in range(2):
            trainer.step()
            version = seeing.new_version()
            for compare in (False, True):
                ((_, answer),) = (await disk.deliver(version, [http], compare=compare)).answers.values()
                assert isinstance(answer, ReloadResponse), answer
            seeing.assert_sees_as(trainer.model)
    seeing.model = trainer.model
    assert trainer.said == []


def chat_of(*urls: str) -> list[Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": "7 3"}, *parts]}]


@pytest.mark.engine
@pytest.mark.long
def test_an_agent_s_images_are_recorded_with_the_tokens_that_they_were(seeing: Seeing, remote: str) -> None:
    session_id, agent = seeing.open_session(max_calls=8, max_tokens=6, seed=3)
    files = [eyes.picture(4), GOOD, eyes.picture(5)]
    chats = [chat_of(data_url(files[0]), f"{remote}/good"), chat_of(data_url(files[2]), data_url(GOOD)), chat_of()]
    for chat in chats:
        agent.chat.completions.create(model="x", messages=chat)
    calls = seeing.record_of(session_id).calls
    assert [[image.data for image in call.images] for call in calls] == [files[:2], [files[2], GOOD], []]
    assert len({call.seed for call in calls}) == 3  # also of equal ids
    assert calls[0].prompt_token_ids == calls[1].prompt_token_ids
    for call in calls[:2]:
        text = "<|user|>7 3<image><image><|end|><|assistant|>"
        assert (list(call.prompt_token_ids), call.images) == seeing.expanded(text, [one.data for one in call.images])
        done = call.completion.model_dump()
        assert max(seeing.deltas(call.prompt_token_ids, call.images, done, seeing.model)) < seeing.tolerance()
    (same,) = seeing.generate(prompts=chats[:1], sampling={"max_tokens": 6, "seed": calls[0].seed})["completions"][0]
    assert same["prompt_token_ids"] == list(calls[0].prompt_token_ids)
    assert tuple(same["token_ids"]) == calls[0].completion.token_ids


def saved(kind: str, image: Any = None, **how: Any) -> bytes:
    file = io.BytesIO()
    (image or Pictures.effect_noise((64, 64), 90)).save(file, kind, **how)
    return file.getvalue()


def animated(kind: str) -> bytes:
    return saved(kind, save_all=True, append_images=[Pictures.new("L", (64, 64), "white")])


def sized(width: int, height: int) -> bytes:
    """A small PNG whose header says another size."""
    import struct
    import zlib

    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return GOOD[:8] + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head)) + GOOD[33:]


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


BAD: dict[str, tuple[str, str]] = {
    "no base64": ("<svg/>", "no base64"),
    "nothing": ("", "no PNG, JPEG or WebP"),
    "a data URL of nothing": ("data:image/png;base64,", "no PNG, JPEG or WebP"),
    "a data URL that is not base64": ("data:image/svg+xml,<svg/>", "no base64"),
    "a page": (coded(b"<html>"), "no PNG, JPEG or WebP"),
    "a program": (coded(b"\x7fELF" + bytes(99)), "no PNG, JPEG or WebP"),
    "another kind": (coded(saved("GIF")), "no PNG, JPEG or WebP"),
    "a drawing": (coded(saved("BMP")), "no PNG, JPEG or WebP"),
    "a false mark": (coded(GOOD[:8] + b"rubbish" * 9), "is damaged"),
    "a PNG that is cut off": (coded(GOOD[: len(GOOD) // 2]), "is damaged"),
    "a JPEG that is cut off": (coded(saved("JPEG")[:-60]), "is damaged"),
    "a WebP that is cut off": (coded(saved("WEBP")[:-20]), "is damaged"),
    "a PNG that moves": (coded(animated("PNG")), "is animated"),
    "a WebP that moves": (coded(animated("WEBP")), "is animated"),
    "no pixels": (coded(sized(0, 8)), "is damaged"),
    "a bomb": (coded(sized(50_000, 50_000)), f"more than {MAX_PIXELS:,} pixels"),
    "a small bomb": (coded(sized(8192, 4097)), f"more than {MAX_PIXELS:,} pixels"),
    "another host": ("http://example.com/a.png", "data.image_hosts: [example.com]"),
    "the cloud's keys": ("http://169.254.169.254/latest/meta-data", "is not allowed"),
    "a host that looks like one": ("http://localhost@169.254.169.254/", "is not allowed"),
    "a file": ("file:///etc/passwd", "is not allowed"),
    "another protocol": ("ftp://localhost/a.png", "is not allowed"),
    "a redirect": ("{remote}/moved", "302"),
    "nobody there": ("http://localhost:9/a.png", "can't be had"),
    "large": (coded(bytes(21 << 20)), "more than"),
}


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_image_is_refused_by_its_number_with_the_fix(seeing: Seeing, remote: str, kind: str) -> None:
    bad, said = BAD[kind]
    good = data_url(GOOD)
    bad = bad.replace("{remote}", remote)
    short = prompt_input(*seeing.expanded(LOOK, [GOOD, GOOD]))
    requests = [
        ("/generate", {"prompts": [prompt]}) for prompt in ({**short, "images": [good, bad]}, chat_of(good, bad))
    ]
    if len(bad) < 1 << 20:
        requests += [("/v1/chat/completions", {"messages": chat_of(good, bad)})]
    for route, body in requests:
        answer = seeing.client.post(route, json=body)
        assert error_of(answer) == (400, "bad_image"), answer.text
        error = answer.json()["error"]
        assert "number 1 of its images" in error["message"]
        assert said in error["message"]
        assert len(answer.content) < 1000


def looks() -> dict[str, bytes]:
    """Files of every kind that vLLM decodes in a way of its own."""
    image = Pictures.effect_noise((20, 12), 90)
    colours = Pictures.merge(
        "RGBA", (image, image.rotate(180), image.transpose(Pictures.Transpose.FLIP_LEFT_RIGHT), image)
    )
    made = {mode: saved("PNG", colours.convert(mode)) for mode in ("L", "LA", "P", "RGB", "RGBA", "1")}
    made["transparent palette"] = saved("PNG", colours.convert("P"), transparency=3)
    made["a colour left out"] = saved("PNG", Pictures.new("RGB", (4, 4), "red"), transparency=(255, 0, 0))
    made["a phone's"] = saved("MPO", colours.convert("RGB"), save_all=True, append_images=[image.convert("RGB")])
    made["16 bits"] = saved("PNG", Pictures.fromarray(np.arange(240, dtype=np.uint16).reshape(12, 20) * 273))
    made["CMYK"] = saved("JPEG", colours.convert("CMYK"))
    exif = Pictures.Exif()
    exif[0x0112] = 6  # it lies on its side
    made["turned"] = saved("JPEG", colours.convert("RGB"), exif=exif)
    return made | {"WebP": saved("WEBP", colours)}


@pytest.mark.parametrize("look", looks())
def test_an_image_looks_as_vllm_s_own_routes_decode_it(look: str) -> None:
    from vllm.multimodal.media import ImageMediaIO

    data = looks()[look]
    assert np.array_equal(np.asarray(decoded(data)), np.asarray(ImageMediaIO().load_bytes(data).media))


def block(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def test_a_tool_s_call_and_result_are_no_media() -> None:
    text = block("text", text="rain")
    blocks = [block("tool_use", id="1", name="f", input={"type": "image"}), block("tool_result", content=[text])]
    messages = [{"role": "assistant", "content": [blocks[0], block("redacted_thinking", data="a")]}]
    messages += [{"role": "user", "content": [blocks[1], block("tool_result", content="rain")]}]
    items = [block("reasoning", summary=[block("summary_text", text="a")], content=[block("reasoning_text", text="a")])]
    items += [block("function_call", arguments="{}"), block("function_call_output", output=[block("input_text")])]
    items += [block("function_call_output", output="rain"), block("message", content=[block("output_text")])]
    assert list(_image_urls({"messages": messages})) == []
    assert list(_image_urls({"input": items})) == []
    assert list(_image_urls({"input": "What do you see?"})) == []


AWAY = "http://169.254.169.254/latest/meta-data"
UNCHECKED = {
    "a medium in a tool's result": {
        "messages": [{"content": [block("tool_result", content=[block("image", source={"type": "url", "url": AWAY})])]}]
    },
    "a medium in a response's input": {"input": [{"content": [block("input_image", image_url=AWAY)]}]},
    "a medium in a function's output": {
        "input": [block("function_call_output", output=[block("input_image", image_url=AWAY)])]
    },
    "a picture of the screen": {
        "input": [block("computer_call_output", output=block("computer_screenshot", image_url=AWAY))]
    },
}


@pytest.mark.parametrize("place", UNCHECKED)
def test_a_medium_that_vllm_would_load_by_itself_is_refused_wherever_it_stands(place: str) -> None:
    with pytest.raises(ApiError, match="is neither text nor an image") as refused:
        list(_image_urls(UNCHECKED[place]))
    assert refused.value.status == 422
