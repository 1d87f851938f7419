"""With a server of the package's own, where that is installed."""

import contextlib
import runpy
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from hocket.config import load
from hocket.envs.base import ENVIRONMENTS, bind
from hocket.errors import ConfigError
from hocket.types import Prompt
from support.episodes import action, user
from support.processes import free_port, wait_for

PROMPT = Prompt(id="p", token_ids=(1,), text="Guess.", meta={"reset": {"highest": 5}})


def test_the_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ENVIRONMENTS.get("openenv")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"env openenv needs the package openenv: \.venv/bin/pip install openenv"):
        bind("openenv", {"url": "http://localhost:1"})


@pytest.mark.parametrize(
    ("rewards", "is_cut_off", "gives"),
    [([None, None], False, False), ([None, 0.0], False, True), ([0.25, None], False, True), ([None], True, True)],
)
async def test_a_session_that_gave_no_reward_to_its_end_has_none_and_not_zero(
    rewards: list[float | None], is_cut_off: bool, gives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    steps = [SimpleNamespace(reward=reward, done=False, observation={"hint": "higher"}) for reward in rewards]
    steps[-1].done = not is_cut_off
    environment = bind("openenv", {"url": "http://localhost:1"})()
    environment._client = SimpleNamespace(step=AsyncMock(side_effect=steps))
    total = sum([(await environment.step(action("13"))).reward for _ in steps])
    if is_cut_off:
        total += await environment.truncated()
    assert (total, environment.gives_reward) == (sum(filter(None, rewards)), gives)


def numbers() -> Any:
    """Make a server whose sessions have a number to be guessed: the highest one."""
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action as ServerAction
    from openenv.core.env_server.types import Observation, State

    class Guess(ServerAction):
        guess: str

    class Told(Observation):
        hint: str = ""

    class Numbers(Environment[Guess, Told, State]):  # type: ignore[misc]  # the package may be missing
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, highest: int = 9, **_: Any) -> Told:
            self.highest = highest
            return Told(hint=f"1 to {highest}, seed {seed}", done=False, reward=0.0)

        def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Told:
            right = action.guess.strip() == str(self.highest)
            return Told(hint="higher", done=right, reward=1.0 if right else -0.25)

        @property
        def state(self) -> State:
            return State()

    return create_fastapi_app(lambda: Numbers(), Guess, Told, max_concurrent_envs=4)


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    import uvicorn

    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started, "the server has started")
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


async def test_an_episode_is_a_session_of_the_server() -> None:
    pytest.importorskip("openenv.core", reason="openenv is not installed")
    with served(numbers()) as url:
        make = bind("openenv", {"url": url, "action": "guess", "observation": "hint"})
        one, other = make(), make()
        start = await one.reset(PROMPT, 2**40 + 7)
        own = await other.reset(Prompt(id="q", token_ids=(1,), meta={"reset": {"seed": 3}}), 1)
        assert own is not None
        assert own.messages[0]["content"] == "1 to 9, seed 3"  # of the row
        assert start is not None
        assert start.messages == user("1 to 5, seed 7")
        first, last = await one.step(action("4")), await one.step(action(" 5"))
        assert (first.reward, first.done, first.messages[0]["content"]) == (-0.25, False, "higher")
        assert (last.reward, last.done, last.messages) == (1.0, True, ())
        assert (await other.step(action("5"))).done is False  # a session of its own, up to 9
        for environment in (one, other):
            await environment.close()
        whole = bind("openenv", {"url": url, "action": None})()
        seen = await whole.reset(PROMPT, 3)
        assert seen is not None
        assert '"hint": "1 to 5, seed 3"' in seen.messages[0]["content"]
        assert "no JSON" in (await whole.step(action("4"))).messages[0]["content"]
        assert (await whole.step(action('{"guess": "5"}'))).reward == 1.0
        await whole.close()
        blind = bind("openenv", {"url": url, "observation": "text"})()
        with pytest.raises(ValueError, match=r"no field 'text', only metadata, hint: set env\.observation"):
            await blind.reset(PROMPT, 3)
        await blind.close()


async def test_the_server_of_the_examples_tells_where_its_number_is() -> None:
    pytest.importorskip("openenv.core", reason="openenv is not installed")
    with served(runpy.run_path("examples/agents/openenv_guess.py")["app"]) as url:
        one = bind("openenv", {"url": url, "action": "guess", "observation": "hint"})()
        assert await one.reset(Prompt(id="p", token_ids=(1,), meta={"reset": {"number": 13}}), 1) is None
        hints = [(await one.step(action(guess))).messages[0]["content"] for guess in ("7", "15")]
        last = await one.step(action("13"))
        await one.close()
    assert (hints, last.reward, last.done) == (["higher", "lower"], 1.0, True)


def test_the_environment_is_found_by_its_name_in_a_config() -> None:
    assert load(None, ["env={name: openenv, url: 'http://localhost:8000'}"]).env.name == "openenv"
