"""The commands that bring hocket's parts together in this process: train, rollout, eval, export and select."""

import asyncio
import itertools
import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hocket.algorithm import choices
from hocket.client.discover import find_servers
from hocket.client.pool import ServerPool
from hocket.cluster.launch import free_port
from hocket.commands.parts import Parts, answers, chosen, clear_gpu, pool_of
from hocket.common import machine, tasks
from hocket.common.files import kind_of, write_atomically
from hocket.common.registry import load_plugins
from hocket.config import Config, read_settings
from hocket.data.prompts import columns_of
from hocket.data.sources import read_rows
from hocket.errors import ConfigError, DataError, ServerError, SyncError, door
from hocket.observe.console import SHORT, Console
from hocket.observe.owner import owning
from hocket.observe.run_folder import RunFolder, lines_of, rollout_of, trainer_id
from hocket.protocol import Health
from hocket.rewards.scorer import RewardCalls, RewardScorer, refuse_failing
from hocket.rollout.collect import collect
from hocket.rollout.episode import Transcript
from hocket.rollout.pipeline import Replay
from hocket.trainer import checkpoints
from hocket.trainer.checkpoints import Checkpoints, Saved
from hocket.types import OnStep, Rollout, Score

if TYPE_CHECKING:
    from hocket.loop import Run

NO_UPDATE = 3  # exit status of a run in which no step updated the weights


def train(config: Config, *, dry_run: bool = False, serve: bool = False, on_step: OnStep = None) -> int:
    """Train on every rank, from the newest checkpoint if there is one; rank 0 runs the loop, the others follow it.

    With `dry_run`, only say what the run would use; with `serve`, start a server if none answers. `on_step` ends the
    run by True. Return the exit status. Raise HocketError for the first fault.
    """
    load_plugins(config.plugins)
    choices.check(config.algorithm, config.rollout.group_size)
    machine.bound_nccl(config.sync.bucket_timeout_s)
    config = chosen(config)  # the same on all ranks; and config.yaml says what is
    if int(os.environ.get("RANK", "0")) > 0:
        from hocket.trainer.trainer import Trainer

        if not dry_run:
            asyncio.run(clear_gpu(config))
        Trainer(config).follow()
        return 0
    with Console(config.trainer.steps) as console, ExitStack() as stack:
        if dry_run:
            _check(Parts(config, console), stack)
            return 0
        stack.enter_context(owning(config.run_dir, console.say, wait=config.checkpoint.resume))
        saved = checkpoints.find(config, console.say)
        if saved is None or saved.step < config.trainer.steps or not (config.run_dir / "summary.json").exists():
            with tasks.event_loop() as run_there:
                summary = run_there(_train(_run(config, saved, console, stack, serve, on_step, run_there)))
            console.finish(config.run_dir)
            return 0 if summary["updated"] else NO_UPDATE
        console.say(f"all {config.trainer.steps} steps are done; for more of them raise trainer.steps")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # the other ranks wait for this one
            Parts(config, console).trainer(stack)
        return 0


def _check(parts: Parts, stack: ExitStack) -> None:
    """Say what a run would use: data, rewards, template, model, memory, and servers where they answer."""
    config = parts.config
    say = parts.console.say
    calls = stack.enter_context(RewardCalls(config.rewards, [*config.rewards.functions, config.eval_reward]))
    prompts = parts.prompts("train", config.data)
    say(f"{len(prompts)} prompts to train on, {len(parts.held_out())} held out")
    parts.stream(prompts)
    first = prompts[0]
    answer = Transcript(first.token_ids, first.opening)
    answer.text = ("a thought\n</think>\n\n" if first.opening.strip() == "<think>" else "") + (first.answer or "")
    rollout = Rollout(id="check", prompt=first, sequences=(answer.sequence(),), reward=0.0)
    (score,) = asyncio.run(RewardScorer(calls, config.rewards.functions).score_group([rollout]))
    gets = f"has no score: {score.error}" if score.error else f"gets {dict(score.parts)}"
    what = "reference answer" if first.answer else "empty answer"
    say(f"the {what} of {first.id}, scored as if the model had written it, {gets}: {SHORT.repr(answer.text)}")

    async def look() -> dict[str, Health | None]:
        urls: Sequence[str] = config.server_urls
        if config.server.discover is not None:
            try:
                urls = await find_servers(config.server.discover)
            except ServerError as error:  # there is none yet
                say(str(error))
        async with ServerPool(urls, token=config.token) as servers:
            members = servers.members
            return {one.url: await one.server.health() if await one.server.answers() else None for one in members}

    found = asyncio.run(look())
    if config.launch.share_gpu and any(found.values()):
        raise ConfigError("the server holds the GPU of launch.share_gpu: stop it for a dry run, which loads the model")
    trainer = parts.trainer(stack)
    parts.limit(trainer)
    say(f"{trainer.num_parameters:,} parameters; {trainer.memory}")
    for url, health in found.items():
        if health is None:
            say(f"no server answers at {url} yet; start one with: {door()} serve CONFIG")
        else:
            trainer.check_same_model(health)
            say(f"server {url} has the same model and tokenizer")
    failed = f"the {what} has no score; try a completion as you expect it: {door()} reward-test --samples FILE CONFIG"
    say(failed if score.error else "nothing stands in the way of a run")


