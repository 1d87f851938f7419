"""The published algorithms, each a row of knobs: the one table behind `algorithm.preset`, LossConfig and the docs.

Knows names and numbers only; what a knob does is written where it acts, in config/ and algorithm/. Without torch, so
that a config is checked within a second.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Baseline = Literal["mean", "leave_one_out", "none", "critic"]
Scale = Literal["group", "batch", "none"]
Ratio = Literal["token", "sequence"]
Clip = Literal["ppo", "cispo", "none"]
Aggregate = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]
Kl = Literal["off", "k1", "k2", "k3"]
KlIn = Literal["loss", "reward"]
Correction = Literal["none", "truncate", "mask", "sequence_mask"]
PresetName = Literal[
    "grpo", "dapo", "dr_grpo", "bnpo", "gspo", "cispo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "ppo"
]

CORRECTION_RANGES: Mapping[Correction, tuple[float, float]] = {
    "none": (0.0, 2.0),
    "truncate": (0.0, 2.0),
    "mask": (0.5, 5.0),
    "sequence_mask": (0.99, 1.01),
}
"""correction_low and correction_high where they are not set: bounds of another quantity under each correction."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One row. Its defaults are the row without a name: what runs where no preset is asked for.

    Attributes:
        source: where it was published: a number of arXiv, or a project.
        remark: what the row leaves out of it, or adds.
    """

    source: str = ""
    remark: str = ""
    baseline: Baseline = "mean"
    scale: Scale = "group"
    ratio: Ratio = "token"
    clip: Clip = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    aggregate: Aggregate = "token_mean"
    correction: Correction = "truncate"
    kl: Kl = "off"
    kl_in: KlIn = "loss"
    kl_coef: float = 0.0
    overlong_share: float = 0.0
    oversampling: float = 1.0

    @property
    def knobs(self) -> dict[str, Any]:
        """The settings of `algorithm` that the row says."""
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if name not in ("source", "remark")}


DEFAULT = Preset(remark="one optimiser step per batch, so that the corrected ratio is 1 and its clip rests")

PRESETS: Mapping[PresetName, Preset] = {
    "grpo": Preset(
        source="2402.03300",
        remark="without the paper's KL term: add kl=k2 kl_coef=0.04",
        clip_high=0.2,
        aggregate="seq_mean_token_mean",
        correction="none",
    ),
    "dapo": Preset(
        source="2503.14476",
        remark="a penalty on the last fifth of the length; groups whose rewards are alike are replaced",
        correction="none",
        overlong_share=0.2,
        oversampling=2.0,
    ),
    "dr_grpo": Preset(source="2503.20783", scale="none", clip_high=0.2, aggregate="constant", correction="none"),
    "bnpo": Preset(source="TRL", remark="its count of tokens is global here", clip_high=0.2, correction="none"),
    "gspo": Preset(
        source="2507.18071",
        ratio="sequence",
        clip_low=3e-4,
        clip_high=4e-4,
        aggregate="seq_mean_token_mean",
        correction="none",
    ),
    "cispo": Preset(
        source="2506.13585",
        remark="the ratio capped at 5",
        clip="cispo",
        clip_low=1.0,
        clip_high=4.0,
        correction="none",
    ),
    "rloo": Preset(
        source="2402.14740",
        remark="clipped, by token; as in the paper: clip=none aggregate=seq_mean_token_sum",
        baseline="leave_one_out",
        scale="none",
        clip_high=0.2,
        correction="none",
    ),
    "reinforce_pp": Preset(
        source="2501.03262",
        baseline="none",
        scale="batch",
        clip_high=0.2,
        correction="none",
        kl="k1",
        kl_in="reward",
        kl_coef=0.01,
    ),
    "reinforce_pp_baseline": Preset(source="2501.03262", scale="batch", clip_high=0.2, correction="none"),
    "ppo": Preset(
        source="1707.06347",
        remark="with a critic (section critic) and generalised advantages, 1506.02438",
        baseline="critic",
        scale="batch",
        clip_high=0.2,
        correction="none",
    ),
}


def reference() -> str:
    """Returns the table of presets as Markdown."""
    columns = ("baseline", "scale", "ratio", "clip", "range", "aggregate", "correction", "kl")
    rows = [f"| preset | {' | '.join(columns)} | besides | source |", "|---" * (len(columns) + 3) + "|"]
    for name, preset in {"(none)": DEFAULT, **{f"`{name}`": row for name, row in PRESETS.items()}}.items():
        knobs = preset.knobs
        knobs["range"] = f"-{preset.clip_low:g} / +{preset.clip_high:g}"
        if preset.kl != "off":
            knobs["kl"] = f"{preset.kl} in {preset.kl_in}, {preset.kl_coef:g}"
        is_paper = preset.source[:1].isdigit()
        source = f"[{preset.source}](https://arxiv.org/abs/{preset.source})" if is_paper else preset.source
        rows.append(f"| {name} | {' | '.join(str(knobs[c]) for c in columns)} | {preset.remark} | {source} |")
    return "\n".join(rows)
