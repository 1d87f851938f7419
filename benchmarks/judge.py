"""A judge behind an endpoint that errs, stalls, lies and bounds requests: calls, lost scores, wall time and its floor.

The judge is a stand-in on loopback. Prints a line for each of two runs, the second of which finds every score in the
cache of the first. The floor is the time until the endpoint may accept the last request: one minute for each
--per-minute requests that came before it; more of them it refuses, and says when to come again.
"""

import asyncio
import contextlib
import math
import tempfile
import time
from array import array
from collections import deque
from typing import Any

from shared import parser

from hocket.config import RewardsConfig
from hocket.types import Prompt
from support.batches import played, scorer_of_all
from support.service import Answer, FakeJudge, Headers, Service, functions

AT_ONCE = 16
MINUTE_S = 60
PROMPT = Prompt(id="p", token_ids=array("I", (1,)))


class Limited:
    """Lets a judge answer so many requests within any minute, and refuses the others."""

    def __init__(self, judge: FakeJudge, per_minute: int) -> None:
        self.judge = judge
        self.per_minute = per_minute
        self.accepted = deque[float]()
        self.refused = 0

    async def __call__(self, headers: Headers, body: Any) -> Answer | None:
        now = time.monotonic()
        while self.accepted and self.accepted[0] <= now - MINUTE_S:
            self.accepted.popleft()
        if len(self.accepted) == self.per_minute:
            self.refused += 1
            wait_s = math.ceil(self.accepted[0] + MINUTE_S - now)
            return 429, {"retry-after": str(wait_s)}, "slow down"
        self.accepted.append(now)
        return await self.judge(headers, body)


async def main(number: int, per_minute: int) -> None:
    print(f"{number:,} scores, {per_minute:,} requests a minute, {AT_ONCE} at once; 5 % errors, 2 % stalls, 2 % lies")
    judge = Limited(FakeJudge(errors=0.05, stalls=0.02, lies=0.02, latency_s=0.2), per_minute)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as scorers:
        async with Service(judge).open() as service:
            for run in ("first", "second"):
                service.arrivals.clear()
                judge.refused = 0
                options = {"max_concurrent": AT_ONCE, "timeout_s": 5, "cache": f"{folder}/judge.db"}
                specs = {"judge": functions(service)["judge"] | options}
                # What an async reward has set up lives until the event loop ends, so its scorer does, too.
                scorer = scorers.enter_context(scorer_of_all(RewardsConfig.model_validate({"functions": specs})))
                begun = time.perf_counter()
                scores = await asyncio.gather(*(scorer.score(played(PROMPT, "r", f"{i}")) for i in range(number)))
                seconds = time.perf_counter() - begun
                lost = sum(score.total != i % 11 / 10 for i, score in enumerate(scores))
                calls = len(service.arrivals)
                floor = max(calls - judge.refused - 1, 0) // per_minute * MINUTE_S
                limits = f"{judge.refused} over the limit, at once {service.most}"
                print(f"{run} run: {calls:,} calls, {lost} lost; {limits}; {seconds:.1f} s, floor {floor} s")


if __name__ == "__main__":
    OPTIONS = parser(
        __doc__, number=(2000, "completions to score"), per_minute=(600, "requests that are accepted within any minute")
    ).parse_args()
    asyncio.run(main(OPTIONS.number, OPTIONS.per_minute))
