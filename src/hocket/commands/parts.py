"""The parts of a run, which runs.py brings together."""

import dataclasses
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.client.batcher import Batcher
from hocket.client.discover import find_servers
from hocket.client.pool import Member, ServerPool
from hocket.client.server import ServerClient
from hocket.cluster.launch import Child, stop, visible_gpus
from hocket.config import Config, DataConfig
from hocket.data import tokenizer as tokenizers
from hocket.data.cache import Prompts
from hocket.data.curriculum import bind
from hocket.data.prompts import load_prompts, renderer_of
from hocket.data.stream import PromptStream
from hocket.envs import base as environments
from hocket.errors import ConfigError, ServerError, door
from hocket.observe.console import SHORT, Console
from hocket.observe.metrics import SUSPICIOUS
from hocket.observe.run_folder import trainer_id
from hocket.protocol import Health
from hocket.protocol.manifest import model_shapes
from hocket.rewards.scorer import RewardCalls, RewardScorer
from hocket.rollout.collect import Play
from hocket.rollout.episode import Limits
from hocket.rollout.evaluate import EVAL_STEP, Evaluation
from hocket.rollout.pipeline import NewBatch, Pipeline, Replay, plan_step, sampling_params
from hocket.rollout.players import Players
from hocket.sync.deltas import DeltaWriter
from hocket.sync.disk import Versions
from hocket.sync.gpu_sharing import put_to_sleep, shared_gpu
from hocket.sync.proof import Proof
from hocket.sync.publish import Publisher
from hocket.sync.sampling import SamplingCheck, contradiction
from hocket.sync.transports import DiskTransport, WithFallback
from hocket.trainer.checkpoints import Saved
from hocket.types import Prompt

if TYPE_CHECKING:
    from hocket.trainer.trainer import Trainer

PROOF_PROMPTS = 16
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
        """Return where a server answers; say where none does."""
        found = []
        try:
            urls = await self.urls()
        except ServerError as error:  # server.discover finds none yet
            say(str(error))
            return []
        for url in urls:
            async with ServerClient(url, token=self.config.token) as server:
                if await server.answers():
                    found.append(url)
                else:
                    say(f"no server answers at {url} yet; start one with: {door()} serve CONFIG")
        return found

    async def answer(self) -> bool:
        """Return whether servers are named, or one answers where it would be started."""
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
        return ServerPool(
            self.config.server_urls,
            find=partial(find_servers, server.discover) if server.discover is not None else None,
            token=self.config.token,
            trainer=trainer,
            take_over=self.config.sync.take_over,
            silence_s=server.silence_s,
            start_timeout_s=server.start_timeout_s,
            **tell,
        )


