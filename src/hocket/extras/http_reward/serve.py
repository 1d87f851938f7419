"""Serve the rewards of a config to the reward `http` of another process.

docs/how-to/reward_service.md has the guide.
"""

import asyncio
import contextlib
import dataclasses
import signal
import socket
from collections.abc import Sequence

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from hocket.common.registry import load_plugins
from hocket.common.tasks import run
from hocket.config import Config
from hocket.errors import RewardError
from hocket.observe.rows import rollout_of
from hocket.rewards.scorer import RewardCalls, RewardScorer
from hocket.server.errors import http_error
from hocket.server.main import bind, http_server, listen
from hocket.server.middleware import Guard, unless_client_leaves
from hocket.types import Rollout

MAX_SAMPLES = 4096  # in a request
WANTED = '{"samples": [{"prompt": text, "completion": text, ...}, ...]}, of one prompt'


def serve(config: Config) -> None:
    """Serve until Ctrl-C or SIGTERM; async rewards are set up before the first request."""
    # uvicorn handles signals itself, and restores this handler when it has shut down.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    load_plugins(config.plugins)
    rewards = config.sole_rewards
    with (
        contextlib.suppress(KeyboardInterrupt),
        contextlib.closing(bind(config.server.host, config.server.port, config.token)) as sock,
        RewardCalls(rewards, rewards.functions) as calls,
    ):
        run(_serve(calls, sock, config.own_url, config.server.host, config.token))
    print("hocket: stopped", flush=True)


async def _serve(
    calls: RewardCalls, sock: socket.socket, url: str, host: str, token: str | None
) -> None:
    app = FastAPI(title="hocket: rewards")
    app.add_exception_handler(HTTPException, http_error)
    scorer = RewardScorer(calls, calls.specs)

    @app.post("/score")
    async def score(request: Request) -> Response:
        """Score the completions of one prompt, as docs/how-to/reward_service.md shows them."""
        try:
            samples = (await request.json())["samples"]
            if len(samples) > MAX_SAMPLES:
                raise ValueError(
                    f"{len(samples)} samples, more than the {MAX_SAMPLES} of one request"
                )
            rollouts = [rollout_of(sample, str(number)) for number, sample in enumerate(samples)]
            if any(rollout.prompt != rollouts[0].prompt for rollout in rollouts):
                raise ValueError("the samples differ in prompt, messages, answer or meta")
            return await unless_client_leaves(request, _answer(scorer, rollouts))
        except asyncio.CancelledError as error:  # by uvicorn, which ends; the client may try again
            raise HTTPException(503, "the service was stopped") from error
        except RewardError as error:
            raise HTTPException(500, str(error)) from error
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise HTTPException(
                422, f"{type(error).__name__}: {error}; the body must be {WANTED}"
            ) from error

    await calls.set_up()
    listen(sock)
    print(f"hocket: rewards {', '.join(calls.specs)} at {url}/score", flush=True)
    await http_server(Guard(app, host=host, token=token), host).serve(sockets=[sock])


async def _answer(scorer: RewardScorer, rollouts: Sequence[Rollout]) -> Response:
    rows = []
    for score in await scorer.score_group(rollouts):
        row = dataclasses.asdict(score)
        if score.error is not None:
            row["total"] = None  # it is NaN, which JSON has not
        rows.append(row)
    return JSONResponse({"scores": rows})
