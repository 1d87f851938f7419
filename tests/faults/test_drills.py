"""Fault drills: real servers and trainers, killed and stopped for real, in the middle of what they do.

After each the run has ended with the cause or gone on as designed, within its deadlines; no prompt was lost or trained
twice; and no process is left.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.processes import Command, Run, Server, free_port, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SLOW = "plugins=[tests/faults/slow_update.py]"
KILLS = int(os.environ.get("KILLS", "3"))
"""Of the trainer, in the drill that kills it again and again; each takes a start of a trainer."""
BIG = ("rollout.prompts_per_step=24", "rollout.group_size=16")
"""Steps whose generation takes about half a second."""


def played(server: Any) -> float:
    """Completions that a server's engine has finished since its start."""
    lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total"))


def leave(server: Any, spares: Any, processes: list[Any]) -> None:
    """Leaves a server to the next drill, or ends it where its trainer has left it within an update."""
    if server.health()["status"] == "ready":
        processes.remove(server)
        spares.left.append(server)
    else:
        server.end()


def test_a_server_that_joins_takes_its_share_and_one_that_is_killed_while_generating_is_made_up_for(
    spares: Any, processes: list[Any]
) -> None:
    first = spares.take()
    processes.append(first)
    first.wait_ready()
    second = Server(first.folder, free_port())
    processes.append(second)
    run = Run(first.folder, "joins", [first, second], "trainer.steps=1000", "pipeline.max_staleness=1", *BIG)
    processes.append(run)
    run.wait_step(5)  # by the first server alone, most likely: the second is loading
    second.wait_ready()
    wait_for(lambda: f"server {second.url} holds version" in run.output(), "the second server has joined")
    run.wait_step(len(run.steps()) + 2)
    before, start = len(run.steps()), [played(first), played(second)]
    run.wait_step(before + 8)
    shares = [played(server) - count for server, count in zip((first, second), start, strict=True)]
    assert sum(shares) > 8 * 24 * 16 * 0.7
    assert min(shares) > 0.3 * sum(shares), shares  # about half: one that ends sooner takes more
    assert max(step["sync/servers"] for step in run.steps()) == 2

    first.wait_until(lambda health: health["in_flight"] > 50, "the first server is generating")
    first.kill()
    first.assert_gone()  # its engine ends with it
    at = len(run.steps())
    run.wait_step(at + 4)  # by the second server alone
    assert f"lost server {first.url}" in run.output()
    assert run.steps()[-1]["sync/servers"] == 1

    back = first.again()
    processes.append(back)
    back.wait_ready()
    wait_for(lambda: run.output().count(f"server {first.url} holds version") == 2, "the first server is back")
    run.wait_step(len(run.steps()) + 3)
    assert run.steps()[-1]["sync/servers"] == 2

    run.popen.send_signal(signal.SIGINT)
    assert run.wait_end() != 0
    run.assert_gone()
    run.assert_whole(len(run.steps()), 24, 16, max_staleness=1)
    second.end()
    leave(back, spares, processes)


def test_the_only_server_may_die_between_steps_during_an_update_or_just_stop(spares: Any, processes: list[Any]) -> None:
    server = spares.take()
    processes.append(server)
    server.wait_ready()
    run = Run(
        server.folder,
        "only",
        [server],
        "trainer.steps=1000",
        "sync.backend=nccl",
        "server.silence_s=6",
        SLOW,
    )
    processes.append(run)

    def kill_and_start_again(when: str) -> Any:
        at, said = len(run.steps()), len(run.output())
        server.kill()
        server.assert_gone()
        wait_for(lambda: "waiting for " + server.url in run.output()[said:], f"the trainer waits after a death {when}")
        again = server.again()
        processes.append(again)
        again.wait_ready()
        run.wait_step(at + 3)
        assert "lost server" in run.output()[said:]
        return again

    run.wait_step(2)
    server.wait_until(lambda health: health["status"] == "updating", "an update")
    server = kill_and_start_again("during an update")

    run.wait_step(len(run.steps()) + 1)
    server = kill_and_start_again("whenever")

    # Stopped, it answers nothing, but its connections stay: only its silence tells.
    silent = re.compile(rf"lost server {server.url}.*not (answered|finish)")
    for _ in range(5):  # on a busy machine generation may have ended before it is stopped; an update waits for longer
        server.wait_until(lambda health: health["in_flight"] > 0, "generation")
        at = len(run.steps())
        server.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        while not silent.search(run.output()) and time.monotonic() - stopped < 30:
            time.sleep(0.2)
        server.signal(signal.SIGCONT)
        run.wait_step(at + 3)
        if silent.search(run.output()):
            break
    assert silent.search(run.output())

    server.wait_until(lambda health: health["status"] == "ready", "no update")
    run.popen.send_signal(signal.SIGINT)
    assert run.wait_end() != 0
    run.assert_gone()
    run.assert_whole(len(run.steps()), 16, 8)
    leave(server, spares, processes)


