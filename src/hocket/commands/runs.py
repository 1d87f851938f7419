"""The commands train, eval and rollout."""

import itertools
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket import run_part
from hocket.algorithm import choices
from hocket.client.pool import ServerPool
from hocket.client.server import ServerClient, prompt_input
from hocket.commands.parts import NO_ROWS, LoadedPrompts, Parts
from hocket.commands.servers import Servers
from hocket.common import machine, tasks
from hocket.common.files import kind_of
from hocket.common.registry import load_plugins
from hocket.config import Config, SourceSettings, read_settings
from hocket.errors import ConfigError, RewardError, SyncError, program
from hocket.launch import free_port, page_of, refuse_missing, stop, visible_gpus
from hocket.observe import loggers
from hocket.observe.console import SHORT, Console
from hocket.observe.metrics import rollout_metrics
from hocket.observe.owner import owning
from hocket.observe.rows import write_rollouts
from hocket.observe.run_folder import RunFolder, trainer_id
from hocket.protocol import GenerateRequest, Health, SamplingParams
from hocket.rewards.scorer import RewardScorer, refuse_failing
from hocket.rollout.collect import collect
from hocket.rollout.transcript import Transcript
from hocket.run_part import Joined, RunPart
from hocket.sync.publish import Publisher
from hocket.sync.transports import chosen_transport
from hocket.trainer import checkpoints
from hocket.trainer import choices as trainer_choices
from hocket.trainer.checkpoints import Checkpoints, Saved
from hocket.types import Group, Metrics, Prompt, Rollout

if TYPE_CHECKING:
    from hocket.algorithm.samples import ScoredGroup
    from hocket.loop import Run
    from hocket.trainer.trainer import Trainer

OnStep = Callable[[int, dict[str, float]], object] | None
"""A function that takes a step's number and metrics, and ends the run by True, or numpy's True."""
RunThere = Callable[[Coroutine[Any, Any, Any]], Any]
"""A function that runs a coroutine in the event loop of the run, and returns its result."""
NO_UPDATE = 3  # exit status of a run in which no step updated the weights


def train(
    config: Config, *, dry_run: bool = False, serve: bool = False, on_step: OnStep = None
) -> int:
    """Train, from the newest checkpoint if there is one. Rank 0 runs the loop, the others follow.

    With `serve` a server is started if none answers. `on_step` is called after each step, and ends
    the run where it returns True. Returns the exit status: 0, or NO_UPDATE.
    """
    # Faults of the settings show first, on all ranks, before anything is started.
    config.refuse_outside()
    load_plugins(config.plugins)
    choices.check(config.algorithm, config.rollout.group_size)
    trainer_choices.check(config.trainer)
    run_part.check(config)
    machine.bound_nccl(config.sync.bucket_timeout_s)
    on_gpu = bool(visible_gpus())
    # Replace `auto`, on all ranks by the same; config.yaml shows the choice, too.
    config = config.chosen(on_gpu=on_gpu)
    chosen_transport(config.sync)
    if not on_gpu:
        machine.keep_freed_memory()
    if int(os.environ.get("RANK", "0")) > 0:
        return _follow(config, dry_run)
    return _lead(config, dry_run, serve, on_step)


def _follow(config: Config, dry_run: bool) -> int:
    """Run a rank above 0: take part in the steps that rank 0 takes. Returns the exit status."""
    from hocket.trainer.trainer import Trainer

    if not dry_run:
        tasks.run(Servers(config).wait_for_gpu())
    Trainer(config).follow()
    return 0


def _lead(config: Config, dry_run: bool, serve: bool, on_step: OnStep) -> int:
    """Run rank 0: the loop, or the checks of a dry run. Returns the exit status."""
    with Console(config.trainer.steps) as console, ExitStack() as stack:
        # A restart waits until the process that it replaces has given the folder up.
        waits = config.checkpoint.resume and not dry_run
        stack.enter_context(owning(config.run_dir, console.say, wait=waits))
        if config.observe.page and not dry_run:
            stack.callback(stop, [page_of(config.run_dir, config.observe, config.token)])
        saved = checkpoints.find(config, console.say, dry_run=dry_run)

        # A run whose last step has a checkpoint may have died before it wrote its summary: it goes
        # on, to write it.
        is_done = saved is not None and saved.step >= config.trainer.steps
        if is_done and (config.run_dir / "summary.json").exists():
            steps = f"all {config.trainer.steps} steps are done"
            console.say(f"{steps}; for more of them raise trainer.steps")
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                # The other ranks have begun to follow a trainer: they end when it is closed here.
                stack.enter_context(Parts.make(config, console)).trainer(needed=0)
            return 0

        with tasks.event_loop() as run_there:
            refuse_missing(visible_gpus())
            loggers.bind(config.observe.loggers)
            with tasks.starting():
                parts = Parts.make(config, console, lambda source: source.reward_names)
                stack.enter_context(parts)
                run_there(parts.set_up())
                if dry_run:
                    _check(parts, saved, run_there)
                    return 0
                try:
                    run = _run(parts, saved, serve, on_step, run_there)
                except BaseException:
                    run_there(parts.servers.release())  # else the next trainer waits for a minute
                    raise
            summary = run_there(_train(run))
        console.finish(config.run_dir)
        return 0 if summary["updated"] else NO_UPDATE


