"""The sections of what is asked, and how it is played and judged: data, curriculum, env, rewards, eval."""

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pydantic
from pydantic import Field

from hocket.common.registry import refuse_owned
from hocket.config.sections import Chosen, Names, Range, Section, or_name

_or_source = pydantic.BeforeValidator(
    lambda value: {"source": value} if isinstance(value, str) else value
)


def _not_own(template: bool | dict[str, Any]) -> bool | dict[str, Any]:
    own = (
        "messages",
        "conversation",
        "tools",
        "add_generation_prompt",
        "tokenize",
        "chat_template",
    )
    options = template if isinstance(template, dict) else {}
    refuse_owned("", options, dict.fromkeys(own, ""), options, "")
    return template if template != {} else True


class DataConfig(Section):
    section: ClassVar[str] = "data"
    otherwise: ClassVar[str] = ""  # other advice, where its rows are of no use
    source: str = "task:sort"
    """Rows: file.jsonl, file.parquet, hf:NAME[:SUBSET] (hub), task:NAME, gym:NAME, verifiers:NAME (hubs.md)."""
    options: dict[str, Any] = Field({})
    """Options of gym:NAME or verifiers:NAME, such as its difficulty: {min_digits: 2}."""
    split: str = "train"
    """Split of a Hugging Face dataset or of a built-in task."""
    prompt_column: str = "prompt"
    """Column of the prompt: text, or a list of chat messages."""
    answer_column: str | None = "answer"
    """Column of the answer; null without one."""
    answer_pattern: re.Pattern[str] | None = None
    """Regular expression; its group 1 is the answer."""
    response_column: str = "response"
    """Column of the demonstration, for sft."""
    system_prompt: str | None = None
    """System message before every prompt and conversation that has none."""
    chat_template: Annotated[bool | dict[str, Any], pydantic.AfterValidator(_not_own)] = True
    """Text prompts become a user message in the chat template, of options such as {enable_thinking: false}."""
    renderer: Chosen | None = None
    """What makes tokens of rows and messages. Default: by the model; or your own."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longer prompts are dropped. Default: what fits."""
    limit: int | None = Field(None, ge=1)
    """Number of rows used, from the first. Default: all."""
    image_hosts: Names = ()
    """Hosts from which URLs of images are fetched, in rows and by servers (vision.md)."""

    def refuse(self) -> None:
        if not self.kind and self.split != type(self).model_fields["split"].default:
            raise ValueError(
                f"split={self.split}: leave it out of a file, which has none; eval.data names held-out rows"
            )
        if self.system_prompt is not None and not self.chat_template:
            raise ValueError("system_prompt needs chat_template: true")
        if self.answer_pattern is None:
            return
        if self.answer_column is None:
            raise ValueError("answer_pattern needs answer_column")
        if self.answer_pattern.groups < 1:
            raise ValueError("answer_pattern needs a group (...) around the answer")

    @property
    def kind(self) -> str:
        """What is said before the colon of a source; "" of a file."""
        kind, colon, _ = self.source.partition(":")
        return kind if colon and kind.isidentifier() and not Path(self.source).is_file() else ""

    @property
    def template_options(self) -> dict[str, Any]:
        return self.chat_template if isinstance(self.chat_template, dict) else {}


class CurriculumConfig(Section, extra="allow"):
    name: str = "shuffle"
    """Order of prompts: `shuffle`, `sorted` or a plugin's; its options."""
    retire_after: int = Field(0, ge=0)  # an option of each (curriculum.md)


class EnvConfig(Section, extra="allow"):
    name: str = "single_turn"
    """`single_turn`, `tools`, `agent`, `step` or a plugin's; its options."""
    max_turns: int = Field(
        16, ge=1
    )  # or model calls of an agent: an option of each (environments.md)
    timeout_s: float = Field(
        60.0, gt=0, le=86_400
    )  # of the environment or agent in an episode: likewise
    history: str = "keep"
    """Way with history that outgrows model.max_length: `keep` ends the episode, `drop_oldest`, or a plugin's."""


class RewardSpec(Section, extra="allow"):
    """Keys of every reward; others are its arguments."""

    gate: bool = False  # at 0 or less the others can only cost
    weight: float = Field(default_factory=lambda known: 0.0 if known.get("gate") else 1.0)
    clip: Range | None = None  # lowest and highest value
    normalize: bool = False  # by mean and deviation in the group
    max_concurrent: int | None = Field(None, ge=1)  # calls of an async reward
    retries: int = Field(5, ge=0)  # of such a call that raises RetryError

    @pydantic.model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        return (
            {"weight": value}
            if isinstance(value, int | float) and not isinstance(value, bool)
            else value
        )


class RewardsConfig(Section):
    functions: dict[str, RewardSpec] = Field({"exact_match": RewardSpec()}, min_length=1)
    """{NAME: weight} or {NAME: {weight: 1, argument: ...}} (rewards.md)."""
    timeout_s: float = Field(30.0, gt=0)
    """Seconds per reward and rollout."""
    max_error_rate: float = Field(0.5, ge=0, le=1)
    """Share of failed scores that stops the run."""

    @property
    def first(self) -> str:
        """Name of the first reward that is no gate."""
        return next(
            (name for name, spec in self.functions.items() if spec.weight),
            next(iter(self.functions)),
        )

    def spec(self, name: str) -> RewardSpec:
        return self.functions.get(name, RewardSpec())


