"""Pass the images of requests to vLLM: each is checked, and preprocessed once per prompt.

All completions of a prompt share what vLLM's preprocessing makes of its images.
"""

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
from hocket.server.middleware import read_body
from hocket.server.parts import CLIENT_PATHS, Server, server_part
from hocket.types import Image

REQUEST_IMAGES: ContextVar[Sequence[bytes]] = ContextVar("images", default=())
"""The image files in the chat request that is being served."""
TEXT_TYPES = [
    *("text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal"),
    *("thinking", "redacted_thinking", "tool_use", "tool_result", "tool_reference"),
    *("tool_addition", "tool_removal"),
]
"""vLLM's types of parts of a message that hold no medium; the content of a tool's result may."""
MESSAGES = ("messages", "input")
"""The fields of a body that hold a chat, by route."""
PARTS = ("content", "output", "summary")
"""The fields of a message that hold its parts, by its type."""
PIXEL_OPTIONS = ("media_io_kwargs", "mm_processor_kwargs")
"""vLLM's options that give the model other pixels than a trainer would."""
_PART = pydantic.TypeAdapter(ImagePart)


class ImageReader:
    """Reads the images of requests, and finds their places in prompts.

    It refuses images for a model that takes none, whose `placeholder` is None.
    """

    def __init__(self, llm: Any, placeholder: Any, hosts: Collection[str]) -> None:
        self._llm = llm
        self._hosts = hosts
        self.placeholder = placeholder

    def expand(self, token_ids: list[int], images: Sequence[str], where: str) -> Any:
        """Make vLLM's prompt from token ids with one placeholder for each image. Raises ApiError.

        vLLM puts in the other tokens of each image. `where` names the prompt in error messages.
        """
        decoded_images = [image for _, image in self.open_images(images, where)]
        count = token_ids.count(self.placeholder)
        if count != len(images):
            placeholders = f"{count} placeholders (token {self.placeholder})"
            message = f"{where}: {placeholders} for {len(images)} images"
            hint = (
                "send one placeholder for each image: the engine puts in the other tokens, also "
                "where they are there"
            )
            raise invalid(message, hint, code="wrong_placeholders")
        try:
            return vllm_requests.image_prompt(self._llm, token_ids, decoded_images)
        except ValueError as error:
            message = f"{where}: {error}"
            raise invalid(message, "send other images", code="refused_by_engine") from error

    def places(self, prompt: Any) -> tuple[Image, ...]:
        """List the images of the request that is being served, with their places in vLLM's prompt.

        Raises ApiError where the prompt has the placeholder of an image without an image.
        """
        ids = prompt["prompt_token_ids"]
        spans = prompt.get("mm_placeholders", {}).get("image", ())

        # A trainer would take a placeholder outside the images' spans for a further image.
        num_inside = 0
        for span in spans:
            num_inside += ids[span.offset : span.offset + span.length].count(self.placeholder)
        if ids.count(self.placeholder) > num_inside:
            message = (
                f"token {self.placeholder} stands for an image, and the prompt has it without one"
            )
            raise invalid(message, "leave its word out of texts", code="wrong_placeholders")

        images = list[Image]()
        for data, span in zip(REQUEST_IMAGES.get(), spans, strict=True):
            image = Image(
                file=data,
                name=file_name(data),
                start=span.offset,
                length=span.length,
                placeholder=self.placeholder,
            )
            images.append(image)
        return tuple(images)

    def open_images(self, texts: Sequence[str], where: str) -> list[tuple[bytes, Any]]:
        """Open the images of a prompt, from URLs or base64. Raises ApiError.

        Returns the file and the decoded image of each. The files are checked as soon as they come,
        so that many large ones are refused before the memory is full.
        """
        if self.placeholder is None:
            message = f"{where}: this model takes no images"
            hint = "leave them out, or serve a vision-language model"
            raise invalid(message, hint, code="no_images")
        images = list[tuple[bytes, Any]]()
        for number, text in enumerate(texts):
            try:
                is_url = "://" in text[:16]
                data = fetched(text, self._hosts, "data.image_hosts") if is_url else from_text(text)
                images.append((data, decoded(data)))
                check_all([file for file, _ in images])
            except ValueError as error:
                message = f"{where}: number {number} of its images: {error}"
                hint = "an image is a PNG, JPEG or WebP file in base64, or such a data URL"
                raise ApiError(400, "bad_image", message, hint) from error
        return images


