"""Count the outcome of every prompt of each epoch, from ledger.jsonl (docs/curriculum.md) and the state of the stream.

{"step": 0, "num_prompts": 2048}    the first line
{"step": 9, "epoch": 1, "prompt": ID, "state": "skipped", "why": ...}    or "retired": left out from this epoch on,
{"step": 12, "epoch": 3, "prompt": ID, "state": "back"}    until this one
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from hocket.commands.command import command, option
from hocket.errors import ConfigError
from hocket.formats import LEDGER, LedgerRow, OutcomeRow

STATES = (
    "trained",
    "filtered",
    "failed",
    "retired",
    "skipped",
    "in flight",
    "missing",
    "pending",
    "pending or in flight",
)
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
    rows: Sequence[LedgerRow], stream: Mapping[str, Any] | None, *, ended: bool = False
) -> list[Account]:
    """Return the account of each epoch that has begun.

    `stream` is the PromptStream's state in the newest checkpoint, None without one; `ended`: nothing is in flight.
    """
    (num_prompts,) = [row["num_prompts"] for row in rows if "num_prompts" in row]
    outcomes = [row for row in rows if "num_prompts" not in row]
    if stream is not None:
        # What was settled, or drawn, since the last line that the checkpoint counts.
        recorded = {row["draw"] for row in outcomes if "draw" in row}
        late: list[OutcomeRow] = [*stream["entries"]]
        late += [_in_flight(draw) for draw in stream["in_flight"]]
        outcomes += [row for row in late if row.get("draw") not in recorded]
    outcomes.sort(
        key=lambda row: (row["epoch"], row["state"] != "back")
    )  # those first, as some stand twice
    ids = {row["prompt"] for row in outcomes}
    epochs = {
        epoch: list(those) for epoch, those in groupby(outcomes, key=lambda row: row["epoch"])
    }
    newest = max(epochs, default=0)
    num_over = newest if ended else 0  # of these epochs nothing is pending or in flight
    pending = "pending"
    if stream is not None:
        num_over = stream["epoch"]
    elif not ended:
        pending = "pending or in flight"
    left_out: dict[str, str] = {}
    found = []
    for epoch in range(max(newest, num_over) + 1):
        fates = []
        for row in epochs.get(epoch, ()):
            if "draw" in row:
                fates.append((row["prompt"], _label(row)))
            elif row["state"] == "back":
                left_out.pop(row["prompt"], None)
            else:
                left_out[row["prompt"]] = _label(row)
        fates += left_out.items()
        times = Counter(prompt for prompt, _ in fates)
        states = Counter(label for _, label in fates)
        twice = {prompt for prompt, num in times.items() if num > 1}
        unknown = num_prompts - len(times)
        missing = unknown if epoch < num_over else 0
        states.update({"missing": missing, pending: unknown - missing})
        wrong = (
            (missing, "not accounted for", ids - times.keys()),
            (len(twice), "accounted for more than once", twice),
        )
        problems = tuple(_problem(*one) for one in wrong if one[0])
        found.append(
            Account(epoch, epoch < num_over or not unknown, num_prompts, +states, problems)
        )  # +: above 0
    return found


def by_source(
    rows: Sequence[LedgerRow], stream: Mapping[str, Any] | None
) -> list[tuple[str, list[LedgerRow], Mapping[str, Any] | None]]:
    """Return name, rows and state of the stream of each source, in a run with data.sources; "" without them."""
    of = defaultdict[str, list[LedgerRow]](list)
    for row in rows:
        of[row.get("source", "")].append(row)
    states = (stream or {}).get("sources")
    return [(name, mine, states[name] if states else stream) for name, mine in of.items()]


def table(found: Sequence[Account]) -> str:
    """Return the newest accounts as text, which ends with whether all balance."""
    lines = []
    for account in found[-NUM_EPOCHS:]:
        lines.append(f"epoch {account.epoch}: {account.num_prompts:,} prompts")
        lines += [
            f"{num:>10,}  {state}" for state, num in sorted(account.states.items(), key=_place)
        ]
    if problems := [
        f"epoch {account.epoch}: {problem}" for account in found for problem in account.problems
    ]:
        return "\n".join([*lines, *problems])
    num = sum(account.finished for account in found)
    verdict = f"every prompt of each finished epoch ({num}) is accounted for exactly once"
    return "\n".join([*lines, verdict if num else "no epoch is finished yet"])


def _in_flight(draw: Mapping[str, Any]) -> OutcomeRow:
    return {
        "draw": draw["draw"],
        "epoch": draw["epoch"],
        "prompt": draw["prompt"],
        "state": "in flight",
    }


def _label(row: OutcomeRow) -> str:
    return f"{row['state']}: {row['why']}" if row.get("why") else row["state"]


def _place(item: tuple[str, int]) -> tuple[int, int, str]:
    label, num = item
    return STATES.index(label.partition(":")[0]), -num, label


def _problem(num: int, what: str, ids: Iterable[str]) -> str:
    shown = sorted(ids)[:NUM_SHOWN]
    if num > len(shown):
        shown.append(f"and {num - len(shown)} more" if shown else "never named")
    return f"{num} prompts are {what}: {', '.join(shown)}"


@command("ledger", option("RUN", type=Path))
def report(args: argparse.Namespace) -> int:
    from hocket.observe.rows import read_ledger, reading
    from hocket.trainer import checkpoints

    rows = read_ledger(args.RUN)
    if not rows or "num_prompts" not in rows[0]:
        raise ConfigError(
            f"{args.RUN} is no run with a ledger: train and quickstart write one, a replay draws nothing"
        )
    kept = checkpoints.complete(args.RUN / checkpoints.FOLDER)
    stream = checkpoints.read(kept[-1], whole=False).parts["prompts"] if kept else None
    ended = (args.RUN / "summary.json").exists()
    with reading(args.RUN / LEDGER):
        by_name = [
            (name, accounts(mine, state, ended=ended))
            for name, mine, state in by_source(rows, stream)
        ]
    for name, listed in by_name:
        print(*filter(None, [name, table(listed)]), sep="\n")
    return int(any(account.problems for _, listed in by_name for account in listed))
