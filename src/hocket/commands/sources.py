"""The sources of a run's prompts: each has its own rows, players and rewards.

A run without data.sources has a single source, named "". `Prompt.source` names the source of a
prompt: by this name the code looks up who plays a prompt, who scores it, and with which settings a
step trains on it.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from hocket.client.batcher import Batcher
from hocket.client.pool import ServerPool
from hocket.config import Config, DataConfig, SourceSettings
from hocket.data.curriculum import bind
from hocket.data.prompts import load_prompts, renderer_of
from hocket.data.stream import PromptStream
from hocket.data.tokenizer import SequenceLimit
from hocket.envs import base as environments
from hocket.errors import ConfigError, DataError
from hocket.observe.console import Console
from hocket.rewards.base import REWARDS
from hocket.rewards.scorer import RewardCalls, RewardScorer
from hocket.rollout.collect import Play
from hocket.rollout.episode import Limits
from hocket.rollout.players import player
from hocket.types import Message, Prompt, Prompts, Rollout, Score

PROBE = "0123456789"  # text of a made-up message, which a chat template must show
RewardNames = Callable[[SourceSettings], Iterable[str]]
"""A function that lists the rewards of a source that a command calls."""


def reward_calls(stack: ExitStack, config: Config, names: RewardNames) -> dict[str, RewardCalls]:
    """Make the `RewardCalls` of each source, for the rewards that `names` lists.

    Sources with equal rewards share one, and so its worker processes. The stack closes them.
    Returns them by the name of the source.
    """
    by_rewards = dict[str, RewardCalls]()  # by names and settings of the rewards, as text
    by_source = dict[str, RewardCalls]()
    for name, source in config.sources.items():
        # eval.reward may be a reward of the run that this source does not train on.
        functions = config.rewards.functions | source.rewards.functions
        rewards = source.rewards.model_copy(update={"functions": functions})
        called = tuple(names(source))
        key = f"{called}{rewards.model_dump_json()}"
        if key not in by_rewards:
            by_rewards[key] = stack.enter_context(RewardCalls(rewards, called))
        by_source[name] = by_rewards[key]
    return by_source


def _refuse_unanswered(data: DataConfig, rewards: Iterable[str]) -> None:
    """Raise ConfigError where a reward takes the answer, but the rows have none."""
    for name in rewards:
        if data.answer_column is None and REWARDS.get(name).needs_answer:
            fact = f"reward {name} takes the answer, but {data.section}.answer_column=null"
            advice = (
                "name the column of the answers, or, in a reward of yours, give the argument a "
                "default"
            )
            raise ConfigError(f"{fact}: {advice}")


@dataclasses.dataclass(frozen=True)
class HeldOutPrompts:
    """Prompts that are not trained on."""

    prompts: Sequence[Prompt]  # the prompts to evaluate, maybe none
    keys: Collection[str]  # the keys of all held-out prompts, also of those beyond eval.num_prompts


class PromptSource:
    """Makes a source's prompts, their stream and their player. It has no state that changes.

    Example: load the training prompts of a run with a single source.

        source = PromptSource(config.default_source, config, tokenizer, limit, console)
        prompts, needed = source.training()
        stream = source.stream(prompts, share=1.0)
    """

    def __init__(
        self,
        settings: SourceSettings,
        config: Config,
        tokenizer: Any,
        limit: SequenceLimit,
        console: Console,
    ) -> None:
        """Make the source of these settings, in the run of `config`.

        Raises ConfigError if the reward env is named, but the environment gives none.
        """
        self.settings = settings
        self._config = config
        self._tokenizer = tokenizer
        self._longest = limit.tokens
        self._limit = limit.setting
        self._console = console
        env = settings.env
        self._environment = environments.bind(env.name, env.model_extra)
        self.example = self._environment()  # an environment with the attributes that all have
        has_scores = config.pipeline.replay is not None  # a replay has the scores of its rollouts
        gives_reward = type(self.example).gives_reward
        if "env" in settings.reward_names and not gives_reward and not has_scores:
            fact = f"the reward env has no value, as env.name={env.name} gives none"
            advice = (
                "name another reward in rewards.functions and eval.reward, or an environment that "
                "gives one"
            )
            raise ConfigError(f"{fact}: {advice}")

    @property
    def _tools(self) -> Sequence[Mapping[str, Any]]:
        return self.example.toolbox.tools if self.example.toolbox else ()

    def training(self) -> tuple[Prompts, int]:
        """Load the training prompts, and count the tokens of the longest one with a completion.

        Raises ConfigError where the rewards lack an answer, or no prompt fits the model.
        """
        settings = self.settings
        _refuse_unanswered(settings.data, settings.rewards.functions)
        completion = settings.max_tokens
        prompts, longest = self._fitting("train", settings.data, "rollout.max_tokens", completion)
        return prompts, longest + self.example.thinking_tokens + completion

    def _check_turns(self, data: DataConfig) -> None:
        """Check that the chat template can render what an environment replies between two turns.

        Raises DataError where it can't render the results of tools. Another environment may reply
        with text, which needs no template: there a line is printed if it can't render messages.
        """
        # Only episodes of several turns show the model what came before.
        env = self.settings.env
        if env.max_turns == 1 or isinstance(self.example, environments.SingleTurn):
            return
        if self._tools:
            tool_name = self._tools[0]["function"]["name"]
            problem = self._problem(data, {"role": "tool", "name": tool_name, "content": PROBE})
            if problem:
                advice = (
                    "take a model whose template renders tools' results behind an answer, or set "
                    "env.max_turns=1"
                )
                raise DataError(f"no turn can follow a tool's result: {problem}; {advice}")
        elif data.chat_template:
            problem = self._problem(data, {"role": "user", "content": PROBE})
            if problem:
                fact = f"no turn can follow a message of env.name={env.name}: {problem}"
                advice = (
                    "take a model whose template does, have the environment answer with text, or "
                    "set env.max_turns=1"
                )
                self._console.say(f"{data.section}: {fact}; {advice}")

    def _problem(self, data: DataConfig, reply: Message) -> str:
        """Describe why the chat template can't render this reply to the model; "" if it can."""
        renderer = renderer_of(data, self._tokenizer, self._tools)
        try:
            text = renderer.decode(renderer.following([reply], ended=None))
        except ValueError as error:
            return str(error)
        if PROBE in text:
            return ""
        return f"the chat template leaves out messages of the role {reply['role']}"

    def held_out(self) -> HeldOutPrompts:
        """Load the prompts of the evaluation. Raises as `training`."""
        data = self.settings.held_out
        if data is None:
            return HeldOutPrompts((), ())
        _refuse_unanswered(data, [self.settings.eval_reward])
        evaluation = self._config.eval
        setting = "rollout.max_tokens" if evaluation.max_tokens is None else "eval.max_tokens"
        prompts, _ = self._fitting("eval", data, setting, self.settings.eval_max_tokens)
        return HeldOutPrompts(prompts[: evaluation.num_prompts], prompts.keys())

    def _fitting(
        self, label: str, data: DataConfig, setting: str, max_tokens: int
    ) -> tuple[Prompts, int]:
        """Load the prompts that leave room for a completion; print how many do not.

        Args:
            label: The first word of the line that is printed.
            data: The rows.
            setting: The setting that gives max_tokens.
            max_tokens: The tokens that a completion may have, after those of thinking.

        Returns:
            The prompts, and the tokens of the longest one.
        """
        self._check_turns(data)
        # A sequence is a prompt, the thinking of the environment's budget, and a completion.
        thinking = self.example.thinking_tokens
        limit = self._limit
        room = self._longest - thinking - max_tokens
        if room < 1:
            before = f", behind env.thinking_tokens={thinking}," if thinking else ""
            fact = f"{setting}={max_tokens}{before} leaves no prompt room in {limit}"
            raise ConfigError(f"{fact}: lower it, or raise that")

        max_prompt_tokens = min(room, data.max_prompt_tokens or room)
        prompts, lengths = load_prompts(
            data,
            self._tokenizer,
            max_prompt_tokens=max_prompt_tokens,
            tools=self._tools,
            source=self.settings.name,
        )
        num_dropped = len(lengths) - len(prompts)
        # Name the setting that dropped prompts, and the value with which all would fit.
        if num_dropped > 0:
            longest = max(lengths)
            max_tokens_for_all = self._longest - thinking - longest
            if max_prompt_tokens < room:
                advice = f"{data.section}.max_prompt_tokens={max_prompt_tokens} leaves them out"
            elif max_tokens_for_all > 0:
                advice = f"{setting}={max_tokens_for_all} has room for all in {limit}"
            else:
                advice = f"{limit} is too short for it"
            limits = f"with more than {max_prompt_tokens} tokens; the longest has {longest}"
            too_long = f"{limits}: {advice}"
            if not prompts:
                raise ConfigError(f"{label}: {data.source} has only prompts {too_long}")
            dropped = f"dropped {num_dropped} prompts of {data.source}"
            self._console.say(f"{label}: {dropped} {too_long}")
        return prompts, max(length for length in lengths if length <= max_prompt_tokens)

    def stream(self, prompts: Prompts, share: float) -> PromptStream:
        """Make a stream of these prompts, which has this share of the run's draws."""
        curriculum = self.settings.curriculum
        return PromptStream(
            prompts,
            bind(curriculum),
            seed=self._config.trainer.seed,
            retire_after=curriculum.retire_after,
            prompts_per_step=self._config.rollout.prompts_per_step * share,
        )

    def play(self, servers: ServerPool, longest: int) -> Play:
        """Make the player of the source's episodes, which end at `longest` tokens."""
        env = self.settings.env
        history = None  # all turns are kept; an episode that outgrows the model ends
        if env.history != "keep":
            history = environments.HISTORIES.get(env.history, "env.history: ")
        limits = Limits(
            max_turns=env.max_turns, max_length=longest, timeout_s=env.timeout_s, history=history
        )
        ask = Batcher(servers, tools=self.example.toolbox).ask
        renderer = renderer_of(self.settings.data, self._tokenizer, self._tools)
        return player(self._environment, servers, ask, renderer, limits)


class EachScorer:
    """Scores rollouts by the rewards of their source: a `Scorer`."""

    def __init__(self, scorers: Mapping[str, RewardScorer]) -> None:
        self._scorers = scorers  # by source

    async def ask(self, rollout: Rollout) -> Mapping[str, Score]:
        return await self._scorers[rollout.prompt.source].ask(rollout)

    async def settle(
        self, rollouts: Sequence[Rollout], values: Sequence[Mapping[str, Score]]
    ) -> tuple[Score, ...]:
        source = rollouts[0].prompt.source  # all rollouts of a group have the same prompt
        return await self._scorers[source].settle(rollouts, values)
