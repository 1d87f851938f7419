"""The table of docs/reference/models.md; one of its columns is a feature of extras."""

from pathlib import Path

import pytest
from tests.trainer.conftest import peak  # noqa: F401 - for each test here
from tests.trainer.test_architecture import QUICK, untried  # noqa: F401 - for each test here

import architectures
from support.parameters import mostly_long


@pytest.mark.parametrize("family", mostly_long(architectures.FAMILIES, *QUICK))
def test_the_page_has_what_comes_out(family: str, tmp_path: Path) -> None:
    result = architectures.try_family(family, str(tmp_path))
    assert result.row(family) in architectures.PAGE.read_text(encoding="utf-8")
    assert all(value <= 1 for value in result.apart.values()), result.apart
