"""What fakes in several tests have in common."""

from typing import Any

from hocket.protocol import Health


def health(**known: Any) -> Health:
    """Returns a server's answer to /health with what is known, and something for the rest."""
    anything: dict[str, Any] = {
        "status": "ready",
        "version": 0,
        "model": "m",
        "dtype": "float32",
        "vocab_size": 9,
        "max_length": 64,
        "tokenizer_sha256": "",
        "session": "s",
        "in_flight": 0,
        "root": "/",
        "device": "cpu",
        "workers": 1,
        "kv_tokens": 4096,
    }
    return Health(**(anything | known))
