"""The live page of a real quickstart in a real browser: curves move, rollouts open, filters work, an alarm appears."""

import re
import time
from pathlib import Path

import pytest

from support.browser import PATH, browser
from support.processes import START_S, Process, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.long]
HOSTILE = "<script>document.title = 'taken'</script></style>\x1b[31m\u202e<img src=x onerror=alert(1)>"
REWARD = f"""
from hocket.rewards import reward
from hocket.types import Score

@reward("noted")
def noted(completion: str) -> Score:
    return Score(total=float(len(set(completion))), note={HOSTILE!r})
"""
SETTINGS = ("trainer.steps=40", "eval.num_prompts=16", "rollout.max_tokens=5", "observe.tokens=true",
            "rewards.functions={exact_match: 1, noted: {weight: 0.1}}")  # fmt: skip


@pytest.mark.skipif(PATH is None, reason="Chromium is not installed")
def test_a_quickstart_is_seen_while_it_learns(tmp_path: Path) -> None:
    (tmp_path / "noted.py").write_text(REWARD)
    log = tmp_path / "log"
    ports = (f"server.port={free_port()}", f"observe.port={free_port()}")
    words = ["quickstart", f"run.dir={tmp_path}/run", f"plugins=[{tmp_path}/noted.py]", *ports, *SETTINGS]
    with Process(words, log) as run, browser() as tab:
        url = r"page: (http://127\.0\.0\.1:\d+/)"
        run.wait_for(lambda: re.search(url, log.read_text()), "the page")
        tab.open(re.findall(url, log.read_text())[0])
        until = time.monotonic() + START_S
        reward = "document.querySelector('svg[aria-label^=\"Reward, \"]')"
        moves = "window.seen ??= new Set(), seen.add({0}?.ariaLabel), [...seen].filter(one => one).length"
        while tab.run(moves.format(reward)) < 3:  # three steps, in the page that was opened first
            assert time.monotonic() < until, log.read_text()
            assert run.popen.poll() is None, log.read_text()
            time.sleep(0.2)
        tab.wait("document.querySelector('.alarms')?.innerText.includes('rollout/truncated')")
        tab.wait("document.querySelectorAll('.prompt').length == 16")
        tab.type("input[type=search]", "sort: ")
        tab.type("input[placeholder=from]", "99")
        assert tab.run("document.querySelectorAll('.prompt').length") == 0
        tab.type("input[placeholder=from]", "")
        tab.click(".prompt")
        tab.wait("document.querySelectorAll('article').length == 12")
        assert "<script>document.title = 'taken'</script>" in tab.run("document.querySelector('article').innerText")
        assert tab.run("[document.title, document.scripts.length, document.images.length]") == ["run · hocket", 2, 0]
        tab.type("select[aria-label='colour of the tokens']", "entropy")
        tab.wait("document.querySelectorAll('.tokens span.given').length > 0 || "
                 "document.querySelector('article').innerText.includes('not trained')")  # fmt: skip
        assert tab.run("document.querySelectorAll('rect').length") > 3  # phases
        assert "up in step" in tab.text()
        assert tab.events == []
