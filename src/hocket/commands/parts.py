"""The parts of a run. runs.py makes them in this order, each from those before it:

| made by           | what                                   | from                                |
|-------------------|----------------------------------------|-------------------------------------|
| `Parts.make`      | workers of rewards, tokenizer, sources | the config                          |
| `Parts.load`      | `LoadedPrompts`                        | the sources                         |
| `own_server`      | a server, if the command starts one    | before the trainer takes GPU memory |
| `Parts.trainer`   | the trainer                            | `LoadedPrompts.needed` must fit     |
| `Servers.pool`    | the servers, which are not asked yet   | the config                          |
| `Parts.publisher` | how weights get to servers             | trainer, pool                       |
| runs.py           | checkpoints; the last one is restored  | trainer, stream, publisher          |
| `Parts.join`      | what joins the run beside the loop     | all above                           |
| `Parts.plays`     | a player of episodes for each source   | pool, `longest_episode(trainer)`    |
| runs.py           | `Run`, the loop                        | all above, scorer and evaluation    |

A stage takes the earlier ones as arguments: none can be made too early. All are frozen but for
trainer, pool, publisher and checkpoints, which have states of their own.

Some of these four know each other, or what joins the run. That is set here, and in no other file:
`Publisher.trainer_turn` and `ServerPool.bring_up` by `publisher` (the latter, in a command without
a trainer, by `servers_as_they_are`); `Publisher.parts`, `ServerPool.on_change` and
`Checkpoints.after` by `join`.
"""

import dataclasses
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.client.discover import find_servers, follow
from hocket.client.member import Member
from hocket.client.pool import ServerPool
from hocket.client.server import ServerClient
from hocket.client.take_over import claim
from hocket.commands import sources
from hocket.commands.sources import HeldOutPrompts, PromptSource, RewardNames
from hocket.config import Config
from hocket.data import model_folder
from hocket.data import tokenizer as tokenizers
from hocket.data.mixture import MixedStream, unlike
from hocket.data.prompt_list import Prompts
from hocket.data.stream import PromptStream
from hocket.errors import ConfigError, ServerError, program
from hocket.launch import Child, stop, visible_gpus
from hocket.observe.console import SHORT, Console
from hocket.observe.run_folder import trainer_id
from hocket.protocol import Health
from hocket.protocol.manifest import model_shapes
from hocket.rewards.scorer import RewardCalls, RewardScorer
from hocket.rollout.collect import Play, Slot
from hocket.rollout.evaluate import EVAL_STEP, Evaluation
from hocket.rollout.pipeline import NewBatch, Pipeline, plan_step, sampling_params
from hocket.rollout.replay import Replay
from hocket.run_part import Joined, RunPart, joining
from hocket.sync.disk import DiskTransport
from hocket.sync.publish import Publisher
from hocket.sync.share_gpu import put_to_sleep, shared_gpu
from hocket.sync.transports import Sending, Transport, chosen_transport
from hocket.sync.versions import Versions
from hocket.trainer.checkpoints import Saved
from hocket.types import Prompt, Rollout

if TYPE_CHECKING:
    from hocket.trainer.trainer import Trainer

NUM_SHOWN = 2  # prompts, at the start
NO_ROWS = "eval.data, or held_out of data.sources, names no rows: set its source or, of a hub dataset, its split"


