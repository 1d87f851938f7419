"""The sources of a run's prompts: each has its own rows, players and rewards.

A run without data.sources has one, of name "". A prompt names its source, `Prompt.source`: what
plays, scores or trains on it looks the source up by that.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from hocket.client.batcher import Batcher
from hocket.client.pool import ServerPool
from hocket.config import Config, DataConfig, SourceSettings
from hocket.data.curriculum import bind
from hocket.data.prompt_list import Prompts
from hocket.data.prompts import load_prompts, renderer_of
from hocket.data.stream import PromptStream
from hocket.envs import base as environments
from hocket.errors import ConfigError, DataError
from hocket.observe.console import Console
from hocket.rewards.base import REWARDS
from hocket.rewards.scorer import RewardCalls, RewardScorer
from hocket.rollout.collect import Play
from hocket.rollout.episode import Limits
from hocket.rollout.players import player
from hocket.types import Message, Prompt, Rollout, Score

ANSWERED = "0123456789"  # what a made-up message says


RewardNames = Callable[[SourceSettings], Iterable[str]]
"""Lists the rewards of a source that a command calls."""


def reward_calls(stack: ExitStack, config: Config, names: RewardNames) -> dict[str, RewardCalls]:
    """Make the callers of the rewards that `names` lists for each source; sources with equal ones share a caller."""
    by_rewards = dict[str, RewardCalls]()
    by_source = dict[str, RewardCalls]()
    for name, source in config.sources.items():
        # eval.reward may be one of the run's that the source does not train on
        functions = config.rewards.functions | source.rewards.functions
        rewards = source.rewards.model_copy(update={"functions": functions})
        called = tuple(names(source))
        key = f"{called}{rewards.model_dump_json()}"
        if key not in by_rewards:
            by_rewards[key] = stack.enter_context(RewardCalls(rewards, called))
        by_source[name] = by_rewards[key]
    return by_source


def _refuse_unanswered(data: DataConfig, rewards: Iterable[str]) -> None:
    for name in rewards:
        if data.answer_column is None and REWARDS.get(name).needs_answer:
            advice = "name the column of the answers, or, in a reward of yours, give the argument a default"
            raise ConfigError(
                f"reward {name} takes the answer, but {data.section}.answer_column=null: {advice}"
            )


@dataclasses.dataclass(frozen=True)
class HeldOutPrompts:
    prompts: Sequence[Prompt]  # to evaluate, maybe none
    keys: Collection[str]  # also of those beyond eval.num_prompts


class PromptSource:
    """Makes a source's prompts, their stream and their player; nothing changes it."""

    def __init__(
        self,
        settings: SourceSettings,
        config: Config,
        tokenizer: Any,
        longest: tuple[int, str],
        console: Console,
    ) -> None:
        self.settings = settings
        self._config = config  # of the run
        self._tokenizer = tokenizer
        self._longest, self._limit = longest  # tokens of a sequence, and what allows no more
        self._console = console
        env = settings.env
        self._environment = environments.bind(env.name, env.model_extra)
        self.example = self._environment()  # has what all of them have
        is_replay = config.pipeline.replay is not None  # which has the scores
        if "env" in settings.reward_names and not type(self.example).gives_reward and not is_replay:
            advice = "name another reward in rewards.functions and eval.reward, or an environment that gives one"
            fact = f"the reward env has no value, as env.name={env.name} gives none"
            raise ConfigError(f"{fact}: {advice}")

    @property
    def _tools(self) -> Sequence[Mapping[str, Any]]:
        return self.example.toolbox.tools if self.example.toolbox else ()

    def training(self) -> tuple[Prompts, int]:
        """Load the training prompts, and count the tokens of the longest one with a completion."""
        settings = self.settings
        _refuse_unanswered(settings.data, settings.rewards.functions)
        answer = settings.max_tokens
        prompts, length = self._fitting("train", settings.data, "rollout.max_tokens", answer)
        return prompts, length + self.example.thinking_tokens + answer

    def _check_turns(self, data: DataConfig) -> None:
        """Check that the chat template shows the model's next turn what it said before, and what it was answered.

        Raise DataError where the results of tools can't be shown. Other environments may answer with text, which needs
        no template: where messages can't be shown, say so.
        """
        env = self.settings.env
        if env.max_turns == 1 or isinstance(self.example, environments.SingleTurn):
            return
        if self._tools:
            said: Message = {
                "role": "tool",
                "name": self._tools[0]["function"]["name"],
                "content": ANSWERED,
            }
            problem = self._unanswerable(data, said)
            if problem:
                advice = "take a model whose template renders tools' results behind an answer, or set env.max_turns=1"
                raise DataError(f"no turn can follow a tool's result: {problem}; {advice}")
        elif data.chat_template:
            problem = self._unanswerable(data, {"role": "user", "content": ANSWERED})
            if problem:
                fact = f"no turn can follow a message of env.name={env.name}: {problem}"
                advice = "take a model whose template does, have the environment answer with text, or set env.max_turns=1"
                self._console.say(f"{data.section}: {fact}; {advice}")

    def _unanswerable(self, data: DataConfig, answer: Message) -> str:
        """Return why an answer to the model's turn can't be shown to it; "" if it can."""
        renderer = renderer_of(data, self._tokenizer, self._tools)
        try:
            shown = renderer.decode(renderer.following([answer], ended=None))
        except ValueError as error:
            return str(error)
        return (
            ""
            if ANSWERED in shown
            else f"the chat template leaves out messages of the role {answer['role']}"
        )

    def held_out(self) -> HeldOutPrompts:
        """Load the prompts of the evaluation."""
        data = self.settings.held_out
        if data is None:
            return HeldOutPrompts((), ())
        _refuse_unanswered(data, [self.settings.eval_reward])
        evaluation = self._config.eval
        setting = "rollout.max_tokens" if evaluation.max_tokens is None else "eval.max_tokens"
        prompts, _ = self._fitting("eval", data, setting, self.settings.eval_max_tokens)
        return HeldOutPrompts(prompts[: evaluation.num_prompts], prompts.keys())

    def _fitting(
        self, what: str, data: DataConfig, setting: str, answer: int
    ) -> tuple[Prompts, int]:
        """Return the prompts that leave room for an answer, and the longest length; say how many do not."""
        self._check_turns(data)
        thought = self.example.thinking_tokens  # before an answer
        limit = self._limit
        room = self._longest - thought - answer
        if room < 1:
            before = f", behind env.thinking_tokens={thought}," if thought else ""
            raise ConfigError(
                f"{setting}={answer}{before} leaves no prompt room in {limit}: lower it, or raise that"
            )
        most = min(room, data.max_prompt_tokens or room)
        prompts, lengths = load_prompts(
            data,
            self._tokenizer,
            max_prompt_tokens=most,
            tools=self._tools,
            source=self.settings.name,
        )
        if len(prompts) < len(lengths):
            fits = self._longest - thought - max(lengths)
            if most < room:
                advice = f"{data.section}.max_prompt_tokens={most} leaves them out"
            elif fits > 0:
                advice = f"{setting}={fits} has room for all in {limit}"
            else:
                advice = f"{limit} is too short for it"
            too_long = f"with more than {most} tokens; the longest has {max(lengths)}: {advice}"
            if not prompts:
                raise ConfigError(f"{what}: {data.source} has only prompts {too_long}")
            self._console.say(
                f"{what}: dropped {len(lengths) - len(prompts)} prompts of {data.source} {too_long}"
            )
        return prompts, max(length for length in lengths if length <= most)

    def stream(self, prompts: Prompts, share: float) -> PromptStream:
        """Return a stream that has this share of the draws."""
        curriculum = self.settings.curriculum
        return PromptStream(
            prompts,
            bind(curriculum),
            seed=self._config.trainer.seed,
            retire_after=curriculum.retire_after,
            prompts_per_step=self._config.rollout.prompts_per_step * share,
        )

    def play(self, servers: ServerPool, longest: int) -> Play:
        """Make the player of its episodes, which end at `longest` tokens."""
        env = self.settings.env
        limits = Limits(
            max_turns=env.max_turns,
            max_length=longest,
            timeout_s=env.timeout_s,
            history=None
            if env.history == "keep"
            else environments.HISTORIES.get(env.history, "env.history: "),
        )
        ask = Batcher(servers, tools=self.example.toolbox).ask
        renderer = renderer_of(self.settings.data, self._tokenizer, self._tools)
        return player(self._environment, servers, ask, renderer, limits)


class EachScorer(RewardScorer):
    """Scores a rollout by the rewards of its source."""

    def __init__(self, scorers: Mapping[str, RewardScorer]) -> None:
        self._scorers = scorers  # by source

    async def ask(self, rollout: Rollout) -> dict[str, Score]:
        return await self._scorers[rollout.prompt.source].ask(rollout)

    async def settle(
        self,
        rollouts: Sequence[Rollout],
        values: Sequence[Mapping[str, Score]],
    ) -> tuple[Score, ...]:
        source = rollouts[0].prompt.source  # a group is of one prompt
        return await self._scorers[source].settle(rollouts, values)
