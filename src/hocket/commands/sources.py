"""The sources of a run's prompts, one without data.sources: each has its own rows, players and rewards."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from hocket.client.batcher import Batcher
from hocket.client.pool import ServerPool
from hocket.config import Config, DataConfig
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


def reward_calls(stack: ExitStack, config: Config, names: Callable[[Config], Iterable[str]]) -> dict[str, RewardCalls]:
    """Make the callers of the rewards that `names` lists for each source; sources with equal ones share a caller."""
    made = dict[str, RewardCalls]()
    found = dict[str, RewardCalls]()
    for source, view in config.views.items():
        # eval.reward may be one of the run's that the source does not train on
        known = view.rewards.model_copy(update={"functions": config.rewards.functions | view.rewards.functions})
        asked = (*names(view),)
        same = f"{asked}{known.model_dump_json()}"
        found[source] = made[same] = made.get(same) or stack.enter_context(RewardCalls(known, asked))
    return found


def _refuse_unanswered(data: DataConfig, rewards: Iterable[str]) -> None:
    for name in rewards:
        if data.answer_column is None and REWARDS.get(name).needs_answer:
            advice = "name the column of the answers, or, in a reward of yours, give the argument a default"
            raise ConfigError(f"reward {name} takes the answer, but {data.section}.answer_column=null: {advice}")


class PromptSource:
    """Prompts, and how they are played."""

    def __init__(self, name: str, config: Config, tokenizer: Any, longest: tuple[int, str], console: Console) -> None:
        self.name = name
        self.config = config  # of the run, as this source has it
        self._tokenizer = tokenizer
        self._longest, self._limit = longest  # tokens of a sequence, and what allows no more
        self._console = console
        self._environment = environments.bind(config.env.name, config.env.model_extra)
        self.example = self._environment()  # has what all of them have
        is_replay = config.pipeline.replay is not None  # which has the scores
        if "env" in config.reward_names and not type(self.example).gives_reward and not is_replay:
            advice = "name another reward in rewards.functions and eval.reward, or an environment that gives one"
            raise ConfigError(f"the reward env has no value, as env.name={config.env.name} gives none: {advice}")
        self.needed = 0  # tokens of the longest training prompt and a completion
        self.tested = set[str]()  # keys of held-out prompts, also of those beyond eval.num_prompts

    @property
    def _tools(self) -> Sequence[Mapping[str, Any]]:
        return self.example.toolbox.tools if self.example.toolbox else ()

    def training(self) -> Prompts:
        """Return the training prompts."""
        _refuse_unanswered(self.config.data, self.config.rewards.functions)
        answer = self.config.rollout.max_tokens
        prompts, length = self._fitting("train", self.config.data, "rollout.max_tokens", answer)
        self.needed = length + self.example.thinking_tokens + answer
        return prompts

    def _check_turns(self, data: DataConfig) -> None:
        """Check that the chat template shows the model's next turn what it said before, and what it was answered.

        Raise DataError where the results of tools can't be shown. Other environments may answer with text, which needs
        no template: where messages can't be shown, say so.
        """
        env = self.config.env
        if env.max_turns == 1 or isinstance(self.example, environments.SingleTurn):
            return
        if self._tools:
            said: Message = {"role": "tool", "name": self._tools[0]["function"]["name"], "content": ANSWERED}
            problem = self._unanswerable(data, said)
            if problem:
                advice = "take a model whose template renders tools' results behind an answer, or set env.max_turns=1"
                raise DataError(f"no turn can follow a tool's result: {problem}; {advice}")
        elif data.chat_template:
            problem = self._unanswerable(data, {"role": "user", "content": ANSWERED})
            if problem:
                fact = f"no turn can follow a message of env.name={env.name}: {problem}"
                advice = (
                    "take a model whose template does, have the environment answer with text, or set env.max_turns=1"
                )
                self._console.say(f"{data.section}: {fact}; {advice}")

    def _unanswerable(self, data: DataConfig, answer: Message) -> str:
        """Return why an answer to the model's turn can't be shown to it; "" if it can."""
        renderer = renderer_of(data, self._tokenizer, self._tools)
        try:
            shown = renderer.decode(renderer.following([answer], ended=None))
        except ValueError as error:
            return str(error)
        return "" if ANSWERED in shown else f"the chat template leaves out messages of the role {answer['role']}"

    def held_out(self) -> Sequence[Prompt]:
        """Return the prompts of the evaluation, maybe none."""
        data = self.config.held_out_data
        settings = self.config.eval
        if data is None:
            return ()
        _refuse_unanswered(data, [self.config.eval_reward])
        setting = "rollout.max_tokens" if settings.max_tokens is None else "eval.max_tokens"
        prompts, _ = self._fitting("eval", data, setting, self.eval_tokens)
        self.tested |= {*prompts.keys()}
        return prompts[: settings.num_prompts]

    @property
    def eval_tokens(self) -> int:
        return self.config.eval.max_tokens or self.config.rollout.max_tokens

    def _fitting(self, what: str, data: DataConfig, setting: str, answer: int) -> tuple[Prompts, int]:
        """Return the prompts that leave room for an answer, and the longest length; say how many do not."""
        self._check_turns(data)
        thought = self.example.thinking_tokens  # before an answer
        limit = self._limit
        room = self._longest - thought - answer
        if room < 1:
            before = f", behind env.thinking_tokens={thought}," if thought else ""
            raise ConfigError(f"{setting}={answer}{before} leaves no prompt room in {limit}: lower it, or raise that")
        most = min(room, data.max_prompt_tokens or room)
        prompts, lengths = load_prompts(
            data, self._tokenizer, max_prompt_tokens=most, tools=self._tools, source=self.name
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
            self._console.say(f"{what}: dropped {len(lengths) - len(prompts)} prompts of {data.source} {too_long}")
        return prompts, max(length for length in lengths if length <= most)

    def stream(self, prompts: Prompts, share: float) -> PromptStream:
        """Return a stream that has this share of the draws."""
        config = self.config
        return PromptStream(
            prompts,
            bind(config.curriculum),
            seed=config.trainer.seed,
            retire_after=config.curriculum.retire_after,
            prompts_per_step=config.rollout.prompts_per_step * share,
        )

    def play(self, servers: ServerPool, longest: int) -> Play:
        env = self.config.env
        limits = Limits(
            max_turns=env.max_turns,
            max_length=longest,
            timeout_s=env.timeout_s,
            history=None if env.history == "keep" else environments.HISTORIES.get(env.history, "env.history: "),
        )
        ask = Batcher(servers, tools=self.example.toolbox).ask
        renderer = renderer_of(self.config.data, self._tokenizer, self._tools)
        return player(self._environment, servers, ask, renderer, limits)


class EachScorer(RewardScorer):
    """Scores a rollout as its source does."""

    def __init__(self, of: Mapping[str, RewardScorer]) -> None:
        self._of = of

    async def ask(self, rollout: Rollout) -> dict[str, Score]:
        return await self._of[rollout.prompt.source].ask(rollout)

    async def settle(self, rollouts: Sequence[Rollout], given: Sequence[Mapping[str, Score]]) -> tuple[Score, ...]:
        return await self._of[rollouts[0].prompt.source].settle(rollouts, given)
