"""Sets of parameters of which `run.py test` takes a few."""

from collections.abc import Iterable
from typing import Any

import pytest


def long(*rows: tuple[Any, ...]) -> list[Any]:
    """Returns rows of parameters marked long."""
    return [pytest.param(*row, marks=pytest.mark.long) for row in rows]


def mostly_long(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Returns the values with all but the quick ones marked long: each proves the same of another setting."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.long) for value in values]
