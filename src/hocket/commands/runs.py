"""The commands train, rollout, eval and reward-test."""

import asyncio
import itertools
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket import run_part
from hocket.algorithm import choices
from hocket.client.pool import ServerPool
from hocket.client.server import ServerClient, prompt_input
from hocket.commands.parts import NO_ROWS, LoadedPrompts, Parts, Servers
from hocket.common import machine, tasks
from hocket.common.files import kind_of
from hocket.common.registry import load_plugins
from hocket.config import Config, read_settings
from hocket.data.columns import columns_of, sample_of
from hocket.data.sources import read_rows
from hocket.errors import ConfigError, DataError, RewardError, SyncError, program
from hocket.launch import free_port, page_of, refuse_missing, stop, visible_gpus
from hocket.observe import loggers
from hocket.observe.console import SHORT, Console
from hocket.observe.owner import owning
from hocket.observe.rows import DAMAGED, rollout_of, without_format, write_rollouts
from hocket.observe.run_folder import RunFolder, trainer_id
from hocket.protocol import GenerateRequest, Health, SamplingParams
from hocket.rewards.scorer import RewardCalls, RewardScorer, refuse_failing
from hocket.rewards.scores import agreement
from hocket.rollout.collect import collect
from hocket.rollout.transcript import Transcript
from hocket.run_part import Joined, RunPart
from hocket.sync.transports import chosen_transport
from hocket.trainer import checkpoints
from hocket.trainer import choices as trainer_choices
from hocket.trainer.checkpoints import Checkpoints, Saved
from hocket.types import Group, Metrics, Prompt, Rollout, Score

if TYPE_CHECKING:
    from hocket.algorithm.samples import ScoredGroup
    from hocket.loop import Run
    from hocket.trainer.trainer import Trainer

OnStep = Callable[[int, dict[str, float]], object] | None
"""Takes a step's number and metrics; True, or numpy's, ends the run."""
RunThere = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine in the event loop of the run."""
NO_UPDATE = 3  # exit status of a run in which no step updated the weights


def train(
    config: Config, *, dry_run: bool = False, serve: bool = False, on_step: OnStep = None
) -> int:
    """Train, from the newest checkpoint if there is one; rank 0 runs the loop, others follow. Return the exit status.

    With `dry_run`, only say what the run would use; with `serve`, start a server if none answers.
    """
    config.refuse_outside()
    load_plugins(config.plugins)
    choices.check(config.algorithm, config.rollout.group_size)
    trainer_choices.check(config.trainer)
    run_part.check(config)
    machine.bound_nccl(config.sync.bucket_timeout_s)
    on_gpu = bool(visible_gpus())
    config = config.chosen(on_gpu=on_gpu)  # on all ranks; config.yaml says it, too
    chosen_transport(config.sync)
    if not on_gpu:
        machine.keep_freed_memory()
    if int(os.environ.get("RANK", "0")) > 0:
        from hocket.trainer.trainer import Trainer

        if not dry_run:
            tasks.run(Servers(config).clear_gpu())
        Trainer(config).follow()
        return 0
    with Console(config.trainer.steps) as console, ExitStack() as stack:
        stack.enter_context(
            owning(config.run_dir, console.say, wait=config.checkpoint.resume and not dry_run)
        )
        if config.observe.page and not dry_run:
            stack.callback(stop, [page_of(config.run_dir, config.observe, config.token)])
        saved = checkpoints.find(config, console.say, dry_run=dry_run)
        is_done = saved is not None and saved.step >= config.trainer.steps
        if not (is_done and (config.run_dir / "summary.json").exists()):
            with tasks.event_loop() as run_there:
                refuse_missing(visible_gpus())
                loggers.bound(config.observe.loggers)
                with tasks.starting():
                    made = Parts.make(config, console, lambda source: source.reward_names)
                    parts = stack.enter_context(made)
                    run_there(parts.set_up())
                    if dry_run:
                        _check(parts, saved, run_there)
                        return 0
                    run = _run(parts, saved, serve, on_step, run_there)
                summary = run_there(_train(run))
            console.finish(config.run_dir)
            return 0 if summary["updated"] else NO_UPDATE
        console.say(
            f"all {config.trainer.steps} steps are done; for more of them raise trainer.steps"
        )
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # the other ranks wait for this one
            stack.enter_context(Parts.make(config, console)).trainer(needed=0)
        return 0


def _check(parts: Parts, saved: Saved | None, run_there: RunThere) -> None:
    """Make the parts of a run and try them, but change nothing."""
    config = parts.config
    say = parts.console.say
    loaded = parts.load()
    num_prompts = sum(len(prompts) for prompts in loaded.training.values())
    say(f"{num_prompts} prompts to train on, {len(loaded.held_out)} held out")
    replay = parts.replay()
    firsts = [prompts[0] for prompts in loaded.training.values()]
    failed = [prompt.id for prompt in firsts if run_there(_try_rewards(parts, prompt))]
    up: Sequence[str] = ()
    if replay is not None:
        run_there(replay.batch(config.trainer.steps))  # the last: it says which are there
    else:
        up = run_there(parts.servers.up(say))
    if replay is None and not (up or config.names_servers):
        from hocket.server.vllm_arguments import cpu_kv_cache, engine_arguments, is_cpu_build

        if is_cpu_build():
            cpu_kv_cache(config)
        if config.server.engine:
            with suppress(ImportError):  # vLLM is not on this machine
                engine_arguments(config)
    if up and config.launch.share_gpu:
        raise ConfigError(
            "the server holds the GPU of launch.share_gpu: stop it for a dry run, which needs it"
        )
    trainer = parts.trainer(loaded.needed, saved)
    if saved:
        loaded.stream.restore(saved.parts["prompts"])
    check_server = parts.server_check(loaded.needed, trainer)
    run_there(_try_servers(parts, up, firsts[0], check_server))
    if failed:
        advice = f"mend the reward, or try a completion as you expect it: {program()} reward-test --samples FILE CONFIG"
        raise RewardError(f"the answer of {failed[0]} has no score, as said above; {advice}")
    say(
        "nothing stands in the way of a run"
        + ("" if up or replay else ", as far as is seen without a server")
    )


async def _try_rewards(parts: Parts, prompt: Prompt) -> bool:
    """Score a prompt's reference answer, twice, as some rewards compare; say and return whether one has no score."""
    say = parts.console.say
    answer = Transcript(prompt.token_ids, prompt.opening, prompt.images)
    answer.text = prompt.answer or ""
    if prompt.opening.strip() == "<think>":
        answer.text = f"a thought\n</think>\n\n{answer.text}"
    here, others = parts.rewards_here(prompt.source)
    if others:
        say(f"not tried, as an async reward may ask a service: {', '.join(others)}")
    if not here:
        return False
    rollout = Rollout(id="check", prompt=prompt, sequences=(answer.sequence(),), reward=0.0)
    score, _ = await RewardScorer(parts.calls[prompt.source], here).score_group([rollout] * 2)
    scored = f"the {'reference' if prompt.answer else 'empty'} answer of {prompt.id}"
    gets = f"has no score: {score.error}" if score.error else f"gets {dict(score.parts)}"
    say(f"{scored}, scored as if the model had written it, {gets}: {SHORT.repr(answer.text)}")
    return score.error is not None


