"""The commands that bring hocket's parts together in this process: train, rollout and eval."""

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hocket import checkpoints
from hocket import tokenizer as tokenizers
from hocket.checkpoints import Checkpoints, Part
from hocket.config import Config, DataConfig
from hocket.data import PromptStream, load_prompts
from hocket.data.curriculum import bind
from hocket.envs import Environment
from hocket.envs import base as environments
from hocket.errors import ConfigError
from hocket.launch import Child, free_port, refuse_dead, server_process
from hocket.observe.console import Console
from hocket.observe.run_folder import RunFolder, lines_of
from hocket.pool import Member, ServerPool
from hocket.protocol import Health
from hocket.registry import load_plugins
from hocket.rewards.scorer import RewardScorer, refuse_failing
from hocket.rollout.collect import Batch, Plan, Play, collect
from hocket.rollout.episodes import player
from hocket.rollout.evaluate import EVAL_STEP, MAIN, Evaluation, eval_rewards
from hocket.rollout.pipeline import NewBatch, Pipeline, Replay, plan_step, sampling_params
from hocket.sync.bring_up import Canary, bring_up
from hocket.sync.disk import VersionFolders
from hocket.sync.gpu_sharing import SharedGpu, own_gpu, put_to_sleep
from hocket.sync.publish import Publisher, TrainerTurn, Transport
from hocket.sync.transports import DiskTransport, WithFallback
from hocket.sync.versions import Versions
from hocket.system import write_atomically
from hocket.types import Prompt

if TYPE_CHECKING:
    from hocket.loop import Run
    from hocket.trainer.trainer import Trainer

CANARY_PROMPTS = 4


def train(config: Config) -> int:
    """Trains on every rank, from the newest checkpoint if there is one; rank 0 runs the loop, the others follow it."""
    load_plugins(config.plugins)
    if int(os.environ.get("RANK", "0")) > 0:
        from hocket.trainer.trainer import Trainer

        asyncio.run(_make_room(config))
        Trainer(config).follow()
        return 0
    with Console(config.observe.console, config.trainer.steps) as console:
        saved = checkpoints.find(config, console.say)
        if saved is None or saved.step < config.trainer.steps or not (config.run_dir / "summary.json").exists():
            with ExitStack() as stack:
                run = _run(config, saved, console, stack)
                asyncio.run(_train(run))
                console.finish(config.run_dir)
            return 0
        console.say(f"all {config.trainer.steps} steps are done; for more of them raise trainer.steps")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # the other ranks wait for this one
            from hocket.trainer.trainer import Trainer

            Trainer(config).close()
    return 0


async def _train(run: "Run") -> None:
    async with run.servers:
        await run.train()


def _run(config: Config, saved: checkpoints.Saved | None, console: Console, stack: ExitStack) -> "Run":
    """Brings the parts together: first rewards and data, whose faults show before any model is loaded.

    Args:
        stack: ends the parts that need it.
    """
    scorer = stack.enter_context(RewardScorer(config.rewards))
    eval_scorer = stack.enter_context(RewardScorer(eval_rewards(config.rewards, config.eval.reward)))
    tokenizer = tokenizers.load(config.model.path)
    make = environments.bind(config.env.name, config.env.model_extra or {})
    prompts = _load("train", config.data, config, tokenizer, console, make)
    held_out = _held_out(config, tokenizer, console, make)
    stream = _stream(config, prompts)
    run_folder = stack.enter_context(RunFolder(config))
    tell = {"on_wait": console.doing, "say": console.say}
    asyncio.run(_make_room(config, **tell))
    console.doing(f"loading {config.model.path} into the trainer")

    from hocket.algorithm.kl import KlController
    from hocket.algorithm.samples import shape
    from hocket.loop import Run
    from hocket.trainer.state import SavedTensors
    from hocket.trainer.trainer import Trainer

    trainer = stack.enter_context(Trainer(config))
    if saved is not None:
        trainer.restore(SavedTensors(saved.folder), saved.trainer)
    console.say(trainer.memory)

    replay = Replay(Path(config.pipeline.replay)) if config.pipeline.replay is not None else None
    if not (saved or replay):
        run_folder.ledger(0, [{"num_prompts": len(prompts)}])
    servers = _pool(config, () if replay else config.server_urls, **tell)
    publisher = _publisher(config, trainer, servers, prompts, console.say)
    kl = KlController(config.algorithm)
    parts: dict[str, Part] = {"prompts": stream, "kl": kl, "sync": publisher.versions, "recorder": run_folder}
    if saved is not None:
        saved.restore(parts)
    play = _player(config, make, servers, tokenizer)
    return Run(
        config=config,
        trainer=trainer,
        servers=servers,
        stream=stream,
        play=play,
        scorer=scorer,
        shape=functools.partial(shape, algorithm=config.algorithm, max_tokens=config.rollout.max_tokens),
        batches=(lambda new_batch: replay) if replay else _pipeline(config, console),
        evaluation=_evaluation(config, {} if replay else held_out, play, eval_scorer),
        publisher=publisher,
        kl=kl,
        folder=run_folder,
        console=console,
        checkpoints=stack.enter_context(Checkpoints(config, trainer.state, parts, last=saved.step if saved else 0)),
    )


