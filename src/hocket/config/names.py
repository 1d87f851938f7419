"""What other programs call a setting, for hints at a key that is not known here."""

from collections.abc import Iterator, Mapping

from hocket.common import markdown
from hocket.common.registry import Registry

OTHER_NAMES: Registry[Mapping[str, str]] = Registry("table of names", elsewhere="hocket.extras.elsewhere")
"""Tables: setting of hocket → what others call it, names with spaces between; of a dotted key, its last words."""
other_names = OTHER_NAMES.register


def name_here(key: str) -> str | None:
    """Return the setting of hocket for a key that ends with another program's name; None for no such name."""
    here = {name: setting for setting, names in _rows() for name in names.split()}
    words = key.split(".")
    ends = [".".join(words[i:]) for i in range(len(words))]
    return next((here[end] for end in ends if end in here), None)


def names_table() -> str:
    """Return the tables of names as one of Markdown."""
    rows = ((setting, f"`{names.replace(' ', '`, `')}`") for setting, names in _rows())
    return markdown.table(("here", "in TRL, OpenRLHF or verl"), rows)


def _rows() -> Iterator[tuple[str, str]]:
    for table in OTHER_NAMES.each():
        yield from table.items()