async def _try_servers(
    parts: Parts, urls: Sequence[str], prompt: Prompt, check_server: Callable[[Health], None]
) -> None:
    """Compare servers with this run, and have each sample a token."""
    config = parts.config
    sampling = SamplingParams(max_tokens=1, seed=1)
    asked = prompt_input(prompt.token_ids, prompt.images)
    toolboxes = [source.example.toolbox for source in parts.sources.values()]
    request = GenerateRequest(
        prompts=[asked], sampling=sampling, tools=next(filter(None, toolboxes), None)
    )
    for url in urls:
        async with ServerClient(url, token=config.token) as server:
            check_server(await server.health())
            await server.ask(request, timeout_s=config.rollout.timeout_s)
            parts.console.say(f"server {url} has the same model and tokenizer, and answers")


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
    parts: Parts, saved: Saved | None, serve: bool, on_step: OnStep, run_there: RunThere
) -> "Run":
    """Bring the parts together; first those whose faults show without server and trainer."""
    config = parts.config
    console = parts.console
    loaded = parts.load()
    replay = parts.replay()
    folder = parts.stack.enter_context(RunFolder(config, console.say))
    for change in folder.changed_plugins:
        console.say(change)

    trainer, servers = _trainer_and_servers(parts, loaded, saved, serve, run_there)
    publisher = parts.publisher(trainer, servers, parts.server_check(loaded.needed, trainer))
    from hocket.algorithm.samples import KlController
    from hocket.loop import Run

    kl = KlController(config.algorithm)
    keeper = _checkpoints(
        parts,
        saved,
        trainer,
        {"prompts": loaded.stream, "kl": kl, "sync": publisher.versions, "recorder": folder},
    )
    if not (saved or replay):
        folder.ledger(0, [*loaded.stream.sizes(), *loaded.stream.entries()])

    joined = Joined(
        config=config,
        folder=folder,
        servers=servers,
        trainer=trainer,
        publisher=publisher,
        prompts=next(iter(loaded.training.values())),
        checkpoints=keeper,
        console=console,
    )
    run_parts = parts.join(joined, [] if on_step is None else [OnStepPart(on_step)])
    plays = parts.plays(servers, parts.longest_episode(trainer))
    return Run(
        config=config,
        trainer=trainer,
        servers=servers,
        stream=loaded.stream,
        play=parts.play(plays),
        scorer=parts.scorer(),
        shape=_shape(config),
        batches=parts.pipeline if replay is None else lambda new_batch: nullcontext(replay),
        evaluation=parts.evaluation(() if replay else loaded.held_out, plays),
        publisher=publisher,
        kl=kl,
        folder=folder,
        console=console,
        parts=run_parts,
        checkpoints=keeper,
    )


