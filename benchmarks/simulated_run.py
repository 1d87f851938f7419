"""One SIMULATED run of hocket: a discrete-event model of loop.py, for simulate.py. Nothing here is measured.

Batches begin as rollout/pipeline.py admits them, groups go to the servers with the fewest tokens in flight as in
batcher.py, a server decodes one token of every running sequence per iteration, rank 0 reads each rollout in its one
event loop, servers pause while weights load (sync.in_flight=keep), and what a lost server had not finished is played
again on the others. Left out: several turns, agents, oversampling, evaluations, checkpoints, lost ranks.
"""

import dataclasses
import heapq
import itertools
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from simulated_inputs import COLD_STEPS, Lengths, Setup, Speeds

try:
    import simpy
except ModuleNotFoundError:
    raise SystemExit("a simulation needs simpy: .venv/bin/pip install simpy") from None

Process = Generator[simpy.Event, Any, None]


@dataclasses.dataclass(eq=False, slots=True)
class Batch:
    """The rollouts of one step."""

    left: int  # not scored yet
    scored: simpy.Event
    tokens: int = 0
    generated: float = 0.0  # when rank 0 had read its last token
    ready: float = 0.0  # when its last score was there
    versions: list[int] = dataclasses.field(default_factory=list)  # of each rollout's first token


@dataclasses.dataclass(eq=False, slots=True)
class Job:
    """One rollout to play."""

    batch: Batch
    group: int
    length: int
    version: int = 0


