"""One POST /generate with many prompts against vLLM without HTTP, on the same requests, taking turns.

- offline: vLLM's own `LLM.generate`, in a process of its own with the same engine settings.
- engine: the server's engine, asked within its process.
- /generate: over HTTP, one answer; and as a stream of lines.

Prints a line for each: the median of sampled tokens per second, the least and the most, and the ratio to offline,
round by round.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import time
import urllib.request
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

from shared import QUICKSTART, beside, parser

if __name__ == "__main__":  # --help does not wait for what follows
    OPTIONS = parser(
        __doc__,
        "config.yaml and section.key=value; the quickstart's by default",
        rounds=(7, "rounds that count, after one that warms up"),
        prompts=(256, "prompts of a request, of 16 tokens each, one completion for each"),
        max_tokens=(64, "tokens of a completion, at most"),
    ).parse_args()

from hocket import config as configs
from hocket.common import environment
from hocket.common.machine import cpu_threads
from hocket.config import read_settings
from hocket.server import main as server_main
from hocket.server import vllm_api, vllm_arguments, vllm_requests
from support.processes import free_port

PROMPT_TOKENS = 16


def offline(pipe: Connection, config: configs.Config) -> None:
    """Answers each request with the number of sampled tokens."""
    from vllm import LLM, EngineArgs, SamplingParams

    llm = LLM.from_engine_args(EngineArgs.from_cli_args(vllm_arguments.engine_arguments(config)))
    pipe.send("ready")
    while True:
        request = pipe.recv()
        first, most = request["sampling"]["seed"], request["sampling"]["max_tokens"]
        params = [
            SamplingParams(seed=first + i, max_tokens=most, logprobs=0, flat_logprobs=True)
            for i in range(len(request["prompts"]))
        ]
        outputs = llm.generate([{"prompt_token_ids": p} for p in request["prompts"]], params, use_tqdm=False)
        pipe.send(sum(len(output.outputs[0].token_ids) for output in outputs))


async def measure(
    llm: Any, args: Any, config: configs.Config, other: Connection, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Returns tokens per second; all ways round by round, so that a slow minute of the machine hits each of them."""
    import uvicorn

    from hocket.server.app import assemble
    from hocket.server.engine import Engine

    engine = Engine(llm, model=config.model.path, root=config.sync_root, timeout_s=60.0, template={})
    door = assemble(engine, arguments=args, host=config.server.host, token=config.token).guard
    await engine.start()
    server = uvicorn.Server(uvicorn.Config(door, port=config.server.port, log_level="warning"))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)

    draw = random.Random(0)
    ids = range(3, llm.model_config.get_vocab_size())
    prompts = [[draw.choice(ids) for _ in range(PROMPT_TOKENS)] for _ in range(options.prompts)]
    body = {"prompts": prompts, "sampling": {"max_tokens": options.max_tokens, "seed": 1}}
    _, jobs = await engine.read(json.dumps(body).encode())

    async def alone() -> int:
        other.send(body)
        return int(await asyncio.to_thread(other.recv))

    async def direct() -> int:
        outputs = await asyncio.gather(
            *(
                vllm_requests.complete(llm, job.token_ids, job.sampling, job.seed, f"direct-{job.prompt}")
                for job in jobs
            )
        )
        return sum(len(output.token_ids) for output in outputs)

    async def whole() -> int:
        answer = json.loads(await asyncio.to_thread(post, config.own_url, body))
        return sum(len(row[0]["token_ids"]) for row in answer["completions"])

    async def stream() -> int:
        lines = (await asyncio.to_thread(post, config.own_url, {**body, "stream": True})).splitlines()
        return sum(len(json.loads(line)["completion"]["token_ids"]) for line in lines[:-1])

    ways: dict[str, Callable[[], Awaitable[int]]] = {
        "offline": alone,
        "engine": direct,
        "/generate": whole,
        "/generate stream": stream,
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            tokens = await way()
            if number > 0:  # the first round warms up
                speeds[name].append(tokens / (time.perf_counter() - start))
    server.should_exit = True
    await serving
    return speeds


def post(url: str, body: dict[str, Any]) -> bytes:
    """Sends one request and returns the whole answer."""
    request = urllib.request.Request(f"{url}/generate", data=json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=600) as response:
        return bytes(response.read())


def report(speeds: dict[str, list[float]], options: argparse.Namespace) -> None:
    """Prints the medians, and their ratios round by round, which the machine's other load disturbs least."""
    sizes = f"{options.prompts} prompts of {PROMPT_TOKENS} tokens, up to {options.max_tokens} new ones each"
    print(f"{sizes}, {options.rounds} rounds")
    for name, values in speeds.items():
        ratio = statistics.median(a / b for a, b in zip(values, speeds["offline"], strict=True))
        spread = f"{min(values):.0f}..{max(values):.0f}"
        print(f"{name:>18}: {statistics.median(values):7.0f} tokens/s ({spread}), {ratio:.2f} of offline")


def main(options: argparse.Namespace) -> None:
    environment.prepare()
    config, _ = read_settings([f"server.port={free_port()}", *options.settings], default=QUICKSTART)
    parallel = config.server.tensor_parallel_size
    server_main.prepare_environment(parallel, cpu_threads(config.model.path, processes=parallel))
    with beside(offline, config, engine=True) as other:
        other.recv()  # two engines that start at once may misjudge a GPU's memory
        args = vllm_arguments.engine_arguments(config)
        llm = vllm_api.start_engine(args)
        try:
            report(asyncio.run(measure(llm, args, config, other, options)), options)
        finally:
            llm.shutdown(timeout=server_main.GRACE_S)


if __name__ == "__main__":
    main(OPTIONS)
