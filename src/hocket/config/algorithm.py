"""What is learned from rewards, and how: the knobs that presets are rows of, and the critic's own."""

from collections.abc import Iterator, Mapping
from typing import Any

import pydantic
from pydantic import Field

from hocket import presets
from hocket.config.sections import Section, UserPath
from hocket.presets import CORRECTION_RANGES, DEFAULT, PRESETS


class AlgorithmConfig(Section):
    preset: presets.PresetName | None = Field(
        None, description="A published algorithm (docs/algorithms.md): fills every key below that is not set."
    )
    baseline: presets.Baseline = Field(
        DEFAULT.baseline,
        description="What a reward is compared with: its group's mean, that of the group's others (leave_one_out), "
        "nothing, or a critic's values. The last two give each token an advantage of its own.",
    )
    scale: presets.Scale = Field(
        DEFAULT.scale,
        description="What that is divided by: the deviation of its group, of the whole batch (over rollouts; over "
        "tokens, whose mean is subtracted too, with baseline none or critic), or nothing.",
    )
    advantage_clip: float | None = Field(None, gt=0, description="Advantages are limited to ± this; default: not.")
    discount: float = Field(
        1.0, gt=0, le=1, description="Baseline none or critic: what a reward weighs one token earlier."
    )
    gae_lambda: float = Field(
        1.0, ge=0, le=1, description="Baseline critic: 1 trusts the rewards to come, 0 the critic's next value."
    )
    reward_clip: tuple[float, float] | None = Field(
        None, description="Rewards are limited to [low, high] before anything else; default: not."
    )
    overlong_share: float = Field(
        DEFAULT.overlong_share,
        ge=0,
        le=1,
        description="Over the last so much of rollout.max_tokens, a penalty on the reward grows from 0 to -1; 0: none.",
    )
    oversampling: float = Field(
        DEFAULT.oversampling,
        ge=1,
        description="Dynamic sampling: a prompt whose group teaches nothing, as all its rewards are alike, is replaced "
        "by the next one, until rollout.prompts_per_step teach something, or this many times as many were played; 1: "
        "it is left out.",
    )
    mask_truncated: bool = Field(
        False, description="Rollouts cut off at rollout.max_tokens count in the baseline and are not trained."
    )
    top_entropy: float = Field(
        1.0, gt=0, le=1, description="Only this share of the batch's tokens, of highest entropy, has an advantage."
    )
    ratio: presets.Ratio = Field(
        DEFAULT.ratio, description="Probability ratio of each token, or its geometric mean over the sequence."
    )
    clip: presets.Clip = Field(
        DEFAULT.clip,
        description="ppo: the smaller of clipped and unclipped; cispo: the clipped ratio weighs the gradient of every "
        "token; none.",
    )
    clip_low: float = Field(
        DEFAULT.clip_low,
        gt=0,
        le=1,
        description="The ratio is clipped below at 1 - clip_low; with a correction it is 1.",
    )
    clip_high: float = Field(
        DEFAULT.clip_high, gt=0, description="The ratio is clipped above at 1 + clip_high; with a correction it is 1."
    )
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="With clip ppo, the ratio of a negative advantage counts up to this; default: unbounded.",
    )
    aggregate: presets.Aggregate = Field(
        DEFAULT.aggregate,
        description="From tokens to the loss, over all micro-batches and ranks: their mean; the mean over sequences of "
        "the mean or of the sum of their tokens; constant: the latter, divided by constant_length.",
    )
    constant_length: int | None = Field(None, ge=1, description="Aggregate constant; default: rollout.max_tokens.")
    correction: presets.Correction = Field(
        DEFAULT.correction,
        description="Importance weight between engine and trainer: none; truncate: capped at correction_high; mask: "
        "0 outside of [correction_low, correction_high]; sequence_mask: that of the tokens, capped at 2, and 0 for "
        "sequences whose geometric mean is outside.",
    )
    correction_low: float = Field(
        CORRECTION_RANGES["truncate"][0],
        ge=0,
        description="Lower bound of the importance weight; mask: 0.5, sequence_mask: 0.99.",
    )
    correction_high: float = Field(
        CORRECTION_RANGES["truncate"][1],
        gt=0,
        description="Upper bound of the importance weight; mask: 5, sequence_mask: 1.01.",
    )
    kl: presets.Kl = Field(
        DEFAULT.kl,
        description="Penalty on the distance x = log(policy / reference) of each token: k1: x; k2: x²/2; "
        "k3: exp(-x) - 1 + x.",
    )
    kl_in: presets.KlIn = Field(
        DEFAULT.kl_in, description="The penalty is a term of the loss, or is taken from the rewards."
    )
    kl_coef: float = Field(DEFAULT.kl_coef, ge=0, description="Weight of the penalty; at the start, with kl_target.")
    kl_target: float | None = Field(
        None,
        gt=0,
        description="In the reward: kl_coef adapts until the mean of a token's penalty is this; default: it stays.",
    )
    kl_horizon: int = Field(10_000, ge=1, description="With kl_target, rollouts over which kl_coef adapts.")
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the policy's entropy, which is then rewarded.")
    reference: UserPath | None = Field(
        None,
        description="Model that a KL divergence is measured from, such as an older version; default: the one that the "
        "run starts from, with model.lora the base without the adapter.",
    )
    reference_reset_every: int = Field(
        0, ge=0, description="The policy becomes its own reference after every so many steps; 0: never."
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        """Sets what the preset says, then the correction's own range, where the user set nothing."""
        if not isinstance(values, Mapping):
            return values
        values = dict(values)
        if values.get("kl") is False:
            values["kl"] = "off"  # which YAML 1.1 takes for a truth value
        knobs = next((row.knobs for name, row in PRESETS.items() if name == values.get("preset")), DEFAULT.knobs)
        if values.get("kl") == "off":
            knobs = {name: value for name, value in knobs.items() if not name.startswith("kl_")}
        filled = {**knobs, **values}
        ranges = (span for name, span in CORRECTION_RANGES.items() if name == filled["correction"])
        low, high = next(ranges, CORRECTION_RANGES["none"])
        return {"correction_low": low, "correction_high": high, **filled}

    @pydantic.model_validator(mode="after")
    def _means_something(self) -> "AlgorithmConfig":
        for nonsense, message in self._contradictions():
            if nonsense:
                raise ValueError(message)
        return self

    def _contradictions(self) -> Iterator[tuple[bool, str]]:
        by_token = self.baseline in ("none", "critic")
        corrected = self.correction != "none"
        in_reward = self.kl_in == "reward"
        yield (
            by_token and self.scale == "group",
            f"baseline={self.baseline} gives every token an advantage, which no group has a deviation of: set scale "
            "to batch or none",
        )
        yield self.discount != 1 and not by_token, "discount is for baseline none or critic; leave it at 1"
        yield self.gae_lambda != 1 and self.baseline != "critic", "gae_lambda is for baseline critic; leave it at 1"
        yield (
            self.reward_clip is not None and self.reward_clip[0] >= self.reward_clip[1],
            "reward_clip is [low, high]: the first must be smaller",
        )
        yield (
            self.ratio == "sequence" and corrected,
            f"ratio=sequence has no effect with correction={self.correction}, where every ratio is 1: set "
            "correction=none, which compares with the policy that sampled",
        )
        yield (
            self.dual_clip is not None and (self.clip != "ppo" or corrected),
            "dual_clip bounds the minimum of clip=ppo where ratios differ from 1: set clip=ppo and correction=none, or "
            "leave it out",
        )
        yield (
            self.constant_length is not None and self.aggregate != "constant",
            "constant_length is for aggregate=constant; set that, or leave it out",
        )
        yield (
            self.correction_low >= self.correction_high,
            f"correction_low={self.correction_low:g} must be below correction_high={self.correction_high:g}",
        )
        yield (
            self.kl == "off" and (in_reward or self.kl_coef > 0 or self.kl_target is not None),
            "kl=off leaves kl_in, kl_coef and kl_target without a meaning: set kl, e.g. to k1 in the reward or k2 in "
            "the loss, or leave them out",
        )
        yield self.kl != "off" and self.kl_coef == 0, f"kl={self.kl} needs a weight, e.g. kl_coef=0.001; or set kl=off"
        yield (
            self.kl == "k1" and not in_reward,
            "k1 in the loss has an expected gradient of zero: set kl_in=reward, or kl=k2",
        )
        yield (
            in_reward and self.scale == "group",
            "scale=group would divide the penalty away where the rewards of a group are alike: with kl_in=reward set "
            "scale=batch or none",
        )
        yield self.kl_target is not None and not in_reward, "kl_target adapts the KL of the rewards: set kl_in=reward"


class CriticConfig(Section):
    path: UserPath | None = Field(
        None, description="Model whose layers the critic of ppo starts from, under a new head; default: model.path."
    )
    learning_rate: float = Field(1e-5, gt=0, description="Constant learning rate of the critic's AdamW.")
    warmup_steps: int = Field(0, ge=0, description="Steps at the start in which only the critic learns.")
    value_clip: float = Field(
        0.5,
        gt=0,
        description="A value that has moved by more than this from the one before the step gains nothing by moving on. "
        "As each batch gives one update, from values that have not moved yet, it limits nothing.",
    )