def _check(parts: Parts, saved: Saved | None, run_there: RunThere) -> None:
    """Make the parts of a run and try them, but change nothing. Raises what a run would raise."""
    config = parts.config
    say = parts.console.say

    # Prompts and rewards.
    loaded = parts.load()
    num_prompts = sum(len(prompts) for prompts in loaded.training.values())
    say(f"{num_prompts} prompts to train on, {len(loaded.held_out)} held out")
    replay = parts.replay()
    first_prompts = [prompts[0] for prompts in loaded.training.values()]
    failed = [prompt.id for prompt in first_prompts if run_there(_try_rewards(parts, prompt))]

    # The servers, or what stands in for them.
    up: Sequence[str] = ()
    num_servers = run_there(parts.servers.num_to_come())
    if replay is not None:
        # The last batch is there only if all are; the error names those that are there.
        run_there(replay.batch(config.trainer.steps))
    else:
        up = run_there(parts.servers.up(say))
        if not up and not config.names_servers:
            _check_server_settings(config)
    if up and config.launch.share_gpu:
        fact = "the server holds the GPU of launch.share_gpu"
        raise ConfigError(f"{fact}: stop it for a dry run, which needs it")

    # The trainer, and whether the servers fit it.
    trainer = parts.trainer(loaded.needed, saved, num_servers=num_servers)
    if saved:
        loaded.stream.restore(saved.parts["prompts"])
    check_server = parts.server_check(loaded.needed, trainer)
    run_there(_try_servers(parts, up, first_prompts[0], check_server))

    if failed:
        fact = f"the answer of {failed[0]} has no score, as said above"
        command = f"{program()} reward-test --samples FILE CONFIG"
        advice = f"mend the reward, or try a completion as you expect it: {command}"
        raise RewardError(f"{fact}; {advice}")
    limit = "" if up or replay else ", as far as is seen without a server"
    say(f"nothing stands in the way of a run{limit}")


def _check_server_settings(config: Config) -> None:
    """Raise ConfigError for settings with which no server would start here."""
    from hocket.server.kv_cache import refuse_large_model
    from hocket.server.vllm_arguments import engine_arguments, is_cpu_build

    if is_cpu_build():
        refuse_large_model(config)
    if config.server.engine:
        with suppress(ImportError):  # vLLM need not be on the trainer's machine
            engine_arguments(config)


async def _try_rewards(parts: Parts, prompt: Prompt) -> bool:
    """Score a prompt's reference answer and print the score; return True if it has none."""
    say = parts.console.say
    answer = Transcript(prompt.token_ids, prompt.opening, prompt.images)
    answer.text = prompt.answer or ""
    # After an opening of <think>, an answer without a thought would be taken for the thought.
    if prompt.opening.strip() == "<think>":
        answer.text = f"a thought\n</think>\n\n{answer.text}"
    calls = parts.calls[prompt.source]
    skipped = [name for name, reward in calls.rewards.items() if reward.runs == "async"]
    names = [name for name in calls.rewards if name not in skipped]
    if skipped:
        say(f"not tried, as an async reward may ask a service: {', '.join(skipped)}")
    if not names:
        return False
    rollout = Rollout(id="check", prompt=prompt, sequences=(answer.sequence(),), reward=0.0)
    scorer = RewardScorer(calls, names)
    # The group has two rollouts, as some rewards compare the rollouts of a group.
    score, _ = await scorer.score_group([rollout] * 2)
    kind = "reference" if prompt.answer else "empty"
    result = f"has no score: {score.error}" if score.error else f"gets {dict(score.parts)}"
    text = SHORT.repr(answer.text)
    subject = f"the {kind} answer of {prompt.id}"
    say(f"{subject}, scored as if the model had written it, {result}: {text}")
    return score.error is not None


async def _try_servers(
    parts: Parts, urls: Sequence[str], prompt: Prompt, check_server: Callable[[Health], None]
) -> None:
    """Compare servers with this run, and have each sample a token."""
    config = parts.config
    toolboxes = [source.example.toolbox for source in parts.sources.values()]
    request = GenerateRequest(
        prompts=[prompt_input(prompt.token_ids, prompt.images)],
        sampling=SamplingParams(max_tokens=1, seed=1),
        # These show whether the server can find tool calls in the model's text.
        tools=next(filter(None, toolboxes), None),
    )
    for url in urls:
        async with ServerClient(url, token=config.token) as server:
            check_server(await server.health())
            await server.ask(request, timeout_s=config.rollout.timeout_s)
            parts.console.say(f"server {url} has the same model and tokenizer, and answers")


