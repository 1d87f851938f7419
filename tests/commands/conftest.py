"""Built-in tasks of a few rows, as no test here looks at many of them."""

import pytest

from hocket.data import sources


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "NUM_ROWS", 64)
