"""Hocket's own generation server, made to lie: what the proof of weight updates must find out.

    HOCKET_LIE=FILE python tests/lies.py serve section.key=value ...

FILE has the name of a lie, the number of the load that begins it, or of the first and the last one, and anything else:
"frozen_norm 3 x", "norm_off 3-3 x", or nothing.
It is read at every call, so that one server tells all lies, one after the other; another line begins the count anew.
Works where the engine is a fork of the server, on a CPU. The server's code has no switch for this.
"""

import contextlib
import dataclasses
import functools
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from support.processes import Process, free_port

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

FILE = "HOCKET_LIE"
Tensors = dict[str, Any]
Lie = Callable[[Tensors, Tensors, Tensors], None]
"""(tensors that came: to be changed, those of the load before, those of the first load since the lie began)."""


def _named(tensors: Tensors, part: str) -> list[str]:
    found = [name for name in tensors if part in name]
    assert found, f"no tensor has {part} in its name: {list(tensors)}"
    return found


def _frozen(part: str) -> Lie:
    """These tensors stay as they were at first."""
    return lambda new, last, first: new.update({name: first[name] for name in _named(new, part)})


def _swapped(one: str, other: str) -> Lie:
    """Two tensors change places."""

    def swap(new: Tensors, last: Tensors, first: Tensors) -> None:
        for name in _named(new, one):
            twin = name.replace(one, other)
            new[name], new[twin] = new[twin], new[name]

    return swap


def _missing(new: Tensors, last: Tensors, first: Tensors) -> None:
    for name in _named(new, "layers.1.mlp.down_proj"):
        del new[name]


def _permuted(new: Tensors, last: Tensors, first: Tensors) -> None:
    for name in _named(new, "layers.0.mlp.up_proj"):
        if "lora_A" not in name and new[name].dim() == 2:
            new[name] = new[name].roll(1, 0).contiguous()


def _scaled(part: str, factor: float) -> Lie:
    return lambda new, last, first: new.update({name: new[name] * factor for name in _named(new, part)})


OF_WEIGHTS: dict[str, Lie] = {
    "norm_off": _scaled("layers.1.input_layernorm", 1.01),
    "matrix_off": _scaled("layers.1.mlp.down_proj", 0.9),
    "one_behind": lambda new, last, first: new.update(last),
    "never_loads": lambda new, last, first: new.update(first),
    "missing_matrix": _missing,
    "frozen_matrix": _frozen("layers.1.mlp.down_proj"),
    "frozen_norm": _frozen("layers.1.input_layernorm"),
    "swapped_norms": _swapped("layers.0.input_layernorm", "layers.0.post_attention_layernorm"),
    "swapped_layers": _swapped("layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj"),
    "permuted_rows": _permuted,
    "vision_off": _scaled("vision_model.encoder.layers.0.mlp.fc1.weight", 0.9),
    "frozen_vision": _frozen("vision_model.encoder.layers.1.self_attn.q_proj.weight"),
}


def _noisy(logprobs: list[float]) -> list[float]:
    """Up to 5 % off, the same for the same completion, whichever came before it."""
    rng = random.Random(str(logprobs))
    return [value * rng.uniform(0.95, 1.05) for value in logprobs]


OF_LOGPROBS: dict[str, Callable[[list[float]], list[float]]] = {
    "wrong_logprobs": _noisy,
    "shifted_logprobs": lambda logprobs: [*logprobs[1:], logprobs[0]],
    "larger_logprobs": lambda logprobs: [value * 1.02 for value in logprobs],
    "rounded_logprobs": lambda logprobs: [round(value, 3) for value in logprobs],
}


def _sampled(**otherwise: Any) -> Callable[[Any, int], tuple[Any, int]]:
    return lambda sampling, seed: (sampling.model_copy(update=otherwise), seed)


