"""Choose the best rollouts of a run as demonstrations for sft: rejection sampling."""

import itertools
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from hocket.common.files import numbered, write_atomically
from hocket.common.registry import load_plugins
from hocket.config import load
from hocket.envs import base as environments
from hocket.errors import ConfigError, door
from hocket.observe.rows import read_lines, reading

SFT_RATE = 1e-5  # learning rate of demonstrations, at least


def select(run: Path, output: Path, *, min_reward: float | None, per_prompt: int) -> str:
    """Write the best rollouts of each prompt, the newest of equal ones, as rows for sft; return what they are.

    `min_reward` is by default the mean. One without a score or an end is never chosen.
    """
    if per_prompt < 1:
        raise ConfigError(f"--per-prompt={per_prompt} would choose nothing: set 1 or more")
    config = load(run / "config.yaml", [])
    load_plugins(config.plugins)
    made = environments.bind(config.env.name, config.env.model_extra or {})()
    if not made.keeps_messages:
        raise ConfigError(f"{run}: of an agent's calls it has the tokens, not the messages; set pipeline.replay={run}")
    tools = {"tools": made.toolbox.tools} if made.toolbox else {}
    rows = []
    for path in reversed(numbered(run / "rollouts", "step_*.jsonl").values()):
        with reading(path):
            rows += [_demonstration(row, tools) for row in read_lines(path)]
    told = sorted(filter(None, rows), key=lambda row: -row["reward"])
    if not told:
        raise ConfigError(
            f"of {len(rows)} rollouts of {run}, none has a score and an end: name a run of train or rollout"
        )
    if min_reward is None:
        min_reward = fmean(row["reward"] for row in told)
    best = defaultdict[str, dict[str, Any]](dict)  # of each prompt: text → row
    for row in told:
        if row["reward"] >= min_reward:
            best[row["prompt_id"]].setdefault(repr([row.get("messages"), row.get("response")]), row)
    chosen = [row for rows in best.values() for row in itertools.islice(rows.values(), per_prompt)]
    if not chosen:
        highest = f"the highest is {told[0]['reward']:g}"
        raise ConfigError(f"no rollout of {run} has a reward of at least {min_reward:g}: {highest}")
    write_atomically(output, "".join(json.dumps(row) + "\n" for row in chosen))
    mean = fmean(row["reward"] for row in chosen)
    plain = "" if "messages" in chosen[0] else " data.chat_template=false"
    rate = max(config.trainer.learning_rate, SFT_RATE)
    more = f"{plain} sft.epochs=3 trainer.learning_rate={rate:g} run.dir=NEW"
    command = f"{door()} sft data.source={output} model.path={config.model.path}{more}"
    share = f"{len(chosen)} of {len(rows)} rollouts, of {len(best)} prompts"
    return f"{output}: {share}; rewards from {min_reward:.3g}, mean {mean:.3g}\nto train on them: {command}"


def _demonstration(row: Mapping[str, Any], tools: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for sft; {} without a score or an end, or where turns have no message between them."""
    said = row.get("dialogue", [{"role": "assistant", "content": row["completion"]}])
    roles = [message["role"] for message in said]
    is_chat = "environment" not in roles and ("assistant", "assistant") not in itertools.pairwise(roles)
    if row["reward"] is None or row["finish_reason"] != "stop" or not is_chat:
        return {}
    known = {"prompt_id": row["prompt_id"], "reward": row["reward"]}
    if row["messages"] is None:
        return {"prompt": row["prompt"], "response": row["completion"], **known}
    return {"messages": [*row["messages"], *said], **tools, **known}
