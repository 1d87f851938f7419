"""Count the outcome of every prompt of each epoch, from ledger.jsonl and the stream's state.

docs/how-to/curriculum.md shows the report.

    {"step": 0, "num_prompts": 2048}    the first line
    {"step": 9, "epoch": 1, "prompt": ID, "state": "skipped", "why": ...}    or "retired"
    {"step": 12, "epoch": 3, "prompt": ID, "state": "back"}

A prompt that is skipped or retired is left out from that epoch on, until it is back.
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
NUM_SHOWN = 10  # prompts that a problem names
NUM_EPOCHS = 4  # the newest ones, which are shown


class Account(NamedTuple):
    """An epoch. Each prompt counts once in `states`, under a state and its reason: "failed: no
    score"."""

    epoch: int
    finished: bool  # all are drawn or left out
    num_prompts: int  # of the whole source
    states: dict[str, int]
    problems: tuple[str, ...]  # prompts that are missing or counted twice


def accounts(
    rows: Sequence[LedgerRow], stream: Mapping[str, Any] | None, *, ended: bool = False
) -> list[Account]:
    """Return the account of each epoch that was begun.

    `stream` is the PromptStream's state in the newest checkpoint, if there is one. `ended`: the run
    has ended, and nothing is in flight.
    """
    (num_prompts,) = [row["num_prompts"] for row in rows if "num_prompts" in row]
    outcomes = [row for row in rows if "num_prompts" not in row]
    if stream is not None:
        # What was settled, or drawn, since the last line that the checkpoint counts.
        recorded = {row["draw"] for row in outcomes if "draw" in row}
        late: list[OutcomeRow] = [*stream["entries"]]
        late += [_in_flight(draw) for draw in stream["in_flight"]]
        outcomes += [row for row in late if row.get("draw") not in recorded]
    # Those that are back come first in an epoch, as some are left out in it again.
    outcomes.sort(key=lambda row: (row["epoch"], row["state"] != "back"))
    ids = {row["prompt"] for row in outcomes}
    epochs = {
        epoch: list(of_epoch) for epoch, of_epoch in groupby(outcomes, key=lambda row: row["epoch"])
    }
    newest = max(epochs, default=0)
    num_over = newest if ended else 0  # epochs in which nothing is pending or in flight
    pending = "pending"
    if stream is not None:
        num_over = stream["epoch"]
    elif not ended:
        pending = "pending or in flight"
    left_out: dict[str, str] = {}
    listed = []
    for epoch in range(max(newest, num_over) + 1):
        labels = []  # the outcome of each prompt
        for row in epochs.get(epoch, ()):
            if "draw" in row:
                labels.append((row["prompt"], _label(row)))
            elif row["state"] == "back":
                left_out.pop(row["prompt"], None)
            else:
                left_out[row["prompt"]] = _label(row)
        labels += left_out.items()
        times = Counter(prompt for prompt, _ in labels)
        states = Counter(label for _, label in labels)
        twice = {prompt for prompt, num in times.items() if num > 1}
        unknown = num_prompts - len(times)
        missing = unknown if epoch < num_over else 0
        states.update({"missing": missing, pending: unknown - missing})
        problems = []
        if missing:
            problems.append(_problem(missing, "not accounted for", ids - times.keys()))
        if twice:
            problems.append(_problem(len(twice), "accounted for more than once", twice))
        finished = epoch < num_over or not unknown
        counts = +states  # without those that are 0
        listed.append(Account(epoch, finished, num_prompts, counts, tuple(problems)))
    return listed


def by_source(
    rows: Sequence[LedgerRow], stream: Mapping[str, Any] | None
) -> list[tuple[str, list[LedgerRow], Mapping[str, Any] | None]]:
    """Return the name, the rows and the state of the stream of each source.

    A run without data.sources has a single source, whose name is "".
    """
    by_name = defaultdict[str, list[LedgerRow]](list)
    for row in rows:
        by_name[row.get("source", "")].append(row)
    states = (stream or {}).get("sources")
    return [
        (name, of_source, states[name] if states else stream) for name, of_source in by_name.items()
    ]


def table(listed: Sequence[Account]) -> str:
    """Write the newest accounts as text, with the problems of all or the verdict at the end."""
    lines = []
    for account in listed[-NUM_EPOCHS:]:
        lines.append(f"epoch {account.epoch}: {account.num_prompts:,} prompts")
        for state, num in sorted(account.states.items(), key=_place):
            lines.append(f"{num:>10,}  {state}")
    problems: list[str] = []
    for account in listed:
        problems += [f"epoch {account.epoch}: {problem}" for problem in account.problems]
    num_finished = sum(account.finished for account in listed)
    if problems:
        lines += problems
    elif num_finished:
        finished = f"each finished epoch ({num_finished})"
        lines.append(f"every prompt of {finished} is accounted for exactly once")
    else:
        lines.append("no epoch is finished yet")
    return "\n".join(lines)


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


def _problem(num: int, problem: str, ids: Iterable[str]) -> str:
    shown = sorted(ids)[:NUM_SHOWN]
    if num > len(shown):
        shown.append(f"and {num - len(shown)} more" if shown else "never named")
    return f"{num} prompts are {problem}: {', '.join(shown)}"


@command(
    "ledger",
    option("RUN", type=Path, help="folder of the run"),
    examples=("runs/quickstart", "runs/quickstart | head"),
    page="how-to/curriculum.md",
)
def report(args: argparse.Namespace) -> int:
    """Print the accounts of a run; return 1 if there is a problem."""
    from hocket.observe.rows import read_ledger, reading
    from hocket.trainer import checkpoints

    rows = read_ledger(args.RUN)
    if not rows or "num_prompts" not in rows[0]:
        raise ConfigError(
            f"{args.RUN} is no run with a ledger: train and quickstart write one, a replay draws "
            "nothing"
        )
    kept = checkpoints.complete(args.RUN / checkpoints.FOLDER)
    stream = checkpoints.read(kept[-1], whole=False).parts["prompts"] if kept else None
    ended = (args.RUN / "summary.json").exists()
    with reading(args.RUN / LEDGER):
        listed_by_name = {
            name: accounts(of_source, state, ended=ended)
            for name, of_source, state in by_source(rows, stream)
        }
    status = 0
    for name, listed in listed_by_name.items():
        if name:
            print(name)
        print(table(listed))
        status |= any(account.problems for account in listed)
    return status