async def _train(run: "Run") -> dict[str, Any]:
    async with run.servers:
        try:
            summary = await run.train()
            if (step := run.folder.last_step) > run.checkpoints.last:  # on_step has ended it
                async with run.publisher.training(publishes=False):
                    await tasks.run_in_thread(run.checkpoints.copy, step, last=True)
                run.checkpoints.complete(step, run.folder.history[-1])
            return summary
        except SyncError as error:
            raise SyncError(f"step {run.folder.last_step + 1}: {error}") from error
        finally:
            await run.servers.release()


def _run(
    config: Config,
    saved: Saved | None,
    console: Console,
    stack: ExitStack,
    serve: bool,
    on_step: OnStep,
    run_there: Callable[[Coroutine[Any, Any, Any]], Any],  # in the event loop of the run
) -> "Run":
    """Bring the parts together; first data and rewards, whose faults show before any server or trainer is up."""
    calls = stack.enter_context(RewardCalls(config.rewards, [*config.rewards.functions, config.eval_reward]))
    parts = Parts(config, console)
    prompts = parts.prompts("train", config.data)
    held_out = parts.held_out()
    stream = parts.stream(prompts)
    run_there(calls.set_up())
    folder = stack.enter_context(RunFolder(config))
    tell: dict[str, Callable[..., None]] = {"on_wait": console.doing, "say": console.say}
    if serve and config.pipeline.replay is None and not run_there(answers(config)):
        tell["on_wait"] = parts.own_server(stack, [f"{config.run_dir}/config.yaml"])
    run_there(clear_gpu(config, **tell))
    trainer = parts.trainer(stack)
    from hocket.algorithm.kl import KlController
    from hocket.algorithm.samples import shape
    from hocket.loop import Run
    from hocket.trainer.state import SavedTensors

    if saved is not None:
        trainer.restore(SavedTensors(saved.folder), saved.trainer)
    parts.limit(trainer)
    console.say(trainer.memory)

    replay = Replay(Path(config.pipeline.replay)) if config.pipeline.replay is not None else None
    if not (saved or replay):
        folder.ledger(0, [{"num_prompts": len(prompts)}])
    servers = ServerPool(()) if replay else pool_of(config, trainer_id(config.run_dir), **tell)
    publisher = parts.publisher(stack, trainer, servers, prompts)
    kl = KlController(config.algorithm)
    kept: dict[str, checkpoints.Part] = {"prompts": stream, "kl": kl, "sync": publisher.versions, "recorder": folder}
    if saved is not None:
        saved.restore(kept)
    play = parts.play(servers)
    return Run(
        config=config,
        trainer=trainer,
        servers=servers,
        stream=stream,
        play=play,
        scorer=RewardScorer(calls, config.rewards.functions),
        shape=partial(shape, algorithm=config.algorithm, max_tokens=config.rollout.max_tokens),
        batches=(lambda new_batch: nullcontext(replay)) if replay else parts.pipeline,
        evaluation=parts.evaluation(() if replay else held_out, play, calls),
        publisher=publisher,
        kl=kl,
        folder=folder,
        console=console,
        on_step=on_step,
        checkpoints=stack.enter_context(Checkpoints(config, trainer.state, kept, last=saved.step if saved else 0)),
    )


