"""The parts of a run. runs.py makes them in this order, each from earlier ones:

| made by           | part                                   | made from, or why at this point     |
|-------------------|----------------------------------------|-------------------------------------|
| `Parts.make`      | reward workers, tokenizer, sources     | the config                          |
| `Parts.load`      | `LoadedPrompts`                        | the sources                         |
| `own_server`      | a server, if the command starts one    | before the trainer takes GPU memory |
| `Parts.trainer`   | the trainer                            | `LoadedPrompts.needed` must fit     |
| `servers.pool`    | the pool, which sends no request yet   | the config                          |
| `Parts.publisher` | the publisher of weights to servers    | trainer, pool                       |
| runs.py           | checkpoints; the last one is restored  | trainer, stream, publisher          |
| `Parts.join`      | the run parts beside the loop          | all above                           |
| `Parts.plays`     | a player of episodes for each source   | pool, `longest_episode(trainer)`    |
| runs.py           | `Run`, the loop                        | all above, scorer and evaluation    |

A stage takes the earlier ones as arguments, so that none can be made too early. All are frozen,
except for trainer, pool, publisher and checkpoints, which have states of their own.

Some of these four call each other, or the run parts, by hooks that this file alone sets:
- `publisher`: `Publisher.trainer_turn` and `ServerPool.bring_up`
- `servers_as_they_are`, in a command without a trainer: `ServerPool.bring_up`
- `join`: `Publisher.parts`, `ServerPool.on_change` and `Checkpoints.after`
"""

import dataclasses
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hocket.client.member import Member
from hocket.client.pool import ServerPool
from hocket.commands import sources
from hocket.commands.servers import Servers, refuse_other, refuse_other_model
from hocket.commands.sources import HeldOutPrompts, PromptSource, RewardNames
from hocket.common import machine
from hocket.config import Config
from hocket.data import model_folder
from hocket.data import tokenizer as tokenizers
from hocket.data.mixture import MixedStream, Stream, drop_held_out
from hocket.data.stream import PromptStream
from hocket.errors import ConfigError
from hocket.launch import Child, stop, visible_gpus
from hocket.observe.console import SHORT, Console
from hocket.protocol import Health
from hocket.rewards.scorer import RewardCalls, RewardScorer, Scorer
from hocket.rollout.collect import Play, Slot
from hocket.rollout.evaluate import EVAL_STEP, Evaluation
from hocket.rollout.pipeline import NewBatch, Pipeline, plan_step, sampling_params
from hocket.rollout.replay import Replay
from hocket.run_part import Joined, RunPart, joining
from hocket.sync.disk import DiskTransport
from hocket.sync.memory import MemoryFolder
from hocket.sync.publish import Publisher
from hocket.sync.share_gpu import shared_gpu
from hocket.sync.transports import Sending, Transport, chosen_transport
from hocket.sync.versions import Versions
from hocket.trainer.checkpoints import Saved
from hocket.types import Prompt, Prompts, Rollout

if TYPE_CHECKING:
    from hocket.trainer.trainer import Trainer

