"""Read the pictures of rows and messages, and give each its tokens in the place of its placeholder (docs/vision.md).

A row has them in a column, as TRL's and those of `datasets`, or in parts of its messages, as OpenAI's API.
"""

import dataclasses
import itertools
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

KEYS = (
    "image",
    "url",
    "path",
    "base64",
)  # of a part with its picture, as templates of transformers know them
PLACE = {"type": "image"}


@renderer("vision")
class SeeingRenderer(Renderer):
    """Renders for a model that takes images."""

    contents = (str, list)

    def __init__(self, data: DataConfig, tokenizer: Any, tools: ToolSchemas) -> None:
        from transformers import AutoProcessor

        self._processor = AutoProcessor.from_pretrained(
            tokenizer.name_or_path, trust_remote_code=False
        )
        self.placeholder: int = self._processor.image_token_id
        kind, _, rest = data.source.partition(":")
        self._folder = Path(data.source).expanduser().absolute().parent  # of a task this one
        if kind == "hf":
            import datasets

            folder = Path(rest.partition(":")[0]).expanduser().absolute()
            self._folder = folder if folder.exists() else Path(datasets.config.HF_CACHE_HOME)
        super().__init__(data, tokenizer, tools)

    def seen(self, columns: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[Any]]:
        """Return columns whose messages have PLACE where pictures are, and the pictures.

        Without a place they come before the text of the first user message, as in TRL.
        """
        asked = self._data.prompt_column
        pictures = [*itertools.chain(*(_listed(columns.get(name)) for name in IMAGE_COLUMNS))]
        told = {name: value for name, value in columns.items() if name not in IMAGE_COLUMNS}
        if pictures and isinstance(told.get(asked), str):
            told[asked] = [*self.chat(told[asked])]
        inline = dict[str, list[Any]]()
        for name in {asked, "messages", self._data.response_column, "chosen", "rejected"}:
            if isinstance(told.get(name), list):
                inline[name] = []
                told[name] = [_message(one, inline[name]) for one in told[name]]
        given = [found for found in inline.values() if found.count(None) < len(found)]
        if given and (pictures or given != given[:1] * len(given)):
            raise ValueError(
                "it has several lists of pictures: leave one, or have 'chosen' and 'rejected' begin alike"
            )
        if pictures and not any(inline.values()):
            for name in [asked] if asked in inline else inline:
                first: Any = next((one for one in told[name] if one.get("role") == "user"), {})
                if isinstance(first.get("content"), str):
                    first["content"] = [
                        *[PLACE] * len(pictures),
                        {"type": "text", "text": first["content"]},
                    ]
        return told, pictures or (given[0] if given else [])

    def expanded(
        self,
        token_ids: list[int],
        pictures: Sequence[Any],
        before: Sequence[Image] = (),
        *,
        whole: bool = True,
    ) -> tuple[list[int], Images]:
        """Return token ids with those of each picture in place of its placeholder, and the pictures.

        Without `whole`, the ids may be a beginning. Raise ValueError for a picture that is missing or broken, or too
        much beside those before.
        """
        places = [index for index, token in enumerate(token_ids) if token == self.placeholder]
        word = self._processor.image_token
        if len(places) > len(pictures) or (whole and len(places) < len(pictures)):
            what = f"{len(pictures)} images for {len(places)} places in the text as the chat template writes it"
            raise ValueError(
                f"{what}: a part {PLACE} is a place, and {word} within a text must not be"
            )
        ids = list[int]()
        images = list[Image]()
        files = [image.data for image in before]
        end = 0
        for place, picture in zip(places, pictures, strict=False):
            ids += token_ids[end:place]
            end = place + 1
            file = self._file(picture)
            try:
                data = file() if callable(file) else file
            except OSError as error:
                raise ValueError(
                    f"an image can't be read: {error}; paths are relative to {self._folder}"
                ) from error
            files.append(data)
            shown = [[decoded(data)]]
            tokens = self._processor(text=[word], images=shown, add_special_tokens=False)[
                "input_ids"
            ][0]
            length = len(tokens)
            images.append(
                Image(
                    file=file,
                    name=file_name(data),
                    start=len(ids),
                    length=length,
                    placeholder=self.placeholder,
                )
            )
            ids += tokens
        check_all(files)
        return [*ids, *token_ids[end:]], tuple(images)

    def observed(self, observation: Any) -> tuple[Any, Sequence[Any]]:
        """Return also its texts with a space in each word that would be read as an image."""
        told, pictures = self.seen({"messages": [*observation.messages]})
        said = {"messages": told["messages"], "text": observation.text}
        return dataclasses.replace(observation, **self._plain(said)), pictures

    def _plain(self, said: Any) -> Any:
        if isinstance(said, list):
            return [*map(self._plain, said)]
        if isinstance(said, dict):
            return {name: self._plain(value) for name, value in said.items()}
        word = self._processor.image_token
        return said.replace(word, f"{word[0]} {word[1:]}") if isinstance(said, str) else said

    def render(self, messages: Sequence[Message], options: Options = None, **more: Any) -> str:
        """Render contents as lists: some templates of models that see take no others."""
        contents = [one.get("content") for one in messages]
        parts = [
            [{"type": "text", "text": one}] if isinstance(one, str) else one for one in contents
        ]
        lists = [
            {**message, "content": content}
            for message, content in zip(messages, parts, strict=True)
        ]
        return super().render(lists, options, **more)

    def origin(self, rows: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Return the processor, and the files that rows name."""
        found: list[Any] = [self._processor.to_json_string()]
        with suppress(ValueError, OSError):  # of a row that is refused later
            for picture in itertools.chain.from_iterable(self.seen(row)[1] for row in rows):
                if path := self._path(picture):
                    there = path.stat()
                    found.append((str(path), there.st_size, there.st_mtime_ns))
        return found

    def _file(self, picture: Any) -> bytes | Callable[[], bytes]:
        if path := self._path(picture):
            return Stored(path.read_bytes)
        match picture:
            case {"bytes": bytes(data)} | bytes(data):
                return data
            case {"path": str(text)} | str(text):
                hosts = self._data.image_hosts, f"{self._data.section}.image_hosts"
                return from_text(text) if text.startswith("data:") else fetched(text, *hosts)
            case PIL.Image.Image():
                return png(picture)
        raise ValueError(
            f"an image must be a path, a data URL, bytes or of Pillow, got {picture!r:.80}"
        )

    def _path(self, picture: Any) -> Path | None:
        """Find an image in the data's folder; a symbolic link that leads out of it is the user's own."""
        text = (
            picture.get("path")
            if isinstance(picture, Mapping) and not picture.get("bytes")
            else picture
        )
        if not isinstance(text, str) or text.startswith("data:") or "://" in text:
            return None
        path = Path(os.path.abspath(self._folder / text))
        if not path.is_relative_to(self._folder):
            raise ValueError(
                f"the image {text!r:.80} is outside {self._folder}: put the data file above its images"
            )
        if path.exists() and not path.is_file():
            raise ValueError(f"the image {text!r:.80} is no file")
        return path


def _listed(value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    return value if isinstance(value, list | tuple) else (value,)


def _message(message: Any, found: list[Any]) -> Any:
    """Return a message with PLACE for its pictures, which are added to those found; None: in the row's column."""
    if not isinstance(message, Mapping):
        raise ValueError(
            f"a message must be {{'role': text, 'content': text}}, got {message!r:.80}"
        )
    content = message.get("content")
    if not isinstance(content, list):
        return {**message}
    parts = list[Mapping[str, str]]()
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                parts.append({"type": "text", "text": text})
                continue
            case {"type": "image_url", "image_url": {"url": str(picture)} | str(picture)}:
                found.append(picture)
            case {"type": "image"}:
                found.append(next((part[key] for key in KEYS if part.get(key) is not None), None))
            case _:
                raise ValueError(
                    f"a part of a message must be of type text, image or image_url, got {part!r:.80}"
                )
        parts.append(PLACE)
    return {
        **message,
        "content": parts if PLACE in parts else "".join(part["text"] for part in parts),
    }