def evaluate_checkpoint(config: Config, arguments: Sequence[str]) -> dict[str, float]:
    """Returns the eval/* metrics of the servers at server.urls, or of model.path in a server started for it.

    Args:
        config: model.path may be a checkpoint of a run, too.
        arguments: the command line that gives a server process the same config.
    """
    load_plugins(config.plugins)
    with ExitStack() as stack:
        if (Path(config.model.path) / checkpoints.STATE_FILE).is_file():
            model = f"{stack.enter_context(TemporaryDirectory(prefix='hocket-'))}/{Path(config.model.path).name}"
            export(Path(config.model.path), Path(model), base=None)
            if config.server.urls:
                raise ConfigError(
                    "the servers at server.urls hold other weights than a checkpoint; leave server.urls out"
                )
            port = free_port(config.server.host, 0)  # whoever listens at server.port serves something else
            changed = {
                "model": config.model.model_copy(update={"path": model}),
                "server": config.server.model_copy(update={"port": port}),
            }
            config = config.model_copy(update=changed)
            arguments = [*arguments, f"model.path={model}", f"server.port={port}"]
        console = stack.enter_context(Console(config.observe.console, steps=0, stderr=True))
        eval_scorer = stack.enter_context(RewardScorer(eval_rewards(config.rewards, config.eval.reward)))
        tokenizer = tokenizers.load(config.model.path)
        make = environments.bind(config.env.name, config.env.model_extra or {})
        held_out = _held_out(config, tokenizer, console, make)
        if not held_out:
            raise ConfigError("eval.num_prompts is 0: nothing to evaluate")

        async def run() -> dict[str, float]:
            async with _as_they_are(config, arguments, tokenizer, console) as servers:
                console.say(f"evaluating on {sum(map(len, held_out.values()))} prompts")
                play = _player(config, make, servers, tokenizer)
                metrics, groups = await _evaluation(config, held_out, play, eval_scorer).run("eval")
                path = config.run_dir / "rollouts" / "eval.jsonl"
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, lines_of(groups))
                console.say(f"what was said, and its scores: {path}")
                return metrics

        return asyncio.run(run())


def roll_out(config: Config, arguments: Sequence[str]) -> None:
    """Plays and scores the batches of trainer.steps steps with what the servers hold, into the run folder.

    Args:
        arguments: as for `evaluate_checkpoint`.
    """
    if (config.run_dir / "metrics.jsonl").exists():
        raise ConfigError(f"{config.run_dir} holds a run already; choose another run.dir")
    load_plugins(config.plugins)
    with ExitStack() as stack:
        console = stack.enter_context(Console(config.observe.console, config.trainer.steps))
        scorer = stack.enter_context(RewardScorer(config.rewards))
        tokenizer = tokenizers.load(config.model.path)
        make = environments.bind(config.env.name, config.env.model_extra or {})
        stream = _stream(config, _load("train", config.data, config, tokenizer, console, make))
        run_folder = stack.enter_context(RunFolder(config))

        async def run() -> None:
            async with _as_they_are(config, arguments, tokenizer, console) as servers:
                play = _player(config, make, servers, tokenizer)

                async def new_batch(plan: Plan) -> Batch:
                    return await collect(plan, stream.take, play, scorer.score)

                async with _pipeline(config, console)(new_batch) as batches:
                    for step in range(1, config.trainer.steps + 1):
                        batch = await batches.batch(step)
                        run_folder.rollouts(f"step_{step:06d}", batch.groups)
                        refuse_failing(batch.groups, config.rewards.max_error_rate)
                        run_folder.finish(step, batch.metrics)
                        console.step(step, batch.metrics)

        asyncio.run(run())
    print(f"rollouts: {config.run_dir}/rollouts; train on them without a server: pipeline.replay={config.run_dir}")


@asynccontextmanager
async def _as_they_are(
    config: Config, arguments: Sequence[str], tokenizer: Any, console: Console
) -> AsyncIterator[ServerPool]:
    """Gives the servers at server.urls, or one of model.path that is started where none answers, with their weights."""
    own: Child | None = None

    def waiting(what: str, waited_s: float) -> None:
        if own is not None:
            refuse_dead(own)
        console.doing(what, waited_s)

    async def check(member: Member, health: Health) -> None:
        if health.tokenizer_sha256 != tokenizers.fingerprint(tokenizer):
            raise ConfigError(
                f"the server at {member.url} serves {health.model}, whose tokenizer is not that of "
                f"model.path={config.model.path}; name the same model, or another server.port"
            )
        if not config.server.urls and Path(health.model).resolve() != Path(config.model.path).resolve():
            raise ConfigError(
                f"the server at {member.url} serves {health.model}, not model.path={config.model.path}; for what it "
                f"holds set server.urls=[{member.url}], for model.path another server.port"
            )
        console.say(f"{member.url} serves {health.model}, version {health.version}")
        member.mark_ready(health.session)

    async with _pool(config, config.server_urls, on_wait=waiting, say=console.say) as servers:
        servers.bring_up = check
        with ExitStack() as stack:
            if not config.server.urls and not await servers.members[0].server.answers():
                own = stack.enter_context(server_process(config, arguments, config.run_dir))
            await servers.wait_up()
            yield servers


def export(folder: Path, output: Path, *, base: str | None) -> None:
    """Writes a model in Hugging Face format from a checkpoint or a published adapter.

    Args:
        base: where the model is that training began with, if it is not where it was.
    """
    from hocket.trainer import lora, state

    if not (folder / checkpoints.STATE_FILE).is_file():
        lora.merge(folder, output, base=base)
        return
    saved = checkpoints.read(folder)
    state.export(
        folder,
        output,
        base=base or saved.config["model"]["path"],
        dtype=saved.trainer["dtype"],
        adapter=saved.trainer["adapter"],
    )


def _stream(config: Config, prompts: Sequence[Prompt]) -> PromptStream:
    return PromptStream(
        prompts,
        config.trainer.seed,
        bind(config.curriculum),
        retire_after=config.curriculum.retire_after,
        prompts_per_step=config.rollout.prompts_per_step,
    )


async def _make_room(config: Config, **tell: Callable[..., None]) -> None:
    """With launch.share_gpu: waits until the server has started, which needs the GPU for itself, and now sleeps.

    Every rank does so before it takes the GPU; nobody wakes the server before all of them have built their trainer.
    """
    if config.launch.share_gpu:
        async with _pool(config, config.server_urls, **tell) as servers:
            await servers.wait_up()
            await put_to_sleep(servers, config.sync, keep=config.model.lora is not None)


def _pool(config: Config, urls: Sequence[str], **tell: Callable[..., None]) -> ServerPool:
    return ServerPool(
        urls,
        token=config.token,
        silence_s=config.server.silence_s,
        start_timeout_s=config.server.start_timeout_s,
        **tell,
    )


