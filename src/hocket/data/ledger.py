"""What became of every prompt: an account of each epoch, from the lines of ledger.jsonl and the state of the stream.

    {"step": 0, "num_prompts": 2048}    first; then what became of them
    {"step": 7, "draw": 112, "epoch": 0, "prompt": ID, "state": "trained", "pass_rate": 0.5}
    {"step": 7, "draw": 113, "epoch": 0, "prompt": ID, "state": "filtered", "why": ..., "pass_rate": 1.0}    or "failed"
    {"step": 9, "epoch": 1, "prompt": ID, "state": "skipped", "why": ...}    or "retired": left out from this epoch on,
    {"step": 12, "epoch": 3, "prompt": ID, "state": "back"}    until this one

Prompts that stay out need no further line, so that a small pool among very many prompts costs little. Pure functions.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SETTLED = ("trained", "filtered", "failed")
LEFT_OUT = ("retired", "skipped")
NUM_SHOWN = 10
NUM_EPOCHS = 4

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One epoch.

    Attributes:
        finished: all of its prompts have been drawn, or are left out.
        num_prompts: of the whole source.
        states: how many prompts came to which (state, why).
        in_flight: how many were drawn and not settled, as the newest checkpoint knows.
        pending: how many nothing is known of: none, where the epoch is finished.
        certain: nobody of them is in flight, as far as the newest checkpoint, or the end of the run, tells.
        missing: those of them that the ledger names elsewhere.
        twice: prompts that came to more than one end.
    """

    epoch: int
    finished: bool
    num_prompts: int
    states: Mapping[tuple[str, str], int]
    in_flight: int
    pending: int
    certain: bool
    missing: tuple[str, ...]
    twice: tuple[str, ...]

    @property
    def balanced(self) -> bool:
        """Whether no prompt has two ends and, where the epoch is finished, each has one or is in flight."""
        return not self.twice and not (self.finished and self.pending)

    def as_dict(self) -> dict[str, Any]:
        """Returns all of it, ready for JSON."""
        states = [{"state": state, "why": why, "prompts": num} for (state, why), num in self.states.items()]
        return dataclasses.asdict(self) | {"states": states, "balanced": self.balanced}


def accounts(rows: Iterable[Row], stream: Mapping[str, Any] | None, *, ended: bool = False) -> list[Account]:
    """Returns the account of each epoch that has begun.

    Args:
        rows: the lines of the ledger.
        stream: the state of the PromptStream in the newest checkpoint; None: there is none, and nobody knows what is
            in flight.
        ended: the run has taken all of its steps, so that nothing is in flight.
    """
    rows = list(rows)
    num_prompts = next(row["num_prompts"] for row in (*rows, stream or {}) if "num_prompts" in row)
    rows = [row for row in rows if "prompt" in row]
    known = {row["draw"] for row in rows if "draw" in row}
    in_flight: list[Row] = []
    if stream is not None:
        rows += [entry for entry in stream["entries"] if entry.get("draw") not in known]
        in_flight = [draw for draw in stream["in_flight"] if draw["draw"] not in known]
    epochs: dict[int, list[Row]] = collections.defaultdict(list)
    for row in rows:
        epochs[row["epoch"]].append(row)
    ids = {row["prompt"] for row in (*rows, *in_flight)}
    newest = max([*epochs, stream["epoch"] if stream is not None else 0])
    left_out: dict[str, tuple[str, str]] = {}
    found = []
    for epoch in range(newest + 1):
        _change(left_out, epochs[epoch])
        found.append(
            _account(
                epoch,
                epochs[epoch],
                left_out,
                [draw["prompt"] for draw in in_flight if draw["epoch"] == epoch],
                ids=ids,
                num_prompts=num_prompts,
                certain=ended or stream is not None,
                finished=epoch < stream["epoch"] if stream is not None else ended and epoch < newest,
            )
        )
    return found


def table(found: Sequence[Account]) -> str:
    """Returns the accounts for people, with all but the newest epochs summed up; the last lines say if they balance."""
    old, new = found[:-NUM_EPOCHS], found[-NUM_EPOCHS:]
    lines = []
    for together in ([old] if old else []) + [[account] for account in new]:
        first, last = together[0], together[-1]
        name = f"epoch {first.epoch}" if first is last else f"epochs {first.epoch} to {last.epoch}"
        lines.append(f"{name}: {sum(account.num_prompts for account in together):,} prompts")
        states: collections.Counter[tuple[str, str]] = collections.Counter()
        for account in together:
            states.update(account.states)
        counts = [(num, f"{state}: {why}" if why else state) for (state, why), num in _in_order(states)]
        counts.append((sum(account.in_flight for account in together), "in flight"))
        unknown = "missing" if last.finished else "pending" if last.certain else "pending or in flight"
        counts.append((sum(account.pending for account in together), unknown))
        lines += [f"{num:>10,}  {what}" for num, what in counts if num]
    return "\n".join([*lines, *_verdict(found)])


def _verdict(found: Sequence[Account]) -> list[str]:
    wrong = [account for account in found if not account.balanced]
    if not wrong:
        num = sum(account.finished for account in found)
        if not num:
            return ["no epoch is finished yet"]
        return [f"every prompt of each finished epoch ({num}) is accounted for exactly once"]
    lines = []
    for account in wrong:
        for ids, num, what in (
            (account.missing, account.pending if account.finished else 0, "not accounted for"),
            (account.twice, len(account.twice), "accounted for more than once"),
        ):
            if num:
                shown = [*ids[:NUM_SHOWN], *([f"and {num - NUM_SHOWN} more"] if num > NUM_SHOWN else [])]
                lines.append(f"epoch {account.epoch}: {num} prompts are {what}: {', '.join(shown) or 'never named'}")
    return lines


def _change(left_out: dict[str, tuple[str, str]], rows: Iterable[Row]) -> None:
    """Takes the prompts that are back in an epoch out of `left_out`, and puts in those that leave in it."""
    rows = list(rows)
    for row in rows:
        if row["state"] == "back":
            left_out.pop(row["prompt"], None)
    for row in rows:
        if row["state"] in LEFT_OUT:
            left_out[row["prompt"]] = (row["state"], row["why"])


def _account(
    epoch: int,
    rows: Iterable[Row],
    left_out: Mapping[str, tuple[str, str]],
    in_flight: Sequence[str],
    *,
    ids: set[str],
    num_prompts: int,
    certain: bool,
    finished: bool,
) -> Account:
    settled = [row for row in rows if row["state"] in SETTLED]
    times = collections.Counter([*(row["prompt"] for row in settled), *left_out, *in_flight])
    states = collections.Counter((row["state"], row.get("why", "")) for row in settled)
    states.update(left_out.values())
    pending = num_prompts - len(times)
    return Account(
        epoch=epoch,
        finished=finished or not pending,
        num_prompts=num_prompts,
        states=dict(_in_order(states)),
        in_flight=len(in_flight),
        pending=pending,
        certain=certain,
        missing=tuple(sorted(ids - times.keys())) if finished else (),
        twice=tuple(sorted(prompt for prompt, num in times.items() if num > 1)),
    )


def _in_order(states: Mapping[tuple[str, str], int]) -> list[tuple[tuple[str, str], int]]:
    """Returns them as they are listed: by state, the most frequent reason first."""
    return sorted(states.items(), key=lambda item: ((*SETTLED, *LEFT_OUT).index(item[0][0]), -item[1], item[0][1]))
