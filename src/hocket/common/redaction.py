"""Remove the secrets of a run from every text that is kept or shown. Standard library only."""

import base64
import re
from urllib.parse import quote

from hocket.errors import ConfigError

SESSION_KEY = "hocket-session-"  # begins the key of an agent's session
_SECRETS = {f"{SESSION_KEY}[0-9a-f]+"}  # regular expressions of what `redacted` removes


def secret(value: str, name: str) -> str:
    """Strip a key, and have `redacted` remove it from now on.

    Raises ConfigError that names the key's setting, if it is no key.
    """
    key = value.strip()
    if not re.fullmatch("[ -~]{8,}", key):
        raise ConfigError(f"{name} needs at least 8 plain ASCII characters")
    # The key may be shown as it is, in a URL, or in base64.
    forms = (key, quote(key, safe=""), base64.b64encode(key.encode()).decode())
    _SECRETS.update(map(re.escape, forms))
    return key


def redacted(text: str) -> str:
    """Replace all secrets in a text by "[secret]"."""
    if not text:
        return text
    # Sorted so that a longer secret is tried before another one that is its beginning.
    patterns = sorted(_SECRETS, reverse=True)
    return re.sub("|".join(patterns), "[secret]", text, flags=re.IGNORECASE)
