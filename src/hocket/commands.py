"""The commands that bring hocket's parts together in this process: train, rollout and eval."""

import asyncio
import os
import reprlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hocket import checkpoints
from hocket import tokenizer as tokenizers
from hocket.batcher import Batcher
from hocket.checkpoints import Checkpoints
from hocket.config import Config, DataConfig, read_settings
from hocket.data.curriculum import bind
from hocket.data.prompts import Renderer, load_prompts
from hocket.data.stream import PromptStream
from hocket.discover import find_servers
from hocket.envs import Agent
from hocket.envs import base as environments
from hocket.errors import ConfigError, ServerError, SyncError
from hocket.launch import Child, free_port, stop, variables
from hocket.observe.console import Console
from hocket.observe.metrics import SUSPICIOUS
from hocket.observe.owner import owning
from hocket.observe.run_folder import RunFolder, lines_of, trainer_id
from hocket.pool import Member, ServerPool
from hocket.protocol import Health
from hocket.registry import load_plugins
from hocket.rewards.scorer import RewardScorer, refuse_failing
from hocket.rollout.agents import Agents
from hocket.rollout.collect import Play, collect
from hocket.rollout.episode import Episode, Limits, TokenBudget, Transcript, single_turn
from hocket.rollout.evaluate import EVAL_STEP, Evaluation, eval_rewards
from hocket.rollout.pipeline import NewBatch, Pipeline, Replay, plan_step, sampling_params
from hocket.sync.bring_up import bring_up
from hocket.sync.disk import Versions
from hocket.sync.gpu_sharing import SharedGpu, own_gpu, put_to_sleep
from hocket.sync.proof import Proof
from hocket.sync.publish import Publisher, TrainerTurn, Transport
from hocket.sync.transports import DiskTransport, WithFallback
from hocket.system import kind_of, newest_version, write_atomically
from hocket.types import Prompt, Rollout

if TYPE_CHECKING:
    from hocket.loop import Run
    from hocket.trainer.trainer import Trainer

PROOF_PROMPTS = 16
NO_UPDATE = 3  # exit status of a run in which no step updated the weights
NUM_SHOWN = 2  # prompts, at the start
_SHORT = reprlib.Repr()
_SHORT.maxstring = 600  # of a longer text, beginning and end


def train(config: Config, *, dry_run: bool = False) -> int:
    """Train on every rank, from the newest checkpoint if there is one; rank 0 runs the loop, the others follow it.

    With `dry_run`, only say what the run would use. Return the exit status. Raise HocketError for the first fault.
    """
    load_plugins(config.plugins)
    if int(os.environ.get("RANK", "0")) > 0:
        from hocket.trainer.trainer import Trainer

        if not dry_run:
            asyncio.run(_make_room(config))
        Trainer(config).follow()
        return 0
    with Console(config.observe.console, config.trainer.steps) as console, ExitStack() as stack:
        if dry_run:
            _check(Parts(config, console), stack)
            return 0
        stack.enter_context(owning(config.run_dir, console.say, wait=config.checkpoint.resume))
        saved = checkpoints.find(config, console.say)
        if saved is None or saved.step < config.trainer.steps or not (config.run_dir / "summary.json").exists():
            summary = asyncio.run(_train(_run(config, saved, console, stack)))
            console.finish(config.run_dir)
            return 0 if summary["updated"] else NO_UPDATE
        console.say(f"all {config.trainer.steps} steps are done; for more of them raise trainer.steps")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # the other ranks wait for this one
            Parts(config, console).trainer(stack)
        return 0


def _check(parts: "Parts", stack: ExitStack) -> None:
    """Say what a run would use: data, rewards, template, model, memory, and servers where they answer."""
    config, say = parts.config, parts.console.say
    scorer = stack.enter_context(RewardScorer(config.rewards))
    stack.enter_context(RewardScorer(eval_rewards(config.rewards, config.eval.reward)))
    prompts = parts.prompts("train", config.data)
    say(f"{len(prompts)} prompts to train on, {len(parts.held_out())} held out")
    parts.stream(prompts)
    first = prompts[0]
    answer = Transcript(first.token_ids, first.opening)
    answer.text = ("a thought\n</think>\n\n" if first.opening.strip() == "<think>" else "") + (first.answer or "")
    rollout = Rollout(id="check", prompt=first, sequences=(answer.sequence(),), reward=0.0)
    score = asyncio.run(scorer.score(rollout))
    say(f"rewards of {_SHORT.repr(answer.text)} for {first.id}: {score.error or dict(score.parts)}")

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
    say(f"{trainer.num_parameters:,} parameters; {trainer.memory}")
    for url, health in found.items():
        if health is None:
            say(f"no server answers at {url} yet; start one with: python3 run.py serve CONFIG")
        else:
            trainer.check_same_model(health)
            say(f"server {url} has the same model and tokenizer")
    say("nothing stands in the way of a run" if score.error is None else "the rewards can't be computed")