class HeldOutConfig(DataConfig):
    section: ClassVar[str] = "eval.data"
    otherwise: ClassVar[str] = ", or eval.num_prompts=0"
    split: str = "test"
    """As in section data."""

    def with_rest_of(self, data: DataConfig) -> "HeldOutConfig | None":
        """Take from `data` what is not set here; None where no other rows are named."""
        is_set = self.model_fields_set
        has_split = data.kind != ""
        if data.kind == "hf":
            folder = Path(data.source.removeprefix("hf:")).expanduser()
            is_saved = folder.joinpath("state.json").is_file()  # by datasets, without splits
            has_split = not is_saved and "split" in is_set
        names_rows = "source" in is_set or (has_split and self.split != data.split)
        if not names_rows:
            return None
        rest = DataConfig.model_fields.keys() - is_set - {"split", "limit"}
        return self.model_copy(update={name: getattr(data, name) for name in rest})


class EvalConfig(Section):
    data: HeldOutConfig = HeldOutConfig()
    """Held-out `source`, or a hub dataset's `split`; else as `data`."""
    num_prompts: int = Field(256, ge=0)
    """Prompts per evaluation. 0 disables evaluation."""
    samples: int = Field(1, ge=1)
    """Sampled rollouts per prompt, for pass@k with k = 1, 2, 4, ...; one more is greedy."""
    threshold: float = 1.0
    """Reward from which a sample passes, for pass@k."""
    every_steps: int = Field(0, ge=0)
    """Steps between evaluations, besides start and end. 0 disables them."""
    max_tokens: int | None = Field(None, ge=1)
    """As rollout.max_tokens, the default."""
    temperature: float | None = Field(None, ge=0, le=2)
    """Temperature of samples; 0: greedy ones alone. Default: rollout.temperature."""
    reward: str | None = None
    """Reward that is measured. Default: the first."""

    def refuse(self) -> None:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError("temperature=0 samples the same every time: set samples to 1")


class SourceConfig(DataConfig):
    """An entry of data.sources as it is written; what it leaves out is in the run's sections."""

    name: str = ""  # default: of its file, data set or task
    weight: float = Field(1.0, ge=0)  # share of the draws, in relation to the others'
    held_out: Annotated[HeldOutConfig, _or_source] = HeldOutConfig()  # as eval.data
    env: Annotated[EnvConfig | None, or_name] = None
    curriculum: Annotated[CurriculumConfig | None, or_name] = None
    rewards: dict[str, RewardSpec] | None = Field(None, min_length=1)  # as rewards.functions
    max_tokens: int | None = Field(None, ge=1)  # as rollout.max_tokens

    @property
    def called(self) -> str:
        rows = self.source if "source" in self.model_fields_set else self.held_out.source
        return self.name or re.sub(r"[^\w-]+", "_", re.split("[:/]", rows)[-1].partition(".")[0])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """All settings that may differ between sources; `Prompt.source` names that of a prompt.

    Example: config.sources[prompt.source].max_tokens
    """

    name: str  # "" in a run without data.sources
    weight: float  # share of the draws, in relation to the others'; 0: only evaluated
    data: DataConfig
    env: EnvConfig
    curriculum: CurriculumConfig
    rewards: RewardsConfig
    max_tokens: int  # of an answer
    held_out: HeldOutConfig | None  # rows of its evaluation; None without
    eval_max_tokens: int
    eval_reward: str

    @property
    def reward_names(self) -> tuple[str, ...]:
        return (*self.rewards.functions, self.eval_reward)

    @property
    def pass_reward(self) -> str:
        """Reward whose mean is the pass rate of a prompt: eval.reward if trained, else the first."""
        is_trained = self.eval_reward in self.rewards.functions
        return self.eval_reward if is_trained else self.rewards.first


class TrainingDataConfig(DataConfig):
    sources: tuple[Annotated[SourceConfig, _or_source], ...] = ()
    """Several sources, drawn by weight, in place of `source`: [{source, weight, rewards, env, ...}] (mixtures.md)."""
    exclude_overlap: bool = False
    """Training prompts that are held-out ones, too, are left out."""

    def refuse(self) -> None:
        super().refuse()
        if not self.sources:
            return
        if self.source != type(self).model_fields["source"].default:
            raise ValueError(f"source={self.source} beside sources: name it in that list")
        names = [one.called for one in self.sources]
        for name in names:
            if not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(
                    f"a source is called {name!r}, as metrics are named: take letters and digits"
                )
            if names.count(name) > 1:
                raise ValueError(f"two sources are called {name}: give each a name")
        if not any(one.weight for one in self.sources):
            raise ValueError("no source has a weight above 0: give one to train on")

    def of(self, source: SourceConfig) -> "TrainingDataConfig":
        """Put what a source sets of this section in place of what stands here."""
        changed: dict[str, Any] = {"sources": ()}
        for name in DataConfig.model_fields.keys() & source.model_fields_set:
            changed[name] = getattr(source, name)
        return self.model_copy(update=changed)
