"""The sections of the task: prompts, curriculum, environment, rewards and evaluation.

A run may mix several sources. Each overrides some of these sections (`SourceConfig`), and
`Config.sources` puts together what then holds for it (`SourceSettings`).
"""

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pydantic
from pydantic import Field

from hocket.config.sections import Chosen, Names, Range, Section, or_name, or_source

TEMPLATE_ARGUMENTS = (
    "messages",
    "conversation",
    "tools",
    "add_generation_prompt",
    "tokenize",
    "chat_template",
)
"""Arguments of `apply_chat_template` that hocket sets itself."""


def _check_template(template: bool | dict[str, Any]) -> bool | dict[str, Any]:
    """Refuse options of a chat template that hocket sets itself; take {} for true."""
    if isinstance(template, bool):
        return template
    owned = [name for name in template if name in TEMPLATE_ARGUMENTS]
    if owned:
        problems = [f"{name} can't be set, as hocket sets it: leave it out" for name in owned]
        raise ValueError("; ".join(problems))
    return template or True


class DataConfig(Section):
    """Section data: the rows, and how a prompt is made of each."""

    section: ClassVar[str] = "data"  # the section's name in errors
    otherwise: ClassVar[str] = ""  # what errors about unusable rows advise besides other rows
    source: str = "task:sort"
    """Rows: file.jsonl, file.parquet, hf:NAME[:SUBSET] (hub), task:NAME, gym:NAME, verifiers:NAME
    (docs/how-to/hubs.md)."""
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
    chat_template: Annotated[bool | dict[str, Any], pydantic.AfterValidator(_check_template)] = True
    """Text prompts become a user message in the chat template, of options such as
    {enable_thinking: false}."""
    renderer: Chosen | None = None
    """What makes tokens of rows and messages. Default: by the model; or your own."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longer prompts are dropped. Default: what fits."""
    limit: int | None = Field(None, ge=1)
    """Number of rows used, from the first. Default: all."""
    image_hosts: Names = ()
    """Hosts from which URLs of images are fetched, in rows and by servers
    (docs/how-to/vision.md)."""

    def refuse(self) -> None:
        if not self.kind and self.split != type(self).model_fields["split"].default:
            advice = "leave it out of a file, which has none; eval.data names held-out rows"
            raise ValueError(f"split={self.split}: {advice}")
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
        """The word before the colon of the source, such as "hf"; "" for a file."""
        kind, colon, _ = self.source.partition(":")
        is_file = not colon or not kind.isidentifier() or Path(self.source).is_file()
        return "" if is_file else kind

    @property
    def template_options(self) -> dict[str, Any]:
        """The options of the chat template."""
        return self.chat_template if isinstance(self.chat_template, dict) else {}


class CurriculumConfig(Section, extra="allow"):
    """Section curriculum: the order of prompts. Other keys are options of the curriculum."""

    name: str = "shuffle"
    """Order of prompts: `shuffle`, `sorted` or a plugin's; its options."""
    retire_after: int = Field(0, ge=0)
    """A prompt is left out once all its rollouts have solved it so many times in a row; 0: never."""


class EnvConfig(Section, extra="allow"):
    """Section env: how episodes are played. Other keys are options of the environment."""

    name: str = "single_turn"
    """`single_turn`, `tools`, `agent`, `step`, `openenv`, `verifiers` or a plugin's; its options."""
    max_turns: int = Field(16, ge=1)
    """Turns of an episode, or model calls of an agent."""
    timeout_s: float = Field(60.0, gt=0, le=86_400)
    """Seconds that the environment or the agent may take in an episode."""
    history: str = "keep"
    """Treatment of history that outgrows model.max_length: `keep` ends the episode, `drop_oldest`,
    or a plugin's."""


def _default_weight(values: dict[str, Any]) -> float:
    """Give a gate no weight in the total, and any other reward the weight 1."""
    return 0.0 if values.get("gate") else 1.0


class RewardSpec(Section, extra="allow"):
    """The keys that every reward has. Other keys are its arguments."""

    gate: bool = False  # where its value is 0 or less, the other rewards can only cost
    weight: float = Field(default_factory=_default_weight)  # factor of its value in the total
    clip: Range | None = None  # lowest and highest value
    normalize: bool = False  # by mean and deviation of the group
    max_concurrent: int | None = Field(None, ge=1)  # calls of an async reward at a time
    retries: int = Field(5, ge=0)  # repetitions of an async call that raises RetryError

    @pydantic.model_validator(mode="before")
    @classmethod
    def _read_number(cls, value: Any) -> Any:
        """Take a bare number for the weight."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return {"weight": value} if is_number else value


class RewardsConfig(Section):
    """Section rewards: what scores a rollout."""

    functions: dict[str, RewardSpec] = Field({"exact_match": RewardSpec()}, min_length=1)
    """{NAME: weight} or {NAME: {weight: 1, argument: ...}} (docs/how-to/rewards.md)."""
    timeout_s: float = Field(30.0, gt=0)
    """Seconds per reward and rollout."""
    max_error_rate: float = Field(0.5, ge=0, le=1)
    """Share of failed scores that stops the run."""

    @property
    def first(self) -> str:
        """The name of the first reward with a weight or, if none has, of the first."""
        for name, spec in self.functions.items():
            if spec.weight:
                return name
        return next(iter(self.functions))

    def spec(self, name: str) -> RewardSpec:
        """Look up a reward's keys; the defaults for a reward that is only measured."""
        return self.functions.get(name, RewardSpec())


class HeldOutConfig(DataConfig):
    """Section eval.data, or held_out of a source: the rows of the evaluation."""

    section: ClassVar[str] = "eval.data"
    otherwise: ClassVar[str] = ", or eval.num_prompts=0"
    split: str = "test"
    """As in section data."""

    def with_rest_of(self, data: DataConfig) -> "HeldOutConfig | None":
        """Take from `data` what is not set here. Returns None where no other rows are named."""
        is_set = self.model_fields_set
        if "source" not in is_set and not self._names_other_split(data):
            return None
        unset = DataConfig.model_fields.keys() - is_set - {"split", "limit"}
        return self.model_copy(update={name: getattr(data, name) for name in unset})

    def _names_other_split(self, data: DataConfig) -> bool:
        """Check whether `split` names other rows of `data.source` than those of `data`."""
        if data.kind == "":
            return False  # a file has no splits
        if data.kind == "hf":
            if "split" not in self.model_fields_set:
                return False  # a data set of the hub may lack the split of the default
            folder = Path(data.source.removeprefix("hf:")).expanduser()
            if folder.joinpath("state.json").is_file():
                return False  # the package datasets has saved this folder, without splits
        return self.split != data.split


class EvalConfig(Section):
    """Section eval: the evaluation on held-out prompts."""

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
    """An entry of data.sources as it is written. The run's sections have what it leaves out."""

    name: str = ""  # default: the name of its file, data set or task
    weight: float = Field(1.0, ge=0)  # share of the draws, relative to the other sources
    held_out: Annotated[HeldOutConfig, or_source] = HeldOutConfig()  # takes the keys of eval.data
    env: Annotated[EnvConfig | None, or_name] = None
    curriculum: Annotated[CurriculumConfig | None, or_name] = None
    # Takes the keys of rewards.functions.
    rewards: dict[str, RewardSpec] | None = Field(None, min_length=1)
    max_tokens: int | None = Field(None, ge=1)  # default: rollout.max_tokens

    @property
    def resolved_name(self) -> str:
        """The source's name or, without one, that of its rows: "math" for data/math.jsonl."""
        if self.name:
            return self.name
        rows = self.source if "source" in self.model_fields_set else self.held_out.source
        stem = re.split("[:/]", rows)[-1].partition(".")[0]
        return re.sub(r"[^\w-]+", "_", stem)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """All settings that may differ between sources; `Prompt.source` names that of a prompt.

    Example: config.sources[prompt.source].max_tokens
    """

    name: str  # the name of the source; "" in a run without data.sources
    weight: float  # share of the draws, relative to the other sources; 0: it is only evaluated
    data: DataConfig
    env: EnvConfig
    curriculum: CurriculumConfig
    rewards: RewardsConfig
    max_tokens: int  # tokens that an answer may have
    held_out: HeldOutConfig | None  # the rows of its evaluation; None without an evaluation
    eval_max_tokens: int  # tokens that an answer may have in the evaluation
    eval_reward: str  # the reward that the evaluation measures

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The rewards of training and evaluation. A name may stand twice."""
        names = list(self.rewards.functions)
        names.append(self.eval_reward)
        return tuple(names)

    @property
    def pass_reward(self) -> str:
        """The reward whose mean is the pass rate of a prompt.

        That is eval.reward if it is trained on, and else the first reward.
        """
        is_trained = self.eval_reward in self.rewards.functions
        return self.eval_reward if is_trained else self.rewards.first


class TrainingDataConfig(DataConfig):
    """Section data, with the keys that only the run itself has."""

    sources: tuple[Annotated[SourceConfig, or_source], ...] = ()
    """Several sources, drawn by weight, in place of `source`: [{source, weight, rewards, env, ...}]
    (docs/how-to/mixtures.md)."""
    exclude_overlap: bool = False
    """Training prompts that are held-out ones, too, are left out."""

    def refuse(self) -> None:
        super().refuse()
        if not self.sources:
            return
        if self.source != type(self).model_fields["source"].default:
            raise ValueError(f"source={self.source} beside sources: name it in that list")
        names = [source.resolved_name for source in self.sources]
        for name in names:
            if not re.fullmatch(r"[\w.-]+", name):
                fact = f"a source is called {name!r}, as metrics are named"
                raise ValueError(f"{fact}: take letters and digits")
            if names.count(name) > 1:
                raise ValueError(f"two sources are called {name}: give each a name")
        if not any(source.weight for source in self.sources):
            raise ValueError("no source has a weight above 0: give one to train on")

    def of(self, source: SourceConfig) -> "TrainingDataConfig":
        """Copy this section for a source: the keys that the source sets override those here."""
        changed: dict[str, Any] = {"sources": ()}
        for name in DataConfig.model_fields.keys() & source.model_fields_set:
            changed[name] = getattr(source, name)
        return self.model_copy(update=changed)
