"""Have a number guessed by hints, in sessions of OpenEnv: uvicorn --app-dir examples/agents openenv_guess:app."""

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: str


class Told(Observation):
    hint: str = ""


class Numbers(Environment):
    """Tells whether the number is higher or lower; a near last guess counts, too."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, number: int = 7, **_: object) -> Told:
        self.number, self.left = number, 5
        return Told(done=False, reward=0.0)

    def step(self, action: Guess, timeout_s: float | None = None, **_: object) -> Told:
        self.left -= 1
        said = action.guess.strip()
        if not said.isdecimal():
            return Told(done=True, reward=0.0)
        gap = abs(int(said) - self.number)
        if gap == 0 or self.left == 0:
            return Told(done=True, reward=1.0 if gap == 0 else 0.3 * max(0.0, 1 - gap / 10))
        return Told(hint="higher" if int(said) < self.number else "lower", done=False, reward=0.0)

    @property
    def state(self) -> State:
        return State()


app = create_fastapi_app(Numbers, Guess, Told, max_concurrent_envs=512)
