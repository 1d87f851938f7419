"""Count the fate of every prompt of each epoch, from the lines of ledger.jsonl and the state of the stream.

{"step": 0, "num_prompts": 2048}    the first line
{"step": 7, "draw": 112, "epoch": 0, "prompt": ID, "state": "trained", "pass_rate": 0.5}
{"step": 7, "draw": 113, "epoch": 0, "prompt": ID, "state": "filtered", "why": ..., "pass_rate": 1.0}    or "failed"
{"step": 9, "epoch": 1, "prompt": ID, "state": "skipped", "why": ...}    or "retired": left out from this epoch on,
{"step": 12, "epoch": 3, "prompt": ID, "state": "back"}    until this one
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

STATES = ("trained", "filtered", "failed", "retired", "skipped", "in flight", "missing", "pending")  # as listed
NUM_SHOWN = 10
NUM_EPOCHS = 4


class Account(NamedTuple):
    """One epoch: each prompt counts once in `states`, under a state and its reason ("failed: no score")."""

    epoch: int
    finished: bool  # all are drawn or left out
    num_prompts: int  # of the whole source
    states: dict[str, int]
    problems: tuple[str, ...]  # prompts that are missing or counted twice


def accounts(
    rows: Sequence[Mapping[str, Any]], stream: Mapping[str, Any] | None, *, ended: bool = False
) -> list[Account]:
    """Return the account of each epoch that has begun.

    `stream` is the state of the PromptStream in the newest checkpoint (None: draws in flight are unknown); `ended`: the
    run has taken all of its steps, so that nothing is in flight.
    """
    num_prompts = rows[0]["num_prompts"]
    rows = list(rows[1:])
    if stream is not None:
        recorded = {row["draw"] for row in rows if "draw" in row}
        late = [*stream["entries"], *({**draw, "state": "in flight"} for draw in stream["in_flight"])]
        rows += [row for row in late if row.get("draw") not in recorded]
    epochs: dict[int, list[Mapping[str, Any]]] = collections.defaultdict(list)
    for row in rows:
        epochs[row["epoch"]].append(row)
    ids = {row["prompt"] for row in rows}
    pending = "pending"
    newest = max(epochs, default=0)
    num_over = 0
    if stream is not None:
        num_over = stream["epoch"]
        newest = max(newest, num_over)
    elif ended:
        num_over = newest
    else:
        pending = "pending or in flight"
    left_out: dict[str, str] = {}
    found = []
    for epoch in range(newest + 1):
        fates = []
        for row in sorted(epochs[epoch], key=lambda row: row["state"] != "back"):  # those first, as some stand twice
            if "draw" in row:
                fates.append((row["prompt"], _label(row)))
            elif row["state"] == "back":
                left_out.pop(row["prompt"], None)
            else:
                left_out[row["prompt"]] = _label(row)
        fates += left_out.items()
        times = collections.Counter(prompt for prompt, _ in fates)
        states = collections.Counter(label for _, label in fates)
        twice = {prompt for prompt, num in times.items() if num > 1}
        unknown = num_prompts - len(times)
        problems = []
        if unknown and epoch < num_over:
            states["missing"] = unknown
            problems.append(_problem(unknown, "not accounted for", ids - times.keys()))
        elif unknown:
            states[pending] = unknown
        if twice:
            problems.append(_problem(len(twice), "accounted for more than once", twice))
        found.append(Account(epoch, epoch < num_over or not unknown, num_prompts, states, tuple(problems)))
    return found


def table(found: Sequence[Account]) -> str:
    """Return the newest accounts as text; the last lines say whether all balance."""
    lines = []
    for account in found[-NUM_EPOCHS:]:
        lines.append(f"epoch {account.epoch}: {account.num_prompts:,} prompts")
        lines += [f"{num:>10,}  {state}" for state, num in sorted(account.states.items(), key=_place)]
    if problems := [f"epoch {account.epoch}: {problem}" for account in found for problem in account.problems]:
        return "\n".join([*lines, *problems])
    num = sum(account.finished for account in found)
    verdict = f"every prompt of each finished epoch ({num}) is accounted for exactly once"
    return "\n".join([*lines, verdict if num else "no epoch is finished yet"])


def _label(row: Mapping[str, Any]) -> str:
    return f"{row['state']}: {row['why']}" if row.get("why") else str(row["state"])


def _place(item: tuple[str, int]) -> tuple[int, int, str]:
    state = next(index for index, state in enumerate(STATES) if item[0].startswith(state))
    return state, -item[1], item[0]


def _problem(num: int, what: str, ids: Iterable[str]) -> str:
    shown = sorted(ids)[:NUM_SHOWN]
    if num > len(shown):
        shown.append(f"and {num - len(shown)} more" if shown else "never named")
    return f"{num} prompts are {what}: {', '.join(shown)}"
