"""Prompts are prepared once: a second start gets the same ones from the cache, and nothing but time depends on it."""

import datetime
import logging
import os
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from filelock import FileLock
from tests.data.test_vision import BLUE, RED, Write

from hocket import config as config_module
from hocket.commands import runs as commands
from hocket.config import DataConfig
from hocket.data import sources
from hocket.data.curriculum import Shuffle
from hocket.data.prompts import load_prompts
from hocket.data.renderer import Renderer
from hocket.data.stream import PromptStream
from hocket.errors import DataError
from hocket.extras import cache
from hocket.extras.cache import KeptPrompts
from hocket.types import Prompts
from support.processes import ROOT
from support.records import user, write_rows
from support.tokenizers import shipped

CHAT = [{"role": "system", "content": "be"}, user("c")]
ROWS = [
    {"prompt": "a", "answer": "1", "level": 2, "more": {"x": [1, 1.0, None, True]}},
    {"prompt": CHAT, "answer": 2.5, "level": 0.5, "more": "\ud800 é"},
    {"prompt": "a longer one", "answer": "3", "level": 1, "more": float("nan")},
]
PAIRS = pyarrow.scalar([(1, 2)], pyarrow.map_(pyarrow.int64(), pyarrow.int64()))
Load = Callable[..., Prompts]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", *ROWS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "hocket" / "prompts"


@pytest.fixture
def load(folder: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> Load:
    def load(source: object, *, cached: bool = True, tok: Any = tokenizer, longest: int = 99, **more: Any) -> Any:
        """Load prompts; without `cached`, prepare them as those of a small source."""
        monkeypatch.setattr(sources, "SMALL", 0 if cached else 1 << 40)
        tools = more.pop("tools", ())
        data = DataConfig(source=str(source)).model_copy(update=more)
        return load_prompts(data, tok, max_prompt_tokens=longest, tools=tools)[0]

    return load


def test_a_second_start_has_the_same_prompts_without_rendering_one(
    load: Load, rows: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, first = load(rows, cached=False), load(rows)
    monkeypatch.setattr(Renderer, "row", None)
    second = load(rows)
    assert (type(plain), type(first), type(second)) == (Prompts, KeptPrompts, KeptPrompts)
    for prompts in (first, second):
        assert list(map(repr, prompts)) == list(map(repr, plain))  # NaN is not equal to itself
        assert prompts[-1].id == plain[-1].id
        assert [prompt.id for prompt in prompts[1:9]] == ["rows.jsonl:2", "rows.jsonl:3"]
        states = [PromptStream(some, Shuffle(), seed=7).state() for some in (prompts, plain)]
        assert states[0] == states[1]
        assert prompts.column("level") == [2, 0.5, 1]
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parents[1]))
    short, expected = load(rows, longest=5), load(rows, cached=False, longest=5)
    assert (list(short), short.fingerprint) == (list(expected), expected.fingerprint)
    assert len(list(folder.rglob("*.arrow"))) == len(short) == 1


def test_what_the_prompts_follow_from_is_in_the_key(
    load: Load, rows: Path, bos_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shouting = shipped(chat_template="{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    tools, other = shipped("tiny-tools"), shipped()
    other.add_tokens("ab")
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    changes: list[dict[str, Any]] = [
        {},
        {"answer_column": None},
        {"prompt_column": "answer", "answer_column": None, "limit": 2},
        {"system_prompt": "Be brief."},
        {"chat_template": False, "limit": 1},
        {"tok": shouting},
        {"tok": bos_tokenizer},
        {"tok": other},
        {"tok": tools},
        {"tok": tools, "tools": (tool,)},
    ]
    monkeypatch.setattr(sources, "NUM_ROWS", 0)  # `limit` of a few rows is for a few
    write_rows(rows, {"prompt": "ab", "answer": "b c", "level": 1})
    found = [[str(list(load(rows, cached=cached, **change))) for change in changes] for cached in (False, True, True)]
    assert found[0] == found[1] == found[2]
    rows.write_text(rows.read_text().replace("b c", "d"), encoding="utf-8")
    assert load(rows)[0].answer == "d"


@pytest.mark.parametrize("hurt", [lambda b: b[:-9], lambda b: b[:400] + b"\xff" + b[401:], lambda b: b"", None])
@pytest.mark.parametrize("kind", ["arrow", "json"])
def test_a_damaged_file_is_not_used_and_written_again(
    load: Load, rows: Path, folder: Path, hurt: Callable[[bytes], bytes] | None, kind: str
) -> None:
    load(rows)
    (file,) = folder.rglob(f"*.{kind}")
    whole = file.read_bytes()
    file.unlink() if hurt is None else file.write_bytes(hurt(whole))
    assert list(map(repr, load(rows))) == list(map(repr, load(rows, cached=False)))
    assert isinstance(load(rows), KeptPrompts)
    (again,) = folder.rglob("*.arrow")
    assert kind == "json" or again.read_bytes() == whole


def test_a_cache_that_can_not_be_written_costs_a_warning_and_nothing_else(
    load: Load, rows: Path, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)  # which another test may have raised
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))  # as a full disk
    try:
        prompts = load(rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (type(prompts), len(prompts), list(folder.rglob("*.arrow"))) == (Prompts, 3, [])
    folder.parent.parent.rename(folder.parents[2] / "before")
    folder.parents[1].touch()  # a file where the folder should be
    assert len(load(rows)) == 3
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parents[2] / "other"))
    for column, value in ("day", pyarrow.scalar(datetime.date(2026, 1, 2))), ("map", PAIRS):
        columns = {"prompt": ["a"], "answer": ["b"], "level": [1], column: pyarrow.array([value], value.type)}
        pyarrow.parquet.write_table(pyarrow.table(columns), rows.with_suffix(".parquet"))
        held = {1: 2} if column == "map" else value.as_py()
        assert load(rows.with_suffix(".parquet"))[0].meta == {"level": 1, column: held}
    assert list(folder.parents[2].glob("other/**/*.arrow")) == []
    said = ["File too large", "Not a directory", "date is not JSON serializable", "a column that JSON can't hold"]
    for record, why in zip(caplog.records, said, strict=True):
        assert record.message.startswith("can't keep the prepared prompts")
        assert why in record.message