async def _train(run: "Run") -> dict[str, Any]:
    async with run.servers:
        try:
            return await run.train()
        except SyncError as error:
            raise SyncError(f"step {run.folder.last_step + 1}: {error}") from error
        finally:
            await run.servers.release()


def _run(config: Config, saved: checkpoints.Saved | None, console: Console, stack: ExitStack) -> "Run":
    """Bring the parts together; first rewards and data, whose faults show before any model is loaded."""
    scorer = stack.enter_context(RewardScorer(config.rewards))
    eval_scorer = stack.enter_context(RewardScorer(eval_rewards(config.rewards, config.eval.reward)))
    parts = Parts(config, console)
    prompts, held_out = parts.prompts("train", config.data), parts.held_out()
    stream = parts.stream(prompts)
    folder = stack.enter_context(RunFolder(config))
    tell: dict[str, Callable[..., None]] = {"on_wait": console.doing, "say": console.say}
    asyncio.run(_make_room(config, **tell))
    trainer = parts.trainer(stack)
    from hocket.algorithm.kl import KlController
    from hocket.algorithm.samples import shape
    from hocket.loop import Run
    from hocket.trainer.state import SavedTensors

    if saved is not None:
        trainer.restore(SavedTensors(saved.folder), saved.trainer)
    console.say(trainer.memory)

    replay = Replay(Path(config.pipeline.replay)) if config.pipeline.replay is not None else None
    if not (saved or replay):
        folder.ledger(0, [{"num_prompts": len(prompts)}])
    servers = ServerPool(()) if replay else _pool(config, trainer_id(config.run_dir), **tell)
    publisher = parts.publisher(trainer, servers, prompts)
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
        scorer=scorer,
        shape=partial(shape, algorithm=config.algorithm, max_tokens=config.rollout.max_tokens),
        batches=(lambda new_batch: replay) if replay else parts.pipeline,
        evaluation=parts.evaluation(() if replay else held_out, play, eval_scorer),
        publisher=publisher,
        kl=kl,
        folder=folder,
        console=console,
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
            export(Path(config.model.path), Path(model), base=None)
            port = free_port(config.server.host, 0)  # a server at server.port has another model
            config, arguments = read_settings([*arguments, f"model.path={model}", f"server.port={port}"])
        console = stack.enter_context(Console(config.observe.console, steps=0, stderr=True))
        eval_scorer = stack.enter_context(RewardScorer(eval_rewards(config.rewards, config.eval.reward)))
        parts = Parts(config, console)
        held_out = parts.held_out()
        if not held_out:
            raise ConfigError("eval.num_prompts is 0: nothing to evaluate")

        async def run() -> dict[str, float]:
            async with parts.servers_as_they_are(arguments) as servers:
                console.say(f"evaluating on {len(held_out)} prompts")
                metrics, groups = await parts.evaluation(held_out, parts.play(servers), eval_scorer).run("eval")
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
        Console(config.observe.console, config.trainer.steps) as console,
        owning(config.run_dir, console.say, wait=False),
        RewardScorer(config.rewards) as scorer,
    ):
        checkpoints.make_room(config.run_dir, console.say)
        parts = Parts(config, console)
        stream = parts.stream(parts.prompts("train", config.data))

        async def run() -> None:
            async with parts.servers_as_they_are(arguments) as servers:
                play = parts.play(servers)
                async with parts.pipeline(lambda plan: collect(plan, stream.take, play, scorer.score)) as batches:
                    for step in range(1, config.trainer.steps + 1):
                        batch = await batches.batch(step)
                        folder.rollouts(f"step_{step:06d}", batch.groups)
                        refuse_failing(batch.groups, config.rewards.max_error_rate)
                        folder.finish(step, batch.metrics)
                        console.step(step, batch.metrics)

        with RunFolder(config) as folder:
            asyncio.run(run())
    print(f"rollouts: {config.run_dir}/rollouts; train on them without a server: pipeline.replay={config.run_dir}")


def export(folder: Path, output: Path, *, base: str | None) -> None:
    """Write a model from a checkpoint or a published adapter; `base` is the model it began with, if that has moved."""
    from hocket.trainer import lora, state

    folder = Path(newest_version(str(folder)))
    kind = kind_of(folder)
    if kind == "adapter":
        return lora.merge(folder, output, base=base)
    if kind == "model":
        raise ConfigError(f"{folder} is a model already: serve it, or load it with transformers, as it is")
    if kind != "checkpoint":
        wanted = "RUN/checkpoints/step_N, or RUN/weights/vN of a run with model.lora"
        raise ConfigError(f"{folder} is neither a checkpoint nor an adapter; name {wanted}")
    saved = checkpoints.read(folder)
    base = base or saved.config["model"]["path"]
    state.export(folder, output, base=base, dtype=saved.trainer["dtype"], adapter=saved.trainer["adapter"])


