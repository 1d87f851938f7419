"""Define what the files of a run folder hold: one type per kind of row, with the meaning of each key.

Everything here is JSON. `format` stands in every row of a .jsonl file and at the top of a .json file, so that a file
that is copied alone can be read; observe/rows.py writes it, checks it, and takes it out again.

Example: the rewards of a step.

    for row in read_rollouts(Path("runs/mine/rollouts/step_000001.jsonl")):
        print(row["id"], row["reward"])
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, TypedDict, final

from hocket.types import FinishReason, Message, TurnReward

FORMAT = 1
"""Version of these formats. A row without the key `format` is older than this key, and read as version 1.

Raise it where an older reader would misread a new file; a key that may be absent needs no new version.
"""

METRICS = "metrics.jsonl"
LEDGER = "ledger.jsonl"
TIMELINE = "timeline.jsonl"
GROWING = (METRICS, LEDGER, TIMELINE)  # files to which a run appends lines
ROLLOUTS = "rollouts"  # folder: step_000001.jsonl, eval_000000.jsonl
TRAINED = "trained"  # folder of what training made of the rollouts
SUMMARY = "summary.json"
PLUGINS = "plugins.json"
OWNER = "owner.json"

MetricsRow = dict[str, float | None]
"""A step of metrics.jsonl: "step", and a number for each metric, None where it was not finite."""


class ImageRow(TypedDict):
    """A picture of a sequence, in `images` of a rollout's row."""

    file: Annotated[
        str, "name in the run's folder `images/`: the SHA-256 of its bytes, and its kind"
    ]
    start: Annotated[int, "place of its first token in `token_ids`"]
    length: Annotated[int, "number of its tokens"]
    placeholder: Annotated[int, "token that stands for it in what servers are sent"]


class SequenceRow(TypedDict):
    """A sequence: a rollout's row has the keys of its last one, and `others` has those before."""

    id: Annotated[
        str,
        "name: `step 3/7/1` is rollout 1 of group `step 3/7`, `step 3/7/1.0` its first other sequence",
    ]
    completion: Annotated[str, "text of the policy's last turn: what rewards score"]
    mask: Annotated[list[int], "per token: 1 where the policy sampled it, else 0"]
    finish_reason: Annotated[FinishReason, "how the last turn ended; `length`: a limit cut it off"]
    turns: Annotated[int, "turns of the policy"]
    version_min: Annotated[int, "oldest weight version that sampled tokens"]
    version_max: Annotated[int, "newest weight version that sampled tokens"]
    opening: Annotated[
        str, "thought that the chat template opened before the completion, mostly empty"
    ]
    token_ids: Annotated[Sequence[int], "every token, the prompt's first"]
    logprobs: Annotated[
        Sequence[float], "per token: the engine's log-prob in nats, 0 where the mask is 0"
    ]
    dialogue: NotRequired[
        Annotated[Sequence[Message], "messages after the prompt; absent if only the policy spoke"]
    ]
    turn_rewards: NotRequired[
        Annotated[
            Sequence[TurnReward],
            "per turn of the policy: number, tokens, reward, state; absent with one turn",
        ]
    ]
    images: NotRequired[
        Annotated[list[ImageRow], "pictures of the sequence, in order; absent without any"]
    ]


class EpisodeRow(TypedDict):
    """What a row has of the whole episode: its prompt and its score."""

    group_id: Annotated[str, "group of the rollouts of one prompt"]
    prompt_id: Annotated[str, "row of the data, `source:row`"]
    prompt: Annotated[str, "text of the prompt: the last user message, or all"]
    messages: Annotated[Sequence[Message] | None, "prompt as a chat; null where it is plain text"]
    answer: Annotated[str | None, "answer of the data, which rewards compare with"]
    meta: Annotated[Mapping[str, Any], "other columns of the data's row"]
    reward: Annotated[
        float | None, "total reward; null with `error`: never 0 for a reward that failed"
    ]
    parts: Annotated[dict[str, float], "each reward, before its weight"]
    error: Annotated[str | None, "why there is no score"]
    note: Annotated[str, "for people: why a judge thinks so, what a program wrote"]
    num_tokens: Annotated[int, "sampled tokens of the whole episode"]
    failed: NotRequired[Annotated[str, "why the episode failed; absent where it did not"]]
    others: NotRequired[
        Annotated[list[SequenceRow], "sequences before the last one; absent without any"]
    ]
    source: NotRequired[Annotated[str, "name in `data.sources`; absent without them"]]
    metrics: NotRequired[
        Annotated[dict[str, float], "numbers of the environment; absent where it gives none"]
    ]


