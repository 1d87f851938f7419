"""Take the secrets of a run out of each text that is kept or shown. Standard library only."""

import base64
import re
from urllib.parse import quote

from hocket.errors import ConfigError

SESSION_KEY = "hocket-session-"  # begins the key of an agent's session
_SECRETS = {f"{SESSION_KEY}[0-9a-f]+"}  # patterns


def secret(value: str, name: str) -> str:
    """Return a key without white space around it, which `redacted` knows from now on. Raise ConfigError for no key."""
    key = value.strip()
    if not re.fullmatch("[ -~]{8,}", key):
        raise ConfigError(f"{name} needs at least 8 plain ASCII characters")
    forms = (key, quote(key, safe=""), base64.b64encode(key.encode()).decode())
    _SECRETS.update(map(re.escape, forms))
    return key


def redacted(text: str) -> str:
    patterns = sorted(_SECRETS, reverse=True)  # of two that begin alike the longer one first
    return text and re.sub("|".join(patterns), "[secret]", text, flags=re.IGNORECASE)
