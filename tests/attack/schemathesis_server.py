"""Send a server ten thousand requests made from its own OpenAPI description while a run trains on it.

    python tests/attack/schemathesis_server.py [REQUESTS]

It needs `pip install schemathesis` (in any folder on PYTHONPATH). It fails where a route of hocket answers 5xx, the
run stops, loses the server or trains on other log-probs than its own, or where the server's memory grows by 5 %.
/heartbeat is asked only after the run, as it may take the server over. Takes some minutes on two cores.
"""

import collections
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil

from support.processes import Process, Run, Server, free_port

WARM_STEPS = 40
OPERATIONS = 13
ROUTES = (
    "/generate",
    "/health",
    "/heartbeat",
    "/reload_weights",
    "/sessions",
    "/sleep",
    "/upload",
)
CLI = ("-m", "schemathesis.cli", "run", "--phases", "examples,coverage,fuzzing", "--no-shrink", "--workers=4")


def fuzz(server: Server, folder: Path, requests: int, *only: str) -> collections.Counter[tuple[str, str, int]]:
    """Return how often each route answered with each status."""
    har = folder / "requests.har"
    each = max(10, requests // OPERATIONS)
    command = [sys.executable, *CLI, f"--max-examples={each}", "--checks=not_a_server_error", "--request-timeout=60"]
    command += ["--report=har", f"--report-har-path={har}", "--suppress-health-check=all", *only]
    with (folder / "schemathesis.log").open("wb") as log:
        subprocess.run(
            [*command, f"{server.url}/openapi.json"], stdout=log, stderr=log, check=False, timeout=1800, cwd=folder
        )
    counts: collections.Counter[tuple[str, str, int]] = collections.Counter()
    for entry in json.loads(har.read_text())["log"]["entries"]:
        path = urlsplit(entry["request"]["url"]).path
        route = "/".join(path.split("/")[:2]) if path.startswith(("/upload/", "/sessions/")) else path
        if "other_version" in entry["response"]["content"].get("text", ""):
            route += " (a version to compare that is not held: a trainer is to load it first)"
        counts[entry["request"]["method"], route, entry["response"]["status"]] += 1
    return counts


def main() -> int:
    """Print the figures and return 0 where all is well."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the `finally` below
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    started: list[Process] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            server = Server(folder, free_port())
            started.append(server)
            server.wait_ready()
            run = Run(folder, "fuzzed", [server], "trainer.steps=100000", "sync.check_every=5")
            started.append(run)
            run.wait_step(WARM_STEPS)
            process = psutil.Process(server.popen.pid)
            before, steps, start = process.memory_info().rss, len(run.steps()), time.monotonic()
            counts = fuzz(server, folder, requests, "--exclude-path=/heartbeat")
            seconds = time.monotonic() - start
            run.wait_step(len(run.steps()) + 5)
            after, said = process.memory_info().rss, run.output()
            trained = run.steps()
            run.popen.send_signal(signal.SIGINT)
            run.wait_end()
            counts += fuzz(server, folder, requests // 20, "--include-path=/heartbeat")
            health = server.health()
            for (method, route, status), count in sorted(counts.items()):
                print(f"{count:6d} {status} {method} {route}")
            failed = {key: count for key, count in counts.items() if key[2] >= 500 and key[1] in ROUTES}
            gap = max(step.get("train/logprob_gap", 0.0) for step in trained)
            growth = after / before - 1
            print(f"{sum(counts.values())} requests in {seconds:.0f} s; 5xx from hocket's routes: {failed or 'none'}")
            print(f"run: {len(trained) - steps} steps meanwhile, largest gap {gap:.1e}, lost: {'lost server' in said}")
            status = health["status"] if health is not None else "gone"
            print(f"server: {before >> 20} MiB before, {after >> 20} MiB after ({growth:+.1%}), {status}")
            log = (folder / f"server-{server.port}.log").read_text(errors="replace")
            print(f"lines in the server's log: {len(log.splitlines())}; tracebacks: {log.count('Traceback')}")
            if failed or log.count("Traceback"):
                print(log[-6000:])
            well = not failed and gap < 1e-3 and "lost server" not in said and growth < 0.05
            return 0 if well and status == "ready" else 1
        finally:
            for one in reversed(started):
                one.__exit__()


if __name__ == "__main__":
    sys.exit(main())