@server_part("images")
def install(server: Server) -> None:
    """Have the sampler take images, and the guard check images on their way to vLLM's routes."""
    engine = server.engine
    placeholder = engine.sampler.placeholder
    image_reader = ImageReader(engine.llm, placeholder, server.image_hosts)
    engine.sampler.image_reader = image_reader
    # A model must not write the placeholder: in the next prompt it would be taken for an image.
    engine.llm.always_end_ids = [] if placeholder is None else [placeholder]

    async def check(path: str, content: bytes) -> bytes | None:
        if not content:
            return None
        body, image_urls = await read_body(_read_chat, content)
        if not image_urls:
            return None
        files, content = await run_in_thread(_with_files, image_reader, body, image_urls)
        REQUEST_IMAGES.set(files)
        return content

    server.guard.checks.append((CLIENT_PATHS, check))


def _read_chat(content: bytes) -> tuple[Any, list[dict[str, Any]]]:
    """Read the body of a chat request, and list the fields image_url in it. Raises ApiError."""
    body = json.loads(content)
    return body, list(_image_urls(body))


def _with_files(
    image_reader: ImageReader, body: dict[str, Any], image_urls: Sequence[dict[str, Any]]
) -> tuple[list[bytes], bytes]:
    """Check the images of a chat request. Raises ApiError.

    Returns the image files, and the body with the files in place of their URLs, so that vLLM loads
    nothing from the network.
    """
    urls = [image_url["url"] for image_url in image_urls]
    files = [data for data, _ in image_reader.open_images(urls, "messages")]
    refused_options = [name for name in PIXEL_OPTIONS if body.get(name)]
    if refused_options:
        message = f"{', '.join(refused_options)}: a trainer would see other pixels"
        raise invalid(message, "leave it out")
    for image_url, data in zip(image_urls, files, strict=True):
        image_url["url"] = data_url(data)
    return files, json.dumps(body).encode()


def _image_urls(body: Any) -> Iterator[dict[str, Any]]:
    """Yield the field image_url of each image in a chat. Raises ApiError for unchecked media."""
    for key in MESSAGES:
        for message in _items(body, key):
            for part in _parts(message):
                # In a part with a uuid vLLM ignores the type, and looks for media in all fields. The
                # uuid stands for the image's hash: vLLM's caches would mix up images with one uuid.
                if part.get("type") in TEXT_TYPES and "uuid" not in part:
                    continue
                try:
                    _PART.validate_python(part)
                except pydantic.ValidationError as error:
                    kind = f"{part.get('type')!r:.60}"
                    message_text = f"{key}: a part of type {kind} is neither text nor an image"
                    hint = (
                        'an image is {"type": "image_url", "image_url": {"url": '
                        '"data:image/png;base64,..."}}, no more, in /v1/chat/completions'
                    )
                    raise invalid(message_text, hint) from error
                yield part["image_url"]


def _parts(message: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a message, and those inside of a tool's result."""
    for key in PARTS:
        parts = _items(message, key)
        if isinstance(message, dict) and isinstance(message.get(key), dict):
            parts = [message[key]]  # the output of some tools is a single part
        for part in parts:
            for nested in (part, *_items(part, "content")):
                if isinstance(nested, dict):
                    yield nested


def _items(container: Any, key: str) -> list[Any]:
    """Read the list under a key; empty where there is no such list. vLLM checks the structure."""
    value = container.get(key) if isinstance(container, dict) else None
    return value if isinstance(value, list) else []
