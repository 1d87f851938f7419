"""The rewards of a config, served to the reward `http` of another process over a real socket."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest
import yaml
from tests.commands.test_mixture import config as mixture

from hocket.commands.cli import main
from hocket.errors import ConfigError
from hocket.extras.http_reward.serve import serve
from support.episodes import Scorers, make_rollout
from support.processes import free_port

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/how-to/reward_service.md").read_text(encoding="utf-8").split("## Serve from another machine")[1]
SERVES, ASKS = (shlex.split(block) for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)[:2])
REMOTE = re.findall(rf"```yaml\n# {re.escape(ASKS[4])}\n(.*?)```", PAGE, re.DOTALL)[0]
TOKEN = SERVES[0].partition("=")[2]
PLUGIN = """
from hocket.errors import RewardError
from hocket.rewards import reward
from hocket.types import Score

@reward("rank")
async def rank(completions, meta):
    if "spent" in completions:
        raise RewardError("the budget is spent")
    if "raise" in completions:
        raise ValueError("no such word")
    return [Score(total=len(one), parts={"level": meta.get("level", 0)}, note=f"it is {one}") for one in completions]
"""


@contextlib.contextmanager
def serving(folder: Path, config: str, plugin: str, end: signal.Signals) -> Iterator[str]:
    """Runs the documented command with rewards that need no model; the signal ends it and leaves nothing."""
    port = free_port()
    (folder / "own.py").write_text(plugin)
    (folder / SERVES[4]).write_text(f"plugins: [own.py]\nrewards: {{functions: {config}}}\n")
    changed = [f"server.port={port}", "server.host=127.0.0.1"]
    command = [sys.executable, str(ROOT / "run.py"), *SERVES[3:5], *changed]
    environment = os.environ | {"HOCKET_TOKEN": TOKEN}
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        names = ", ".join(yaml.safe_load(config))
        assert served.stdout.readline() == f"hocket: rewards {names} at http://127.0.0.1:{port}/score\n"
        yield f"http://127.0.0.1:{port}/score"
        served.send_signal(end)
        assert served.communicate(timeout=60)[0] == "hocket: stopped\n"
        assert served.returncode == 0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    functions = "{rank: 0.5, exact_match: {gate: true}, length: {weight: 0, up_to: 6}}"
    with serving(tmp_path_factory.mktemp("serve"), functions, PLUGIN, signal.SIGINT) as url:
        yield url


async def test_http_gets_totals_parts_notes_and_errors_of_another_process_as_from_its_own(
    url: str, scorer_of: Scorers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOCKET_TOKEN", TOKEN)
    assert ASKS[0] == SERVES[0]  # both sides have the token
    documented = yaml.safe_load(REMOTE)["rewards"]["functions"]["http"]
    scorer = scorer_of({"http": {**documented, "url": url}})  # type: ignore[dict-item]
    right, wrong = await scorer.score_group([make_rollout("abcd"), make_rollout("ab")])
    # 0.5 · 4 where the gate is open
    names = {"http": 2.0, "http/rank": 4.0, "http/rank/level": 2.0, "http/exact_match": 1.0, "http/length": 0.5}
    assert (right.total, right.parts, right.note) == (2.0, names, "http: rank: it is abcd")
    assert (wrong.total, wrong.parts["http/rank"]) == (0.0, 2.0)
    for score in await scorer.score_group([make_rollout("raise"), make_rollout("ab")]):
        assert str(score.error).startswith("http: rank: ValueError: no such word")
    (spent,) = await scorer.score_group([make_rollout("spent")])
    assert 'answered 500: {"error":{"code":"http_error","message":"the budget is spent"' in str(spent.error)


def ask(url: str, body: Any, token: str | None = TOKEN) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    text = body if isinstance(body, str) else json.dumps(body)
    request = urllib.request.Request(url, data=text.encode(), headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"samples": [{"prompt": "a", "completion": 5}]}, "'completion' must be a text, got 5; the body must be"),
        ({"samples": [{"prompt": p, "completion": "a"} for p in "ab"]}, "the samples differ in prompt, messages"),
        ({"samples": [{}] * 4097}, "4097 samples, more than the 4096 of one request"),
        ('{"samples": ' + "[" * 100_000, "RecursionError: "),
        ([5], "the body must be"),
    ],
)
def test_a_body_that_holds_no_samples_is_refused_with_what_it_must_be(url: str, body: Any, told: str) -> None:
    status, answer = ask(url, body)
    assert (status, told in answer["error"]["message"]) == (422, True), answer  # in the form of every route
    assert ask(url, body, token=None)[0] == ask(url, body, token="wrong")[0] == 401


SLOW = """
import asyncio
from pathlib import Path
from hocket.rewards import reward

@reward("slow")
class Slow:
    async def __aenter__(self): return self
    async def __aexit__(self, *exc_info): Path("torn_down").touch()
    async def __call__(self, completion):
        Path("begun").touch()
        try:
            await asyncio.sleep(999)
        finally:
            Path("given_up").touch()
"""


@pytest.mark.long
def test_calls_end_with_their_client_or_the_service_which_sigterm_tears_down(tmp_path: Path) -> None:
    body = json.dumps({"samples": [{"prompt": "a", "completion": "b"}]}).encode()
    begun, given_up = tmp_path / "begun", tmp_path / "given_up"

    def ask_until_begun(url: str) -> HTTPConnection:
        client = stack.enter_context(contextlib.closing(HTTPConnection(urlsplit(url).netloc)))
        client.request("POST", "/score", body, {"Authorization": f"Bearer {TOKEN}"})
        while not begun.exists():
            time.sleep(0.01)
        begun.unlink()
        return client

    with contextlib.ExitStack() as stack:
        with serving(tmp_path, "{slow: {max_concurrent: 1}}", SLOW, signal.SIGTERM) as url:
            ask_until_begun(url).close()
            while not given_up.exists():
                time.sleep(0.01)
            waiting = ask_until_begun(url)
        assert (tmp_path / "torn_down").exists()
        assert waiting.getresponse().status == 503


def test_other_machines_need_a_token_and_a_model_that_can_not_be_loaded_ends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOCKET_TOKEN", raising=False)
    (tmp_path / "broken.py").write_text(
        "from hocket.rewards import reward\n@reward('broken_model')\nclass B:\n"
        "    async def __aenter__(self): raise OSError('no weights')\n"
        "    async def __aexit__(self, *exc_info): ...\n"
        "    async def __call__(self, completion): ...\n"
    )
    command = ["serve-reward", f"plugins=[{tmp_path}/broken.py]", "rewards.functions={broken_model: 1}"]
    assert main([*command, "server.host=0.0.0.0"]) == 1
    assert "lets other machines in: set server.token" in capsys.readouterr().err
    assert main([*command, f"server.port={free_port()}"]) == 1
    assert "error: reward 'broken_model' can't be set up: OSError: no weights" in capsys.readouterr().err


def test_rewards_that_differ_between_sources_are_no_answer_to_another_process() -> None:
    with pytest.raises(ConfigError, match=r"the source guess has rewards of its own: add data\.sources="):
        serve(mixture())