class RolloutRow(SequenceRow, EpisodeRow):
    """A rollout with its score: a line of `rollouts/step_N.jsonl` or `rollouts/eval_N.jsonl`."""


class TrainedRow(TypedDict):
    """What training made of a sequence: a line of `trained/step_N.jsonl`. The lists need `observe.tokens`."""

    id: Annotated[str, "the sequence's"]
    advantage: Annotated[float, "mean advantage of its sampled tokens"]
    advantages: NotRequired[
        Annotated[Sequence[float], "per token: advantage, 0 where the mask is 0"]
    ]
    trainer: NotRequired[
        Annotated[list[float], "per token: the trainer's log-prob in nats, before the step"]
    ]
    entropy: NotRequired[
        Annotated[list[float], "per token: entropy of the policy in nats, before the step"]
    ]


LeftOut = Literal["retired", "skipped"]


@final
class SizeRow(TypedDict):
    """A source's size: the first line of `ledger.jsonl`, of each of `data.sources`."""

    step: NotRequired[Annotated[int, "0: the row is written before the first step"]]
    num_prompts: Annotated[int, "prompts of the source"]
    source: NotRequired[Annotated[str, "name in `data.sources`; absent without them"]]


@final
class OutcomeRow(TypedDict):
    """What became of a prompt: the other lines of `ledger.jsonl` ([curriculum](../how-to/curriculum.md))."""

    step: NotRequired[
        Annotated[
            int, "step that it was settled in; absent in a checkpoint, whose step is not over"
        ]
    ]
    draw: NotRequired[
        Annotated[
            int, "number of the draw in the run, from 0; absent where the prompt was not drawn"
        ]
    ]
    epoch: Annotated[int, "epoch of its source, from 0"]
    prompt: Annotated[str, "row of the data, as `prompt_id` of a rollout"]
    state: Annotated[
        Literal["trained", "filtered", "failed", "retired", "skipped", "back", "in flight"],
        "what became of it; `in flight` only in a checkpoint",
    ]
    why: NotRequired[Annotated[str, "reason; absent where it was trained or came back"]]
    pass_rate: NotRequired[
        Annotated[float, "share of its scored rollouts that solved it; absent without a score"]
    ]
    source: NotRequired[Annotated[str, "name in `data.sources`; absent without them"]]


LedgerRow = SizeRow | OutcomeRow


@final
class SpanRow(TypedDict):
    """What a process did when: a line of `timeline.jsonl`."""

    step: Annotated[int, "step at whose end it was written"]
    name: Annotated[str, "phase: generate, reward, train, sync, ..."]
    who: Annotated[str, "`trainer` or `servers`"]
    start: Annotated[float, "beginning, in seconds of Unix time by the trainer's clock"]
    end: Annotated[float, "end, likewise"]


class ServerRow(TypedDict):
    """A server as the trainer knew it, in `servers` of a line of `timeline.jsonl`."""

    url: Annotated[str, "its address"]
    up: Annotated[bool, "whether it held the current weights and worked"]
    state: Annotated[str, "state in the pool: `up`, `joining`, `waiting`, `lost`, ..."]
    reason: Annotated[str | None, "why it is in this state"]
    version: Annotated[int, "weight version that it held; -1 before it is known"]
    status: NotRequired[
        Annotated[str, "what it says of itself; this and the next are absent until it answers"]
    ]
    in_flight: NotRequired[Annotated[int, "completions that it works on"]]
    waiting: NotRequired[Annotated[int | None, "completions that its engine has not begun"]]
    kv_use: NotRequired[Annotated[float | None, "share of its KV cache in use, from 0 to 1"]]
    kv_tokens: NotRequired[Annotated[int, "tokens that fit into its KV cache"]]


