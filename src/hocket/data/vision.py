"""Read the images of rows and messages, and put each one's tokens in its place.

docs/how-to/vision.md has the guide.

A row has images in a column, as in TRL and `datasets`, or in parts of its messages, as in OpenAI's
API.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import PIL.Image

from hocket.common.vision import Stored, check_all, decoded, fetched, file_name, from_text, png
from hocket.config import DataConfig
from hocket.data.renderer import IMAGE_COLUMNS, Images, Options, Renderer, ToolSchemas, renderer
from hocket.types import Image, Message

# Keys under which a part of a message may have its image, as templates of transformers know them.
KEYS = ("image", "url", "path", "base64")
PLACE = {"type": "image"}  # a part that stands for an image: the template writes a placeholder


@renderer("vision")
class SeeingRenderer(Renderer):
    """Renders for a model that takes images.

    A raw image is what a row has: bytes, a path, a URL, a mapping or an image of Pillow. An
    `Image` is one that has its tokens in a sequence.
    """

    contents = (str, list)

    def __init__(self, data: DataConfig, tokenizer: Any, tools: ToolSchemas) -> None:
        from transformers import AutoProcessor

        self._processor = AutoProcessor.from_pretrained(
            tokenizer.name_or_path, trust_remote_code=False
        )
        self.placeholder: int = self._processor.image_token_id
        # Paths of images are relative to the data file. A built-in task takes the current folder.
        self._folder = Path(data.source).expanduser().absolute().parent
        kind, _, name = data.source.partition(":")
        if kind == "hf":
            import datasets

            folder = Path(name.partition(":")[0]).expanduser().absolute()
            # A data set of the hub has its image files in the cache.
            self._folder = folder if folder.exists() else Path(datasets.config.HF_CACHE_HOME)
        super().__init__(data, tokenizer, tools)

    def split_images(self, columns: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[Any]]:
        """Split a row into columns whose messages have PLACE for each image, and the raw images.

        If the messages have no places, the images come before the text of the first user
        message, as in TRL. Raise ValueError if a row has several lists of images.
        """
        prompt_column = self._data.prompt_column
        remaining = {name: value for name, value in columns.items() if name not in IMAGE_COLUMNS}

        # Images in columns of their own. A text with such images becomes a chat: only the chat
        # template writes placeholders.
        in_columns: list[Any] = []
        for name in IMAGE_COLUMNS:
            value = columns.get(name)
            if isinstance(value, list | tuple):
                in_columns += value
            elif value is not None:
                in_columns.append(value)
        if in_columns and isinstance(remaining.get(prompt_column), str):
            remaining[prompt_column] = list(self.chat(remaining[prompt_column]))

        # Put PLACE for the images in messages. An entry of `inline` is None where a part only
        # marks the place of an image that is in a column.
        inline: dict[str, list[Any]] = {}
        for name in (prompt_column, "messages", self._data.response_column, "chosen", "rejected"):
            if name not in inline and isinstance(remaining.get(name), list):
                inline[name] = []
                messages = remaining[name]
                remaining[name] = [_with_places(message, inline[name]) for message in messages]

        # A list of None alone has places for the images of a column. Several columns may show the
        # same images, as `chosen` and `rejected` do.
        lists = [images for images in inline.values() if images.count(None) < len(images)]
        if lists and (in_columns or any(images != lists[0] for images in lists)):
            raise ValueError(
                "it has several lists of images: leave one, "
                "or have 'chosen' and 'rejected' begin alike"
            )
        if not in_columns:
            return remaining, lists[0] if lists else []

        # No message has a place for the images of the columns: put them first.
        if not any(inline.values()):
            for name in [prompt_column] if prompt_column in inline else list(inline):
                _put_first(remaining[name], len(in_columns))
        return remaining, in_columns

    def insert_images(
        self,
        token_ids: list[int],
        raw_images: Sequence[Any],
        before: Sequence[Image] = (),
        *,
        whole: bool = True,
    ) -> tuple[list[int], Images]:
        """Put each image's tokens in the place of its placeholder. Returns the ids and the images.

        Raise ValueError if an image is missing or broken, or if there are too many together with
        those `before`.
        """
        # Every placeholder token is the place of an image, in order.
        places = [index for index, token in enumerate(token_ids) if token == self.placeholder]
        word = self._processor.image_token
        if len(places) > len(raw_images) or (whole and len(places) < len(raw_images)):
            raise ValueError(
                f"{len(raw_images)} images for {len(places)} places in the text as the chat "
                f"template writes it: a part {PLACE} is a place, and {word} within a text must "
                "not be"
            )
        ids: list[int] = []
        images: list[Image] = []
        files = [image.data for image in before]
        end = 0  # the tokens up to here are in `ids`
        for place, raw_image in zip(places, raw_images, strict=False):
            # Copy the text before the placeholder, and leave the placeholder out.
            ids += token_ids[end:place]
            end = place + 1

            # The processor knows how many tokens an image of this size has.
            file = self._file(raw_image)
            data = self._read(file)
            files.append(data)
            encoded = self._processor(
                text=[word], images=[[decoded(data)]], add_special_tokens=False
            )
            tokens = encoded["input_ids"][0]
            image = Image(
                file=file,
                name=file_name(data),
                start=len(ids),
                length=len(tokens),
                placeholder=self.placeholder,
            )
            images.append(image)
            ids += tokens

        # Their number and size are limited over the whole sequence, as servers limit them.
        check_all(files)
        return ids + token_ids[end:], tuple(images)

    def split_observation(self, observation: Any) -> tuple[Any, Sequence[Any]]:
        """Split an environment's observation into one with PLACE for its images, and these.

        Its texts have a space within each word that would be read as an image.
        """
        columns, raw_images = self.split_images({"messages": list(observation.messages)})
        messages = self._plain(columns["messages"])
        text = self._plain(observation.text)
        return dataclasses.replace(observation, messages=messages, text=text), raw_images

    def _plain(self, value: Any) -> Any:
        """Break the image token's word in all texts of a value."""
        if isinstance(value, list):
            return [self._plain(part) for part in value]
        if isinstance(value, dict):
            return {name: self._plain(part) for name, part in value.items()}
        if isinstance(value, str):
            word = self._processor.image_token
            return value.replace(word, f"{word[0]} {word[1:]}")
        return value

    def render(self, messages: Sequence[Message], options: Options = None, **more: Any) -> str:
        """Render a chat whose contents are lists: some templates of such models take no text."""
        with_parts = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, str):
                content = [{"type": "text", "text": content}]
            with_parts.append(dict(message) | {"content": content})
        return super().render(with_parts, options, **more)

    def image_files(self, rows: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Describe the processor, and the path, size and time of each file that rows name."""
        facts: list[Any] = [self._processor.to_json_string()]
        with suppress(ValueError, OSError):  # a row with such an error is refused later
            for row in rows:
                _, raw_images = self.split_images(row)
                for raw_image in raw_images:
                    path = self._path(raw_image)
                    if path:
                        stat = path.stat()
                        facts.append((str(path), stat.st_size, stat.st_mtime_ns))
        return facts

    def _file(self, raw_image: Any) -> bytes | Callable[[], bytes]:
        """Return the bytes of an image's file, or a function that reads them."""
        path = self._path(raw_image)
        if path:
            return Stored(path.read_bytes)
        match raw_image:
            case {"bytes": bytes(data)} | bytes(data):
                return data
            case {"path": str(text)} | str(text):
                if text.startswith("data:"):
                    return from_text(text)
                return fetched(text, self._data.image_hosts, f"{self._data.section}.image_hosts")
            case PIL.Image.Image():
                return png(raw_image)
        raise ValueError(
            f"an image must be a path, a data URL, bytes or of Pillow, got {raw_image!r:.80}"
        )

    def _read(self, file: bytes | Callable[[], bytes]) -> bytes:
        try:
            return file() if callable(file) else file
        except OSError as error:
            raise ValueError(
                f"an image can't be read: {error}; paths are relative to {self._folder}"
            ) from error

    def _path(self, raw_image: Any) -> Path | None:
        """Return an image's path in the data's folder; None if it is no path.

        A symbolic link may lead out of the folder: it is the user's own.
        """
        text = raw_image
        if isinstance(raw_image, Mapping) and not raw_image.get("bytes"):
            text = raw_image.get("path")
        if not isinstance(text, str) or text.startswith("data:") or "://" in text:
            return None
        # Not resolved, so that a link within the folder counts as within. A row must not read
        # other files of the machine by "..".
        path = Path(os.path.abspath(self._folder / text))
        if not path.is_relative_to(self._folder):
            raise ValueError(
                f"the image {text!r:.80} is outside {self._folder}: "
                "put the data file above its images"
            )
        if path.exists() and not path.is_file():
            raise ValueError(f"the image {text!r:.80} is no file")
        return path


def _put_first(messages: list[Any], num_images: int) -> None:
    """Put places of images before the text of the first user message."""
    for message in messages:
        if message.get("role") == "user":
            if isinstance(message.get("content"), str):
                text = {"type": "text", "text": message["content"]}
                message["content"] = [PLACE] * num_images + [text]
            return


def _with_places(message: Any, raw_images: list[Any]) -> Any:
    """Return a copy of a message with PLACE for each image, which is added to `raw_images`.

    None is added for a part without an image: that is in a column of the row.
    """
    if not isinstance(message, Mapping):
        raise ValueError(
            f"a message must be {{'role': text, 'content': text}}, got {message!r:.80}"
        )
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts: list[Mapping[str, str]] = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                parts.append({"type": "text", "text": text})
                continue
            case {"type": "image_url", "image_url": {"url": str(url)} | str(url)}:
                raw_images.append(url)
            case {"type": "image"}:
                values = [part[key] for key in KEYS if part.get(key) is not None]
                raw_images.append(values[0] if values else None)
            case _:
                raise ValueError(
                    "a part of a message must be of type text, image or image_url, "
                    f"got {part!r:.80}"
                )
        parts.append(PLACE)
    # Without images a message is plain text again.
    if PLACE in parts:
        return dict(message) | {"content": parts}
    return dict(message) | {"content": "".join(part["text"] for part in parts)}