def test_two_starts_at_once_prepare_once_and_one_that_fails_leaves_nothing(
    load: Load, rows: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, rendered = Renderer.row, []
    monkeypatch.setattr(Renderer, "row", lambda *given: (rendered.append(given), row(*given))[1])
    with ThreadPoolExecutor(2) as starts:
        assert [len(found) for found in starts.map(load, [rows] * 2)] == [3, 3]
    assert len(rendered) == 3
    write_rows(rows, {})
    with pytest.raises(DataError, match=r"rows\.jsonl:1: no column 'prompt'"):
        load(rows)
    assert len(list(folder.rglob("*.arrow"))) == 1


def test_a_start_that_waits_for_another_one_says_so(
    load: Load, rows: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(rows)
    (prepared,) = (path for path in folder.iterdir() if path.is_dir())
    other = FileLock(folder.with_name("locks") / prepared.name)
    other.acquire()
    lines = []

    def warn(line: str) -> None:
        lines.append(line)
        other.release()  # the other start has ended

    monkeypatch.setattr(cache, "PATIENCE_S", 0.0)
    monkeypatch.setattr(cache.log, "warning", warn)
    assert len(load(rows)) == 3
    assert lines == ["another start is preparing these prompts: waiting for it (Ctrl-C to give up)"]


def test_what_nobody_used_for_a_month_is_removed(load: Load, rows: Path, folder: Path) -> None:
    load(rows)
    (used,) = folder.iterdir()
    month_ago, hour = time.time() - cache.UNUSED_S, 3600
    for old in folder / "unused", used:
        old.mkdir(exist_ok=True)
        os.utime(old, (0, month_ago + (hour if old is used else -hour)))
    load(rows)  # is used again
    assert list(folder.iterdir()) == [used]
    assert used.stat().st_mtime > month_ago + 2 * hour


def test_a_hugging_face_data_set_is_known_by_its_content(
    load: Load, rows: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    source = tmp_path / "source"
    for kind in ("files", "saved"):
        for answer in ("x", "y"):
            sources._loaded.cache_clear()  # of one process
            source.mkdir(exist_ok=True)
            made = datasets.Dataset.from_list([{"prompt": "a", "answer": answer, "level": 1}])
            made.to_json(str(source / "train.jsonl")) if kind == "files" else made.save_to_disk(str(source))
            for _ in range(2):
                (prompt,) = load(f"hf:{source}")
                assert (prompt.answer, prompt.id) == (answer, f"hf:{source}/train:0")
    assert len(list(folder.rglob("*.arrow"))) == 4


def test_the_second_start_takes_pictures_from_the_cache_until_a_file_changes(
    sighted: Any, write_jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "12:30.png").write_bytes(RED)
    data = DataConfig(source=write_jsonl({"prompt": "a", "image": "12:30.png"}), answer_column=None)

    def start() -> Prompts:
        return load_prompts(data, sighted, max_prompt_tokens=100)[0]

    first = start()
    with monkeypatch.context() as patch:
        patch.setattr("hocket.data.vision.decoded", None)  # the second has nothing to decode
        second = start()
    assert isinstance(second, cache.KeptPrompts)
    assert ([*first], first.fingerprint) == ([*second], second.fingerprint)
    (tmp_path / "12:30.png").write_bytes(BLUE)
    third = start()
    assert third[0].images[0].data == BLUE
    assert third.fingerprint != first.fingerprint


def test_a_start_makes_no_prompt_of_the_cache_but_those_that_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, made, make = tmp_path / "rows.jsonl", list[object](), KeptPrompts.__getitem__
    write_rows(rows, *({"prompt": "a" * size, "answer": "b"} for size in (1, 9, 30, 2)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sources, "SMALL", 0)  # bytes from which on prompts are cached
    monkeypatch.setattr(KeptPrompts, "__getitem__", lambda self, index: made.append(index) or make(self, index))
    settings = [f"data.source={rows}", "data.max_prompt_tokens=20", "rollout.max_tokens=16"]
    settings.append(f"model.path={ROOT}/checkpoints/tiny-sort")
    with commands.Console(1) as console:
        parts = commands.Parts.make(config_module.load(None, settings), console)
        loaded = parts.load(compare=False)
        assert len(loaded.training[""]) == 3
    assert made == [slice(None, 2), 0, 1]
    assert loaded.needed == 9 + 3 + 16  # of those that are short enough; the template adds 3 tokens