class Parts:
    def __init__(self, config: Config, console: Console, tokenizer: Any = None) -> None:
        self.config = config.chosen(on_gpu=bool(visible_gpus()))
        self.servers = Servers(self.config)
        self.console = console
        self.tokenizer = tokenizer or tokenizers.load(config.model.path)
        self.environment = environments.bind(config.env.name, config.env.model_extra or {})
        self.example = self.environment()  # has what all of them have
        self.longest, self.longest_by = tokenizers.longest_sequence(config.model, self.config.trainer)
        self.needed = 0  # tokens of the longest training prompt and a completion

    def trainer(self, stack: ExitStack, saved: Saved | None = None) -> "Trainer":
        from hocket.trainer.state import SavedTensors
        from hocket.trainer.trainer import Trainer

        self.console.doing(f"loading {self.config.model.path} into the trainer")
        trainer = stack.enter_context(Trainer(self.config))
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

    def prompts(self) -> Prompts:
        """Return the training prompts, and show the first."""
        prompts = self.training()
        num_asked = self.config.rollout.prompts_per_step
        step = f"rollout.prompts_per_step={num_asked}"
        if len(prompts) < num_asked:
            self.console.say(f"{step} with {len(prompts)} prompts: each step repeats some; lower it")
        num_updates = self.config.algorithm.minibatches
        if num_asked % num_updates:
            self.console.say(f"{step} is no multiple of algorithm.minibatches={num_updates}: updates differ in size")
        for prompt in prompts[:NUM_SHOWN]:
            seen = SHORT.repr(self.tokenizer.decode(prompt.token_ids))
            self.console.say(f"prompt {prompt.id}, as the model sees it: {seen}")
        return prompts

    def training(self) -> Prompts:
        """Return the training prompts."""
        answer = self.config.rollout.max_tokens
        prompts, longest = self._fitting("train", self.config.data, "rollout.max_tokens", answer)
        self.needed = longest + self.example.thinking_tokens + answer
        return prompts

    @property
    def single_turns(self) -> bool:
        return self.config.env.name == "single_turn"

    def _fitting(self, what: str, data: DataConfig, setting: str, answer: int) -> tuple[Prompts, int]:
        """Return the prompts that leave room for an answer, and the longest length; say how many do not."""
        thought = self.example.thinking_tokens  # before an answer
        room = self.longest - thought - answer
        if room < 1:
            before = f", behind env.thinking_tokens={thought}," if thought else ""
            what = f"{setting}={answer}{before} leaves no prompt room in {self.longest_by}"
            raise ConfigError(f"{what}: lower it, or raise that")
        limit = min(room, data.max_prompt_tokens or room)
        prompts, lengths = load_prompts(data, self.tokenizer, max_prompt_tokens=limit, tools=self._tools)
        if len(prompts) < len(lengths):
            longest = max(lengths)
            fits = self.longest - thought - longest
            if limit < room:
                advice = f"{data.section}.max_prompt_tokens={limit} leaves them out"
            elif fits > 0:
                advice = f"{setting}={fits} has room for all in {self.longest_by}"
            else:
                advice = f"{self.longest_by} is too short for it"
            too_long = f"with more than {limit} tokens; the longest has {longest}: {advice}"
            if not prompts:
                raise ConfigError(f"{what}: {data.source} has only prompts {too_long}")
            self.console.say(f"{what}: dropped {len(lengths) - len(prompts)} prompts of {data.source} {too_long}")
        return prompts, max(length for length in lengths if length <= limit)

    def check_server(self, health: Health) -> None:
        """Raise ServerError for a server that can't take this run's weights or prompts."""
        config = self.config
        model = config.model
        root = str(config.sync_root.resolve())
        reads_root = config.sync.backend != "nccl" and not config.sync.upload
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

    @property
    def _tools(self) -> Sequence[Mapping[str, Any]]:
        return self.example.toolbox.tools if self.example.toolbox else ()

    def held_out(self) -> Sequence[Prompt]:
        """Return the prompts of the evaluation; say so if there are none."""
        data = self.config.held_out_data
        settings = self.config.eval
        if data is None:
            if settings.num_prompts:
                self.console.say(f"nothing is evaluated: {NO_ROWS}")
            return ()
        setting = "rollout.max_tokens" if settings.max_tokens is None else "eval.max_tokens"
        answer = settings.max_tokens or self.config.rollout.max_tokens
        if (data.source, data.split) == (self.config.data.source, self.config.data.split):
            self.console.say("eval.data has the rows of section data: these are trained on, and not held out")
        prompts, _ = self._fitting("eval", data, setting, answer)
        return prompts[: settings.num_prompts]

    def stream(self, prompts: Prompts) -> PromptStream:
        config = self.config
        return PromptStream(
            prompts,
            bind(config.curriculum),
            seed=config.trainer.seed,
            retire_after=config.curriculum.retire_after,
            prompts_per_step=config.rollout.prompts_per_step,
        )

    def scorer(self, calls: RewardCalls) -> RewardScorer:
        return RewardScorer(calls, self.config.rewards.functions)

    def play(self, servers: ServerPool) -> Play:
        env = self.config.env
        players = Players(
            pool=servers,
            ask=Batcher(servers, tools=self.example.toolbox).ask,
            make=self.environment,
            renderer=renderer_of(self.config.data, self.tokenizer, self._tools),
            decode=self.tokenizer.decode,
            limits=Limits(
                max_turns=env.max_turns,
                max_length=self.longest,
                timeout_s=env.timeout_s,
                history=None if env.history == "keep" else environments.HISTORIES.get(env.history, "env.history: "),
            ),
        )
        play: Play = self.example.player(players)
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

    def eval_scorer(self, calls: RewardCalls) -> RewardScorer:
        return RewardScorer(calls, [self.config.eval_reward])

    def evaluation(self, prompts: Sequence[Prompt], play: Play, calls: RewardCalls) -> Evaluation:
        config = self.config
        settings = config.eval
        return Evaluation(
            prompts=prompts,
            play=play,
            scorer=self.eval_scorer(calls),
            reward=config.eval_reward,
            samples=settings.samples,
            sampling=sampling_params(
                config.rollout,
                seed=config.trainer.seed,
                step=EVAL_STEP,
                temperature=settings.temperature,
                max_tokens=settings.max_tokens,
            ),
            threshold=settings.threshold,
            timeout_s=config.rollout.timeout_s * (1 + int(config.pipeline.max_staleness)),  # batches ahead come first
            max_error_rate=config.rewards.max_error_rate,
        )

    def publisher(
        self,
        stack: ExitStack,
        trainer: "Trainer",
        servers: ServerPool,
        prompts: Sequence[Prompt],
        calls: RewardCalls,
        history: Sequence[Mapping[str, float | None]],
    ) -> Publisher:
        """Choose the weights' way and checks, by which the pool brings up servers."""
        from hocket.sync.collective import CollectiveTransport

        config = self.config
        say = self.console.say
        versions = Versions(config.run_dir, trainer)
        if config.sync.backend == "delta":
            versions.first = DeltaWriter(versions).write
        disk = DiskTransport(versions, config.sync_root, config.sync, say)
        publisher = Publisher(versions=versions, pool=servers, transport=disk)
        if config.launch.share_gpu:
            disk.on_written = trainer.offload
            publisher.trainer_turn = partial(shared_gpu, trainer, servers, config.sync, config.model.lora is not None)
        elif config.sync.backend == "nccl" and config.pipeline.replay is None:
            fast = CollectiveTransport(trainer, config.sync, freezes=bool(config.model.freeze))
            stack.callback(fast.close)
            publisher.transport = WithFallback(fast, disk, say)
        proof = Proof(
            publisher=publisher,
            prompts=prompts[:PROOF_PROMPTS],
            trainer=trainer,
            rollout=config.rollout,
            sync=config.sync,
            alarmed=lambda: not SUSPICIOUS.isdisjoint(self.console.alarmed),
        )
        publisher.check = proof.check
        if config.sync.check_share and config.pipeline.replay is None:
            # An answer's tokens have a say in whether it is trained, or in the rewards of those before it
            of_group = any(reward.of_group for reward in calls.rewards.values())
            fair = not (config.algorithm.mask_truncated or config.algorithm.reward_range or of_group)
            sampling = SamplingCheck(proof, config.sync.check_share, config.rollout.group_size, history, fair=fair)
            if self.single_turns:  # others' turns end in other ways, too
                ends = tokenizers.end_ids(config.model.path, self.tokenizer)
                stop = config.rollout.stop
                sampling.claim = partial(contradiction, decode=self.tokenizer.decode, ends=ends, stop=stop)
            publisher.check_rollouts = sampling.check
            publisher.check_step = sampling.check_step
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
                member.mark_ready(health)

        with ExitStack() as stack:
            waiting = self.console.doing if await self.servers.answer() else self.own_server(stack, arguments)
            async with self.servers.pool(on_wait=waiting, say=self.console.say) as servers:
                servers.bring_up = check
                await servers.wait_up()
                yield servers

    def own_server(self, stack: ExitStack, arguments: Sequence[str]) -> Callable[[str, float], None]:
        """Start a server of model.path; return what to call while waiting for it."""
        config = self.config
        log = config.run_dir / "logs" / "server.log"
        self.console.say(f"no server answers at {config.own_url}: starting one for {config.model.path}, log {log}")
        env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HOCKET_TOKEN": config.token or ""}
        child = Child(["-m", "hocket", "serve", *arguments], env=env, log=log)
        stack.callback(stop, [child])

        def waiting(what: str, waited_s: float) -> None:
            child.refuse_dead()
            self.console.doing(what, waited_s)

        return waiting
