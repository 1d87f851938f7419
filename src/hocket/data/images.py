"""Read the pictures of rows and messages, and give each its tokens in the place of its placeholder (docs/vision.md).

A row has them in a column, as TRL's and those of `datasets`, or in parts of its messages, as OpenAI's API.
"""

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import PIL.Image

from hocket.common.images import MAX_BYTES, check_all, decoded, fetched, from_text, png
from hocket.config import DataConfig
from hocket.types import Image, Message

COLUMNS = ("image", "images")
SOURCES = ("image", "url", "path", "base64")  # keys of a part with its picture, as templates of transformers know them


class Eyes:
    """What a renderer needs for a model that sees."""

    def __init__(self, data: DataConfig, tokenizer: Any) -> None:
        from transformers import AutoProcessor

        self._data = data
        self._processor = AutoProcessor.from_pretrained(tokenizer.name_or_path, trust_remote_code=False)
        kind, _, rest = data.source.partition(":")
        self._folder = Path.cwd() if kind == "task" else Path(data.source).expanduser().absolute().parent
        if kind == "hf":
            import datasets

            folder = Path(rest.partition(":")[0]).expanduser().absolute()
            self._folder = folder if folder.exists() else Path(datasets.config.HF_CACHE_HOME)

    def seen(self, columns: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """Return columns whose messages say by parts {"type": "image"} where pictures are, and the pictures.

        Without such a part they come before the text of the first user message, as in TRL.
        """
        asked = self._data.prompt_column
        told = {name: value for name, value in columns.items() if name not in COLUMNS}
        pictures = [*itertools.chain.from_iterable(_listed(columns.get(name)) for name in COLUMNS)]
        in_column = bool(pictures)
        placed = False
        if in_column and isinstance(told.get(asked), str):
            said = (("system", self._data.system_prompt), ("user", told[asked]))
            told[asked] = [{"role": role, "content": content} for role, content in said if content is not None]
        for name in (asked, "messages", self._data.response_column, "chosen", "rejected"):
            if not isinstance(told.get(name), list):
                continue
            found: list[Any] = []
            told[name] = [_message(one, found) for one in told[name]]
            placed = placed or bool(found)
            inline = [one for one in found if one is not None]
            if inline and in_column:
                raise ValueError(f"column {name!r} has pictures in its messages, and others are in a column: leave one")
            if name == "rejected" and inline and pictures not in ([], inline):
                raise ValueError("column 'rejected' has other pictures than 'chosen': both sides must begin alike")
            pictures = pictures or inline
        if in_column and not placed:
            for chat in [told[asked]] if isinstance(told.get(asked), list) else filter(_is_chat, told.values()):
                first = next((one for one in chat if one["role"] == "user"), chat[0])
                if isinstance(first.get("content"), str):
                    text = {"type": "text", "text": first["content"]}
                    first["content"] = [*({"type": "image"} for _ in pictures), text]
        return told, pictures

    def expanded(
        self, token_ids: Sequence[int], pictures: Sequence[Any], *, whole: bool = True
    ) -> tuple[list[int], tuple[Image, ...]]:
        """Return token ids with those of each picture in place of its placeholder, and the pictures.

        Without `whole`, the ids may be a beginning. Raise ValueError for a picture that is missing, broken or too many.
        """
        placeholder = self._processor.image_token_id
        places = [index for index, token in enumerate(token_ids) if token == placeholder]
        if len(places) > len(pictures) or (whole and len(places) < len(pictures)):
            word = self._processor.image_token
            what = f"{len(pictures)} images for {len(places)} places in the text as the chat template writes it"
            raise ValueError(f"{what}: a part {{'type': 'image'}} is a place, and {word} within a text must not be")
        ids = list[int]()
        images = list[Image]()
        end = 0
        for place, picture in zip(places, pictures, strict=False):
            ids += token_ids[end:place]
            end = place + 1
            data = self._read(picture)
            tokens = self._processor(text=[self._processor.image_token], images=[[decoded(data)]])["input_ids"][0]
            images.append(Image(data=data, start=len(ids), length=len(tokens), placeholder=placeholder))
            ids += tokens
        check_all([image.data for image in images])
        return [*ids, *token_ids[end:]], tuple(images)

    def in_parts(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages whose contents are lists: some templates of models that see take no others."""
        contents = [one.get("content") for one in messages]
        parts = [[{"type": "text", "text": one}] if isinstance(one, str) else one for one in contents]
        return [{**message, "content": content} for message, content in zip(messages, parts, strict=True)]

    def origin(self, rows: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Return what prompts follow from beside the rows: the processor, and the files that rows name."""
        found: list[Any] = [self._processor.to_json_string()]
        with suppress(ValueError, OSError):  # of a row that is refused later
            for picture in itertools.chain.from_iterable(self.seen(row)[1] for row in rows):
                path = picture.get("path") if isinstance(picture, Mapping) and not picture.get("bytes") else picture
                if isinstance(path, str) and ":" not in path:
                    there = self._path(path).stat()
                    found.append((path, there.st_size, there.st_mtime_ns))
        return found

    def _read(self, picture: Any) -> bytes:
        match picture:
            case {"bytes": bytes(data)} | bytes(data):
                return data
            case {"path": str(text)} | str(text):
                if text.startswith("data:"):
                    return from_text(text)
                if "://" in text:
                    return fetched(text, self._data.image_hosts, f"{self._data.section}.image_hosts")
                try:
                    with self._path(text).open("rb") as file:
                        return file.read(MAX_BYTES + 1)
                except OSError as error:
                    raise ValueError(
                        f"an image can't be read: {error}; paths are relative to {self._folder}"
                    ) from error
            case PIL.Image.Image():
                return png(picture)
        raise ValueError(f"an image must be a path, a data URL, bytes or of Pillow, got {picture!r:.80}")

    def _path(self, text: str) -> Path:
        """Return a path in the data's folder; a symbolic link that leads out of it is the user's own."""
        path = Path(os.path.abspath(self._folder / text))
        if not path.is_relative_to(self._folder):
            raise ValueError(f"the image {text!r:.80} is outside {self._folder}: put the data file above its images")
        if path.exists() and not path.is_file():
            raise ValueError(f"the image {text!r:.80} is no file")
        return path


def _listed(value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    return value if isinstance(value, list | tuple) else (value,)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) and "role" in one for one in value)


def _message(message: Any, found: list[Any]) -> Any:
    """Return a message without its pictures, which are added to those found; None for one of the row's column."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return {**message} if isinstance(message, Mapping) else message
    parts = list[Mapping[str, str]]()
    for part in message["content"]:
        match part:
            case {"type": "text", "text": str(text)}:
                parts.append({"type": "text", "text": text})
                continue
            case {"type": "image_url", "image_url": {"url": str(picture)} | str(picture)}:
                found.append(picture)
            case {"type": "image"}:
                found.append(next((part[key] for key in SOURCES if part.get(key) is not None), None))
            case _:
                raise ValueError(f"a part of a message must be of type text, image or image_url, got {part!r:.80}")
        parts.append({"type": "image"})
    if {"type": "image"} in parts:
        return {**message, "content": parts}
    return {**message, "content": "".join(part["text"] for part in parts)}
