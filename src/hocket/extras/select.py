"""Choose rollouts of a run: the best as demonstrations (rejection sampling), best and worst as preferences."""

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

SFT_RATE = 1e-5  # learning rate of demonstrations, at least


DataRow = dict[str, Any]  # of the file that is written: columns of data.source


def select(run: Path, output: Path, *, min_reward: float | None, per_prompt: int) -> str:
    """Write the best rollouts of each prompt, the newest of equal ones, as rows for sft; return what they are.

    `min_reward` is by default the mean.
    """
    if per_prompt < 1:
        raise ConfigError(f"--per-prompt={per_prompt} would choose nothing: set 1 or more")
    config, tools, told, num = _read(run)
    least = fmean(map(_reward, told)) if min_reward is None else min_reward
    best = defaultdict[str, dict[str, RolloutRow]](dict)  # of each prompt: what is said → row
    for row in sorted(told, key=_reward, reverse=True):
        if _reward(row) >= least:
            best[row["prompt_id"]].setdefault(repr(_answer(row)), row)
    chosen = [row for rows in best.values() for row in itertools.islice(rows.values(), per_prompt)]
    if not chosen:
        highest = max(map(_reward, told))
        raise ConfigError(
            f"no rollout of {run} has a reward of at least {least:g}: the highest is {highest:g}"
        )
    mean = fmean(map(_reward, chosen))
    what = f"{len(chosen)} of {num} rollouts, of {len(best)} prompts; rewards from {least:.3g}, mean {mean:.3g}"
    rate = max(config.trainer.learning_rate, SFT_RATE)
    options = f"sft.epochs=3 trainer.learning_rate={rate:g} "
    rows = [_demonstration(row, {**tools[_source(row)], **_pictures(row, run)}) for row in chosen]
    return _write(output, rows, what, config.model.path, "sft", options)


def select_pairs(run: Path, output: Path) -> str:
    """Write best and worst of each group, the first of equal ones, as preferences; return what they are."""
    config, tools, told, num = _read(run)
    groups = defaultdict[str, list[RolloutRow]](list)
    for row in told:
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
            sides = {"chosen": _answer(best), "rejected": _answer(worst), "margin": margin}
            asked = {"prompt": best["messages"] or best["prompt"], "prompt_id": best["prompt_id"]}
            pairs.append({**asked, **sides, **tools[_source(best)], **_pictures(best, run)})
    if not pairs:
        raise ConfigError(
            f"no group of {run} has different answers with different rewards: none is preferred"
        )
    what = f"{len(pairs)} pairs of {len(groups)} groups, whose answers and rewards differ; "
    what += f"{num - len(told)} of {num} rollouts have no score, no end or no text"
    return _write(output, pairs, what, config.model.path, "dpo")


def _read(run: Path) -> tuple[Config, Mapping[str, DataRow], list[RolloutRow], int]:
    """Return a run's config, the column "tools" by source, the rollouts with a score and an end, and the number of all.

    The newest come first. Those of agents, and those that say nothing, end in a thought, or have turns without a
    message between them are left out, too.
    """
    config = load(run / "config.yaml", [])
    load_plugins(config.plugins)
    envs = {name: source.env for name, source in config.sources.items()}
    made = {name: environments.bind(env.name, env.model_extra)() for name, env in envs.items()}
    chats = {name: one for name, one in made.items() if one.keeps_messages}
    if not chats:
        raise ConfigError(
            f"{run}: of an agent's calls it has the tokens, not the messages; set pipeline.replay={run}"
        )
    rows: list[RolloutRow] = []
    for path in reversed(numbered(run / ROLLOUTS, "step_*.jsonl").values()):
        rows += read_rollouts(path)
    with reading(run / ROLLOUTS):
        told = [row for row in rows if _source(row) in chats and _is_whole(row)]
    if not told:
        raise ConfigError(
            f"of {len(rows)} rollouts of {run}, none has a score and an end: name a run of train or rollout"
        )
    tools = {
        name: {"tools": one.toolbox.tools} if one.toolbox else {} for name, one in chats.items()
    }
    return config, tools, told, len(rows)


def _source(row: RolloutRow) -> str:
    return row.get("source", "")


def _reward(row: RolloutRow) -> float:
    reward = row["reward"]
    assert reward is not None  # `_is_whole`
    return reward


def _is_whole(row: RolloutRow) -> bool:
    turns = _turns(row)
    in_thought = environments.left_open(row.get("opening", "") + row["completion"])
    if in_thought or {"role": "assistant", "content": ""} in turns:
        return False
    roles = [message["role"] for message in turns]
    is_chat = "environment" not in roles and ("assistant", "assistant") not in itertools.pairwise(
        roles
    )
    has_all = "others" not in row  # of an episode, not of its last sequence alone
    return row["reward"] is not None and row["finish_reason"] == "stop" and is_chat and has_all


def _turns(row: RolloutRow) -> Sequence[Message]:
    return row.get("dialogue", [{"role": "assistant", "content": row["completion"]}])


def _answer(row: RolloutRow) -> str | Sequence[Message]:
    """Return what the policy answered: a text, or turns to a prompt that is a chat."""
    return row["completion"] if row["messages"] is None else _turns(row)


def _demonstration(row: RolloutRow, tools: DataRow) -> DataRow:
    known: DataRow = {"prompt_id": row["prompt_id"], "reward": row["reward"]}
    if row["messages"] is None:
        return {"prompt": row["prompt"], "response": row["completion"], **known}
    return {"messages": [*row["messages"], *_turns(row)], **tools, **known}


def _pictures(row: RolloutRow, run: Path) -> DataRow:
    """Return the column "images" of a row that has some."""
    if not row.get("images"):
        return {}
    from hocket.common.vision import data_url
    from hocket.observe.vision import image_of

    with reading(run / "images"):
        return {"images": [data_url(image_of(image, run).data) for image in row["images"]]}


def _write(
    output: Path, rows: Sequence[DataRow], what: str, model: str, command: str, options: str = ""
) -> str:
    write_atomically(output, "".join(json.dumps(row) + "\n" for row in rows))
    plain = " data.chat_template=false" if isinstance(rows[0].get("prompt"), str) else ""
    names = f"data.source={output} model.path={model}{plain} {options}run.dir=NEW"
    return f"{output}: {what}\nto train on them: {program()} {command} {names}"


@command(
    "select",
    option("RUN", type=Path),
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
)
def select_rows(args: argparse.Namespace) -> None:
    run = run_of(args.RUN)
    if args.pairs:
        print(select_pairs(run, args.OUTPUT or run / "pairs.jsonl"))
        return
    output = args.OUTPUT or run / "selected.jsonl"
    print(select(run, output, min_reward=args.min_reward, per_prompt=args.per_prompt))
