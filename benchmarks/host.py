"""Host work of one step: seconds of one core per million completion tokens, stage by stage, at one and at four ranks.

64 prompts x 16 completions, without engine and model: completions that are ready go through what the server
("server: ...") and rank 0 (the rest) do with them besides computing. Prints a line for each number of ranks: the sum,
then each stage. Processor time, the smallest of the repeats. `rows` runs in a thread beside the event loop. rank0.py
tells what a rollout and a rank cost.
"""

import argparse
import asyncio
import contextlib
import functools
import pickle
import random
import struct
import tempfile
import time
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from answering import answering
from shared import parser

if __name__ == "__main__":  # --help does not wait for what follows
    OPTIONS = parser(
        __doc__,
        ranks=([1, 4], "numbers of trainer processes, one after the other"),
        tokens=(1000, "tokens of a completion: from half to one and a half times as many"),
        repeats=(3, "measurements of each, of which the smallest counts"),
    ).parse_args()

import torch

from hocket.algorithm.samples import shape, train_samples
from hocket.client.batcher import Turn
from hocket.client.pool import Deadline
from hocket.client.server import ServerClient
from hocket.common.files import write_atomically
from hocket.config import AlgorithmConfig
from hocket.envs.base import SingleTurn
from hocket.observe.metrics import rollout_metrics, staleness_metrics
from hocket.observe.rows import lines_of
from hocket.protocol import Completion, GenerateRequest, SamplingParams, StreamEnd, StreamLine
from hocket.rollout.collect import Slot
from hocket.rollout.episode import Episode, Limits, TokenBudget
from hocket.trainer.batching import TrainBatch, divide, unpack
from hocket.types import Group, Prompt, Score

PROMPTS, GROUP_SIZE, PROMPT_TOKENS, VOCABULARY = 64, 16, 200, 150_000
SAMPLING = SamplingParams(max_tokens=1 << 14, seed=0)
BLIND: Any = SimpleNamespace(decode=str, split_observation=lambda seen: (seen, ()), placeholder=None)
LIMITS = Limits(max_turns=1, max_length=1 << 20, timeout_s=600.0)
Sampled = tuple[list[int], list[float], str]  # what the engine gives: token ids, log-probs, text


class Stages:
    """Adds up processor seconds by the name of the stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.seconds[name] += time.process_time() - start


def sample(tokens: int) -> list[Sampled]:
    """Returns completions of half to one and a half times so many tokens: float32 log-probs, four letters a token."""
    found = []
    for number in range(PROMPTS * GROUP_SIZE):
        draw = random.Random(number)
        length = draw.randint(tokens // 2, tokens * 3 // 2)
        logprobs = [struct.unpack("f", struct.pack("f", -draw.expovariate(2)))[0] for _ in range(length)]
        found.append(([draw.randrange(VOCABULARY) for _ in range(length)], logprobs, "word" * length))
    return found


def encode(sampled: Sequence[Sampled]) -> list[bytes]:
    """Returns the lines of the server's answer."""
    lines = []
    for number, (token_ids, logprobs, text) in enumerate(sampled):
        completion = Completion(
            token_ids=array("I", token_ids),
            logprobs=array("d", logprobs),
            text=text,
            finish_reason="stop",
            versions=((1, 0, len(token_ids)),),
        )
        line = StreamLine(prompt=number // GROUP_SIZE, index=number % GROUP_SIZE, completion=completion)
        lines.append((line.model_dump_json(context=True) + "\n").encode())
    return lines


def answer(lines: Sequence[bytes], request: object) -> Sequence[bytes]:
    return lines


async def play(port: int, prompts: Sequence[Prompt], stage: Stages) -> list[Group]:
    """Returns the groups of the completions that the server sends."""
    groups, deadline = [], Deadline(600.0)
    async with ServerClient(f"http://127.0.0.1:{port}") as client:
        with stage("HTTP, decode"):
            request = GenerateRequest(prompts=[[1]], sampling=SAMPLING)
            lines = [line async for line in client.generate(request, timeout_s=600.0)]
    with stage("rollouts"):
        for number, prompt in enumerate(prompts):
            rollouts = []
            for index in range(GROUP_SIZE):
                id = f"step 1/{number}"
                slot = Slot(id=f"{id}/{index}", group=id, number=index, sampling=SAMPLING, deadline=deadline)

                async def ask(turn: Turn, place: int = number * GROUP_SIZE + index) -> Completion:
                    return lines[place].completion

                rollouts.append(await Episode(prompt, slot, SingleTurn, ask, BLIND, LIMITS, TokenBudget()).play())
            scores = tuple(Score(total=float(index % 2), parts={"r": 1.0}) for index in range(GROUP_SIZE))
            groups.append(Group(id=f"step 1/{number}", rollouts=tuple(rollouts), scores=scores, draw=number))
    return groups


def measured(batches: Sequence[TrainBatch]) -> list[dict[int, dict[str, tuple[float, ...]]]]:
    """Returns a column as a model measures it."""
    return [unpack(batch, {"old_logprobs": batch.rollout_logprobs_bt}) for batch in batches]


def step(port: int, sampled: Sequence[Sampled], num_ranks: int, folder: Path) -> dict[str, float]:
    """Returns the processor seconds of each stage per million completion tokens."""
    stage, algorithm, draw = Stages(), AlgorithmConfig(), random.Random(0)
    ids = [tuple(draw.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)) for _ in range(PROMPTS)]
    prompts = [Prompt(id=f"p{number}", token_ids=array("I", own), text="?") for number, own in enumerate(ids)]
    with stage("server: encode"):
        encode(sampled)
    groups = asyncio.run(play(port, prompts, stage))
    with stage("metrics"):
        rollout_metrics(groups)
        staleness_metrics(groups, version=1, bound=0)
    with stage("rows"):
        write_atomically(folder / "rows.jsonl", lines_of(groups))
    with stage("advantages"):
        shaped = [shape(group, algorithm, SAMPLING.max_tokens) for group in groups]
        samples, _ = train_samples(shaped, [], algorithm, 0.0)
    with stage("divide"):
        shares = divide(samples, micro_batch_tokens=SAMPLING.max_tokens, num_ranks=num_ranks)
    with stage("send"):
        for share in shares[1:]:
            pickle.dumps(share)
    with stage("build"):
        own = [make(torch.device("cpu")) for make in shares[0]]
    with stage("measured columns"):
        measured(own)
    for batches in ([make(torch.device("cpu")) for make in share] for share in shares[1:]):
        sent = pickle.dumps(measured(batches))
        with stage("measured columns"):
            pickle.loads(sent)
    tokens = sum(len(token_ids) for token_ids, _, _ in sampled)
    return {name: seconds / tokens * 1e6 for name, seconds in stage.seconds.items()}


def main(options: argparse.Namespace) -> None:
    sampled = sample(options.tokens)
    lines = [*encode(sampled), StreamEnd(version=1, model="m").model_dump_json().encode() + b"\n"]
    with answering(functools.partial(answer, lines)) as port, tempfile.TemporaryDirectory() as folder:
        for num_ranks in options.ranks:
            found = [step(port, sampled, num_ranks, Path(folder)) for _ in range(options.repeats)]
            least = {name: min(one[name] for one in found) for name in found[0]}
            print(f"{num_ranks} ranks: {sum(least.values()):.3f} s per million tokens: ", end="")
            print(", ".join(f"{name} {value:.3f}" for name, value in least.items()), flush=True)


if __name__ == "__main__":
    main(OPTIONS)
