"""The settings of the algorithm, and the published algorithms as presets over them.

The formulas are in docs/explanation/numerics.md.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import pydantic
from pydantic import Field

from hocket.config.sections import Chosen, ModelPath, Range, Section, markdown_table


class AdaptiveKl(Section):
    """Subtract the KL from the rewards, with a coefficient that adapts (algorithm/samples.py)."""

    name: Literal["reward"]
    target: float = Field(gt=0)  # the KL per token that the coefficient aims at
    horizon: int = Field(10_000, ge=1)  # rollouts over which the coefficient moves by at most 20 %


Scale = Literal["group", "batch", "tokens", "none"]
PresetName = Literal[
    "grpo",
    "dapo",
    "dr_grpo",
    "bnpo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "ppo",
    "distill",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Preset:
    """A published algorithm, as the settings in which it differs from the defaults."""

    source: str  # number on arXiv, or the name of a project
    remark: str
    knobs: Mapping[str, Any]  # setting -> value


def _published(source: str, remark: str = "", **changes: Any) -> Preset:
    # The papers clip alike on both sides, and know no correction between engine and trainer.
    return Preset(source, remark, {"clip_high": 0.2, "correction": "none"} | changes)


PRESETS: Mapping[str, Preset] = {
    "grpo": _published(
        "2402.03300",
        "without the paper's KL term: add kl=k2 kl_coef=0.04",
        aggregate="seq_mean_token_mean",
    ),
    "dapo": _published(
        "2503.14476",
        "overlong_share, oversampling",
        clip_high=0.28,
        overlong_share=0.2,
        oversampling=2.0,
        minibatches=16,
    ),
    "dr_grpo": _published("2503.20783", scale="none", aggregate="constant"),
    "bnpo": _published("TRL", "with a global token count"),
    "gspo": _published(
        "2507.18071",
        ratio="sequence",
        clip_low=3e-4,
        clip_high=4e-4,
        aggregate="seq_mean_token_mean",
        minibatches=4,
    ),
    "cispo": _published(
        "2506.13585",
        "ratio capped at 5",
        objective="cispo",
        clip_low=1.0,
        clip_high=4.0,
        minibatches=16,
    ),
    "rloo": _published(
        "2402.14740",
        "the paper has objective=none aggregate=seq_mean_token_sum",
        advantage="leave_one_out",
        scale="none",
    ),
    "reinforce_pp": _published(
        "2501.03262", advantage="none", scale="tokens", kl="k1", kl_in="reward", kl_coef=0.01
    ),
    "reinforce_pp_baseline": _published(
        "2501.03262", "without the paper's KL term: add kl=k2 and a kl_coef", scale="tokens"
    ),
    "ppo": _published(
        "1707.06347",
        "with a critic and generalized advantages, 1506.02438; epochs of 1909.08593",
        advantage="critic",
        scale="tokens",
        epochs=4,
    ),
    "distill": _published(
        "2306.13649",
        "reference: the teacher; the reverse KL of sampled tokens alone, with rewards of weight 0",
        advantage={"name": "none", "discount": 0.0},
        scale="none",
        objective="none",
        kl="k1",
        kl_in="reward",
        kl_coef=1.0,
    ),
}


class AdvantageConfig(Section):
    """The settings from rewards to advantages, and of the updates of a step."""

    preset: PresetName | None = None
    """Published algorithm (docs/reference/presets.md); replaces defaults."""
    advantage: Chosen = "mean"
    """How rewards become advantages. `mean`, `leave_one_out`: minus a mean of the group; `none`,
    option discount: the return of each token; `critic`, options discount and gae_lambda: GAE; or
    your own."""
    credit: Chosen = "episode"
    """Advantage of a turn. `episode`: that of the episode's reward; `turn`, option discount: from
    the rewards of this turn and later ones; `step_groups`, options discount and weight: also from
    the returns of turns that began in an equal state; or your own."""
    scale: Scale = "group"
    """Advantages are divided by the deviation in the `group` or `batch`, with `none` by nothing;
    `tokens` whitens them over all trained tokens."""
    overlong_share: float = Field(0.0, ge=0, le=1)
    """Last share of max_tokens, over which a penalty grows from 0 to 1."""
    oversampling: float = Field(1.0, ge=1)
    """Dynamic sampling: up to this x prompts_per_step."""
    epochs: int = Field(1, ge=1)
    """Passes over the samples of a step."""
    minibatches: int = Field(1, ge=1)
    """Most updates per epoch, on whole groups."""
    stop_kl: float | None = Field(None, gt=0)
    """KL(policy before the step ‖ policy) that ends its updates."""
    mask_truncated: bool = False
    """Exclude truncated rollouts from the loss, not from the baseline."""
    reward_range: Range | None = None
    """Only groups whose mean reward lies strictly between the two are trained."""
    reference: ModelPath | None = None
    """Reference of the KL: a model as in model.path, or URL of a server that scores. Default:
    model.path, no adapter."""


class LossKnobs(Section):
    """The settings from advantages to the loss."""

    ratio: Literal["token", "sequence"] = "token"
    """Probability ratio per `token`, or its geometric mean per `sequence`."""
    objective: Chosen = "ppo"
    """`ppo`: min(clipped, unclipped), option dual_clip: the largest ratio where the advantage is
    negative; `cispo`: clipped as fixed weight; `none`; or your own objective."""
    clip_low: float = Field(0.2, gt=0, le=1)
    """Lower clip range, 1 - clip_low."""
    clip_high: float = Field(0.28, gt=0)
    """Upper clip range, 1 + clip_high."""
    aggregate: Chosen = "token_mean"
    """Sum of token losses, over all micro-batches and ranks: `token_mean`; the mean over sequences
    of a mean, `seq_mean_token_mean`, or of a sum, `seq_mean_token_sum`; `constant`: the last one
    divided by rollout.max_tokens."""
    correction: Chosen = "truncate"
    """Importance weight between engine and trainer, option bounds: `truncate` clips it to [0, 2];
    `mask` sets it to 0 outside [0.5, 5]; `sequence_mask` does so to a sequence whose weights
    have a geometric mean outside [0.99, 1.01], and clips those of others to 2; `none`."""
    kl: Chosen = "off"
    """KL penalty, x = log(policy/reference): `k1` x, `k2` x²/2, `k3` exp(-x) - 1 + x."""
    kl_in: Literal["loss", "reward"] | AdaptiveKl = "loss"
    """Place of the penalty: `loss` or `reward`; {name: reward, target: KL per token} adapts
    kl_coef."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the penalty, or its start."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""


