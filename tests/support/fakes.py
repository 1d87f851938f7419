"""What fakes in several tests have in common."""

import hashlib
from pathlib import Path
from typing import Any

from hocket.protocol import Completion, Health, Manifest, ReloadResponse
from hocket.types import Image


def health(**known: Any) -> Health:
    """Returns a server's answer to /health with what is known, and something for the rest."""
    anything: dict[str, Any] = {
        "status": "ready",
        "version": 0,
        "model": "m",
        "dtype": "float32",
        "architecture": "",
        "vocab_size": 9,
        "max_length": 64,
        "max_adapter_rank": 0,
        "tokenizer_sha256": "",
        "session": "s",
        "in_flight": 0,
        "root": "/",
        "device": "cpu",
        "workers": 1,
        "kv_tokens": 4096,
    }
    return Health(**(anything | known))


def reloaded(version: int, checksum: str, session: str = "s") -> ReloadResponse:
    """Returns a server's answer when it has loaded a version."""
    return ReloadResponse(version=version, seconds=0.1, num_tensors=2, checksum=checksum, session=session)


def completion(*token_ids: int, logprobs: tuple[float, ...], version: int = 1, text: str = "") -> Completion:
    """Returns a completion that ended by itself."""
    spans = ((version, 0, len(token_ids)),)
    return Completion(token_ids=token_ids, logprobs=logprobs, finish_reason="stop", versions=spans, text=text)


def image(data: bytes, *, start: int = 0, length: int = 1, placeholder: int = 9) -> Image:
    """Returns an image by the name that it has everywhere."""
    name = f"{hashlib.sha256(data).hexdigest()}.png"
    return Image(file=data, name=name, start=start, length=length, placeholder=placeholder)


def manifest_of(folder: Path) -> Manifest:
    """Returns the manifest of a published version."""
    return Manifest.model_validate_json((folder / "manifest.json").read_bytes())


class Clock:
    """Time that passes where a test says so, in the place of the module `time`."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic
