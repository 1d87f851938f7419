"""Scores per second of exact_match and math, and what the scorer adds to the bare function.

All are asked for at once, as a step with large groups does. Prints a line for each reward: scores per second of the
bare function on one core, and through the scorer; microseconds of wall time that a score takes longer so.
"""

import asyncio
import time
from array import array

from shared import parser

from hocket.config import RewardsConfig
from hocket.rewards import RewardScorer, builtin
from hocket.rewards.workers import NUM_WORKERS
from hocket.types import Prompt, Rollout
from support.batches import played, scorer_of_all


def rollouts(number: int, said: str) -> list[Rollout]:
    prompts = [Prompt(id=f"rows:{i}", token_ids=array("I", (1,)), answer=str(i)) for i in range(number)]
    return [played(prompt, f"step 1/{i}/0", said.format(i + i % 2)) for i, prompt in enumerate(prompts)]


def main(number: int) -> None:
    print(f"{number:,} scores, {NUM_WORKERS} worker processes")
    for name, said in (("exact_match", "{}"), ("math", r"<think>a while</think>So it is \boxed{{{}}}.")):
        given, function = rollouts(number, said), getattr(builtin, name)
        function(given[0].text, given[0].prompt.answer)  # imports what it needs
        begun = time.perf_counter()
        bare = sum(function(one.text, one.prompt.answer) for one in given)
        bare_s = time.perf_counter() - begun
        with scorer_of_all(RewardsConfig.model_validate({"functions": {name: 1.0}})) as scorer:

            async def score(given: list[Rollout], scorer: RewardScorer = scorer) -> tuple[float, float]:
                await asyncio.gather(*map(scorer.score, given[: 4 * NUM_WORKERS]))  # workers have started
                begun = time.perf_counter()
                scores = await asyncio.gather(*map(scorer.score, given))
                return time.perf_counter() - begun, sum(one.total for one in scores)

            scored_s, total = asyncio.run(score(given))
        assert total == bare, f"{total} is not {bare}"
        added = 1e6 * (scored_s - bare_s) / number
        rates = f"bare {number / bare_s:,.0f}/s, scored {number / scored_s:,.0f}/s"
        print(f"{name}: {rates}, {added:+.1f} µs of wall time per score")


if __name__ == "__main__":
    main(parser(__doc__, number=(10_000, "scores of each reward")).parse_args().number)