def evaluate_checkpoint(config: Config, arguments: Sequence[str]) -> dict[str, float]:
    """Return the eval/* metrics of the servers that the config names, or of a model or checkpoint in an own server."""
    load_plugins(config.plugins)
    with ExitStack() as stack:
        if kind_of(Path(config.model.path)) == "checkpoint":
            if config.server.urls or config.server.discover:
                raise ConfigError("a checkpoint needs a server of its own: leave server.urls and server.discover out")
            model = f"{stack.enter_context(TemporaryDirectory(prefix='hocket-'))}/{Path(config.model.path).name}"
            from hocket.trainer.export import export

            export(Path(config.model.path), Path(model), base=None)
            port = free_port(config.server.host, 0)  # a server at server.port has another model
            config, arguments = read_settings([*arguments, f"model.path={model}", f"server.port={port}"])
        console = stack.enter_context(Console(0, stderr=True))
        calls = stack.enter_context(RewardCalls(config.rewards, [config.eval_reward]))
        parts = Parts(config, console)
        held_out = parts.held_out()
        if not held_out:
            raise ConfigError("nothing to evaluate: set eval.num_prompts, and eval.data.source to held-out rows")

        async def run() -> dict[str, float]:
            await calls.set_up()  # before a server is started
            async with parts.servers_as_they_are(arguments) as servers:
                console.say(f"evaluating on {len(held_out)} prompts")
                metrics, groups = await parts.evaluation(held_out, parts.play(servers), calls).run("eval")
            path = config.run_dir / "rollouts" / "eval.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, lines_of(groups))
            console.say(f"completions and their scores: {path}")
            return metrics

        return asyncio.run(run())


def roll_out(config: Config, arguments: Sequence[str]) -> None:
    """Play and score the batches of trainer.steps steps with the servers' weights, into the run folder."""
    load_plugins(config.plugins)
    with (
        Console(config.trainer.steps) as console,
        owning(config.run_dir, console.say, wait=False),
        RewardCalls(config.rewards, config.rewards.functions) as calls,
    ):
        checkpoints.make_room(config.run_dir, console.say)
        parts = Parts(config, console)
        stream = parts.stream(parts.prompts("train", config.data))

        async def run() -> None:
            await calls.set_up()  # before a server is started
            async with parts.servers_as_they_are(arguments) as servers:
                play = parts.play(servers)
                scorer = RewardScorer(calls, config.rewards.functions)
                async with parts.pipeline(lambda plan: collect(plan, stream.take, play, scorer)) as batches:
                    for step in range(1, config.trainer.steps + 1):
                        batch = await batches.batch(step)
                        folder.rollouts(f"step_{step:06d}", batch.groups)
                        refuse_failing(batch.groups, config.rewards.max_error_rate)
                        folder.finish(step, batch.metrics)
                        console.step(step, batch.metrics)

        with RunFolder(config) as folder:
            asyncio.run(run())
    print(f"rollouts: {config.run_dir}/rollouts; train on them without a server: pipeline.replay={config.run_dir}")


def score_samples(config: Config, file: Path) -> int:
    """Print the rewards of the completions in a file, and what a call takes; return how many failed, at most 1.

    Groups are those of a run's rollouts, or rows of one prompt and answer.
    """
    load_plugins(config.plugins)
    groups: dict[str, list[Rollout]] = {}
    for place, row in read_rows(config.data.model_copy(update={"source": str(file), "limit": None})):
        try:
            columns = columns_of(row)
            own = {"group_id", "prompt_id", "parts"} <= columns.keys()
            rollout = rollout_of(columns, place, None if own else config.data)
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{place} is no sample: {error}") from error
        prompt = rollout.prompt
        group = columns["group_id"] if own else repr((prompt.text, prompt.messages, prompt.answer))
        groups.setdefault(group, []).append(rollout)

    async def score() -> list[Score]:
        as_in_a_step = asyncio.Semaphore(config.rollout.prompts_per_step)

        async def score_group(group: Sequence[Rollout]) -> Sequence[Score]:
            async with as_in_a_step:
                return await scorer.score_group(group)

        return list(itertools.chain(*await asyncio.gather(*map(score_group, groups.values()))))

    with RewardCalls(config.rewards, config.rewards.functions) as calls:
        scorer = RewardScorer(calls, config.rewards.functions)
        scores = asyncio.run(score())
    for rollout, one in zip(itertools.chain(*groups.values()), scores, strict=True):
        parts = ", ".join(f"{name} {value:.4g}" for name, value in one.parts.items())
        print(rollout.id, f"{one.total:.4g}" if one.error is None else f"error: {one.error}", parts, sep="  ")
        for line in one.note.splitlines():
            print("   ", "".join(filter(str.isprintable, line)))  # it may be what a program wrote
    for name, seconds in calls.seconds.items():
        took = f"median {1000 * median(seconds):.3g} ms, slowest {1000 * max(seconds):.3g} ms" if seconds else "none"
        print(f"calls of {name}: {took} (the first of a process loads it)")
    failed = sum(one.error is not None for one in scores)
    print(f"{len(scores)} samples in {len(groups)} groups, {failed} without a score")
    return int(failed > 0 or not scores)
