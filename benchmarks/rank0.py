"""Processor seconds that rank 0, one process, needs per rollout, token and rank: the limits of one event loop.

What is counted is the trainer's side alone (answering.py): HTTP, parsing, rollouts, groups (in the event loop, while
servers generate), then rows of the rollouts file, dividing, pickling seven of eight ranks' shares and building its own
(between the last score and the update). No engine, no model. Prints a line of milliseconds per rollout for each length,
and as JSON the seconds that simulate.py takes as defaults: of the event loop per rollout and per sampled token, and
after the last score per token, prompt included.
"""

import argparse
import asyncio
import functools
import json
import pickle
import random
import time
from array import array
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from answering import answering
from shared import parser

if __name__ == "__main__":  # --help does not wait for what follows
    OPTIONS = parser(
        __doc__,
        rollouts=(1024, "rollouts of a batch, in groups of 16"),
        tokens=([64, 4096], "sampled tokens of a rollout: a short one's and a long one's"),
    ).parse_args()

import torch

from hocket.client.batcher import Batcher
from hocket.client.pool import Deadline, ServerPool
from hocket.envs.base import SingleTurn
from hocket.observe.rows import lines_of
from hocket.protocol import Completion, Health, SamplingParams, StreamEnd
from hocket.rollout.collect import Batch, Plan, collect
from hocket.rollout.episode import Limits
from hocket.rollout.players import player
from hocket.trainer.batching import divide
from hocket.types import Prompt, Rollout, Score, TrainSample
from support.batches import scoring

GROUP_SIZE, PROMPT_TOKENS, VOCABULARY = 16, 500, 150_000
HEALTH = Health(
    status="ready", version=1, model="m", dtype="bfloat16", architecture="", vocab_size=VOCABULARY, max_length=1 << 20,
    tokenizer_sha256="", session="s", root="/", device="cpu", workers=1, kv_tokens=1 << 24,
    in_flight=0, max_adapter_rank=0,
)  # fmt: skip


def answer(request: Any) -> Iterator[bytes]:
    """Yields the lines that a server answers: completions of sampling.max_tokens, or its health."""
    if request is None:
        yield HEALTH.model_dump_json().encode()
        return
    body = completion(request["sampling"]["max_tokens"])
    for prompt, seeds in enumerate(request["seeds"]):
        for index in range(len(seeds)):
            yield f'{{"prompt":{prompt},"index":{index},"completion":{body}}}\n'.encode()
    yield StreamEnd(version=1, model="m").model_dump_json().encode() + b"\n"


@functools.cache
def completion(tokens: int) -> str:
    """Returns a completion of this length, packed: large token ids, float32 log-probs, four letters per token."""
    draw = random.Random(tokens)
    return Completion(
        token_ids=array("I", [draw.randrange(VOCABULARY) for _ in range(tokens)]),
        logprobs=array("d", [-draw.expovariate(2) for _ in range(tokens)]),
        text="word" * tokens,
        finish_reason="stop",
        versions=((1, 0, tokens),),
    ).model_dump_json(context=True)


async def score(rollout: Rollout) -> Score:
    return Score(total=float(len(rollout.text) % 2), parts={"r": 1.0})


async def gather(port: int, rollouts: int, tokens: int) -> tuple[float, Batch]:
    """Collects one batch; returns the processor seconds of this process, and the batch."""
    prompt_ids = tuple(random.Random(0).randrange(VOCABULARY) for _ in range(PROMPT_TOKENS))
    count = rollouts // GROUP_SIZE
    left = {i: Prompt(id=f"p{i}", token_ids=array("I", (i, *prompt_ids)), text="?") for i in range(count)}
    plan = Plan(
        label="step 1",
        sampling=SamplingParams(max_tokens=tokens, seed=0),
        group_size=GROUP_SIZE,
        wanted=count,
        at_most=count,
        deadline=Deadline(600.0),
    )
    async with ServerPool([f"http://127.0.0.1:{port}"]) as pool:
        limits = Limits(max_turns=1, max_length=1 << 20, timeout_s=600.0)
        blind: Any = SimpleNamespace(split_observation=lambda seen: (seen, ()), placeholder=None, decode=str)
        ask = Batcher(pool).ask
        play = player(SingleTurn, pool, ask, blind, limits)
        start = time.process_time()
        batch = await collect(plan, lambda n: {i: left.pop(i) for i in list(left)[:n]}, play, scoring(score))
        return time.process_time() - start, batch


def seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def prepare(batch: Batch, tokens: int) -> dict[str, float]:
    """Returns the processor seconds of each part of the work between the last score and the update."""
    samples = [
        TrainSample(sequence=sequence, advantages=array("d", map(float, sequence.mask)))
        for group in batch.groups
        for rollout in group.rollouts
        for sequence in rollout.sequences
    ]
    most = max(32_768, tokens + PROMPT_TOKENS + 1)
    own, *others = divide(samples, micro_batch_tokens=most, num_ranks=8)
    return {
        "rows": seconds(lambda: lines_of(batch.groups).encode()),
        "divide": seconds(lambda: divide(samples, micro_batch_tokens=most, num_ranks=8)),
        "send": seconds(lambda: [pickle.dumps(share) for share in others]),
        "build": seconds(lambda: [make(torch.device("cpu")) for make in own]),
    }


def main(options: argparse.Namespace) -> None:
    with answering(answer) as port:
        found = []
        for tokens in options.tokens:
            asyncio.run(gather(port, GROUP_SIZE, tokens))  # the server makes its completion
            loop_s, batch = asyncio.run(gather(port, options.rollouts, tokens))
            parts = prepare(batch, tokens)
            found.append((loop_s / options.rollouts, sum(parts.values()) / options.rollouts))
            text = ", ".join(f"{name} {value / options.rollouts * 1e3:.3f}" for name, value in parts.items())
            print(f"{tokens} tokens: ms per rollout: event loop {found[-1][0] * 1e3:.3f}, {text}", flush=True)
    (short, _), (long, after) = found[0], found[-1]
    token_s = (long - short) / (options.tokens[-1] - options.tokens[0])
    figures = {
        "rollout_s": max(0.0, short - token_s * options.tokens[0]),
        "rollout_token_s": token_s,
        "step_token_s": after / (options.tokens[-1] + PROMPT_TOKENS),
    }
    print(json.dumps({name: float(f"{value:.3g}") for name, value in figures.items()}))


if __name__ == "__main__":
    main(OPTIONS)