NUM_SHOWN = 2  # prompts that are printed at the start
NO_ROWS = (
    "eval.data, or held_out of data.sources, names no rows: set its source or, of a hub dataset, "
    "its split"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedPrompts:
    """The prompts of a run."""

    training: Mapping[str, Prompts]  # the prompts to train on, by source
    held_out: Sequence[Prompt]  # the prompts of the evaluation
    stream: Stream  # draws prompts from `training`
    needed: int  # tokens of the longest training prompt with a completion


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts(AbstractContextManager["Parts"]):
    """The parts of a run that need neither server nor trainer, and methods that make the others.

    Leaving its context closes the parts.

    Example: print the first prompts of a config.

        with Parts.make(config, console) as parts:
            stream = parts.load().stream
            for prompt in stream.take(2).values():
                console.say(parts.tokenizer.decode(prompt.token_ids))
    """

    config: Config
    console: Console
    servers: Servers
    calls: Mapping[str, RewardCalls]  # the callers of the rewards, by source
    tokenizer: Any
    longest: int  # tokens that a sequence may have in the model
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
        """Make the parts that need neither servers nor a trainer.

        Args:
            rewards: Lists the rewards of a source that the command calls; by default none.
            trains: Whether a trainer will be made.

        Raises:
            ConfigError: A setting does not fit the model, or a source's environment.
        """
        config = config.chosen(on_gpu=bool(visible_gpus()))
        with ExitStack() as stack:
            # The workers of rewards come first: their processes start while the model is examined.
            calls = sources.reward_calls(stack, config, rewards)
            # A command that only sends requests needs the tokenizer: its server examines the model.
            if trains:
                tokenizer = model_folder.examine(config.model)
            else:
                tokenizer = tokenizers.load(config.model.path)
            limit = tokenizers.longest_sequence(config.model, config.trainer)
            by_name = {}
            for name, settings in config.sources.items():
                by_name[name] = PromptSource(settings, config, tokenizer, limit, console)
            return cls(
                config=config,
                console=console,
                servers=Servers(config),
                calls=calls,
                tokenizer=tokenizer,
                longest=limit.tokens,
                sources=by_name,
                stack=stack.pop_all(),
            )

    def __exit__(self, *exc_info: Any) -> None:
        self.stack.__exit__(*exc_info)

    async def set_up(self) -> None:
        """Set up the rewards of all sources."""
        for calls in self.calls.values():
            await calls.set_up()

    def trainer(
        self, needed: int, saved: Saved | None = None, *, num_servers: int = 0
    ) -> "Trainer":
        """Make the trainer, with the state of a checkpoint if there is one.

        Raises ConfigError where a micro-batch has room for fewer than `needed` tokens, or where the
        CPU's memory has no room for the trainer beside `num_servers` that are still to load.
        """
        from hocket.commands import room
        from hocket.trainer.state import SavedTensors
        from hocket.trainer.trainer import Trainer

        if not visible_gpus():
            room.refuse(self.config, num_servers, machine.free_before_servers())
        self.console.doing(f"loading {self.config.model.path} into the trainer")
        trainer = self.stack.enter_context(Trainer(self.config))
        if saved:
            trainer.restore(SavedTensors(saved.folder), saved.trainer)
        self.check_fits(needed, trainer)
        self.console.say(f"{trainer.num_parameters:,} parameters; {trainer.description}")
        return trainer

    def check_fits(self, needed: int, trainer: "Trainer") -> None:
        """Raise ConfigError where the first turn of an episode may outgrow a micro-batch."""
        size = self.longest_episode(trainer)
        if size < needed and self.config.pipeline.replay is None:
            fact = f"a prompt with its completion may have {needed} tokens, but {size} fit"
            advice = (
                "set trainer.gradient_checkpointing=true, or a lower rollout.max_tokens or "
                "data.max_prompt_tokens"
            )
            raise ConfigError(f"{fact}: {advice}")

    def longest_episode(self, trainer: "Trainer") -> int:
        """Count the tokens that an episode may have in the model and in a micro-batch."""
        # The last token is only predicted: it takes no position of the micro-batch.
        return min(self.longest, trainer.micro_batch_tokens + 1)

    def load(self, *, compare: bool = True) -> LoadedPrompts:
        """Load the prompts of all sources, and print the first ones.

        Without `compare` nothing is evaluated: held-out prompts are loaded only where
        data.exclude_overlap leaves them out of training.
        """
        say = self.console.say
        is_mixture = bool(self.config.data.sources)

        # The prompts to train on. A source without a weight is only evaluated.
        training = dict[str, Prompts]()
        weights = dict[str, float]()
        needed = 0
        for name, source in self.sources.items():
            weight = source.settings.weight
            if weight:
                training[name], longest = source.training()
                weights[name] = weight
                needed = max(needed, longest)
        total = sum(weights.values())
        shares = {name: weight / total for name, weight in weights.items()}
        if is_mixture:
            for name, prompts in training.items():
                say(f"source {name}: {len(prompts):,} prompts, {shares[name]:.1%} of the draws")
        self._show(training)

        # The prompts to evaluate, which may have to be left out of training.
        excludes = self.config.data.exclude_overlap
        held_out: Sequence[Prompt] = ()
        if compare or excludes:
            evaluated = self.held_out()
            held_out = evaluated.prompts
            training = drop_held_out(training, evaluated.keys, excludes, say)

        # One stream of draws over all sources.
        streams = dict[str, PromptStream]()
        for name, prompts in training.items():
            streams[name] = self.sources[name].stream(prompts, shares[name])
        if is_mixture:
            stream: Stream = MixedStream(streams, weights, self.config.trainer.seed)
        else:
            stream = streams[""]
        return LoadedPrompts(training=training, held_out=held_out, stream=stream, needed=needed)

    def _show(self, prompts: Mapping[str, Prompts]) -> None:
        """Print the first prompts, where answers end, and what is odd about the batch's size."""
        say = self.console.say
        end_tokens = tokenizers.said_end(self.config.model.path, self.tokenizer)
        if end_tokens:
            say(end_tokens)

        # These settings work, but are rarely meant.
        num_prompts = sum(map(len, prompts.values()))
        batch_size = self.config.rollout.prompts_per_step
        setting = f"rollout.prompts_per_step={batch_size}"
        if num_prompts < batch_size:
            say(f"{setting} with {num_prompts} prompts: each step repeats some; lower it")
        low_rate = self.config.trainer.below_peak(self.config.trainer.steps)
        if low_rate:
            say(low_rate)
        num_updates = self.config.algorithm.minibatches
        if batch_size % num_updates:
            multiple = f"is no multiple of algorithm.minibatches={num_updates}"
            say(f"{setting} {multiple}: updates differ in size")

        # The first source stands for all.
        first_prompts = next(iter(prompts.values()))
        for prompt in first_prompts[:NUM_SHOWN]:
            text = SHORT.repr(self.tokenizer.decode(prompt.token_ids))
            say(f"prompt {prompt.id}, as the model sees it: {text}")

    def server_check(self, needed: int, trainer: "Trainer") -> Callable[[Health], None]:
        """Make a check that raises ServerError for a server that this run can't use.

        A server must take `needed` tokens if all episodes have a single turn, and else the longest
        episode.
        """
        envs = {source.settings.env.name for source in self.sources.values()}
        length = needed if envs == {"single_turn"} else self.longest_episode(trainer)
        return partial(refuse_other, self.config, self.tokenizer, length)

    def held_out(self) -> HeldOutPrompts:
        """Load the held-out prompts of all sources; print a line if there are none."""
        prompts: list[Prompt] = []
        keys = set[str]()
        for source in self.sources.values():
            held_out = source.held_out()
            prompts += held_out.prompts
            keys.update(held_out.keys)
        if not prompts and self.config.eval.num_prompts:
            self.console.say(f"nothing is evaluated: {NO_ROWS}")
        return HeldOutPrompts(prompts, keys)

    def scorer(self) -> Scorer:
        """Make the scorer of training, by the rewards that each source trains on."""
        return self._scorer(lambda source: source.rewards.functions)

    def _scorer(self, names: RewardNames) -> Scorer:
        scorers = {}
        for name, source in self.sources.items():
            scorers[name] = RewardScorer(self.calls[name], names(source.settings))
        if len(scorers) == 1:
            return next(iter(scorers.values()))
        return sources.EachScorer(scorers)

    def plays(self, servers: ServerPool, longest: int) -> dict[str, Play]:
        """Make each source's player of episodes, which end at `longest` tokens."""
        return {name: source.play(servers, longest) for name, source in self.sources.items()}

    def training_play(self, plays: Mapping[str, Play]) -> Play:
        """Make the player of training, which plays each prompt as its source plays it."""
        lengths = {name: source.settings.max_tokens for name, source in self.sources.items()}
        return self._play_by_source(plays, lengths)

    def _play_by_source(self, plays: Mapping[str, Play], lengths: Mapping[str, int]) -> Play:
        """Make a player that looks up a prompt's source, its player and its tokens per answer.

        One source whose answers are as long as rollout.max_tokens, which every slot has, needs no
        look-up: the player is its own.
        """
        if len(plays) == 1 and list(lengths.values()) == [self.config.rollout.max_tokens]:
            return next(iter(plays.values()))

        async def play(prompt: Prompt, slot: Slot) -> Rollout:
            sampling = slot.sampling.model_copy(update={"max_tokens": lengths[prompt.source]})
            return await plays[prompt.source](prompt, dataclasses.replace(slot, sampling=sampling))

        return play

    def replay(self) -> Replay | None:
        """Make the replay of another run's rollouts; None where pipeline.replay names no run."""
        source = self.config.pipeline.replay
        return None if source is None else Replay(Path(source))

    def pipeline(self, new_batch: NewBatch) -> Pipeline:
        """Make the pipeline that gathers the batches of the steps, some ahead of training."""
        trainer = self.config.trainer
        ahead = int(self.config.pipeline.max_staleness)
        plan = partial(
            plan_step,
            config=self.config.rollout,
            seed=trainer.seed,
            oversampling=self.config.algorithm.oversampling,
            max_staleness=ahead,
        )
        return Pipeline(
            new_batch,
            plan,
            steps=trainer.steps,
            max_staleness=ahead,
            early=not self.config.launch.share_gpu,
            progress=self.console.progress,
        )

    def evaluation(self, prompts: Sequence[Prompt], plays: Mapping[str, Play]) -> Evaluation:
        """Make the evaluation on held-out prompts, each played and scored as its source says."""
        config = self.config
        settings = config.eval
        lengths = {name: source.settings.eval_max_tokens for name, source in self.sources.items()}
        rewards = {name: source.settings.eval_reward for name, source in self.sources.items()}
        sampling = sampling_params(
            config.rollout,
            seed=config.trainer.seed,
            step=EVAL_STEP,
            temperature=settings.temperature,
        )
        # The servers finish the batches ahead first.
        batches_before = int(config.pipeline.max_staleness)
        return Evaluation(
            prompts=prompts,
            play=self._play_by_source(plays, lengths),
            scorer=self._scorer(lambda source: [source.eval_reward]),
            rewards=rewards,
            samples=settings.samples,
            sampling=sampling,
            threshold=settings.threshold,
            timeout_s=config.rollout.timeout_s * (1 + batches_before),
            max_error_rate=config.rewards.max_error_rate,
        )

    def publisher(
        self,
        trainer: "Trainer",
        servers: ServerPool,
        check_server: Callable[[Health], None],
    ) -> Publisher:
        """Make the publisher of weights, with the transport that the config chooses.

        From now on the pool has the publisher bring up each server that passes `check_server`.
        """
        config = self.config
        versions = Versions(config.run_dir, trainer, _memory(config, self.console.say))
        self.stack.callback(versions.close)
        by_disk = partial(DiskTransport, versions, config.sync_root, config.sync, self.console.say)
        transport: Transport
        if config.pipeline.replay is not None:
            transport = by_disk()  # a replay has no server to send to
        elif config.launch.share_gpu:
            # The trainer leaves the GPU before the server loads the new version there.
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

        # The hooks between publisher, trainer and pool.
        if config.launch.share_gpu:
            # With LoRA, new weights are adapters: the server keeps its base weights.
            keep = config.model.lora is not None
            publisher.trainer_turn = partial(shared_gpu, trainer, publisher, config.sync, keep)
        servers.bring_up = partial(publisher.bring_up, check_server)
        return publisher

    def join(self, joined: Joined, last_parts: Sequence[RunPart]) -> list[RunPart]:
        """Make the run parts and hook them to the run's servers, publisher and checkpoints.

        Returns them in the order in which they are called; `last_parts` come last.
        """
        run_parts: list[RunPart] = []
        for part in joining(joined):
            # The next part may fail to be made: this one must be closed then, too.
            self.stack.callback(part.close)
            run_parts.append(part)
        run_parts.extend(last_parts)

        def servers_changed() -> None:
            for part in run_parts:
                part.servers_changed()

        joined.servers.on_change = servers_changed
        joined.publisher.parts = run_parts
        joined.checkpoints.after = [part.checkpointed for part in run_parts]
        return run_parts

    @asynccontextmanager
    async def servers_as_they_are(self, arguments: Sequence[str]) -> AsyncIterator[ServerPool]:
        """Yield the pool of the servers, with the weights that they have.

        Where none answers, start a server of model.path with these arguments.
        Raises ConfigError for a server of another model.
        """
        say = self.console.say
        if await self.servers.expected():
            on_wait: Callable[[str, float], None] = self.console.doing
        else:
            on_wait = self.own_server(arguments)
        async with self.servers.pool(on_wait=on_wait, say=say) as servers:

            async def bring_up(there: Mapping[Member, Health]) -> None:
                for member, health in there.items():
                    refuse_other_model(self.config, self.tokenizer, member.url, health)
                    line = f"the server at {member.url} serves {health.model}"
                    line += f", version {health.version}"
                    if health.version:
                        line += ": what a run has trained, not the model itself"
                    say(line)
                    servers.mark_loaded(member, health)

            servers.bring_up = bring_up
            await servers.wait_up()
            yield servers

    def own_server(self, arguments: Sequence[str]) -> Callable[[str, float], None]:
        """Start a server of model.path, which is stopped when the parts are closed.

        Returns the function to call while waiting for it. That function raises if the server has
        ended.
        """
        config = self.config
        log = config.run_dir / "logs" / "server.log"
        starts = f"starting one for {config.model.path}, log {log}"
        self.console.say(f"no server answers at {config.own_url}: {starts}")
        env = {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "HOCKET_TOKEN": config.token or "",
        }
        command = ["-m", "hocket", "serve"]
        command += arguments
        child = Child(command, env=env, log=log)
        self.stack.callback(stop, [child])

        def on_wait(activity: str, waited_s: float) -> None:
            child.refuse_dead()
            self.console.doing(activity, waited_s)

        return on_wait


def _memory(config: Config, say: Callable[[str], None]) -> MemoryFolder | None:
    """Make the folder for versions in memory, if all servers are on this machine."""
    if config.sync.upload or config.server.discover or config.pipeline.replay:
        return None
    hosts = [urlsplit(url).hostname or "" for url in config.server_urls]
    return MemoryFolder(say) if all(map(machine.is_here, hosts)) else None