async def _train(run: "Run") -> dict[str, Any]:
    """Run the loop, release the servers, and return the run's summary."""
    async with run.servers:
        try:
            summary = await run.train()
            step = run.folder.last_step
            # Where on_step has ended the run, its last step may have no checkpoint yet.
            if step > run.checkpoints.newest:
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
    """Make the run from its parts; first those whose faults show without server and trainer."""
    config = parts.config
    loaded = parts.load()
    replay = parts.replay()
    folder = _run_folder(parts)

    # The slow parts, which import torch: what comes before shows its faults sooner.
    trainer, servers, publisher = _connect(parts, loaded, saved, serve, run_there)
    from hocket.algorithm.samples import KlController
    from hocket.loop import Run

    # A checkpoint keeps the state of these beside the trainer's.
    kl = KlController(config.algorithm)
    states: dict[str, checkpoints.Resumable] = {
        "prompts": loaded.stream,
        "kl": kl,
        "sync": publisher.versions,
        "recorder": folder,
    }
    keeper = _checkpoints(parts, saved, trainer, states)
    # The ledger of a new run begins with its prompts; a run that resumes goes on with its ledger.
    if not (saved or replay):
        folder.ledger(0, itertools.chain(loaded.stream.sizes(), loaded.stream.entries()))

    # The parts that watch the run, or end it.
    joined = Joined(
        config=config,
        folder=folder,
        servers=servers,
        trainer=trainer,
        publisher=publisher,
        prompts=next(iter(loaded.training.values())),
        checkpoints=keeper,
        console=parts.console,
    )
    # on_step comes last: it gets the metrics of all other parts.
    run_parts = parts.join(joined, [] if on_step is None else [OnStepPart(on_step)])

    # The loop. A replay has the batches of an earlier run; nothing is played or evaluated then.
    plays = parts.plays(servers, parts.longest_episode(trainer))
    return Run(
        config=config,
        trainer=trainer,
        servers=servers,
        stream=loaded.stream,
        play=parts.training_play(plays),
        scorer=parts.scorer(),
        shape=_shape(config),
        batches=parts.pipeline if replay is None else lambda new_batch: nullcontext(replay),
        evaluation=parts.evaluation(() if replay else loaded.held_out, plays),
        publisher=publisher,
        kl=kl,
        folder=folder,
        console=parts.console,
        parts=run_parts,
        checkpoints=keeper,
    )


def _run_folder(parts: Parts) -> RunFolder:
    """Open the folder of the run, and print which plugins have changed since the run began."""
    folder = parts.stack.enter_context(RunFolder(parts.config, parts.console.say))
    for change in folder.changed_plugins:
        parts.console.say(change)
    return folder


def _connect(
    parts: Parts, loaded: LoadedPrompts, saved: Saved | None, serve: bool, run_there: RunThere
) -> "tuple[Trainer, ServerPool, Publisher]":
    """Load the trainer, from a checkpoint if there is one, and connect it with the servers.

    The pool is empty for a replay. The publisher sends nothing yet.
    """
    config = parts.config
    console = parts.console
    is_replay = config.pipeline.replay is not None
    # The server comes first: if it shares this GPU, it allocates its memory before the trainer.
    on_wait: Callable[..., None] = console.doing
    num_servers = run_there(parts.servers.num_to_come())
    if serve and not is_replay and not run_there(parts.servers.expected()):
        on_wait = parts.own_server([f"{config.run_dir}/config.yaml"])
    run_there(parts.servers.wait_for_gpu(on_wait=on_wait, say=console.say))
    trainer = parts.trainer(loaded.needed, saved, num_servers=num_servers)
    if is_replay:
        servers = ServerPool(())
    else:
        servers = parts.servers.pool(trainer_id(config.run_dir), on_wait=on_wait, say=console.say)
    check_server = parts.server_check(loaded.needed, trainer)
    return trainer, servers, parts.publisher(trainer, servers, check_server)


def _checkpoints(
    parts: Parts,
    saved: Saved | None,
    trainer: "Trainer",
    states: Mapping[str, checkpoints.Resumable],
) -> Checkpoints:
    """Restore these states from a checkpoint, if there is one, and make the writer of the next.

    Records that were written after the checkpoint are cut off: what may fail comes before.
    """
    last = 0
    if saved:
        saved.restore(states)
        last = saved.step
    return parts.stack.enter_context(Checkpoints(parts.config, trainer.state, states, newest=last))