class LossConfig(LossKnobs):
    """The part of the settings that losses.py reads."""

    constant_length: int | None = Field(None, ge=1)  # divisor of aggregate=constant, in tokens


class AlgorithmConfig(LossKnobs, AdvantageConfig):
    """Section algorithm: from rewards to the loss."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        preset = PRESETS.get(str(values.get("preset"))) if isinstance(values, Mapping) else None
        if preset is None:
            return values
        knobs = dict(preset.knobs)
        if values.get("kl") == "off":  # then a preset's kl_in and kl_coef would have no effect
            knobs.pop("kl_in", None)
            knobs.pop("kl_coef", None)
        return knobs | dict(values)

    @property
    def updates(self) -> int:
        """Most optimizer steps per step of the run."""
        return self.epochs * self.minibatches

    @property
    def by_turn(self) -> bool:
        """Whether turns of an episode may have different advantages."""
        return self.credit != "episode"

    def loss(self, max_tokens: int) -> LossConfig:
        """Return the settings of the loss; max_tokens is a completion's longest length."""
        knobs = self.model_dump(include=set(LossKnobs.model_fields))
        return LossConfig(**knobs, constant_length=max_tokens)

    def refuse(self) -> None:
        corrects = self.correction != "none"
        in_reward = self.kl_in != "loss"
        if self.ratio == "sequence" and corrects and self.updates == 1:
            raise ValueError(
                "with a correction and one update every ratio is 1: set correction=none, or "
                "several updates (epochs, minibatches)"
            )
        if self.stop_kl is not None and self.updates == 1:
            raise ValueError("stop_kl has no effect with epochs=1 and minibatches=1")
        if self.stop_kl is not None and not corrects:
            raise ValueError(
                "stop_kl needs a correction: without one the ratio is to the engine's log-probs"
            )
        if self.kl == "off" and (in_reward or self.kl_coef or self.reference):
            raise ValueError(
                "kl=off: kl_in, kl_coef, reference have no effect; set kl or leave them out"
            )
        if self.kl != "off" and self.kl_coef == 0:
            raise ValueError(f"kl={self.kl} needs a weight, e.g. kl_coef=0.001; or set kl=off")
        if in_reward and self.scale == "group":
            raise ValueError("with kl_in=reward set another scale: group cancels it")


class CriticConfig(Section):
    """Section critic: the model that predicts returns (trainer/critic.py)."""

    path: ModelPath | None = None
    """Model of the critic's layers. Default: model.path."""
    learning_rate: float = Field(1e-5, gt=0)
    """Constant learning rate of the critic's AdamW."""
    warmup_steps: int = Field(0, ge=0)
    """First steps, in which only the critic learns."""
    value_clip: float | None = Field(0.5, gt=0)
    """Most that a value moves in a step to lower its loss. null: no limit."""


def preset_table() -> str:
    """Print all presets as Markdown (docs/reference/presets.md)."""
    columns = (
        "advantage",
        "scale",
        "ratio",
        "objective",
        "range",
        "aggregate",
        "correction",
        "kl",
        "updates",
    )
    defaults = {name: field.default for name, field in AlgorithmConfig.model_fields.items()}
    remark = "with a correction and one update every ratio is 1 and its clip has no effect"
    presets = {"(none)": Preset("", remark, {})}
    presets |= {f"`{name}`": preset for name, preset in PRESETS.items()}
    rows = []
    for name, preset in presets.items():
        knobs = defaults | dict(preset.knobs)
        knobs["updates"] = f"{knobs['epochs']} x {knobs['minibatches']}"
        knobs["range"] = f"-{knobs['clip_low']:g} / +{knobs['clip_high']:g}"
        if knobs["kl"] != "off":
            knobs["kl"] = f"{knobs['kl']} in {knobs['kl_in']}, {knobs['kl_coef']:g}"
        source = preset.source
        if source[:1].isdigit():
            source = f"[{source}](https://arxiv.org/abs/{source})"
        # A setting with options is a dict: without quotes it is shown as YAML has it.
        cells = [str(knobs[column]).replace("'", "") for column in columns]
        rows.append((name, *cells, preset.remark, source))
    return markdown_table(("preset", *columns, "besides", "source"), rows)
