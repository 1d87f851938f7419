"""For the site: links that leave docs/ lead to the repository, if mkdocs.yml names it, and else are plain text."""

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **others: Any) -> str:
    """Rewrite the links of a page that lead out of docs/."""

    def rewritten(match: re.Match[str]) -> str:
        text, link = match.groups()
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), link))
        if target.startswith("docs/"):
            return match[0]
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{target})" if config.repo_url else text

    return LINK.sub(rewritten, markdown)