def _trainer_and_servers(
    parts: Parts, loaded: LoadedPrompts, saved: Saved | None, serve: bool, run_there: RunThere
) -> "tuple[Trainer, ServerPool]":
    """Load the trainer, from a checkpoint if there is one; make the pool, empty for a replay."""
    config = parts.config
    console = parts.console
    is_replay = config.pipeline.replay is not None
    # A server that shares this GPU allocates its memory before the trainer does.
    waiting: Callable[..., None] = console.doing
    if serve and not is_replay and not run_there(parts.servers.answer()):
        waiting = parts.own_server([f"{config.run_dir}/config.yaml"])
    run_there(parts.servers.clear_gpu(on_wait=waiting, say=console.say))
    # This may fail: it comes before records behind the checkpoint are cut off.
    trainer = parts.trainer(loaded.needed, saved)
    if is_replay:
        return trainer, ServerPool(())
    return trainer, parts.servers.pool(trainer_id(config.run_dir), on_wait=waiting, say=console.say)


def _checkpoints(
    parts: Parts, saved: Saved | None, trainer: "Trainer", kept: Mapping[str, checkpoints.Resumable]
) -> Checkpoints:
    """Restore what a checkpoint kept beside the trainer's state, and make what writes the next."""
    last = 0
    if saved:
        saved.restore(kept)
        last = saved.step
    return parts.stack.enter_context(Checkpoints(parts.config, trainer.state, kept, last=last))


def _shape(config: Config) -> "Callable[[Group], ScoredGroup]":
    """Make what shapes a group's rewards for training, by the settings of the group's source."""
    from hocket.algorithm.samples import shape

    sources = config.sources
    default = config.default_source  # a replay may be of other sources

    def shaped(group: Group) -> "ScoredGroup":
        source = sources.get(group.source, default)
        env_weight = source.rewards.spec("env").weight
        return shape(group, config.algorithm, source.max_tokens, env_weight, source.pass_reward)

    return shaped


class OnStepPart(RunPart):
    """Calls `on_step` of the Python interface with each step; the run ends where that returns True."""

    def __init__(self, on_step: Callable[[int, dict[str, float]], object]) -> None:
        self._on_step = on_step

    def ends(self, step: int, metrics: Metrics) -> bool:
        answer = self._on_step(step, metrics)
        return isinstance(answer, bool | np.bool_) and bool(answer)


def evaluate_checkpoint(arguments: Sequence[str]) -> dict[str, float]:
    """Return the eval/* metrics of the servers that settings name, or of their model."""
    config, _ = read_settings(arguments)
    load_plugins(config.plugins)
    with ExitStack() as stack:
        if kind_of(Path(config.model.path)) == "checkpoint":
            if config.names_servers:
                raise ConfigError(
                    "a checkpoint needs a server of its own: leave server.urls and server.discover out"
                )
            saved = Path(config.model.path)
            model = Path(stack.enter_context(TemporaryDirectory(prefix="hocket-")), saved.name)
            from hocket.trainer.state import export  # which needs torch

            export(saved, model, base=None)
            port = free_port(config.server.host, 0)  # a server at server.port has another model
            config, arguments = read_settings(
                [*arguments, f"model.path={model}", f"server.port={port}"]
            )
        console = stack.enter_context(Console(0, stderr=True))
        made = Parts.make(config, console, lambda source: [source.eval_reward], trains=False)
        parts = stack.enter_context(made)
        held_out = parts.held_out().prompts
        if not held_out:
            raise ConfigError(f"nothing to evaluate: {NO_ROWS}; eval.num_prompts must not be 0")

        async def run() -> dict[str, float]:
            await parts.set_up()  # before a server is started
            async with parts.servers_as_they_are(arguments) as servers:
                console.say(f"evaluating on {len(held_out)} prompts")
                evaluation = parts.evaluation(held_out, parts.plays(servers, parts.longest))
                metrics, groups = await evaluation.run("eval")
            path = write_rollouts(config.run_dir, "eval", groups)
            console.say(f"completions and their scores: {path}")
            return metrics

        return tasks.run(run())


