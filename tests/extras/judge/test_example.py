from pathlib import Path

import httpx
import pytest

from hocket import config
from hocket.types import Prompt
from support.batches import played, scorer_of_all
from support.processes import ROOT, Process, free_port


async def test_the_stand_in_of_the_judge_example_judges_as_its_config_asks(tmp_path: Path) -> None:
    port = free_port()
    with Process([str(port)], tmp_path / "log", program=["examples/judge/fake_judge.py"]) as judge:
        judge.wait_for(lambda: answers(port), "the stand-in answers")
        url = f"rewards.functions.judge.base_url=http://127.0.0.1:{port}/v1"
        rewards = config.load(ROOT / "examples/judge/config.yaml", [url]).rewards
        with scorer_of_all(rewards) as scorer:
            prompt = Prompt(id="p", token_ids=(1,), text="Sort: dbca", answer="abcd")
            scores = [await scorer.score(played(prompt, "r", text)) for text in ("abcd", "abdc", "dcba")]
    assert [score.parts["judge"] for score in scores] == pytest.approx([1, 2 / 3, 0])


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/docs", timeout=5).is_success
    except httpx.TransportError:
        return False
