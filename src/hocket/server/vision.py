"""Take images from requests to vLLM: each is checked, and preprocessed once for all completions of its prompt."""

import json
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import pydantic

from hocket.common.tasks import run_in_thread
from hocket.common.vision import check_all, data_url, decoded, fetched, file_name, from_text
from hocket.protocol import ImagePart
from hocket.server import vllm_requests
from hocket.server.errors import ApiError, invalid
from hocket.server.openai import PATH
from hocket.server.parts import Server, server_part
from hocket.types import Image

CARRIED: ContextVar[Sequence[bytes]] = ContextVar(
    "images", default=()
)  # by the request being served
TEXTS = [
    "text",
    "input_text",
    "output_text",
    "refusal",
    "thinking",
    "tool_reference",
]  # vLLM's types of parts
OPTIONS = ("media_io_kwargs", "mm_processor_kwargs")  # of vLLM: other pixels than a trainer makes
_PART = pydantic.TypeAdapter(ImagePart)


class Eyes:
    """Opens images, and finds their places in prompts; a model that takes none refuses them."""

    def __init__(self, llm: Any, placeholder: Any, hosts: Collection[str]) -> None:
        self._llm = llm
        self._hosts = hosts
        self.placeholder = placeholder

    def expand(self, token_ids: list[int], images: Sequence[str], where: str) -> Any:
        """Return vLLM's prompt of token ids with one placeholder for each image. Raises ApiError."""
        opened = [image for _, image in self.opened(images, where)]
        if (count := token_ids.count(self.placeholder)) != len(images):
            message = (
                f"{where}: {count} placeholders (token {self.placeholder}) for {len(images)} images"
            )
            hint = "send one placeholder for each image: the engine puts in the other tokens, also where they are there"
            raise invalid(message, hint, code="wrong_placeholders")
        try:
            return vllm_requests.image_prompt(self._llm, token_ids, opened)
        except ValueError as error:
            raise invalid(
                f"{where}: {error}", "send other images", code="refused_by_engine"
            ) from error

    def places(self, prompt: Any) -> tuple[Image, ...]:
        """Return the images of vLLM's prompt, of the request that is served. Raises ApiError."""
        ids = prompt["prompt_token_ids"]
        spans = prompt.get("mm_placeholders", {}).get("image", ())
        seen = sum(
            ids[span.offset : span.offset + span.length].count(self.placeholder) for span in spans
        )
        if ids.count(self.placeholder) > seen:  # a trainer would take it for an image
            message = (
                f"token {self.placeholder} stands for an image, and the prompt has it without one"
            )
            raise invalid(message, "leave its word out of texts", code="wrong_placeholders")
        return tuple(
            Image(
                file=data,
                name=file_name(data),
                start=span.offset,
                length=span.length,
                placeholder=self.placeholder,
            )
            for data, span in zip(CARRIED.get(), spans, strict=True)
        )

    def opened(self, texts: Sequence[str], where: str) -> list[tuple[bytes, Any]]:
        """Return the files of a prompt and what is in them. Raises ApiError."""
        if self.placeholder is None:
            message = f"{where}: this model takes no images"
            raise invalid(
                message, "leave them out, or serve a vision-language model", code="no_images"
            )
        found = list[tuple[bytes, Any]]()
        for number, text in enumerate(texts):
            try:
                is_url = "://" in text[:16]
                data = fetched(text, self._hosts, "data.image_hosts") if is_url else from_text(text)
                found.append((data, decoded(data)))
                check_all([data for data, _ in found])
            except ValueError as error:
                hint = "an image is a PNG, JPEG or WebP file in base64, or such a data URL"
                raise ApiError(
                    400, "bad_image", f"{where}: number {number} of its images: {error}", hint
                ) from error
        return found


@server_part("images")
def install(server: Server) -> None:
    """Have the sampler take images, and the guard check those on their way to vLLM's routes."""
    engine = server.engine
    placeholder = engine.sampler.placeholder
    engine.sampler.image_reader = eyes = Eyes(engine.llm, placeholder, server.image_hosts)
    engine.llm.stops = (
        [] if placeholder is None else [placeholder]
    )  # read again, it would be taken for an image

    async def check(content: bytes) -> bytes | None:
        if not content:
            return None
        files, content = await run_in_thread(_checked, eyes, content)
        CARRIED.set(files)
        return content

    server.guard.checks.append((PATH, check))


def _checked(eyes: Eyes, content: bytes) -> tuple[list[bytes], bytes]:
    """Return the files in a body, and the body with them in the place of URLs: vLLM loads none. Raises ApiError."""
    body = json.loads(content)
    found = list(_images(body))
    if not found:
        return [], content
    files = [data for data, _ in eyes.opened([one["url"] for one in found], "messages")]
    if wrong := [name for name in OPTIONS if body.get(name)]:
        raise invalid(f"{', '.join(wrong)}: a trainer would see other pixels", "leave it out")
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