class Parts:
    """Makes the parts that train, rollout and eval have in common."""

    def __init__(self, config: Config, console: Console) -> None:
        self.config, self.console = config, console
        self.tokenizer = tokenizers.load(config.model.path)
        self.environment = environments.bind(config.env.name, config.env.model_extra or {})
        self.longest, self.limit = tokenizers.longest_sequence(config.model, config.trainer)

    def trainer(self, stack: ExitStack) -> "Trainer":
        """Load the model into a trainer, which ends with the stack."""
        from hocket.trainer.trainer import Trainer

        self.console.doing(f"loading {self.config.model.path} into the trainer")
        return stack.enter_context(Trainer(self.config))

    def prompts(self, what: str, data: DataConfig, max_tokens: int | None = None) -> Sequence[Prompt]:
        """Return the prompts of a source that are short enough, and say how many were not."""
        made = self.environment()
        thought = getattr(made, "thinking_tokens", 0)  # before an answer of max_tokens
        setting = "eval.max_tokens" if max_tokens else "rollout.max_tokens"
        room = self.longest - thought - (max_tokens := max_tokens or self.config.rollout.max_tokens)
        if room < 1:
            before = f", behind env.thinking_tokens={thought}," if thought else ""
            raise ConfigError(f"{setting}={max_tokens}{before} leaves no prompt room in {self.limit}: lower it")
        tools = made.toolbox.tools if made.toolbox else ()
        prompts, num_dropped, longest = load_prompts(data, self.tokenizer, max_prompt_tokens=room, tools=tools)
        limit, fits = min(room, data.max_prompt_tokens or room), self.longest - thought - longest
        advice = f"{setting}={fits} has room for all" if fits > 0 else f"{self.limit} is too short for it"
        advice = f"{data.section}.max_prompt_tokens={limit} leaves them out" if limit < room else advice
        too_long = f"with more than {limit} tokens; the longest has {longest}: {advice}"
        if num_dropped:
            self.console.say(f"{what}: dropped {num_dropped} prompts of {data.source} {too_long}")
        for prompt in prompts[:NUM_SHOWN] if what == "train" else ():
            seen = _SHORT.repr(self.tokenizer.decode(prompt.token_ids))
            self.console.say(f"prompt {prompt.id}, as the model sees it: {seen}")
        if not prompts:
            raise ConfigError(f"{what}: {data.source} has only prompts {too_long}")
        return prompts

    def held_out(self) -> Sequence[Prompt]:
        """Return the prompts of the evaluation; empty with eval.num_prompts=0."""
        settings, template = self.config.eval, self.config.data.chat_template_kwargs
        data = settings.data.model_copy(update={"chat_template_kwargs": settings.data.chat_template_kwargs or template})
        return self.prompts("eval", data, settings.max_tokens)[: settings.num_prompts] if settings.num_prompts else ()

    def stream(self, prompts: Sequence[Prompt]) -> PromptStream:
        """Return the stream that draws the prompts of the batches."""
        curriculum, size = self.config.curriculum, self.config.rollout.prompts_per_step
        seed, retire_after = self.config.trainer.seed, curriculum.retire_after
        return PromptStream(prompts, seed, bind(curriculum), retire_after=retire_after, prompts_per_step=size)

    def play(self, servers: ServerPool) -> Play:
        """Return how episodes are played on these servers: single turns, turns with an environment, or agents."""
        made, env = self.environment(), self.config.env
        ask = Batcher(servers, tools=made.toolbox).ask
        # Prompts leave room for a turn, and the engine queues turns itself.
        if type(made) is environments.SingleTurn and not made.thinking_tokens:
            return partial(single_turn, ask=ask)
        limits = Limits(max_turns=env.max_turns, max_length=self.longest, timeout_s=env.timeout_s)
        budget = TokenBudget(lambda: sum(member.kv_tokens for member in servers.members))
        if isinstance(made, Agent):
            return Agents(agent=made, pool=servers, limits=limits, decode=self.tokenizer.decode, budget=budget).play
        renderer = Renderer(self.config.data, self.tokenizer, made.toolbox.tools if made.toolbox else ())
        return lambda prompt, seat: Episode(prompt, seat, self.environment, ask, renderer, limits, budget).play()

    def pipeline(self, new_batch: NewBatch) -> Pipeline:
        """Return the pipeline of the batches that `new_batch` gathers."""
        config, trainer, ahead = self.config.rollout, self.config.trainer, self.config.pipeline.max_staleness
        oversampling = self.config.algorithm.oversampling
        plan = partial(plan_step, config=config, seed=trainer.seed, oversampling=oversampling, max_staleness=ahead)
        return Pipeline(new_batch, plan, steps=trainer.steps, max_staleness=ahead, progress=self.console.progress)

    def evaluation(self, prompts: Sequence[Prompt], play: Play, scorer: RewardScorer) -> Evaluation:
        """Return the evaluation on held-out prompts; it shares the servers with the batches ahead."""
        config, settings = self.config, self.config.eval
        seed, temperature = config.trainer.seed, settings.temperature
        return Evaluation(
            prompts=prompts,
            play=play,
            score=scorer.score,
            reward=next(iter(eval_rewards(config.rewards, settings.reward).functions)),
            samples=settings.samples,
            sampling=sampling_params(
                config.rollout, seed=seed, step=EVAL_STEP, temperature=temperature, max_tokens=settings.max_tokens
            ),
            timeout_s=config.rollout.timeout_s * (1 + config.pipeline.max_staleness),
            max_error_rate=config.rewards.max_error_rate,
        )

    def publisher(self, trainer: "Trainer", servers: ServerPool, prompts: Sequence[Prompt]) -> Publisher:
        """Choose the way of the weights, and have the pool bring up servers with it."""
        from hocket.sync.collective import CollectiveTransport

        config, say = self.config, self.console.say
        versions = Versions(config.run_dir, trainer, config.sync)
        disk = DiskTransport(versions, config.sync_root, config.sync, say)
        transport: Transport = disk
        turn: TrainerTurn = own_gpu
        if config.launch.share_gpu:
            transport = SharedGpu(disk, versions, trainer, servers, config.sync, keep=config.model.lora is not None)
            turn = transport.trainer_turn
        elif config.sync.backend == "nccl" and config.pipeline.replay is None:
            transport = WithFallback(CollectiveTransport(trainer, config.sync), disk, say)
        proof = Proof(
            prompts=prompts[:PROOF_PROMPTS],
            trainer=trainer,
            rollout=config.rollout,
            sync=config.sync,
            trainer_turn=turn,
            say=say,
            alarmed=lambda: not SUSPICIOUS.isdisjoint(self.console.alarmed),
        )
        publisher = Publisher(versions=versions, pool=servers, transport=transport, proof=proof, trainer_turn=turn)
        servers.bring_up = partial(bring_up, publisher, trainer.check_same_model, say)
        return publisher

    @asynccontextmanager
    async def servers_as_they_are(self, arguments: Sequence[str]) -> AsyncIterator[ServerPool]:
        """Give the servers that the config names with their weights, or one of model.path, started if none answers."""
        server, model, own = self.config.server, self.config.model.path, list[Child]()
        named = bool(server.urls or server.discover)

        def waiting(what: str, waited_s: float) -> None:
            for child in own:
                child.refuse_dead()
            self.console.doing(what, waited_s)

        async def check(member: Member, health: Health) -> None:
            serves = f"the server at {member.url} serves {health.model}"
            if health.tokenizer_sha256 != tokenizers.fingerprint(self.tokenizer):
                raise ConfigError(f"{serves}, whose tokenizer is not that of model.path={model}; name the same model")
            if not named and Path(health.model).resolve() != Path(model).resolve():
                advice = f"to measure that one set server.urls=[{member.url}], else another server.port"
                raise ConfigError(f"{serves}, not model.path={model}; {advice}")
            self.console.say(f"{serves}, version {health.version}")
            member.mark_ready(health.session)

        async with _pool(self.config, on_wait=waiting, say=self.console.say) as servers:
            servers.bring_up = check
            with ExitStack() as stack:
                if not named and not await servers.members[0].server.answers():
                    log = self.config.run_dir / "logs" / "server.log"
                    self.console.say(f"no server answers at {self.config.own_url}: starting one for {model}, log {log}")
                    env = variables(self.config.launch.server_gpus or "")
                    stack.callback(stop, own)
                    own.append(Child(["-m", "hocket", "serve", *arguments], env=env, log=log))
                await servers.wait_up()
                yield servers


async def _make_room(config: Config, **tell: Callable[..., None]) -> None:
    """With launch.share_gpu, wait for the server and put it to sleep, on every rank before it takes the GPU."""
    if config.launch.share_gpu:
        async with _pool(config, trainer_id(config.run_dir), **tell) as servers:
            await servers.wait_up()
            await put_to_sleep(servers, config.sync, keep=config.model.lora is not None)


def _pool(config: Config, trainer: str | None = None, **tell: Callable[..., None]) -> ServerPool:
    server = config.server
    return ServerPool(
        config.server_urls,
        find=partial(find_servers, server.discover) if server.discover is not None else None,
        token=config.token,
        trainer=trainer,
        take_over=config.sync.take_over,
        silence_s=server.silence_s,
        start_timeout_s=server.start_timeout_s,
        **tell,
    )
