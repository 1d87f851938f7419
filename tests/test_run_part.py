import contextlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hocket import run_part
from hocket.common.registry import load_plugins
from hocket.config import load
from hocket.data import tokenizer
from hocket.run_part import RUN_PARTS, RunPart, joining


@contextlib.contextmanager
def joined(tmp_path: Path, *settings: str) -> Iterator[list[RunPart]]:
    """The parts of a run with these settings, closed at the end."""
    run: Any = SimpleNamespace(
        config=load(None, [*settings]),
        folder=SimpleNamespace(path=tmp_path, history=[], last_step=0),
        servers=SimpleNamespace(states=tuple),
        trainer=SimpleNamespace(numbers=None, tokenizer=tokenizer.load("checkpoints/tiny-sort")),
        publisher=None,
        prompts=(),
        checkpoints=None,
        console=SimpleNamespace(say=print, alarmed=()),
    )
    parts = [*joining(run)]
    yield parts
    for part in parts:
        part.close()


def test_a_part_of_one_s_own_may_end_the_run(tmp_path: Path) -> None:
    """The one that the documentation of RunPart shows."""
    shown = re.search(r'        @run_part\("until"\)\n.*?>= 0\.9\n', RunPart.__doc__ or "", re.S)
    assert shown is not None
    file = tmp_path / "until.py"
    head = "from hocket.run_part import Joined, RunPart, run_part\nfrom hocket.types import Metrics\n"
    file.write_text(head + textwrap.dedent(shown[0]))
    load_plugins([str(file)])
    try:
        with joined(tmp_path) as parts:
            until = parts[-1]
            assert [until.ends(1, {"reward/mean": value}) for value in (0.5, 0.95)] == [False, True]
            assert (until.evaluated(1, {}), until.summary()) == ({}, {})
    finally:
        RUN_PARTS.forget("until")


def test_what_a_part_may_do_stands_in_the_order_of_a_step() -> None:
    order = ["rolled_out", "max_gap", "samples", "trained", "published", "checkpointed", "evaluated"]
    order += ["ends", "recorded", "servers_changed", "summary", "close"]
    assert [name for name in vars(run_part.RunPart) if not name.startswith("_")] == order


def test_a_run_without_the_checks_says_so_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_modules", "items"):  # copies: the order of the others' parts stays
        others = {part: value for part, value in getattr(RUN_PARTS, name).items() if part != "checks"}
        monkeypatch.setattr(RUN_PARTS, name, others)
    lines: list[str] = []
    monkeypatch.setattr("builtins.print", lines.append)
    with joined(tmp_path) as parts:
        assert not any(type(part).__name__ == "SamplingCheck" for part in parts)
    (line,) = lines
    assert line == (
        "sync.check_every and sync.check_share: needs the run part 'checks', whose file in hocket/extras was deleted; "
        "train/logprob_gap still stops a run whose servers compute with other weights"
    )
