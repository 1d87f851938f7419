"""One POST /generate with many prompts against vLLM without HTTP, on the same requests, taking turns.

    python benchmarks/generate.py [config.yaml] [section.key=value ...]

- offline: vLLM's own `LLM.generate`, in a process of its own with the same engine settings.
- engine: the server's engine, asked within its process.
- /generate: over HTTP, one answer; and as a stream of lines.

Prints medians in tokens per second, and the ratios to offline round by round. ROUNDS, PROMPTS and MAX_TOKENS in the
environment are read, too.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from hocket import config as configs
from hocket.config import read_settings
from hocket.server import main, vllm_api, vllm_arguments

ROUNDS = int(os.environ.get("ROUNDS", "7"))
PROMPTS = int(os.environ.get("PROMPTS", "256"))
PROMPT_TOKENS = 16
MAX_TOKENS = int(os.environ.get("MAX_TOKENS", "64"))


ENGINE = (
    "model",
    "dtype",
    "seed",
    "generation_config",
    "logprobs_mode",
    "max_num_seqs",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "kv_cache_memory_bytes",
    "enforce_eager",
    "enable_chunked_prefill",
    "max_num_batched_tokens",
    "distributed_executor_backend",
)
"""What both engines are started with."""


def offline(config: configs.Config) -> None:
    """Answers each line of standard input, a request, with the number of sampled tokens."""
    from vllm import LLM, SamplingParams

    args = vllm_arguments.engine_arguments(config)
    llm = LLM(**{name: getattr(args, name) for name in ENGINE if getattr(args, name) is not None})
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        first, most = request["sampling"]["seed"], request["sampling"]["max_tokens"]
        params = [
            SamplingParams(seed=first + i, max_tokens=most, logprobs=0, flat_logprobs=True)
            for i in range(len(request["prompts"]))
        ]
        outputs = llm.generate([{"prompt_token_ids": p} for p in request["prompts"]], params, use_tqdm=False)
        print(sum(len(output.outputs[0].token_ids) for output in outputs), flush=True)


async def measure(llm: Any, args: Any, config: configs.Config, other: "subprocess.Popen[str]") -> None:
    """Runs all ways round by round, so that a slow minute of the machine hits each of them."""
    import uvicorn

    from hocket.server.app import assemble
    from hocket.server.engine import Engine

    engine = Engine(llm, model=config.model.path, root=config.sync_root, timeout_s=60.0)
    app = await vllm_api.openai_app(llm, args)
    door = assemble(app, engine, host=config.server.host, token=config.token)
    await engine.start()
    server = uvicorn.Server(uvicorn.Config(door, port=config.server.port, log_level="warning"))
    server.capture_signals = main.contextlib.nullcontext  # type: ignore
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)

    draw = random.Random(0)
    ids = range(3, llm.model_config.get_vocab_size())
    prompts = [[draw.choice(ids) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    body = {"prompts": prompts, "sampling": {"max_tokens": MAX_TOKENS, "seed": 1}}
    _, jobs = await engine.read(json.dumps(body).encode())

    def ask(line: str) -> str:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write(line + "\n")
        other.stdin.flush()
        return other.stdout.readline()

    async def alone() -> int:
        return int(await asyncio.to_thread(ask, json.dumps(body)))

    async def direct() -> int:
        outputs = await asyncio.gather(
            *(vllm_api.complete(llm, job.token_ids, job.sampling, job.seed, f"direct-{job.prompt}") for job in jobs)
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
    for number in range(ROUNDS + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            tokens = await way()
            if number > 0:  # the first round warms up
                speeds[name].append(tokens / (time.perf_counter() - start))
    server.should_exit = True
    await serving
    report(speeds)


def post(url: str, body: dict[str, Any]) -> bytes:
    """Sends one request and returns the whole answer."""
    request = urllib.request.Request(f"{url}/generate", data=json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=600) as response:
        return bytes(response.read())


def report(speeds: dict[str, list[float]]) -> None:
    """Prints the medians, and their ratios round by round, which the machine's other load disturbs least."""
    print(f"{PROMPTS} prompts of {PROMPT_TOKENS} tokens, up to {MAX_TOKENS} new ones each, {ROUNDS} rounds")
    for name, values in speeds.items():
        ratio = statistics.median(a / b for a, b in zip(values, speeds["offline"], strict=True))
        spread = f"{min(values):.0f}..{max(values):.0f}"
        print(f"{name:>18}: {statistics.median(values):7.0f} tokens/s ({spread}), {ratio:.2f} of offline")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="config.yaml | section.key=value")
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen, _ = read_settings(options.settings)
    main.prepare_environment(chosen.server.tensor_parallel_size)
    if options.offline:
        offline(chosen)
        sys.exit()
    command = [sys.executable, __file__, *sys.argv[1:], "--offline"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as partner:
        assert partner.stdout is not None
        while partner.stdout.readline() not in ("ready\n", ""):  # "": it has ended, and said why
            pass
        arguments = vllm_arguments.engine_arguments(chosen)
        running = vllm_api.start_engine(arguments)
        try:
            asyncio.run(measure(running, arguments, chosen, partner))
        finally:
            running.shutdown(timeout=main.GRACE_S)