def _publisher(
    config: Config, trainer: "Trainer", servers: ServerPool, prompts: Sequence[Prompt], say: Callable[[str], None]
) -> Publisher:
    """Choose the way of the weights, and have the pool bring up servers with it."""
    from hocket.sync.collective import CollectiveTransport

    folders = VersionFolders(config.run_dir, trainer, config.sync)
    disk = DiskTransport(folders, config.sync_root, config.sync, say)
    transport: Transport = disk
    trainer_turn: TrainerTurn = own_gpu
    if config.launch.share_gpu:
        keep = config.model.lora is not None
        transport = SharedGpu(disk, folders, trainer, servers, config.sync, keep=keep)
        trainer_turn = transport.trainer_turn
    elif config.sync.backend == "nccl" and servers.members:
        transport = WithFallback(CollectiveTransport(trainer, config.sync), disk, say)
    canary = Canary(prompts[:CANARY_PROMPTS], trainer, config.rollout, config.sync, trainer_turn)
    publisher = Publisher(
        versions=Versions(folders),
        pool=servers,
        transport=transport,
        check=canary.check,
        check_every=config.sync.canary_every,
        trainer_turn=trainer_turn,
    )
    servers.bring_up = functools.partial(bring_up, publisher, trainer.check_same_model, say)
    return publisher


def _player(config: Config, make: Callable[[], Environment], servers: ServerPool, tokenizer: Any) -> Play:
    return player(
        make,
        servers,
        tokenizer,
        env=config.env,
        data=config.data,
        max_length=tokenizers.longest_sequence(config.model, config.trainer),
    )


def _pipeline(config: Config, console: Console) -> Callable[[NewBatch], Pipeline]:
    """Return what makes the pipeline of batches that a function gathers."""
    plan = functools.partial(
        plan_step,
        config=config.rollout,
        seed=config.trainer.seed,
        oversampling=config.algorithm.oversampling,
        max_staleness=config.pipeline.max_staleness,
    )
    return functools.partial(
        Pipeline,
        plan=plan,
        steps=config.trainer.steps,
        max_staleness=config.pipeline.max_staleness,
        progress=console.progress,
    )


def _evaluation(
    config: Config, datasets: Mapping[str, Sequence[Prompt]], play: Play, eval_scorer: RewardScorer
) -> Evaluation:
    sampling = sampling_params(
        config.rollout, seed=config.trainer.seed, step=EVAL_STEP, temperature=config.eval.temperature
    )
    return Evaluation(
        datasets=datasets,
        play=play,
        score=eval_scorer.score,
        reward=next(iter(eval_rewards(config.rewards, config.eval.reward).functions)),
        samples=config.eval.samples,
        sampling=sampling,
        timeout_s=config.rollout.timeout_s * (1 + config.pipeline.max_staleness),
        max_error_rate=config.rewards.max_error_rate,
    )


def _held_out(
    config: Config, tokenizer: Any, console: Console, make: Callable[[], Environment]
) -> dict[str, tuple[Prompt, ...]]:
    """Returns the prompts of the evaluation by the name of their dataset; nothing where there is none."""
    if config.eval.num_prompts == 0:
        return {}
    datasets = {MAIN: config.eval.data}
    return {
        name: _load(f"eval {name}".strip(), data, config, tokenizer, console, make)[: config.eval.num_prompts]
        for name, data in datasets.items()
    }


def _load(
    what: str, data: DataConfig, config: Config, tokenizer: Any, console: Console, make: Callable[[], Environment]
) -> tuple[Prompt, ...]:
    """Returns the prompts of a source that are short enough, and says how many were not."""
    longest = tokenizers.longest_sequence(config.model, config.trainer) - config.rollout.max_tokens
    toolbox = make().toolbox
    tools = toolbox.tools if toolbox else ()
    prompts, num_dropped = load_prompts(data, tokenizer, max_prompt_tokens=longest, tools=tools)
    if num_dropped:
        limit = min(longest, data.max_prompt_tokens or longest)
        console.say(f"{what}: dropped {num_dropped} prompts of {data.source} with more than {limit} tokens")
    if not prompts:
        raise ConfigError(
            f"{what}: no prompt of {data.source} is short enough; lower rollout.max_tokens, or raise "
            "trainer.micro_batch_tokens"
        )
    return prompts
