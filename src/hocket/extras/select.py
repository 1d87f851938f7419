"""Choose rollouts of a run: the best as demonstrations (rejection sampling), or the best and worst
as preferences."""

import argparse
import itertools
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from hocket.commands.command import command, option, run_of
from hocket.common.files import numbered, write_atomically
from hocket.common.registry import load_plugins
from hocket.config import Config, load
from hocket.envs import base as environments
from hocket.errors import ConfigError, program
from hocket.formats import ROLLOUTS, RolloutRow
from hocket.observe.rows import read_rollouts, reading
from hocket.types import Message

SFT_RATE = 1e-5  # the lowest learning rate of demonstrations

DataRow = dict[str, Any]  # a row of the file that is written, by the columns of data.source


def select(run: Path, output: Path, *, min_reward: float | None, per_prompt: int) -> str:
    """Write the best rollouts of each prompt, of equal ones the newest, as rows for sft.

    `min_reward` is by default the mean. Returns a description of the rows.
    """
    if per_prompt < 1:
        raise ConfigError(f"--per-prompt={per_prompt} would choose nothing: set 1 or more")
    config, tools, rollouts, num = _read(run)
    least = fmean(map(_reward, rollouts)) if min_reward is None else min_reward
    best = defaultdict[str, dict[str, RolloutRow]](dict)  # by prompt and answer
    for row in sorted(rollouts, key=_reward, reverse=True):
        if _reward(row) >= least:
            best[row["prompt_id"]].setdefault(repr(_answer(row)), row)
    chosen: list[RolloutRow] = []
    for of_prompt in best.values():
        chosen += itertools.islice(of_prompt.values(), per_prompt)
    if not chosen:
        highest = max(map(_reward, rollouts))
        raise ConfigError(
            f"no rollout of {run} has a reward of at least {least:g}: the highest is {highest:g}"
        )
    mean = fmean(map(_reward, chosen))
    description = (
        f"{len(chosen)} of {num} rollouts, of {len(best)} prompts; rewards from {least:.3g}, "
        f"mean {mean:.3g}"
    )
    rate = SFT_RATE
    if config.trainer.learning_rate != "auto":
        rate = max(config.trainer.learning_rate, SFT_RATE)
    options = f"sft.epochs=3 trainer.learning_rate={rate:g} "
    rows = [_demonstration(row, tools[_source(row)] | _pictures(row, run)) for row in chosen]
    return _write(output, rows, description, config.model.path, "sft", options)


def select_pairs(run: Path, output: Path) -> str:
    """Write the best and the worst of each group, of equal ones the first, as preferences.

    Returns a description of the rows.
    """
    config, tools, rollouts, num = _read(run)
    groups = defaultdict[str, list[RolloutRow]](list)
    for row in rollouts:
        groups[row["group_id"]].append(row)
    pairs = []
    for group in groups.values():
        best = max(group, key=_reward)
        worst = min(group, key=_reward)
        margin = _reward(best) - _reward(worst)
        if (
            margin > 0
            and _answer(best) != _answer(worst)
            and best.get("images") == worst.get("images")
        ):
            pair = {
                "prompt": best["messages"] or best["prompt"],
                "prompt_id": best["prompt_id"],
                "chosen": _answer(best),
                "rejected": _answer(worst),
                "margin": margin,
            }
            pairs.append(pair | tools[_source(best)] | _pictures(best, run))
    if not pairs:
        raise ConfigError(
            f"no group of {run} has different answers with different rewards: none is preferred"
        )
    description = (
        f"{len(pairs)} pairs of {len(groups)} groups, whose answers and rewards differ; "
        f"{num - len(rollouts)} of {num} rollouts have no score, no end or no text"
    )
    return _write(output, pairs, description, config.model.path, "dpo")


