"""A judge behind an endpoint that errs, stalls and lies: calls, the most in a minute, wall time and its floor.

The judge is a stand-in on loopback. Prints a line for each of two runs, the second of which finds every score in the
cache of the first. The floor is the time until the last request may be sent: one minute for each --per-minute requests
that came before it.
"""

import asyncio
import tempfile
import time

from shared import parser

from hocket.config import RewardsConfig
from hocket.types import Prompt
from support.batches import played, scorer_of_all
from support.service import FakeJudge, Service, functions

AT_ONCE = 16
PROMPT = Prompt(id="p", token_ids=(1,))


async def main(number: int, per_minute: int) -> None:
    print(f"{number:,} scores, {per_minute:,} requests a minute, {AT_ONCE} at once; 5 % errors, 2 % stalls, 2 % lies")
    judge = FakeJudge(errors=0.05, stalls=0.02, lies=0.02, latency_s=0.2)
    with tempfile.TemporaryDirectory() as folder:
        async with Service(judge).open() as service:
            for run in ("first", "second"):
                service.arrivals.clear()
                limits = {"requests_per_minute": per_minute, "max_concurrent": AT_ONCE, "timeout_s": 5}
                specs = {"judge": functions(service)["judge"] | limits | {"cache": f"{folder}/judge.db"}}
                with scorer_of_all(RewardsConfig.model_validate({"functions": specs})) as scorer:
                    begun = time.perf_counter()
                    scores = await asyncio.gather(*(scorer.score(played(PROMPT, "r", f"{i}")) for i in range(number)))
                    seconds = time.perf_counter() - begun
                lost, calls = sum(score.total != i % 11 / 10 for i, score in enumerate(scores)), len(service.arrivals)
                most = f"most in a minute {service.most_within(60)}, at once {service.most}"
                floor = max(calls - 1, 0) // per_minute * 60
                print(f"{run} run: {calls:,} calls, {lost} lost; {most}; {seconds:.1f} s, floor {floor} s")


if __name__ == "__main__":
    OPTIONS = parser(
        __doc__, number=(2000, "completions to score"), per_minute=(600, "requests that are allowed within any minute")
    ).parse_args()
    asyncio.run(main(OPTIONS.number, OPTIONS.per_minute))