class Server:
    """Decodes up to max_concurrent sequences at once, a token of each per iteration; others queue."""

    def __init__(self, simulation: "Simulation") -> None:
        self.simulation = simulation
        self.running: list[tuple[float, int, Job]] = []  # a heap: (iteration in which it ends, number, job)
        self.queue: deque[Job] = deque()
        self.up, self.paused, self.back = True, False, False  # back: answers again, waits to be brought up
        self.version = self._plan_number = 0
        self.in_flight = self.busy_s = self.iteration = 0.0
        self._owed_s = self._since = self._iteration_s = 0.0  # owed: requests and prefills before the next iteration
        self._rate = 1.0

    @property
    def works(self) -> bool:
        return self.up and not self.paused and bool(self.running)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Credit the progress so far, change something in the body, and plan the next completion anew."""
        self.settle()
        yield
        self.plan()
        self.simulation.share_cores()

    def settle(self) -> None:
        """Credit the time since the last change."""
        elapsed, self._since = self.simulation.env.now - self._since, self.simulation.env.now
        if self.works:
            self.busy_s += elapsed
            paid = min(self._owed_s, elapsed * self._rate)
            self._owed_s -= paid
            self.iteration += (elapsed * self._rate - paid) / self._iteration_s

    def plan(self) -> None:
        """Begin what there is room for, and set a timer for the next completion; an older timer is void."""
        speeds, setup = self.simulation.speeds, self.simulation.setup
        while self.up and not self.paused and self.queue and len(self.running) < setup.max_concurrent:
            job = self.queue.popleft()
            job.version = self.version
            heapq.heappush(self.running, (self.iteration + job.length, next(self.simulation.numbers), job))
            self._owed_s += speeds.admit_s
        self._plan_number += 1
        if self.works:
            self._rate = self.simulation.rate
            self._iteration_s = max(1e-12, speeds.decode_fixed_s + speeds.decode_token_s * len(self.running))
            seconds = self._owed_s + (self.running[0][0] - self.iteration) * self._iteration_s
            timer = self.simulation.env.timeout(max(0.0, seconds / self._rate), self._plan_number)
            timer.callbacks.append(self._complete)

    def _complete(self, timer: simpy.Event) -> None:
        if timer.value != self._plan_number:
            return
        self.settle()
        self.iteration = max(self.iteration, self.running[0][0])  # whatever rounding has left
        while self.running and self.running[0][0] <= self.iteration + 1e-6:
            self.simulation.finish(self, heapq.heappop(self.running)[2])
        self.plan()
        self.simulation.share_cores()

    def die(self) -> list[Job]:
        """Stop, and return what was not finished: all of it is played again elsewhere."""
        with self.changing():
            lost = [job for _, _, job in self.running] + list(self.queue)
            self.up, self.running, self.in_flight, self._owed_s = False, [], 0.0, 0.0
            self.queue.clear()
        return lost


class Simulation:
    """One run. `train` mirrors loop.py; the rest is what it waits for."""

    def __init__(self, setup: Setup, speeds: Speeds, lengths: Lengths, *, seed: int = 0) -> None:
        self.setup, self.speeds, self.lengths = setup, speeds, lengths
        self.env, self.random = simpy.Environment(), random.Random(seed)
        self.servers = [Server(self) for _ in range(setup.servers)]
        self.waiting: deque[list[Job]] = deque()  # groups, or what is left of them
        self.version = self.replayed = 0
        self._tokens = speeds.prompt_tokens + setup.max_tokens  # that a rollout counts as in flight
        self.rate, self.training, self._rate_changed = 1.0, False, self.env.event()
        self.batches: dict[int, Batch] = {}
        # Batches that began together stay together: a wait comes back every max_staleness + 1 steps.
        counted = math.ceil(setup.steps / (setup.max_staleness + 1)) * (setup.max_staleness + 1)
        self.steps = COLD_STEPS + counted + 2 * setup.max_staleness  # it fills and empties, which is not counted
        self.numbers = itertools.count()  # of groups and, in heaps, of jobs
        self._gathering, self._gathered = 0, 0.0  # batches under way; when the last one was complete
        self._rank0_free = self.rank0_busy_s = 0.0
        self._scorers = [0.0] * speeds.reward_workers
        self.records: list[dict[str, float]] = []

    def run(self, progress: Callable[[str], None] = lambda text: None) -> dict[str, float]:
        """Simulate all steps and return the means of the warm ones."""
        if self.speeds.mtbf_s:
            for server in self.servers:
                self.env.process(self._failures(server))
        self.env.run(self.env.process(self.train(progress)))
        first, last = COLD_STEPS + self.setup.max_staleness, self.steps - self.setup.max_staleness
        start, end = self.records[first], self.records[last]
        warm, seconds = self.records[first:last], end["start"] - start["start"]
        total = {name: math.fsum(row[name] for row in warm) for name in warm[0]}
        step_s = math.fsum(total[name] for name in ("generate", "reward", "host", "train", "sync"))
        tokens, rollouts = total["tokens"], self.setup.prompts * self.setup.group_size
        return {
            "steps_per_h": 3600 * len(warm) / seconds,
            "tokens_per_s": tokens / seconds,
            "rollouts_per_s": rollouts * len(warm) / seconds,
            "step_s": step_s / len(warm),
            "wait_for_batch": (total["generate"] + total["reward"]) / step_s,
            "host": total["host"] / step_s,
            "train": total["train"] / step_s,
            "sync": total["sync"] / step_s,
            "wait_for_policy": total["no_batch"] / len(warm),
            "trainer_idle": 1 - total["train"] / seconds,
            "servers_idle": 1 - (end["busy"] - start["busy"]) / (seconds * self.setup.servers),
            "rank0_busy": (end["rank0"] - start["rank0"]) / seconds,
            "staleness_mean": total["age"] / len(warm),
            "staleness_max": max(row["oldest"] for row in warm),
            "replayed": self.replayed / rollouts / self.steps,
        }

    def train(self, progress: Callable[[str], None] = lambda text: None) -> Process:
        """Take all steps, as loop.py's `Run.train`."""
        env, setup, speeds = self.env, self.setup, self.speeds
        asked = 0.0
        for step in range(1, self.steps + 1):
            yield from self.bring_up()
            progress(f"step {step}/{self.steps}")
            start = env.now
            no_batch_s = 0.0 if self._gathering else start - max(asked, self._gathered)
            row = {"start": start, "no_batch": no_batch_s / (start - asked) if step > 1 else 0.0} | self._spent()
            asked = start
            for due in range(step, min(step + setup.max_staleness, self.steps) + 1):
                if due not in self.batches:
                    self._begin(due)
            batch = self.batches[step]
            yield batch.scored
            del self.batches[step]
            row["generate"] = max(0.0, batch.generated - start)
            row["reward"] = env.now - start - row["generate"]
            ages = [self.version - version for version in batch.versions]
            row |= {"age": statistics.fmean(ages), "oldest": max(ages), "tokens": batch.tokens}
            positions = batch.tokens + len(ages) * speeds.prompt_tokens
            for name, part in ("host", self._prepare), ("train", self._update), ("sync", self._publish):
                began = env.now
                yield from part(positions)
                row[name] = env.now - began
            self.records.append(row)
        self.records.append({"start": env.now} | self._spent())

    def _prepare(self, positions: float) -> Process:
        """Write the rollouts file and pack the batch, in rank 0's one thread of Python."""
        seconds = self.speeds.step_s + self.speeds.step_token_s * positions
        yield self.env.timeout(self._on_rank_0(seconds) - self.env.now)

    def _spent(self) -> dict[str, float]:
        for server in self.servers:
            server.settle()
        return {"busy": math.fsum(server.busy_s for server in self.servers), "rank0": self.rank0_busy_s}

    def _begin(self, step: int) -> None:
        """Begin a step's batch: draw the lengths of its groups and hand them to the servers."""
        setup, groups = self.setup, []
        size = setup.prompts * setup.group_size
        batch = self.batches[step] = Batch(left=size, scored=self.env.event())
        for _ in range(setup.prompts):
            drawn = self.random.choice(self.lengths)
            drawn = drawn if len(drawn) == setup.group_size else self.random.choices(drawn, k=setup.group_size)
            number = next(self.numbers)
            groups.append([Job(batch, number, min(length, setup.max_tokens)) for length in drawn])
            batch.tokens += sum(job.length for job in groups[-1])

        def come(timer: simpy.Event) -> None:
            self.waiting += groups
            self.dispatch()

        self._gathering += 1
        self.env.timeout(self.speeds.batch_s).callbacks.append(come)

    def dispatch(self) -> None:
        """Send waiting groups to the servers with the fewest tokens in flight: as `Batcher`."""
        up = [server for server in self.servers if server.up]
        if not self.waiting or not up:
            return
        loads = [(server.in_flight, index) for index, server in enumerate(up)]
        heapq.heapify(loads)
        given: list[list[Job]] = [[] for _ in up]
        while self.waiting:
            group, (load, index) = self.waiting.popleft(), loads[0]
            heapq.heapreplace(loads, (load + self._tokens * len(group), index))
            given[index] += group
        for server, jobs in zip(up, given, strict=True):
            if jobs:
                with server.changing():
                    server.queue += jobs
                    server.in_flight += self._tokens * len(jobs)

    def finish(self, server: Server, job: Job) -> None:
        """Have rank 0 read a rollout and score it; the last one completes its batch."""
        server.in_flight -= self._tokens
        batch, env, speeds = job.batch, self.env, self.speeds
        batch.versions.append(job.version)
        read = self._on_rank_0(speeds.rollout_s + speeds.rollout_token_s * job.length)
        batch.generated = max(batch.generated, read)
        scored = read + speeds.reward_s
        if self._scorers:
            scored = max(read, self._scorers[0]) + speeds.reward_s
            heapq.heapreplace(self._scorers, scored)
        batch.ready, batch.left = max(batch.ready, scored), batch.left - 1
        if batch.left == 0:
            env.timeout(batch.ready - env.now).callbacks.append(lambda timer: self._complete(batch))

    def _complete(self, batch: Batch) -> None:
        self._gathering, self._gathered = self._gathering - 1, self.env.now
        batch.scored.succeed()

    def _on_rank_0(self, seconds: float) -> float:
        """Return when rank 0's one thread of Python will have done this work, after what it has to do before."""
        self._rank0_free = max(self.env.now, self._rank0_free) + seconds
        self.rank0_busy_s += seconds
        return self._rank0_free

    def _update(self, positions: float) -> Process:
        """Train; where cores are shared, as fast as the servers leave them."""
        speeds, mine = self.speeds, positions * self.speeds.trained_share / self.setup.ranks
        micro_batches = math.ceil(mine / self.setup.micro_batch_tokens)
        left = speeds.train_fixed_s + speeds.micro_batch_s * micro_batches + speeds.position_s * mine
        self.training = True
        self.share_cores()
        while left > 1e-9:
            start, rate = self.env.now, self.rate
            yield self.env.timeout(left / rate) | self._rate_changed
            left -= (self.env.now - start) * rate
        self.training = False
        self.share_cores()

    def share_cores(self) -> None:
        """Slow down all that works by the same factor where the machine has too few cores."""
        speeds = self.speeds
        if not speeds.cores:
            return
        wanted = speeds.server_cores * sum(server.works for server in self.servers)
        wanted += speeds.trainer_cores * self.training
        rate = min(1.0, speeds.cores / wanted) if wanted else 1.0
        if rate != self.rate:
            self.rate = rate
            for server in self.servers:
                server.settle()
                server.plan()
            changed, self._rate_changed = self._rate_changed, self.env.event()
            changed.succeed()

    def _publish(self, positions: float) -> Process:
        """Hand the new weights to every server; those pause while they load."""
        yield self.env.timeout(self.speeds.prepare_s)
        up = [server for server in self.servers if server.up]
        for server in up:
            with server.changing():
                server.paused = True
        yield self.env.timeout(self.speeds.transfer_s + self.speeds.per_server_s * len(up))
        self.version += 1
        for server in up:
            with server.changing():
                server.paused, server.version = False, self.version

    def bring_up(self) -> Process:
        """Give servers that are back the current weights, all at once."""
        back = [server for server in self.servers if server.back]
        for server in back:
            server.back = False
        if back:
            yield self.env.timeout(self.bring_up_s(len(back)))
        for server in back:
            with server.changing():
                server.up, server.version = True, self.version
        self.dispatch()

    def bring_up_s(self, servers: int) -> float:
        """Return how long it takes to bring up this many servers at once; they check side by side."""
        speeds = self.speeds
        return speeds.prepare_s + speeds.transfer_s + speeds.per_server_s * servers + speeds.check_s

    def outage(self, server: Server, after_s: float, away_s: float) -> Process:
        """Lose a server; its work goes to the others once that is noticed, and it is brought up at a later step."""
        yield self.env.timeout(after_s)
        lost = server.die()
        yield self.env.timeout(self.speeds.silence_s)
        self.replayed += len(lost)
        together = sorted(lost, key=lambda job: job.group)
        self.waiting += [list(jobs) for _, jobs in itertools.groupby(together, lambda job: job.group)]
        self.dispatch()
        yield self.env.timeout(max(0.0, away_s - self.speeds.silence_s))
        server.back = True
        if not any(other.up for other in self.servers):  # nothing goes on without it
            yield from self.bring_up()

    def _failures(self, server: Server) -> Process:
        while True:
            yield from self.outage(server, self.random.expovariate(1 / self.speeds.mtbf_s), self.speeds.return_s)
