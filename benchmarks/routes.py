"""The server's client routes against plain vLLM's server, on the same load, taking turns.

Both servers run vLLM's engine with the same arguments: hocket's, and `vllm.entrypoints.launchers.api_server.entry` of
the same package. Each round asks one after the other with so many requests, so many at once, and the other way round in
the next. Prints a line for each route: requests, then the medians over the rounds of hocket's throughput, p50 and p99
of a request's seconds as ratios to plain vLLM's, with the least and the most. /generate is compared with
/v1/completions of plain vLLM, prompt by prompt.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shared import QUICKSTART, ROOT, parser

if __name__ == "__main__":  # --help does not wait for what follows
    OPTIONS = parser(
        __doc__,
        "config.yaml and section.key=value; the quickstart's by default",
        rounds=(5, "rounds that count, after one that warms up"),
        requests=(200, "requests of a route and a round"),
        at_once=(32, "requests that wait at once"),
        max_tokens=(32, "tokens of an answer"),
    ).parse_args()

import httpx

from support.processes import Process, free_port

PLAIN = """
import sys

import uvloop
from hocket.common.machine import cpu_threads
from hocket.config import read_settings
from hocket.server import main, vllm_arguments

config, _ = read_settings(sys.argv[1:])
main.prepare_environment(1, cpu_threads(config.model.path, processes=1))
arguments = vllm_arguments.app_arguments(vllm_arguments.engine_arguments(config))
arguments.uvicorn_log_level = "error"
arguments.disable_uvicorn_access_log = True
from vllm.entrypoints.launchers.api_server.entry import run_server

uvloop.run(run_server(arguments))
"""
PROMPT_TOKENS = 16
CHAT = [{"role": "user", "content": "Sort: cba"}]
ROUTES = {
    "/v1/completions": ("/v1/completions", "/v1/completions", False),
    "/v1/completions, stream": ("/v1/completions", "/v1/completions", True),
    "/v1/chat/completions": ("/v1/chat/completions", "/v1/chat/completions", False),
    "/v1/chat/completions, stream": ("/v1/chat/completions", "/v1/chat/completions", True),
    "/generate": ("/generate", "/v1/completions", False),
}
"""By name: hocket's route, plain vLLM's, and whether they stream."""


def body_of(
    route: str, prompt: Sequence[int], options: argparse.Namespace, stream: bool, ends_late: bool
) -> dict[str, Any]:
    """The body of one request; where it `ends_late`, no token ends the answer before `max_tokens`."""
    if route == "/generate":
        return {"prompts": [prompt], "sampling": {"max_tokens": options.max_tokens, "seed": 1}}
    asked = {"messages": CHAT} if "chat" in route else {"prompt": prompt}
    return {**asked, "max_tokens": options.max_tokens, "seed": 1, "stream": stream, "ignore_eos": ends_late}


async def load(
    url: str, route: str, options: argparse.Namespace, stream: bool, ends_late: bool, seed: int
) -> tuple[float, list[float]]:
    """Ask with all requests. Returns the seconds of all, and of each."""
    draw = random.Random(seed)
    bodies = []
    for _ in range(options.requests):
        prompt = [draw.randrange(3, 90) for _ in range(PROMPT_TOKENS)]
        bodies.append(body_of(route, prompt, options, stream, ends_late))
    seconds: list[float] = []
    limits = httpx.Limits(max_connections=options.at_once)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        places = asyncio.Semaphore(options.at_once)

        async def ask(body: dict[str, Any]) -> None:
            async with places:
                start = time.perf_counter()
                answer = await client.post(route, json=body)
                assert answer.status_code == 200, answer.text
                seconds.append(time.perf_counter() - start)

        start = time.perf_counter()
        await asyncio.gather(*(ask(body) for body in bodies))
        return time.perf_counter() - start, seconds


def percentile(seconds: Sequence[float], share: float) -> float:
    """The value below which this share of the requests is."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def measure(ours: str, plain: str, options: argparse.Namespace) -> None:
    for name, (route, plain_route, stream) in ROUTES.items():
        ratios: dict[str, list[float]] = {"throughput": [], "p50": [], "p99": []}
        for number in range(options.rounds + 1):
            turns = [("ours", ours, route), ("plain", plain, plain_route)]
            results = {}
            for side, url, asked in turns if number % 2 else reversed(turns):
                results[side] = await load(url, asked, options, stream, route == plain_route, number)
            if number == 0:
                continue
            (our_s, our_each), (plain_s, plain_each) = results["ours"], results["plain"]
            ratios["throughput"].append(plain_s / our_s)
            for share in (0.5, 0.99):
                ratio = percentile(our_each, share) / percentile(plain_each, share)
                ratios[f"p{100 * share:.0f}"].append(ratio)
        shown = []
        for figure, values in ratios.items():
            shown.append(f"{figure} {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        print(f"{name}: {options.requests} requests x {options.rounds}; {', '.join(shown)}", flush=True)


def main(options: argparse.Namespace) -> None:
    settings = options.settings or [QUICKSTART]
    with tempfile.TemporaryDirectory() as folder:
        servers = []
        for name, program, command in (
            ("ours", ("run.py",), ["serve"]),
            ("plain", ("-c", PLAIN), []),
        ):
            port = free_port()
            words = [*command, *settings, f"server.port={port}", f"run.dir={folder}/{name}"]
            servers.append(
                (
                    f"http://127.0.0.1:{port}",
                    Process(words, Path(folder, f"{name}.log"), program=program, PYTHONPATH=f"{ROOT}/src"),
                )
            )
        (ours, first), (plain, second) = servers
        with first, second:
            for url, process in servers:
                process.wait_for(partial(is_up, url), f"{url} is up")
            asyncio.run(measure(ours, plain, options))


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", timeout=5).is_success
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    main(OPTIONS)