@final
class ServersRow(TypedDict):
    """What was known of the servers: a line of `timeline.jsonl`, of each step and of each loss of a server."""

    step: Annotated[int, "step in which it was written"]
    time: Annotated[float, "seconds of Unix time by the trainer's clock"]
    servers: Annotated[Sequence[ServerRow], "every server of the pool"]


TimelineRow = SpanRow | ServersRow


class PluginRow(TypedDict):
    """A file under `plugins`: an element of `plugins.json`, and of `plugins` in `summary.json`."""

    path: Annotated[str, "where the file was"]
    sha256: Annotated[str, "SHA-256 of its text"]
    registers: Annotated[list[str], "what it registers: `reward mine`"]
    copy: Annotated[str, "its copy, in the run folder"]


class BestEvaluation(TypedDict):
    """The best evaluation, in `best` of `summary.json`."""

    step: Annotated[int, "its step"]
    metric: Annotated[str, "metric that was the highest, or lowest"]
    value: Annotated[float, "value of that metric"]
    folder: Annotated[str, "folder of its weights, in the run folder"]


EvalValues = Mapping[str, float | None]


class Summary(TypedDict):
    """`summary.json`, which a run has when it has ended. A part of the run may add keys of its own."""

    before: Annotated[
        EvalValues, "metrics `eval/*` of step 0, named without `eval/`; {} without held-out prompts"
    ]
    after: Annotated[EvalValues, "those of the last evaluation"]
    steps: Annotated[int, "number of the last step"]
    updated: Annotated[int, "steps that changed the weights"]
    train_seconds: Annotated[float, "seconds of all steps: the sum of `time/step`"]
    seed: Annotated[int, "`trainer.seed`"]
    final_version: Annotated[int, "newest weight version"]
    plugins: Annotated[list[PluginRow], "files under `plugins`"]
    best: NotRequired[
        Annotated[
            BestEvaluation, "best evaluation; absent without `checkpoint.best` or an evaluation"
        ]
    ]


class Owner(TypedDict):
    """`owner.json`, which names the process that a run folder belongs to, and is there as long as it runs."""

    pid: Annotated[int, "number of the process"]
    host: Annotated[str, "name of its machine"]
    since: Annotated[str, "when it began, by that machine's clock"]


class KeptSample(TypedDict):
    """A sequence of a step that was not finite, in `samples` of `skipped/step_N.json`.

    It has further lists of a number per token, by the name of what the losses read (`ref_logprobs`, ...).
    """

    id: Annotated[str, "the sequence's"]
    text: Annotated[str, "its tokens as text"]
    token_ids: Annotated[list[int], "every token, the prompt's first"]
    mask: Annotated[list[int], "per token: 1 where the policy sampled it, else 0"]
    rollout_logprobs: Annotated[list[float], "per token: the engine's log-prob in nats"]
    advantages: Annotated[list[float], "per token: advantage"]
    version_min: Annotated[int, "oldest weight version that sampled tokens"]


class KeptBatch(TypedDict):
    """`skipped/step_N.json`: the batch of a step that was not finite. NaN and Infinity stand in it as such."""

    not_finite: Annotated[str, "what was not finite first, and what helps"]
    samples: Annotated[list[KeptSample], "what the step trained on"]


ROWS: dict[str, tuple[type, ...]] = {
    "rollouts/step_N.jsonl, rollouts/eval_N.jsonl": (EpisodeRow, SequenceRow, ImageRow),
    "trained/step_N.jsonl": (TrainedRow,),
    "ledger.jsonl": (SizeRow, OutcomeRow),
    "timeline.jsonl": (SpanRow, ServersRow, ServerRow),
    "summary.json": (Summary, BestEvaluation),
    "plugins.json": (PluginRow,),
    "skipped/step_N.json": (KeptBatch, KeptSample),
    "owner.json": (Owner,),
}
"""File -> the types of what it holds. docs/reference/metrics.md has the keys of metrics.jsonl."""
