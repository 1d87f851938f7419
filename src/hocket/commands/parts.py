"""The parts of a run, which runs.py brings together."""

import dataclasses
import itertools
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.client.discover import find_servers, follow
from hocket.client.member import Member
from hocket.client.pool import ServerPool
from hocket.client.server import ServerClient
from hocket.client.take_over import claim
from hocket.commands.sources import EachScorer, PromptSource, reward_calls
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
from hocket.rewards.scorer import RewardScorer
from hocket.rollout.collect import Play, Seat
from hocket.rollout.evaluate import EVAL_STEP, Evaluation
from hocket.rollout.pipeline import NewBatch, Pipeline, plan_step, sampling_params
from hocket.rollout.replay import Replay
from hocket.sync.disk import DiskTransport
from hocket.sync.publish import Publisher
from hocket.sync.share_gpu import put_to_sleep, shared_gpu
from hocket.sync.transports import Sending, chosen_transport
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


class Parts(AbstractContextManager["Parts"]):
    """Makes the parts of a run; leaving it closes them.

    rewards: names of those that are called, of each source.
    trains: whether a trainer is among the parts.
    """

    def __init__(
        self,
        config: Config,
        console: Console,
        rewards: Callable[[Config], Iterable[str]] = lambda view: (),
        *,
        trains: bool = True,
    ) -> None:
        self.config = config.chosen(on_gpu=bool(visible_gpus()))
        self.servers = Servers(self.config)
        self.console = console
        with ExitStack() as stack:
            self.calls = reward_calls(stack, self.config, rewards)  # their processes start meanwhile
            # A server of its own examines the model for commands that only ask servers.
            self.tokenizer = model_folder.examine(config.model) if trains else tokenizers.load(config.model.path)
            longest = tokenizers.longest_sequence(config.model, self.config.trainer)
            self.longest, _ = longest
            views = self.config.views.items()
            self.sources = {name: PromptSource(name, one, self.tokenizer, longest, console) for name, one in views}
            self.stack = stack.pop_all()

    def __exit__(self, *exc_info: Any) -> None:
        self.stack.__exit__(*exc_info)

    async def set_up(self) -> None:
        """Set the rewards up."""
        for calls in self.calls.values():
            await calls.set_up()

    @property
    def needed(self) -> int:
        """Tokens of the longest training prompt and a completion."""
        return max(source.needed for source in self.sources.values())

    def trainer(self, saved: Saved | None = None) -> "Trainer":
        from hocket.trainer.state import SavedTensors
        from hocket.trainer.trainer import Trainer

        self.console.doing(f"loading {self.config.model.path} into the trainer")
        trainer = self.stack.enter_context(Trainer(self.config))
        if saved:
            trainer.restore(SavedTensors(saved.folder), saved.trainer)
        self.limit(trainer)
        self.console.say(f"{trainer.num_parameters:,} parameters; {trainer.memory}")
        return trainer

    def limit(self, trainer: "Trainer") -> None:
        """Let no episode outgrow a micro-batch. Raise ConfigError where the first turn may."""
        size = trainer.micro_batch_tokens + 1  # the last token is only predicted
        self.longest = min(self.longest, size)
        if size < self.needed and self.config.pipeline.replay is None:
            advice = "set trainer.gradient_checkpointing=true, or a lower rollout.max_tokens or data.max_prompt_tokens"
            raise ConfigError(f"a prompt with its completion may have {self.needed} tokens, but {size} fit: {advice}")

    def load(self, *, compare: bool = True) -> tuple[dict[str, Prompts], list[Prompt], PromptStream]:
        """Return the training prompts of each source, the held-out ones, and the stream that draws the former.

        Without `compare`, held-out ones are read only if they are to be left out of the former.
        """
        config = self.config
        weights = {one.called: one.weight for one in config.data.sources if one.weight} or {"": 1.0}
        shares = {name: weight / sum(weights.values()) for name, weight in weights.items()}
        prompts = {name: self.sources[name].training() for name in weights}
        if config.data.sources:
            for name, mine in prompts.items():
                self.console.say(f"source {name}: {len(mine):,} prompts, {shares[name]:.1%} of the draws")
        self._show(prompts)
        held_out = []
        if compare or config.data.exclude_overlap:
            held_out = self.held_out()
            tested = set[str]().union(*(source.tested for source in self.sources.values()))
            prompts = unlike(prompts, tested, config.data.exclude_overlap, self.console.say)
        streams = {name: self.sources[name].stream(mine, shares[name]) for name, mine in prompts.items()}
        stream = next(iter(streams.values()))
        if config.data.sources:
            stream = MixedStream(streams, weights, config.trainer.seed)
        return prompts, held_out, stream

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
            self.console.say(f"{step} is no multiple of algorithm.minibatches={num_updates}: updates differ in size")
        for prompt in next(iter(prompts.values()))[:NUM_SHOWN]:
            seen = SHORT.repr(self.tokenizer.decode(prompt.token_ids))
            self.console.say(f"prompt {prompt.id}, as the model sees it: {seen}")

    @property
    def single_turns(self) -> bool:
        return all(source.config.env.name == "single_turn" for source in self.sources.values())

    def check_server(self, health: Health) -> None:
        """Raise ServerError for a server that can't take this run's weights or prompts."""
        config = self.config
        model = config.model
        root = str(config.sync_root.resolve())
        reads_root = config.sync.transport != "nccl" and not config.sync.upload
        length = self.needed if self.single_turns else self.longest
        rank = model.lora.rank if model.lora else 0
        # Without weights the path does not say it; the first version that is loaded does.
        kind = health.architecture if model.random_init else model_shapes(model.path).architecture
        for what, theirs, ours, setting in (
            ("architecture", health.architecture, kind, "model.path"),
            ("tokenizer", health.tokenizer_sha256, tokenizers.fingerprint(self.tokenizer), "model.path"),
            ("root of versions", health.root if reads_root else root, root, "sync.root, or set sync.upload=true"),
            ("longest sequence", min(health.max_length, length), length, "model.max_length"),
            ("highest rank of adapters", min(health.max_adapter_rank, rank), rank, "model.lora"),
        ):
            if theirs != ours:
                differ = f"the server, of {health.model}, has the {what} {theirs}, this run {ours}"
                raise ServerError(f"{differ}: start both with the same {setting}", code="other_model")

    def held_out(self) -> list[Prompt]:
        """Return the prompts of the evaluation; say so if there are none."""
        found = [source.held_out() for source in self.sources.values()]
        if not any(found) and self.config.eval.num_prompts:
            self.console.say(f"nothing is evaluated: {NO_ROWS}")
        return [*itertools.chain(*found)]

    def scorer(self) -> RewardScorer:
        return self._scorer(lambda view: view.rewards.functions)

    def rewards_here(self, source: str) -> tuple[list[str], list[str]]:
        """Return the rewards of a source that run on this machine, and the async ones, which may ask a service."""
        rewards = self.calls[source].rewards
        here = [name for name, reward in rewards.items() if reward.runs != "async"]
        return here, [name for name in rewards if name not in here]

    def _scorer(self, names: Callable[[Config], Iterable[str]]) -> RewardScorer:
        scorers = {name: RewardScorer(self.calls[name], names(one.config)) for name, one in self.sources.items()}
        if len(scorers) == 1:
            return next(iter(scorers.values()))
        return EachScorer(scorers)

    def plays(self, servers: ServerPool) -> dict[str, Play]:
        """Make each source's player of episodes."""
        return {name: source.play(servers, self.longest) for name, source in self.sources.items()}

    def play(
        self,
        plays: Mapping[str, Play],
        length: Callable[[PromptSource], int] = lambda source: source.config.rollout.max_tokens,
    ) -> Play:
        """Make one player for all sources: a prompt is played as its source plays it, up to the source's length."""
        if len(plays) == 1:
            (only,) = self.sources.values()
            if length(only) == self.config.rollout.max_tokens:
                return next(iter(plays.values()))

        async def play(prompt: Prompt, seat: Seat) -> Rollout:
            sampling = seat.sampling.model_copy(update={"max_tokens": length(self.sources[prompt.source])})
            return await plays[prompt.source](prompt, dataclasses.replace(seat, sampling=sampling))

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
        return Pipeline(new_batch, plan, steps=trainer.steps, max_staleness=ahead, early=early, progress=progress)

    def evaluation(self, prompts: Sequence[Prompt], plays: Mapping[str, Play]) -> Evaluation:
        config = self.config
        settings = config.eval
        return Evaluation(
            prompts=prompts,
            play=self.play(plays, lambda source: source.eval_tokens),
            scorer=self._scorer(lambda view: [view.eval_reward]),
            rewards={name: source.config.eval_reward for name, source in self.sources.items()},
            samples=settings.samples,
            sampling=sampling_params(
                config.rollout, seed=config.trainer.seed, step=EVAL_STEP, temperature=settings.temperature
            ),
            threshold=settings.threshold,
            timeout_s=config.rollout.timeout_s * (1 + int(config.pipeline.max_staleness)),  # batches ahead come first
            max_error_rate=config.rewards.max_error_rate,
        )

    def publisher(self, trainer: "Trainer", servers: ServerPool) -> Publisher:
        """Choose the transport of the weights, by which the pool brings up servers."""
        config = self.config
        say = self.console.say
        versions = Versions(config.run_dir, trainer)
        by_disk = partial(DiskTransport, versions, config.sync_root, config.sync, say)
        disk = by_disk()
        publisher = Publisher(
            versions=versions, pool=servers, transport=disk, max_logprob_gap=config.sync.max_logprob_gap
        )
        has_servers = config.pipeline.replay is None
        if config.launch.share_gpu and has_servers:
            disk.on_written = trainer.offload
            publisher.trainer_turn = partial(shared_gpu, trainer, publisher, config.sync, config.model.lora is not None)
        elif has_servers:
            sending = Sending(
                config=config, trainer=trainer, versions=versions, disk=by_disk, say=say, at_end=self.stack.callback
            )
            publisher.transport = chosen_transport(config.sync)(sending)
        servers.bring_up = partial(publisher.bring_up, self.check_server)
        return publisher

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
                if not config.names_servers and Path(health.model).resolve() != Path(model).resolve():
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
        self.console.say(f"no server answers at {config.own_url}: starting one for {config.model.path}, log {log}")
        env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HOCKET_TOKEN": config.token or ""}
        child = Child(["-m", "hocket", "serve", *arguments], env=env, log=log)
        self.stack.callback(stop, [child])

        def waiting(what: str, waited_s: float) -> None:
            child.refuse_dead()
            self.console.doing(what, waited_s)

        return waiting
