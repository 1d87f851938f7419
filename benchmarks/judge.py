"""Measure a judge behind an endpoint that errs, stalls and lies: calls, the most in a minute, wall time and its floor.

    python benchmarks/judge.py [NUMBER] [PER_MINUTE]

The floor is the time until the last request may be sent: one minute for each PER_MINUTE that came before it.
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "rewards"))

from test_judge import FakeJudge, functions

from batches import scorer_of_all
from hocket.config import RewardsConfig
from hocket.types import Prompt, Rollout, TokenSequence
from service import Service

AT_ONCE = 16


def rollout(number: int) -> Rollout:
    sequence = TokenSequence(token_ids=(1,), mask=(False,), logprobs=(0.0,), text=str(number))
    return Rollout(id=str(number), prompt=Prompt(id="p", token_ids=(1,)), sequences=(sequence,))


async def main(number: int, per_minute: int) -> None:
    print(f"{number:,} scores, {per_minute:,} requests a minute, {AT_ONCE} at once; 5 % errors, 2 % stalls, 2 % lies")
    judge = FakeJudge(errors=0.05, stalls=0.02, lies=0.02, latency_s=0.2)
    with tempfile.TemporaryDirectory() as folder:
        async with Service(judge).open() as service:
            for run in ("first", "second"):
                service.arrivals.clear()
                limits = {"requests_per_minute": per_minute, "max_concurrent": AT_ONCE, "timeout_s": 5}
                specs = functions(service, **limits, cache=f"{folder}/judge.db")
                with scorer_of_all(RewardsConfig.model_validate({"functions": specs})) as scorer:
                    begun = time.perf_counter()
                    scores = await asyncio.gather(*(scorer.score(rollout(i)) for i in range(number)))
                    seconds = time.perf_counter() - begun
                lost, calls = sum(score.total != i % 11 / 10 for i, score in enumerate(scores)), len(service.arrivals)
                most = f"most in a minute {service.most_within(60)}, at once {service.most}"
                floor = max(calls - 1, 0) // per_minute * 60
                print(f"{run} run: {calls:,} calls, {lost} lost; {most}; {seconds:.1f} s, floor {floor} s")


if __name__ == "__main__":
    given = dict(enumerate(map(int, sys.argv[1:])))
    asyncio.run(main(given.get(0, 2000), given.get(1, 600)))
