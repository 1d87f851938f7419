"""Serve the rewards of a config, in the formats in which the reward `http` asks (docs/rewards.md)."""

import asyncio
import contextlib
import itertools
from typing import Any

from fastapi import FastAPI, HTTPException, Request

from hocket.config import Config
from hocket.errors import RewardError
from hocket.rewards.samples import by_prompt, rollout_of
from hocket.rewards.scorer import RewardCalls, RewardScorer
from hocket.server.main import GRACE_S, bind, check
from hocket.server.middleware import Guard
from hocket.types import Score


def serve(config: Config) -> None:
    """Serve until Ctrl-C; the models of the rewards are loaded before the first request is read."""
    check(config.server.host, config.token, random_init=False)
    names = config.rewards.functions
    with (
        contextlib.suppress(KeyboardInterrupt),
        contextlib.closing(bind(config.server.host, config.server.port)) as sock,
        RewardCalls(config.rewards, names) as calls,
    ):
        asyncio.run(_serve(config, calls, sock))
    print("hocket: stopped", flush=True)


async def _serve(config: Config, calls: RewardCalls, sock: Any) -> None:
    import uvicorn

    await calls.set_up()
    served = Guard(
        app_of(RewardScorer(calls, config.rewards.functions)),
        host=config.server.host,
        token=config.token,
        admits=lambda path, token: False,
        require_ready=lambda: None,
    )
    print(f"hocket: rewards {', '.join(calls.specs)} at {config.own_url}/score", flush=True)
    settings = uvicorn.Config(served, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_S)
    await uvicorn.Server(settings).serve(sockets=[sock])


def app_of(scorer: RewardScorer) -> FastAPI:
    """Return the app with the one route."""
    app = FastAPI(title="hocket: rewards")

    @app.post("/score")
    async def score(request: Request) -> dict[str, list[Any]]:
        """Score {"samples": [{"prompt", "completion", ...}, ...]}, or OpenRLHF's {"query", "prompts", "labels"}."""
        try:
            body = await request.json()
            if openrlhf := "query" in body:
                columns = zip(body["prompts"], body["query"], body["labels"], strict=True)
                rows = [{"prompt": p, "completion": q.removeprefix(p), "answer": a} for p, q, a in columns]
            else:
                rows = body["samples"]
            rollouts = [rollout_of(row.get("id", str(i)), row) for i, row in enumerate(rows)]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            wanted = '{"samples": [{"prompt": text, "completion": text, ...}, ...]}'
            raise HTTPException(422, f"{type(error).__name__}: {error}; the body must be {wanted}") from error
        groups = by_prompt(rollouts)
        try:
            scored = await asyncio.gather(*map(scorer.score_group, groups))
        except RewardError as error:
            raise HTTPException(500, str(error)) from error
        found = dict(zip(map(id, itertools.chain(*groups)), itertools.chain(*scored), strict=True))
        scores = [found[id(one)] for one in rollouts]
        if not openrlhf:
            return {"scores": [_answer(one) for one in scores]}
        if errors := [one.error for one in scores if one.error is not None]:
            raise HTTPException(500, f"{len(errors)} of {len(scores)} have no score; the first: {errors[0]}")
        return {"rewards": [one.total for one in scores]}

    return app


def _answer(score: Score) -> dict[str, Any]:
    value = {"error": score.error} if score.error is not None else {"total": score.total, "parts": dict(score.parts)}
    return value | {"note": score.note}