@dataclasses.dataclass(frozen=True)
class Servers:
    """The servers that a config names, or that it would start."""

    config: Config

    async def urls(self) -> Sequence[str]:
        where = self.config.server.discover
        return self.config.server_urls if where is None else await find_servers(where)

    async def up(self, say: Callable[[str], None]) -> list[str]:
        """List the addresses at which a server answers; say where none does."""
        found = []
        try:
            urls = await self.urls()
        except ServerError as error:  # server.discover finds none yet
            say(str(error))
            return []
        for url in urls:
            async with ServerClient(url, token=self.config.token) as server:
                try:
                    await server.health()
                    found.append(url)
                except ServerError as error:  # another program may listen there
                    if error.code != "unreachable":
                        raise
                    say(f"no server answers at {url} yet; start one with: {program()} serve CONFIG")
        return found

    async def answer(self) -> bool:
        """Check whether servers are named, or one answers where it would be started."""
        return self.config.names_servers or bool(await self.up(lambda line: None))

    async def clear_gpu(self, **tell: Callable[..., None]) -> None:
        """Wait for a server that may be on this GPU, and put it to sleep to share it, before any rank takes memory.

        vLLM counts what others allocate while it starts as its own, and its KV cache gets so much less.
        """
        config = self.config
        shares = config.launch.share_gpu
        if shares or (config.pipeline.replay is None and visible_gpus() and not config.gpus_apart):
            async with self.pool(trainer_id(config.run_dir), **tell) as servers:
                await servers.wait_up()
                if shares:
                    await put_to_sleep(servers, config.sync, keep=config.model.lora is not None)

    def pool(self, trainer: str | None = None, **tell: Callable[..., None]) -> ServerPool:
        """Return the servers' pool; `trainer`: id under which a run takes them."""
        server = self.config.server
        pool = ServerPool(
            self.config.server_urls,
            token=self.config.token,
            trainer=trainer,
            silence_s=server.silence_s,
            start_timeout_s=server.start_timeout_s,
            **tell,
        )
        if server.discover is not None:
            follow(pool, partial(find_servers, server.discover))
        if trainer is not None:
            claim(pool, trainer, take_over=self.config.sync.take_over)
        return pool


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedPrompts:
    """The prompts of a run."""

    training: Mapping[str, Prompts]  # by source
    held_out: Sequence[Prompt]
    stream: PromptStream  # draws from `training`
    needed: int  # tokens of the longest training prompt and a completion


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts(AbstractContextManager["Parts"]):
    """Makes the parts of a run; leaving it closes them."""

    config: Config
    console: Console
    servers: Servers
    calls: Mapping[str, RewardCalls]  # by source
    tokenizer: Any
    longest: int  # tokens of a sequence
    sources: Mapping[str, PromptSource]
    stack: ExitStack

    @classmethod
    def make(
        cls,
        config: Config,
        console: Console,
        rewards: RewardNames = lambda source: (),
        *,
        trains: bool = True,
    ) -> "Parts":
        """Make what needs neither servers nor a trainer; `trains`: there will be a trainer."""
        config = config.chosen(on_gpu=bool(visible_gpus()))
        with ExitStack() as stack:
            calls = sources.reward_calls(stack, config, rewards)  # their processes start meanwhile
            # A server of its own examines the model for commands that only ask servers.
            tokenizer = (
                model_folder.examine(config.model) if trains else tokenizers.load(config.model.path)
            )
            longest = tokenizers.longest_sequence(config.model, config.trainer)
            by_name = {}
            for name, settings in config.sources.items():
                by_name[name] = PromptSource(settings, config, tokenizer, longest, console)
            return cls(
                config=config,
                console=console,
                servers=Servers(config),
                calls=calls,
                tokenizer=tokenizer,
                longest=longest[0],
                sources=by_name,
                stack=stack.pop_all(),
            )

    def __exit__(self, *exc_info: Any) -> None:
        self.stack.__exit__(*exc_info)

    async def set_up(self) -> None:
        """Set the rewards up."""
        for calls in self.calls.values():
            await calls.set_up()

    def trainer(self, needed: int, saved: Saved | None = None) -> "Trainer":
        """Make the trainer. Raise ConfigError where a micro-batch has less than `needed` tokens."""
        from hocket.trainer.state import SavedTensors
        from hocket.trainer.trainer import Trainer

        self.console.doing(f"loading {self.config.model.path} into the trainer")
        trainer = self.stack.enter_context(Trainer(self.config))
        if saved:
            trainer.restore(SavedTensors(saved.folder), saved.trainer)
        self.check_fits(needed, trainer)
        self.console.say(f"{trainer.num_parameters:,} parameters; {trainer.memory}")
        return trainer

    def check_fits(self, needed: int, trainer: "Trainer") -> None:
        """Raise ConfigError where the first turn of an episode may outgrow a micro-batch."""
        size = self.longest_episode(trainer)
        if size < needed and self.config.pipeline.replay is None:
            fact = f"a prompt with its completion may have {needed} tokens, but {size} fit"
            advice = "set trainer.gradient_checkpointing=true, or a lower rollout.max_tokens or data.max_prompt_tokens"
            raise ConfigError(f"{fact}: {advice}")

    def longest_episode(self, trainer: "Trainer") -> int:
        """Count the tokens that an episode may have in the model and in a micro-batch."""
        return min(self.longest, trainer.micro_batch_tokens + 1)  # the last one is only predicted

    def load(self, *, compare: bool = True) -> LoadedPrompts:
        """Load the prompts; without `compare`, held-out ones only to leave them out of training."""
        say = self.console.say
        excludes = self.config.data.exclude_overlap
        training = dict[str, Prompts]()
        needed = 0
        for name, source in self.sources.items():
            if source.settings.weight:
                training[name], longest = source.training()
                needed = max(needed, longest)
        weights = {name: self.sources[name].settings.weight for name in training}
        total = sum(weights.values())
        shares = {name: weight / total for name, weight in weights.items()}
        if self.config.data.sources:
            for name, prompts in training.items():
                say(f"source {name}: {len(prompts):,} prompts, {shares[name]:.1%} of the draws")
        self._show(training)

        held_out: Sequence[Prompt] = ()
        if compare or excludes:
            evaluated = self.held_out()
            held_out = evaluated.prompts
            training = unlike(training, evaluated.keys, excludes, say)

        streams = dict[str, PromptStream]()
        for name, prompts in training.items():
            streams[name] = self.sources[name].stream(prompts, shares[name])
        if self.config.data.sources:
            stream: PromptStream = MixedStream(streams, weights, self.config.trainer.seed)
        else:
            stream = streams[""]
        return LoadedPrompts(training=training, held_out=held_out, stream=stream, needed=needed)

    def _show(self, prompts: Mapping[str, Prompts]) -> None:
        """Show the first prompts, and say what is odd about their number, and where answers end."""
        if added := tokenizers.said_end(self.config.model.path, self.tokenizer):
            self.console.say(added)
        num = sum(map(len, prompts.values()))
        num_asked = self.config.rollout.prompts_per_step
        step = f"rollout.prompts_per_step={num_asked}"
        if num < num_asked:
            self.console.say(f"{step} with {num} prompts: each step repeats some; lower it")
        if low := self.config.trainer.below_peak(self.config.trainer.steps):
            self.console.say(low)
        num_updates = self.config.algorithm.minibatches
        if num_asked % num_updates:
            self.console.say(
                f"{step} is no multiple of algorithm.minibatches={num_updates}: updates differ in size"
            )
        for prompt in next(iter(prompts.values()))[:NUM_SHOWN]:
            seen = SHORT.repr(self.tokenizer.decode(prompt.token_ids))
            self.console.say(f"prompt {prompt.id}, as the model sees it: {seen}")

    def server_check(self, needed: int, trainer: "Trainer") -> Callable[[Health], None]:
        """Make the check of a server, which must take the longest episode, or a single turn."""
        envs = {source.settings.env.name for source in self.sources.values()}
        length = needed if envs == {"single_turn"} else self.longest_episode(trainer)
        return partial(self._check_server, length)

    def _check_server(self, length: int, health: Health) -> None:
        """Raise ServerError for a server that can't take this run's weights or prompts."""
        config = self.config
        model = config.model
        root = str(config.sync_root.resolve())
        reads_root = config.sync.transport != "nccl" and not config.sync.upload
        rank = model.lora.rank if model.lora else 0
        # Without weights the path does not say it; the first version that is loaded does.
        kind = health.architecture if model.random_init else model_shapes(model.path).architecture
        for what, theirs, ours, setting in (
            ("architecture", health.architecture, kind, "model.path"),
            (
                "tokenizer",
                health.tokenizer_sha256,
                tokenizers.fingerprint(self.tokenizer),
                "model.path",
            ),
            (
                "root of versions",
                health.root if reads_root else root,
                root,
                "sync.root, or set sync.upload=true",
            ),
            ("longest sequence", min(health.max_length, length), length, "model.max_length"),
            ("highest rank of adapters", min(health.max_adapter_rank, rank), rank, "model.lora"),
        ):
            if theirs != ours:
                differ = f"the server, of {health.model}, has the {what} {theirs}, this run {ours}"
                raise ServerError(
                    f"{differ}: start both with the same {setting}", code="other_model"
                )

    def held_out(self) -> HeldOutPrompts:
        """Load the prompts of the evaluation, those of all sources; say so if there are none."""
        prompts: list[Prompt] = []
        keys = set[str]()
        for source in self.sources.values():
            held_out = source.held_out()
            prompts += held_out.prompts
            keys.update(held_out.keys)
        if not prompts and self.config.eval.num_prompts:
            self.console.say(f"nothing is evaluated: {NO_ROWS}")
        return HeldOutPrompts(prompts, keys)

    def scorer(self) -> RewardScorer:
        return self._scorer(lambda source: source.rewards.functions)

    def rewards_here(self, source: str) -> tuple[list[str], list[str]]:
        """Return the rewards of a source that run on this machine, and the async ones, which may ask a service."""
        rewards = self.calls[source].rewards
        here = [name for name, reward in rewards.items() if reward.runs != "async"]
        return here, [name for name in rewards if name not in here]

    def _scorer(self, names: RewardNames) -> RewardScorer:
        scorers = {}
        for name, source in self.sources.items():
            scorers[name] = RewardScorer(self.calls[name], names(source.settings))
        if len(scorers) == 1:
            return next(iter(scorers.values()))
        return sources.EachScorer(scorers)

    def plays(self, servers: ServerPool, longest: int) -> dict[str, Play]:
        """Make each source's player of episodes, which end at `longest` tokens."""
        return {name: source.play(servers, longest) for name, source in self.sources.items()}

    def play(self, plays: Mapping[str, Play]) -> Play:
        """Make the player of training: a prompt is played as its source plays it."""
        lengths = {name: source.settings.max_tokens for name, source in self.sources.items()}
        return self._play(plays, lengths)

    def _play(self, plays: Mapping[str, Play], lengths: Mapping[str, int]) -> Play:
        """Look each prompt's player up by its source, and the tokens that an answer may have."""
        if lengths == {"": self.config.rollout.max_tokens}:
            return plays[""]  # nothing to look up

        async def play(prompt: Prompt, slot: Slot) -> Rollout:
            sampling = slot.sampling.model_copy(update={"max_tokens": lengths[prompt.source]})
            return await plays[prompt.source](prompt, dataclasses.replace(slot, sampling=sampling))

        return play

    def replay(self) -> Replay | None:
        source = self.config.pipeline.replay
        return None if source is None else Replay(Path(source))

    def pipeline(self, new_batch: NewBatch) -> Pipeline:
        trainer = self.config.trainer
        ahead = int(self.config.pipeline.max_staleness)
        plan = partial(
            plan_step,
            config=self.config.rollout,
            seed=trainer.seed,
            oversampling=self.config.algorithm.oversampling,
            max_staleness=ahead,
        )
        early = not self.config.launch.share_gpu
        progress = self.console.progress
        return Pipeline(
            new_batch,
            plan,
            steps=trainer.steps,
            max_staleness=ahead,
            early=early,
            progress=progress,
        )

    def evaluation(self, prompts: Sequence[Prompt], plays: Mapping[str, Play]) -> Evaluation:
        config = self.config
        settings = config.eval
        lengths = {name: source.settings.eval_max_tokens for name, source in self.sources.items()}
        return Evaluation(
            prompts=prompts,
            play=self._play(plays, lengths),
            scorer=self._scorer(lambda source: [source.eval_reward]),
            rewards={name: source.settings.eval_reward for name, source in self.sources.items()},
            samples=settings.samples,
            sampling=sampling_params(
                config.rollout,
                seed=config.trainer.seed,
                step=EVAL_STEP,
                temperature=settings.temperature,
            ),
            threshold=settings.threshold,
            timeout_s=config.rollout.timeout_s
            * (1 + int(config.pipeline.max_staleness)),  # batches ahead come first
            max_error_rate=config.rewards.max_error_rate,
        )

    def publisher(
        self,
        trainer: "Trainer",
        servers: ServerPool,
        check_server: Callable[[Health], None],
    ) -> Publisher:
        """Choose the transport of the weights; it brings up the servers that pass the check."""
        config = self.config
        versions = Versions(config.run_dir, trainer)
        by_disk = partial(DiskTransport, versions, config.sync_root, config.sync, self.console.say)
        transport: Transport
        if config.pipeline.replay is not None:
            transport = by_disk()  # to no server
        elif config.launch.share_gpu:
            transport = by_disk(on_written=trainer.offload)
        else:
            sending = Sending(
                config=config,
                trainer=trainer,
                versions=versions,
                disk=by_disk,
                say=self.console.say,
                at_end=self.stack.callback,
            )
            transport = chosen_transport(config.sync)(sending)
        publisher = Publisher(
            versions=versions,
            pool=servers,
            transport=transport,
            max_logprob_gap=config.sync.max_logprob_gap,
        )
        if config.launch.share_gpu:
            keep = config.model.lora is not None  # new weights are adapters
            publisher.trainer_turn = partial(shared_gpu, trainer, publisher, config.sync, keep)
        servers.bring_up = partial(publisher.bring_up, check_server)
        return publisher

    def join(self, joined: Joined, more: Sequence[RunPart]) -> list[RunPart]:
        """Make the parts that join a run, and have all hear of its servers; `more` come last."""
        run_parts: list[RunPart] = []
        for part in joining(joined):
            self.stack.callback(part.close)  # before the next one is made, which may fail
            run_parts.append(part)
        run_parts.extend(more)

        def servers_changed() -> None:
            for part in run_parts:
                part.servers_changed()

        joined.servers.on_change = servers_changed
        joined.publisher.parts = run_parts
        joined.checkpoints.after = [part.checkpointed for part in run_parts]
        return run_parts

    @asynccontextmanager
    async def servers_as_they_are(self, arguments: Sequence[str]) -> AsyncIterator[ServerPool]:
        """Give the servers with the weights that they have, or start one of model.path if none answers."""
        config = self.config
        model = config.model.path

        async def check(there: Mapping[Member, Health]) -> None:
            for member, health in there.items():
                serves = f"the server at {member.url} serves {health.model}"
                if health.tokenizer_sha256 != tokenizers.fingerprint(self.tokenizer):
                    other = f"whose tokenizer is not that of model.path={model}"
                    raise ConfigError(f"{serves}, {other}; name the same model")
                if (
                    not config.names_servers
                    and Path(health.model).resolve() != Path(model).resolve()
                ):
                    advice = f"to measure that one set server.urls=[{member.url}], else another server.port"
                    raise ConfigError(f"{serves}, not model.path={model}; {advice}")
                self.console.say(f"{serves}, version {health.version}")
                servers.mark_up(member, health)

        waiting = self.console.doing if await self.servers.answer() else self.own_server(arguments)
        async with self.servers.pool(on_wait=waiting, say=self.console.say) as servers:
            servers.bring_up = check
            await servers.wait_up()
            yield servers

    def own_server(self, arguments: Sequence[str]) -> Callable[[str, float], None]:
        """Start a server of model.path; return what to call while waiting for it."""
        config = self.config
        log = config.run_dir / "logs" / "server.log"
        self.console.say(
            f"no server answers at {config.own_url}: starting one for {config.model.path}, log {log}"
        )
        env = {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "HOCKET_TOKEN": config.token or "",
        }
        child = Child(["-m", "hocket", "serve", *arguments], env=env, log=log)
        self.stack.callback(stop, [child])

        def waiting(what: str, waited_s: float) -> None:
            child.refuse_dead()
            self.console.doing(what, waited_s)

        return waiting