def _read(run: Path) -> tuple[Config, Mapping[str, DataRow], list[RolloutRow], int]:
    """Read a run's config, the column "tools" by source, the rollouts that can be chosen, and the
    number of all rollouts.

    The newest come first. Rollouts without a score or an end are left out, and those of agents,
    without text, that end in a thought, or have turns without a message between them.
    """
    config = load(run / "config.yaml", [])
    load_plugins(config.plugins)
    envs = {name: source.env for name, source in config.sources.items()}
    made = {name: environments.bind(env.name, env.model_extra)() for name, env in envs.items()}
    chats = {name: env for name, env in made.items() if env.keeps_messages}
    if not chats:
        raise ConfigError(
            f"{run}: of an agent's calls it has the tokens, not the messages; set "
            f"pipeline.replay={run}"
        )
    rows: list[RolloutRow] = []
    for path in reversed(numbered(run / ROLLOUTS, "step_*.jsonl").values()):
        rows += read_rollouts(path)
    with reading(run / ROLLOUTS):
        rollouts = [row for row in rows if _source(row) in chats and _is_whole(row)]
    if not rollouts:
        raise ConfigError(
            f"of {len(rows)} rollouts of {run}, none has a score and an end: name a run of train "
            "or rollout"
        )
    tools: dict[str, DataRow] = {}
    for name, env in chats.items():
        tools[name] = {"tools": env.toolbox.tools} if env.toolbox else {}
    return config, tools, rollouts, len(rows)


def _source(row: RolloutRow) -> str:
    return row.get("source", "")


def _reward(row: RolloutRow) -> float:
    reward = row["reward"]
    assert reward is not None  # `_is_whole`
    return reward


def _is_whole(row: RolloutRow) -> bool:
    """Check whether a rollout has a score, an end, and all of its messages."""
    turns = _turns(row)
    in_thought = environments.left_open(row.get("opening", "") + row["completion"])
    if in_thought or {"role": "assistant", "content": ""} in turns:
        return False
    roles = [message["role"] for message in turns]
    has_two_in_a_row = ("assistant", "assistant") in itertools.pairwise(roles)
    is_chat = "environment" not in roles and not has_two_in_a_row
    has_all = "others" not in row  # else it is only the last sequence of an episode
    return row["reward"] is not None and row["finish_reason"] == "stop" and is_chat and has_all


def _turns(row: RolloutRow) -> Sequence[Message]:
    return row.get("dialogue", [{"role": "assistant", "content": row["completion"]}])


def _answer(row: RolloutRow) -> str | Sequence[Message]:
    """Return the policy's answer: a text, or if the prompt is a chat its turns."""
    return row["completion"] if row["messages"] is None else _turns(row)


def _demonstration(row: RolloutRow, of_chat: DataRow) -> DataRow:
    """Make a row for sft; `of_chat` are further columns of a chat: tools, images."""
    known: DataRow = {"prompt_id": row["prompt_id"], "reward": row["reward"]}
    if row["messages"] is None:
        return {"prompt": row["prompt"], "response": row["completion"]} | known
    messages = list(row["messages"]) + list(_turns(row))
    return {"messages": messages} | of_chat | known


def _pictures(row: RolloutRow, run: Path) -> DataRow:
    """Return the column "images" of a row; {} without images."""
    if not row.get("images"):
        return {}
    from hocket.common.vision import data_url
    from hocket.observe.vision import image_of

    with reading(run / "images"):
        return {"images": [data_url(image_of(image, run).data) for image in row["images"]]}


def _write(
    output: Path,
    rows: Sequence[DataRow],
    description: str,
    model: str,
    command: str,
    options: str = "",
) -> str:
    """Write the rows; returns their description and the command that trains on them."""
    write_atomically(output, "".join(json.dumps(row) + "\n" for row in rows))
    plain = " data.chat_template=false" if isinstance(rows[0].get("prompt"), str) else ""
    names = f"data.source={output} model.path={model}{plain} {options}run.dir=NEW"
    return f"{output}: {description}\nto train on them: {program()} {command} {names}"


@command(
    "select",
    option("RUN", type=Path, help="folder of the run"),
    option(
        "OUTPUT",
        type=Path,
        nargs="?",
        help="file of the rows; default RUN/selected.jsonl, or RUN/pairs.jsonl",
    ),
    option(
        "--pairs", action="store_true", help="write best and worst of each group as preferences"
    ),
    option("--min-reward", type=float, help="lowest reward; default: the mean of the run"),
    option("--per-prompt", type=int, default=1, help="most rollouts of one prompt (default 1)"),
    examples=("runs/quickstart --per-prompt 2", "runs/quickstart pairs.jsonl --pairs"),
    page="how-to/sft_dpo.md",
)
def select_rows(args: argparse.Namespace) -> None:
    """Write rows that are chosen from a run."""
    run = run_of(args.RUN)
    if args.pairs:
        print(select_pairs(run, args.OUTPUT or run / "pairs.jsonl"))
        return
    output = args.OUTPUT or run / "selected.jsonl"
    print(select(run, output, min_reward=args.min_reward, per_prompt=args.per_prompt))
