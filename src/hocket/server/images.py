"""Take images from requests to vLLM: each is checked, and preprocessed once for all completions of its prompt."""

import json
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import pydantic

from hocket.common.images import MAX_IMAGES, LargeImageError, data_url, decoded, fetched, from_text
from hocket.common.tasks import run_in_thread
from hocket.protocol import ImagePart
from hocket.server import vllm_api
from hocket.server.engine import Engine
from hocket.server.errors import ApiError, invalid
from hocket.server.generate import Blind
from hocket.server.middleware import Guard
from hocket.server.openai import PATH
from hocket.types import Image

CARRIED: ContextVar[Sequence[bytes]] = ContextVar("images", default=())  # by the request being served
TEXTS = ["text", "input_text", "output_text", "refusal", "thinking", "tool_reference"]  # vLLM's types of parts
OTHER = 0  # any token but a placeholder
OPTIONS = ("media_io_kwargs", "mm_processor_kwargs")  # of vLLM: other pixels than a trainer makes
_PART = pydantic.TypeAdapter(ImagePart)


class Sight(Blind):
    """A model with eyes."""

    def __init__(self, llm: Any, placeholder: int, hosts: Collection[str]) -> None:
        self._llm = llm
        self._placeholder = placeholder
        self._hosts = hosts

    def expand(self, token_ids: list[int], images: Sequence[str | None], where: str) -> Any:
        if not images:
            return None
        places = [place for place, token in enumerate(token_ids) if token == self._placeholder]
        if len(places) != len(images):
            message = f"{where}: {len(places)} placeholders (token {self._placeholder}) for {len(images)} images"
            hint = "send one placeholder for each image: the engine puts in the other tokens, also where they are there"
            raise invalid(message, hint, code="wrong_placeholders")
        opened = [image for _, image in self.opened([text for text in images if text is not None], where)]
        sampled = [place for place, text in zip(places, images, strict=True) if text is None]
        hidden = token_ids.copy()
        for place in sampled:
            hidden[place] = OTHER
        try:
            prompt = vllm_api.image_prompt(self._llm, hidden, opened)
        except ValueError as error:
            raise invalid(f"{where}: {error}", "send other images", code="refused_by_engine") from error
        for place in sampled:
            before = sum(place > other for other in set(places).difference(sampled))
            more = sum(span.length - 1 for span in prompt["mm_placeholders"]["image"][:before])
            prompt["prompt_token_ids"][place + more] = self._placeholder
        return prompt

    def places(self, prompt: Any) -> tuple[Image, ...]:
        spans = prompt.get("mm_placeholders", {}).get("image", ())
        return tuple(
            Image(data=data, start=span.offset, length=span.length, placeholder=self._placeholder)
            for data, span in zip(CARRIED.get(), spans, strict=True)
        )

    def opened(self, texts: Sequence[str], where: str) -> list[tuple[bytes, Any]]:
        """Return files and what is in them. Raises ApiError."""
        if len(texts) > MAX_IMAGES:
            message = f"{where}: {len(texts)} images are more than the {MAX_IMAGES} of one prompt"
            raise ApiError(413, "too_many_images", message, "send fewer")
        found = []
        for number, text in enumerate(texts):
            try:
                is_url = "://" in text[:16]
                data = fetched(text, self._hosts, "data.image_hosts") if is_url else from_text(text)
                found.append((data, decoded(data)))
            except ValueError as error:
                status = 413 if isinstance(error, LargeImageError) else 400
                hint = "an image is a PNG, JPEG or WebP file in base64, or such a data URL"
                raise ApiError(status, "bad_image", f"{where}: number {number} of its images: {error}", hint) from error
        return found


def install(guard: Guard, engine: Engine, hosts: Collection[str]) -> None:
    """Have the sampler take images, and the guard check those on their way to vLLM's routes."""
    placeholder = vllm_api.image_token(engine.llm)
    eyes = None
    if placeholder is not None:
        engine.sampler.eyes = eyes = Sight(engine.llm, placeholder, hosts)

    async def check(path: str, content: bytes) -> bytes | None:
        if not content or not PATH.fullmatch(path):
            return None
        files, content = await run_in_thread(_checked, eyes, content)
        CARRIED.set(files)
        return content

    guard.checks.append(check)


def _checked(eyes: Sight | None, content: bytes) -> tuple[list[bytes], bytes]:
    """Return the files in a body, and the body with them in the place of URLs: vLLM loads none. Raises ApiError."""
    body = json.loads(content)
    found = list(_images(body))
    if not found:
        return [], content
    if eyes is None:
        raise invalid("messages: this model takes no images", "leave them out", code="no_images")
    if wrong := [name for name in OPTIONS if body.get(name)]:
        raise invalid(f"{', '.join(wrong)}: a trainer would see other pixels", "leave it out")
    files = [data for data, _ in eyes.opened([one["url"] for one in found], "messages")]
    for one, data in zip(found, files, strict=True):
        one["url"] = data_url(data)
    return files, json.dumps(body).encode()


def _images(body: Any) -> Iterator[dict[str, Any]]:
    """Yield the image_url of each image in a chat. Raises ApiError for media that are not checked."""
    for message in _items(body, "messages"):
        for part in _items(message, "content"):
            if not isinstance(part, dict) or (part.get("type") in TEXTS and "uuid" not in part):
                continue
            try:
                _PART.validate_python(part)
            except pydantic.ValidationError as error:
                wrong = f"messages: a part of type {part.get('type')!r:.60} is neither text nor an image"
                hint = 'an image is {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}, no more'
                raise invalid(wrong, hint) from error
            yield part["image_url"]


def _items(holder: Any, key: str) -> list[Any]:
    value = holder.get(key) if isinstance(holder, dict) else None
    return value if isinstance(value, list) else []
