"""The parts of a run with data.sources: of each source its own, chosen by the source of a prompt."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from hocket.client.pool import ServerPool
from hocket.commands.parts import Parts
from hocket.config import Config, RewardsConfig
from hocket.data.cache import Prompts
from hocket.data.curriculum import bind
from hocket.data.mixture import MixedStream, Mixture, Selected, of_source
from hocket.data.stream import PromptStream
from hocket.observe.console import Console
from hocket.observe.metrics import by_source
from hocket.rewards.scorer import RewardCalls, RewardScorer
from hocket.rollout.collect import Play, Seat
from hocket.rollout.evaluate import Evaluation, measured
from hocket.types import Group, Metrics, Prompt, Rollout, Score

if TYPE_CHECKING:
    from hocket.trainer.trainer import Trainer


class MixedCalls(RewardCalls):
    """Calls the rewards of each source; sources with the same rewards share their workers."""

    def __init__(self, views: Mapping[str, Config], names: Callable[[Config], Iterable[str]]) -> None:
        super().__init__(RewardsConfig(), ())
        made = dict[str, RewardCalls]()
        self.of = dict[str, RewardCalls]()
        for name, view in views.items():
            asked = (*names(view),)
            same = f"{asked}{view.rewards.model_dump_json()}"
            if same not in made:
                made[same] = RewardCalls(view.rewards, asked)
            self.of[name] = made[same]
            self.rewards |= {f"{name}/{one}": reward for one, reward in made[same].rewards.items()}

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        for calls in self.of.values():
            calls.__exit__(*exc_info)

    async def set_up(self) -> None:
        for calls in self.of.values():
            await calls.set_up()


class MixedScorer(RewardScorer):
    def __init__(self, of: Mapping[str, RewardScorer]) -> None:
        self._of = of

    async def ask(self, rollout: Rollout) -> dict[str, Score]:
        return await self._of[rollout.prompt.source].ask(rollout)

    async def settle(self, rollouts: Sequence[Rollout], given: Sequence[Mapping[str, Score]]) -> tuple[Score, ...]:
        return await self._of[rollouts[0].prompt.source].settle(rollouts, given)


class MixedParts(Parts):
    def __init__(self, config: Config, console: Console) -> None:
        super().__init__(config, console)
        self.of = {name: Parts(view, console, self.tokenizer) for name, view in config.views.items()}
        self._weights = {one.called: one.weight for one in config.data.sources if one.weight}
        with_tools = (part.example for part in self.of.values() if part.example.toolbox)
        self.example = next(with_tools, self.example)  # of which a dry run tries the tools
        self._plays = dict[str, Play]()

    def limit(self, trainer: "Trainer") -> None:
        super().limit(trainer)
        for part in self.of.values():
            part.longest = self.longest

    def training(self) -> Prompts:
        loaded = {name: self.of[name].training() for name in self._weights}
        self.needed = max(part.needed for part in self.of.values())
        total = sum(self._weights.values())
        for name, prompts in loaded.items():
            self.console.say(f"source {name}: {len(prompts):,} prompts, {self._weights[name] / total:.1%} of the draws")
        return Mixture({name: Selected(prompts, range(len(prompts)), name) for name, prompts in loaded.items()})

    @property
    def single_turns(self) -> bool:
        return all(part.single_turns for part in self.of.values())

    def held_out(self) -> Sequence[Prompt]:
        of = {name: part.held_out() for name, part in self.of.items() if part.config.held_out_data is not None}
        prompts = [of_source(prompt, name) for name, mine in of.items() for prompt in mine]
        return prompts or super().held_out()

    def stream(self, prompts: Prompts) -> PromptStream:
        assert isinstance(prompts, Mixture)
        total = sum(self._weights.values())

        def make(name: str, number: Callable[[], int]) -> PromptStream:
            config = self.of[name].config
            return PromptStream(
                prompts.of[name],
                bind(config.curriculum),
                seed=config.trainer.seed,
                retire_after=config.curriculum.retire_after,
                prompts_per_step=config.rollout.prompts_per_step * self._weights[name] / total,
                number=number,
            )

        streams = {name: partial(make, name) for name in prompts.of}
        return MixedStream(streams, self._weights, self.config.trainer.seed)

    def scorer(self, calls: RewardCalls) -> RewardScorer:
        assert isinstance(calls, MixedCalls)
        return MixedScorer({name: part.scorer(calls.of[name]) for name, part in self.of.items()})

    def eval_scorer(self, calls: RewardCalls) -> RewardScorer:
        assert isinstance(calls, MixedCalls)
        return MixedScorer({name: part.eval_scorer(calls.of[name]) for name, part in self.of.items()})

    def play(self, servers: ServerPool) -> Play:
        self._plays = {name: part.play(servers) for name, part in self.of.items()}
        return self._play({name: part.config.rollout.max_tokens for name, part in self.of.items()})

    def _play(self, max_tokens: Mapping[str, int]) -> Play:
        async def play(prompt: Prompt, seat: Seat) -> Rollout:
            sampling = seat.sampling.model_copy(update={"max_tokens": max_tokens[prompt.source]})
            return await self._plays[prompt.source](prompt, dataclasses.replace(seat, sampling=sampling))

        return play

    def evaluation(self, prompts: Sequence[Prompt], play: Play, calls: RewardCalls) -> Evaluation:
        configs = {name: part.config for name, part in self.of.items()}
        lengths = {name: config.eval.max_tokens or config.rollout.max_tokens for name, config in configs.items()}
        rewards = {name: config.eval_reward for name, config in configs.items()}
        whole = super().evaluation(prompts, self._play(lengths), calls)
        return dataclasses.replace(whole, measure=partial(measured_each, rewards=rewards, threshold=whole.threshold))


def measured_each(groups: Sequence[Group], rewards: Mapping[str, str], threshold: float) -> Metrics:
    """Return eval/NAME/METRIC of each held-out set, and as eval/METRIC the mean over those that have it.

    The mean of k independent means has the standard error √(Σ error²) / k.
    """
    metrics = Metrics()
    of = dict[str, list[float]]()
    for name, mine in by_source(groups).items():
        for key, value in measured(mine, rewards[name], threshold).items():
            metrics[key.replace("eval/", f"eval/{name}/", 1)] = value
            of.setdefault(key, []).append(value)
    for key, values in of.items():
        metrics[key] = math.hypot(*values) / len(values) if key.endswith("_stderr") else statistics.fmean(values)
    return metrics