def roll_out(arguments: Sequence[str]) -> None:
    """Play and score trainer.steps batches with the servers' weights, into the run folder."""
    config, _ = read_settings(arguments)
    load_plugins(config.plugins)
    with (
        Console(config.trainer.steps) as console,
        owning(config.run_dir, console.say, wait=False),
        Parts.make(config, console, lambda source: source.rewards.functions, trains=False) as parts,
    ):
        checkpoints.make_room(config.run_dir, console.say)
        stream = parts.load(compare=False).stream

        async def run() -> None:
            await parts.set_up()  # before a server is started
            async with parts.servers_as_they_are(arguments) as servers:
                play = parts.play(parts.plays(servers, parts.longest))
                scorer = parts.scorer()
                async with parts.pipeline(
                    lambda plan: collect(plan, stream.take, play, scorer)
                ) as batches:
                    for step in range(1, config.trainer.steps + 1):
                        batch = await batches.batch(step)
                        folder.rollouts(f"step_{step:06d}", batch.groups)
                        refuse_failing(batch.groups, config.rewards.max_error_rate)
                        folder.finish(step, batch.metrics)
                        console.step(step, batch.metrics)

        with RunFolder(config, console.say) as folder:
            tasks.run(run())
    print(
        f"rollouts: {config.run_dir}/rollouts; train on them without a server: pipeline.replay={config.run_dir}"
    )


def score_samples(config: Config, file: Path, against: str | None) -> int:
    """Print the rewards of a file's completions, and what a call takes; return 1 where one has no score.

    Groups are those of a run, or rows of one prompt and answer. `against`: a reward to compare their total with.
    """
    if not file.is_file():
        raise ConfigError(
            f"--samples {file} is not a file: give rows in .jsonl, or a run's rollouts/step_N.jsonl"
        )
    load_plugins(config.plugins)
    rewards = config.sole_rewards
    functions = rewards.functions
    groups: dict[str, list[Rollout]] = {}
    for place, row in read_rows(
        config.data.model_copy(update={"source": str(file), "limit": None})
    ):
        try:
            columns = columns_of(row, ())
            if {"group_id", "prompt_id", "parts"} <= columns.keys():  # of a run
                rollout = rollout_of(
                    without_format(columns, file), place, file.absolute().parents[1]
                )
                group = columns["group_id"]
            else:
                rollout = rollout_of({**sample_of(columns, config.data), "id": place})
                prompt = rollout.prompt
                group = repr((prompt.text, prompt.messages, prompt.answer, hash(prompt.images)))
        except DAMAGED as error:
            raise DataError(f"{place} is no sample: {error}") from error
        groups.setdefault(group, []).append(rollout)

    async def score(scorer: RewardScorer) -> list[Score]:
        as_in_a_step = asyncio.Semaphore(config.rollout.prompts_per_step)

        async def score_group(group: Sequence[Rollout]) -> Sequence[Score]:
            async with as_in_a_step:
                return await scorer.score_group(group)

        return list(itertools.chain(*await asyncio.gather(*map(score_group, groups.values()))))

    compared = []
    with RewardCalls(rewards, filter(None, (*functions, against))) as calls:
        scores = tasks.run(score(RewardScorer(calls, functions)))
        if against:
            calls.specs[against] = calls.specs[against].model_copy(
                update={"weight": 1.0}
            )  # a run may only measure it
            both = zip(scores, tasks.run(score(RewardScorer(calls, [against]))), strict=True)
            grouped = [[*itertools.islice(both, len(group))] for group in groups.values()]
            compared = [f"against {against}: {agreement(grouped)}"]
    for rollout, one in zip(itertools.chain(*groups.values()), scores, strict=True):
        parts = ", ".join(f"{name} {value:.4g}" for name, value in one.parts.items())
        print(
            rollout.id,
            f"{one.total:.4g}" if one.error is None else f"error: {one.error}",
            parts,
            sep="  ",
        )
        for line in one.note.splitlines():
            print("   ", "".join(filter(str.isprintable, line)))  # it may be what a program wrote
    for name, seconds in calls.seconds.items():
        took = (
            f"median {1000 * median(seconds):.3g} ms, slowest {1000 * max(seconds):.3g} ms"
            if seconds
            else "none"
        )
        print(f"calls of {name}: {took} (the first of a process loads it)")
    failed = sum(one.error is not None for one in scores)
    print(
        *compared,
        f"{len(scores)} samples in {len(groups)} groups, {failed} without a score",
        sep="\n",
    )
    return int(failed > 0 or not scores)
