"""Templates that write the day write the run's: prompts are the same where a run goes on behind midnight."""

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import transformers.utils.chat_template_utils as templates

from hocket import config as config_module
from hocket.config import DataConfig
from hocket.data import day
from hocket.data.day import Day
from hocket.data.renderer import Renderer
from hocket.trainer import checkpoints
from hocket.trainer.checkpoints import Checkpoints
from support.engines import make_tokenizer

EVENING = datetime.fromisoformat("2026-11-28T23:50:00+00:00")
MORNING = datetime.fromisoformat("2026-11-29T08:10:00+00:00")
ASKED = [{"role": "user", "content": "a"}]
Set = Callable[[datetime], None]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Set:
    """Sets the time that hocket and transformers see; a new process has a day of its own."""

    def at(now: datetime) -> None:
        fixed = type("Fixed", (datetime,), {"now": classmethod(lambda *_: now)})
        monkeypatch.setattr(day, "datetime", fixed)
        monkeypatch.setattr(templates, "datetime", fixed)
        started = Day()
        for module in ("hocket.data.renderer", "hocket.trainer.checkpoints"):
            monkeypatch.setattr(f"{module}.DAY", started)

    return at


def rendered(form: str = "%d %b %Y") -> str:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('" + form + "') }};{% for m in messages %}{{ m.content }}{% endfor %}"
    return Renderer(DataConfig(source="rows.jsonl"), tokenizer, ()).render(ASKED)


class Nothing:
    """A trainer, or a part of a run, without a state."""

    def state(self, sink: Callable[[Mapping[str, Any]], None] | None = None) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("form", ["%d %b %Y", "%F", "%B %d, %Y"])  # Llama 3.2, gpt-oss, Granite
def test_a_resumed_run_renders_the_day_on_which_it_began_and_another_one_its_own(
    form: str, tmp_path: Path, clock: Set
) -> None:
    config = config_module.load(None, [f"run.dir={tmp_path}/run", "trainer.steps=1", "checkpoint.resume=true"])
    other = config_module.load(None, [f"run.dir={tmp_path}/other"])
    clock(EVENING)
    assert checkpoints.find(config, lambda line: None) is None
    assert rendered(form) == f"{EVENING.strftime(form)};a"
    with Checkpoints(config, Nothing().state, {}) as kept:
        kept.copy(1, last=True)
        kept.complete(1, {})
    clock(MORNING)
    assert rendered(form) == f"{MORNING.strftime(form)};a"
    assert checkpoints.find(config, lambda line: None) is not None
    assert rendered(form) == f"{EVENING.strftime(form)};a"
    checkpoints.find(other, lambda line: None)  # in the same process
    assert rendered(form) == f"{MORNING.strftime(form)};a"