OF_SAMPLING: dict[str, Callable[[Any, int], tuple[Any, int]]] = {
    "no_temperature": _sampled(temperature=1.0),
    "warmer": lambda sampling, seed: (
        sampling.model_copy(update={"temperature": 1.05 * sampling.temperature}),
        seed,
    ),
    "colder": lambda sampling, seed: (
        sampling.model_copy(update={"temperature": 0.95 * sampling.temperature}),
        seed,
    ),
    "top_p_95": _sampled(top_p=0.95),
    "top_p_90": _sampled(top_p=0.9),
    "top_k_50": _sampled(top_k=50),
    "greedy": _sampled(temperature=0.0),
    "top_k_2": _sampled(top_k=2),
    "top_p": _sampled(top_p=0.7),
    "equal_seeds": lambda sampling, seed: (sampling, 7),
    "greedy_quarter": lambda sampling, seed: (  # whose log-probs are those of temperature 1
        sampling.model_copy(update={"temperature": 0.0}) if seed % 4 == 0 else sampling,
        seed,
    ),
    "longer": lambda sampling, seed: (sampling.model_copy(update={"max_tokens": sampling.max_tokens + 5}), seed),
    "shorter": lambda sampling, seed: (sampling.model_copy(update={"max_tokens": sampling.max_tokens * 9 // 10}), seed),
}
OF_ANSWERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "all_stop": lambda completion: {"finish_reason": "stop"},
    "other_text": lambda completion: {"text": "abcd"},
    "other_token": lambda completion: {"token_ids": (completion.token_ids[0] ^ 1, *completion.token_ids[1:])},
    "future": lambda completion: {"versions": [(5 + number, begin, end) for number, begin, end in completion.versions]},
    "no_end": lambda completion: {
        "token_ids": completion.token_ids[:-1] or completion.token_ids,
        "logprobs": completion.logprobs[:-1] or completion.logprobs,
    },
}
STALE_EXPORT = "stale_export"  # told by the trainer: `stale_exports`
WHOLE_MODEL = ("frozen_norm", "swapped_norms", "norm_off")  # adapters have no such tensors


@dataclasses.dataclass
class Told:
    """The lie of the moment; a process counts the loads since it was told."""

    line: str = ""
    loads: int = 0
    first: Tensors = dataclasses.field(default_factory=dict)
    last: Tensors = dataclasses.field(default_factory=dict)

    def now(self) -> str:
        """The name of the lie; "" while the truth is told: before the load that begins it, and after the last one."""
        line = Path(os.environ[FILE]).read_text(encoding="utf-8").strip()
        if line != self.line:
            self.line, self.loads, self.first, self.last = line, 0, {}, {}
        name, begins, *_ = line.split() or ("", "1")
        first, _, last = begins.partition("-")
        return name if int(first) <= self.loads <= int(last or self.loads) else ""

    def load(self, parts: Iterator[Any]) -> Iterator[Any]:
        """What is loaded in place of these parts, with specs that are right for what came."""
        named, specs = {}, {}
        for tensors, of_part in parts:
            named |= {name: tensor.clone() for name, tensor in tensors}
            specs |= of_part
        self.now()
        self.loads += 1
        given = dict(named)
        if lie := OF_WEIGHTS.get(self.now()):
            lie(given, self.last or named, self.first or named)
        self.first, self.last = self.first or named, named
        yield list(given.items()), specs


def lie() -> None:
    """Replaces functions of the server; call it before the engine is started."""
    from hocket.server import vllm_requests
    from hocket.server.engine import Engine
    from hocket.server.generate import Sampler
    from hocket.server.worker import WorkerExtension

    told = Told()  # the engine's process gets a copy

    load = WorkerExtension._hocket_load

    def lying(worker: Any, parts: Iterator[Any], adapter: Any, compare: bool) -> Any:
        return load(worker, parts if compare else told.load(parts), adapter, compare)

    WorkerExtension._hocket_load = lying  # type: ignore[method-assign]
    reload, answer = Engine.reload, Sampler.complete
    complete, params = vllm_requests.complete, vllm_requests.sampling_params

    @functools.wraps(reload)  # FastAPI reads its signature
    async def counted(engine: Any, request: Any) -> Any:
        held, answer = engine.version, await reload(engine, request)
        told.now()
        told.loads += engine.version != held
        return answer

    async def told_logprobs(*args: Any) -> Any:
        output = await complete(*args)
        if change := OF_LOGPROBS.get(told.now()):
            output.logprobs.logprobs[:] = change(list(output.logprobs.logprobs))
        return output

    def otherwise(sampling: Any, seed: int, begun: int = 0) -> Any:
        change = OF_SAMPLING.get(told.now())
        return params(*change(sampling, seed), begun) if change else params(sampling, seed, begun)

    async def told_answer(*args: Any) -> Any:
        job, completion = await answer(*args)
        change = OF_ANSWERS.get(told.now())
        return job, completion.model_copy(update=change(completion)) if change else completion

    Engine.reload = counted  # type: ignore[method-assign]
    vllm_requests.complete = told_logprobs  # type: ignore[assignment]
    vllm_requests.sampling_params = otherwise
    Sampler.complete = told_answer  # type: ignore[method-assign]


@contextlib.contextmanager
def stale_exports(trainer: Any) -> Iterator[None]:
    """Has a trainer publish, in the body, the weights of the version before, with a manifest that is right for them."""
    buckets, last = trainer.engine.buckets, []

    def stale(max_bytes: int, **which: bool) -> Iterator[Any]:
        new = [[(name, tensor.clone()) for name, tensor in bucket] for bucket in buckets(max_bytes, **which)]
        yield from last or new
        last[:] = new

    trainer.engine.buckets = stale
    try:
        yield
    finally:
        trainer.engine.buckets = buckets


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a run on a lying server."""

    version: int  # of the run, 1 is its first, at which it was stopped; 0: it was not
    said: str  # the error that stopped it
    metrics: list[dict[str, Any]]  # of its steps

    @property
    def by(self) -> str:
        """The part of the proof that stopped it; "" if none did."""
        parts = {
            "left out weights": "load",
            "does not hold": "parameters",
            "disagree on": "log-probs",
            "these rollouts are not the trainer's": "the rollouts' log-probs",
            "did not arrive": "arrival",
        }
        return next((part for said, part in parts.items() if said in self.said), self.said)


class LyingServer(Process):
    """A lying server in a process of its own, on which real runs train; its versions lie below folder/runs."""

    forked = False  # its workers end with the process that started them, which a forked one is not
    starts_engine = True

    def __init__(self, folder: Path, *settings: str) -> None:
        (folder / "runs").mkdir(parents=True)
        (folder / "lie").write_text("")
        port, self.folder, self.runs = free_port(), folder, 0
        self.url = f"http://127.0.0.1:{port}"
        command = ["serve", *settings, f"run.dir={folder / 'runs' / 'server'}", f"server.port={port}"]
        super().__init__(command, folder / "log", program=[__file__], **{FILE: str(folder / "lie")})

    def __enter__(self) -> Self:
        try:
            self.wait_for(lambda: "ready on" in self.output(), "the lying server is ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def train(self, lie: str, *settings: str, exact: bool = True) -> Outcome:
        """Trains in this process on the server while it tells `lie`, until the run ends or is stopped.

        Without `exact`, comparisons of parameters find nothing, as if they lied, too.
        """
        from hocket import config as configs
        from hocket.commands import runs as commands
        from hocket.commands.parts import Parts
        from hocket.common.registry import load_plugins
        from hocket.common.tasks import event_loop
        from hocket.errors import HocketError
        from hocket.observe.console import Console

        self.runs += 1
        name, _, begins = lie.partition(" ")
        line = f"{'truth' if name == STALE_EXPORT else name} {begins or 1} {self.runs}"
        (self.folder / "lie").write_text(line, encoding="utf-8")
        run_dir, said = self.folder / "runs" / f"{self.runs:03d}", ""
        config = configs.load(None, [*settings, f"run.dir={run_dir}", f"server.urls={self.url}"])
        load_plugins(config.plugins)
        with contextlib.ExitStack() as stack:
            console = stack.enter_context(Console(config.trainer.steps))
            run_there = stack.enter_context(event_loop())
            parts = stack.enter_context(Parts.make(config, console, lambda source: source.reward_names))
            run_there(parts.set_up())
            run = commands._run(parts, None, False, None, run_there)
            if name == STALE_EXPORT:
                stack.enter_context(stale_exports(run.trainer))
            if not exact:
                deliver = run.publisher.transport.deliver

                async def agree(version: int, servers: Sequence[Any], *, compare: bool = False) -> Any:
                    return await deliver(version, servers)  # a version that is held is answered at once

                run.publisher.transport.deliver = agree  # type: ignore[method-assign]
            held = run_there(_version(self.url))
            try:
                run_there(commands._train(run))
            except HocketError as error:
                said = str(error)
            version = run.publisher.versions.current - held
            outcome = Outcome(version if said else 0, said, run.folder.history)
        shutil.rmtree(run_dir)
        return outcome


async def _version(url: str) -> int:
    from hocket.client.server import ServerClient

    async with ServerClient(url) as server:
        return (await server.health()).version


def serve(arguments: Sequence[str]) -> None:
    """Serves, and lies."""
    from hocket import config as configs
    from hocket.common.processes import die_with_parent
    from hocket.server.main import serve

    die_with_parent(os.getppid(), signal.SIGKILL)
    lie()
    serve(configs.load(None, list(arguments)))


def play(folder: Path, settings: Sequence[str], runs: Sequence[Sequence[str]]) -> Iterator[Outcome]:
    """Starts a lying server, and yields the outcome of each run: a lie, and further settings."""
    with LyingServer(folder, *settings) as server:
        for told, *further in runs:
            yield server.train(told, *settings, *further)


def main(command: str, *arguments: str) -> None:
    """Serves, or plays runs given as JSON: [folder, settings, runs]; prints one JSON object per outcome.

    Of a run that was not stopped it tells the alarms of the last step.
    """
    if command == "serve":
        return serve(arguments)
    from hocket.common import environment
    from hocket.observe.metrics import alarms

    environment.prepare()
    folder, settings, runs = json.loads(arguments[0])
    for outcome in play(Path(folder), settings, runs):
        said = outcome.said or " ".join(alarms(outcome.metrics[-1]))
        print("OUTCOME", json.dumps([outcome.version, said]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