def _shape(config: Config) -> "Callable[[Group], ScoredGroup]":
    """Make the function that prepares a group's rewards, by the settings of the group's source."""
    from hocket.algorithm.samples import shape

    def shape_of(source: SourceSettings) -> "Callable[[Group], ScoredGroup]":
        return partial(
            shape,
            algorithm=config.algorithm,
            max_tokens=source.max_tokens,
            env_weight=source.rewards.spec("env").weight,
            pass_reward=source.pass_reward,
        )

    # A replay's groups may name sources of another config.
    default = shape_of(config.default_source)
    if not config.data.sources:
        return default
    shapes = {name: shape_of(source) for name, source in config.sources.items()}
    return lambda group: shapes.get(group.source, default)(group)


class OnStepPart(RunPart):
    """Calls `on_step` of the Python interface with each step, and ends the run if it returns True.

    Example: end a run as soon as its loss is no number.

        part = OnStepPart(lambda step, metrics: metrics["train/loss"] != metrics["train/loss"])
        is_last_step = part.ends(1, {"train/loss": float("nan")})
    """

    def __init__(self, on_step: Callable[[int, dict[str, float]], object]) -> None:
        self._on_step = on_step

    def ends(self, step: int, metrics: Metrics) -> bool:
        answer = self._on_step(step, metrics)
        return isinstance(answer, bool | np.bool_) and bool(answer)


def evaluate_checkpoint(arguments: Sequence[str]) -> dict[str, float]:
    """Evaluate the weights of the servers that settings name, or else of model.path.

    Returns the metrics eval/*. Raises ConfigError where there is nothing to evaluate.
    """
    config, _ = read_settings(arguments)
    load_plugins(config.plugins)
    with ExitStack() as stack:
        if kind_of(Path(config.model.path)) == "checkpoint":
            config, arguments = _exported(config, arguments, stack)
        # Standard output is for the metrics: the console prints to standard error.
        console = stack.enter_context(Console(0, stderr=True))
        parts = Parts.make(config, console, lambda source: [source.eval_reward], trains=False)
        stack.enter_context(parts)
        held_out = parts.held_out().prompts
        if not held_out:
            raise ConfigError(f"nothing to evaluate: {NO_ROWS}; eval.num_prompts must not be 0")

        async def run() -> dict[str, float]:
            await parts.set_up()  # a reward that can't be set up fails before a server is started
            async with parts.servers_as_they_are(arguments) as servers:
                console.say(f"evaluating on {len(held_out)} prompts")
                evaluation = parts.evaluation(held_out, parts.plays(servers, parts.longest))

                def ended(done: int, total: int) -> None:
                    console.doing(f"{done}/{total} answers")

                metrics, groups = await evaluation.run("eval", ended=ended)
            path = write_rollouts(config.run_dir, "eval", groups)
            console.say(f"completions and their scores: {path}")
            return metrics

        return tasks.run(run())


def _exported(
    config: Config, arguments: Sequence[str], stack: ExitStack
) -> tuple[Config, Sequence[str]]:
    """Export the checkpoint that model.path names to a folder that is deleted with the stack.

    Returns the config and the arguments of a server that loads this folder.
    """
    if config.names_servers:
        fact = "a checkpoint needs a server of its own"
        raise ConfigError(f"{fact}: leave server.urls and server.discover out")
    saved = Path(config.model.path)
    model = Path(stack.enter_context(TemporaryDirectory(prefix="hocket-")), saved.name)
    from hocket.trainer.state import export  # imports torch

    export(saved, model, base=None)
    port = free_port(config.server.host, 0)  # a server at server.port has another model
    settings = [f"model.path={model}", f"server.port={port}"]
    return read_settings(list(arguments) + settings)


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
            await parts.set_up()  # a reward that can't be set up fails before a server is started
            async with parts.servers_as_they_are(arguments) as servers:
                play = parts.training_play(parts.plays(servers, parts.longest))
                scorer = parts.scorer()
                pipeline = parts.pipeline(lambda plan: collect(plan, stream.take, play, scorer))
                async with pipeline as batches:
                    for step in range(1, config.trainer.steps + 1):
                        batch = await batches.batch(step)
                        folder.rollouts(f"step_{step:06d}", batch.groups)
                        refuse_failing(batch.groups, config.rewards.max_error_rate)
                        metrics = batch.metrics | rollout_metrics(batch.groups)
                        folder.finish(step, metrics)
                        console.step(step, metrics)

        with RunFolder(config, console.say) as folder:
            tasks.run(run())
    advice = f"train on them without a server: pipeline.replay={config.run_dir}"
    print(f"rollouts: {config.run_dir}/rollouts; {advice}")