def test_the_trainer_may_die_during_an_update_and_the_disk_may_be_full(spares: Any, processes: list[Any]) -> None:
    server = spares.take()
    processes.append(server)
    server.wait_ready()
    slow = ("trainer.steps=1000", "sync.backend=nccl", SLOW)
    over = "sync.take_over=true"  # or it would wait for a minute, as the killed one could not say that it has ended
    for name in ("a", "b"):  # twice: what the first one left behind harms neither the second one nor the server
        run = Run(server.folder, f"update-{name}", [server], *slow, over)
        processes.append(run)
        run.wait_step(2)
        server.wait_until(lambda health: health["status"] == "updating", "an update")
        run.kill()
        run.assert_gone()
        server.wait_until(lambda health: health["status"] != "updating", "the server has noticed")
        # Had all buckets been sent already, the update is whole.
        assert server.health()["status"] in ("failed", "ready")

    run = Run(server.folder, "after", [server], "trainer.steps=4", "sync.backend=nccl", over)
    processes.append(run)
    assert run.wait_end() == 0, run.output()
    run.assert_gone()
    run.assert_whole(4, 16, 8)
    assert server.health()["version"] == json.loads((run.dir / "summary.json").read_text())["final_version"]

    weights = server.folder / "runs" / "full" / "weights"
    weights.mkdir(parents=True)
    with small_disk(weights):
        run = Run(server.folder, "full", [server], "trainer.steps=1000")
        processes.append(run)
        run.wait_step(3)
        held = server.health()["version"]
        with contextlib.suppress(OSError), (weights / "filler").open("wb") as filler:
            filler.write(bytes(8 << 20))
        assert run.wait_end(120) != 0
        assert re.search(r"can't write weight version \d+ to .*: .*No space left on device.*free space", run.output())
        assert [path.name for path in weights.iterdir() if path.name.startswith(".")] == []
        assert run.steps()[-1]["step"] >= 3
        run.assert_gone()
    health = server.health()
    assert (health["status"], health["version"] >= held) == ("ready", True)
    assert httpx.post(f"{server.url}/generate", json={"prompts": [[5]]}, timeout=60).status_code == 200
    leave(server, spares, processes)


def test_a_trainer_that_is_killed_again_and_again_trains_each_prompt_exactly_once(
    tmp_path: Path, spares: Any, processes: list[Any], rng: random.Random
) -> None:
    server = spares.take()
    processes.append(server)
    server.wait_ready()
    num_prompts, num_steps, per_step, epochs = 60, 36, 5, 3
    settings = (
        "pipeline.max_staleness=2",
        "checkpoint.resume=true",
        "checkpoint.every_steps=1",
        "checkpoint.async=true",
        f"data.limit={num_prompts}",
        f"trainer.steps={num_steps}",
        f"rollout.prompts_per_step={per_step}",
        "rollout.group_size=4",
    )
    for kill in range(KILLS):
        run = Run(server.folder, "again", [server], *settings)
        processes.append(run)
        run.wait_step((kill + 1) * num_steps // (KILLS + 2))
        time.sleep(rng.uniform(0, 0.5))  # anywhere in the step
        assert run.popen.poll() is None, "it was over before it could be killed"
        run.kill()
        run.assert_gone()
    last = Run(server.folder, "again", [server], *settings)
    processes.append(last)
    assert last.wait_end() == 0, last.output()

    steps = last.steps()
    assert [step["step"] for step in steps] == list(range(1, num_steps + 1))
    assert max(step["staleness/max"] for step in steps) <= 2
    assert max(step["staleness/mean"] for step in steps) > 0  # they did run ahead
    first, *rows = map(json.loads, (last.dir / "ledger.jsonl").read_text().splitlines())
    assert first == {"format": 1, "step": 0, "num_prompts": num_prompts}
    assert sorted(row["draw"] for row in rows) == list(range(num_steps * per_step))
    for epoch in range(epochs):
        mine = [row for row in rows if row["epoch"] == epoch]
        assert len({row["prompt"] for row in mine}) == len(mine) == num_prompts
    assert {row["state"] for row in rows} <= {"trained", "filtered"}
    for step in range(1, num_steps + 1):  # what the ledger says was trained in a step was
        played = (last.dir / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
        ids = {json.loads(line)["prompt_id"] for line in played}
        assert ids == {row["prompt"] for row in rows if row["step"] == step}
    asked = Command(["ledger", str(last.dir)], tmp_path / "ledger.log")
    processes.append(asked)
    assert asked.popen.wait(60) == 0, asked.output()
    assert "accounted for exactly once" in asked.output()
    leave(server, spares, processes)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=False, capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)
