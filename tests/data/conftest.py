from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hocket.common.registry import load_plugins
from hocket.data import tokenizer as tokenizers
from hocket.data.curriculum import CURRICULA, Curriculum
from support.eyes import make_idefics
from support.records import write_rows
from support.tokenizers import make_tokenizer, shipped

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The tokenizer that ships: one token per byte."""
    return shipped()


@pytest.fixture(scope="session")
def sighted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tokenizer of a tiny model that sees."""
    return tokenizers.load(make_idefics(tmp_path_factory.mktemp("eyes")))


@pytest.fixture
def bos_tokenizer() -> Any:
    """Words a to e are 3 to 7; adds <s> (0) before whatever it encodes, and its chat template writes <s> too."""
    words = ["<s>", "</s>", "<eot>", *"abcde", "user", "assistant"]
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] }} {{ m['content'] }}<eot>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    special = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<eot>"]}
    return make_tokenizer(words, template, unknown="e", before="<s>", **special)


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    def write(*rows: Any, name: str = "rows.jsonl") -> str:
        return str(write_rows(tmp_path / name, *rows))

    return write


@pytest.fixture(scope="session")
def window(tmp_path_factory: pytest.TempPathFactory) -> type[Curriculum]:
    """The curriculum that docs/how-to/curriculum.md shows, as it stands."""
    if "window" in CURRICULA.names:  # for the tests of another folder
        return CURRICULA.get("window")
    page = (ROOT / "docs" / "how-to" / "curriculum.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    plugin = tmp_path_factory.mktemp("plugins") / "my_curriculum.py"
    plugin.write_text(code)
    load_plugins([str(plugin)])
    return CURRICULA.get("window")
