"""The account of each epoch, from lines and a state written out by hand."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.data import test_stream as streams
from tests.data.test_mixture import new_stream

from hocket.commands.cli import main
from hocket.data.curriculum import Curriculum
from hocket.data.stream import PromptOutcome
from hocket.extras.ledger import Account, accounts, by_source, table
from support.records import prompts, saved, write_rows


def line(draw: int, epoch: int, prompt: str, state: str = "trained", why: str = "") -> dict[str, Any]:
    return change(epoch, prompt, state, why) | {"draw": draw}


def change(epoch: int, prompt: str, state: str, why: str = "") -> dict[str, Any]:
    return {"step": 1, "epoch": epoch, "prompt": prompt, "state": state} | ({"why": why} if why else {})


def stream(epoch: int, *in_flight: tuple[int, int, str], entries: Any = ()) -> dict[str, Any]:
    draws = [{"draw": number, "epoch": e, "prompt": prompt} for number, e, prompt in in_flight]
    return {"epoch": epoch, "in_flight": draws, "entries": list(entries)}


def count(num: int, rows: list[dict[str, Any]], state: dict[str, Any] | None, *, ended: bool = False) -> list[Account]:
    return accounts([{"step": 0, "num_prompts": num}, *rows], state, ended=ended)


def test_every_prompt_of_an_epoch_has_one_place() -> None:
    rows = [
        line(0, 0, "a"),
        line(1, 0, "b", "filtered", "every reward is 1"),
        line(2, 0, "c", "failed", "no score"),
        line(3, 0, "d", "filtered", "every reward is 0"),
        change(1, "b", "retired", "solved 1 times in a row"),
        line(4, 1, "d"),
    ]
    found = count(4, rows, stream(1, (4, 1, "d"), (5, 1, "a")))  # draw 4 was settled after the checkpoint
    assert [(account.finished, account.problems) for account in found] == [(True, ()), (False, ())]
    assert table(found).splitlines() == [
        "epoch 0: 4 prompts",
        "         1  trained",
        "         1  filtered: every reward is 0",
        "         1  filtered: every reward is 1",
        "         1  failed: no score",
        "epoch 1: 4 prompts",
        "         1  trained",
        "         1  retired: solved 1 times in a row",
        "         1  in flight",
        "         1  pending",
        "every prompt of each finished epoch (1) is accounted for exactly once",
    ]


def test_a_prompt_that_is_left_out_stays_out_until_it_is_back() -> None:
    rows = [
        change(0, "b", "skipped", "too hard"),
        line(0, 0, "a"),
        line(1, 1, "a"),
        change(2, "b", "back"),
        line(2, 2, "b"),
        line(3, 2, "a"),
    ]
    out = {"trained": 1, "skipped: too hard": 1}
    found = count(2, rows, stream(3))
    assert [account.states for account in found] == [out, out, {"trained": 2}, {"pending": 2}]


def test_a_prompt_that_is_lost_or_settled_twice_is_named() -> None:
    rows = [line(0, 0, "a"), line(1, 0, "b"), line(2, 0, "b"), line(3, 1, "c"), line(4, 1, "a"), line(5, 1, "b")]
    first, second = count(4, rows, stream(1))
    assert (first.states, second.problems) == ({"trained": 3, "missing": 2}, ())
    assert table([first, second]).splitlines()[-2:] == [
        "epoch 0: 2 prompts are not accounted for: c, and 1 more",
        "epoch 0: 1 prompts are accounted for more than once: b",
    ]
    (drawn_while_out, _) = count(1, [change(0, "a", "skipped", "why"), line(0, 0, "a")], stream(1))
    assert drawn_while_out.problems == ("1 prompts are accounted for more than once: a",)
    first, *_ = count(30, [*(line(i, 1, f"p{i:02}") for i in range(30)), line(30, 2, "p00")], None, ended=True)
    assert first.problems[0].startswith("30 prompts are not accounted for: p00, p01")
    assert first.problems[0].endswith("p09, and 20 more")


def test_what_was_settled_and_not_recorded_at_the_checkpoint_counts_once() -> None:
    entries = [line(1, 0, "b"), change(1, "a", "skipped", "why")]
    for recorded in ([], entries):
        found = count(2, [line(0, 0, "a"), *recorded], stream(1, entries=entries))
        assert [account.states for account in found] == [{"trained": 2}, {"skipped: why": 1, "pending": 1}]


def test_without_a_checkpoint_older_epochs_are_judged_once_the_run_has_ended_and_the_newest_is_pending() -> None:
    rows = [line(0, 0, "a"), line(1, 1, "a"), line(2, 1, "b"), line(3, 2, "a")]
    problems = [(account.finished, account.problems) for account in count(2, rows, None, ended=True)]
    assert problems == [(True, ("1 prompts are not accounted for: b",)), (True, ()), (False, ())]
    assert not any(account.problems for account in count(2, rows, None))
    for ended, what in ((False, "pending or in flight"), (True, "pending")):
        shown = table(count(1000, rows[:1], None, ended=ended)).splitlines()
        assert shown[1:] == ["         1  trained", f"       999  {what}", "no epoch is finished yet"]


def test_the_newest_four_epochs_are_shown_and_the_problems_of_all() -> None:
    rows = [line(2 * e + i, e, "ab"[i]) for e in range(6) for i in range(2) if (e, i) != (0, 1)]
    shown = table(count(2, rows, stream(6))).splitlines()
    assert [text for text in shown if text.startswith("epoch")] == [
        *(f"epoch {e}: 2 prompts" for e in (3, 4, 5, 6)),
        "epoch 0: 1 prompts are not accounted for: b",
    ]


def test_the_ledger_accounts_for_each_source() -> None:
    stream = new_stream({"a": 3, "b": 1}, 4)
    for number in [*stream.take(25)][:24]:
        stream.settle(number, PromptOutcome(state="trained"))
    rows = [*stream.sizes(), *stream.entries()]
    assert rows[:2] == [{"num_prompts": 4, "source": "a"}, {"num_prompts": 4, "source": "b"}]
    assert sorted(row["draw"] for row in rows[2:]) == list(range(24))
    found = {name: accounts(mine, state) for name, mine, state in by_source(rows, saved(stream))}
    finished = {name: sum(account.finished for account in of) for name, of in found.items()}
    assert not [account.problems for of in found.values() for account in of if account.problems]
    assert finished["a"] + finished["b"] >= 4
    assert found["a"][0].states == {"trained": 4}
    (alone,) = by_source([{"num_prompts": 2}, {"epoch": 0, "prompt": "x", "state": "trained", "draw": 0}], None)
    assert (alone[0], len(alone[1]), alone[2]) == ("", 2, None)


def test_the_ledger_balances_or_names_who_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoints" / "step_000003"  # a replay has checkpoints, too, but no draws
    folder.mkdir(parents=True)
    (folder / "COMPLETE").touch()
    for path in (tmp_path, tmp_path / "elsewhere"):
        assert main(["ledger", str(path)]) == 1
        assert capsys.readouterr().err.startswith(f"error: {path} is no run with a ledger")
    draws = [{"step": 1, "draw": i, "epoch": i, "prompt": "a", "state": "trained"} for i in range(2)]
    lines = [{"step": 0, "num_prompts": 2}, *draws]
    write_rows(tmp_path / "ledger.jsonl", *lines)
    prompts = {"epoch": 1, "num_prompts": 2, "in_flight": [{"draw": 5, "epoch": 0, "prompt": "b"}], "entries": []}
    saved = {"step": 3, "config": {}, "metrics": {}, "trainer": {}, "parts": {"prompts": prompts}}
    write_rows(folder / "state.json", saved)
    assert main(["ledger", str(tmp_path)]) == 0
    table = ["epoch 0: 2 prompts", "         1  trained", "         1  in flight"]
    assert capsys.readouterr().out.splitlines()[:3] == table
    for row in ("{", {"step": 1, "draw": 1}, draws[0] | {"epoch": "x"}):
        write_rows(tmp_path / "ledger.jsonl", *lines, row)
        assert main(["ledger", str(tmp_path)]) == 1
        assert f"{tmp_path}/ledger.jsonl is damaged: " in capsys.readouterr().err
    write_rows(tmp_path / "ledger.jsonl", *lines)
    shutil.rmtree(folder)  # now nothing tells where b is
    (tmp_path / "summary.json").touch()
    assert main(["ledger", str(tmp_path)]) == 1
    assert "epoch 0: 1 prompts are not accounted for: never named\n" in capsys.readouterr().out


def test_an_epoch_whose_prompts_are_all_retired_is_finished_and_balanced() -> None:
    stream = streams.new_stream(prompts(3), seed=0, retire_after=2)
    for draw in [*stream.take(5), *stream.take(1)]:
        stream.settle(draw, streams.solved(1.0))
    assert stream.take(2) == {}
    found = accounts([{"num_prompts": 3}, *stream.entries()], stream.state())
    assert [(a.finished, a.problems, "pending" in a.states) for a in found] == [(True, (), False)] * 2


@pytest.mark.usefixtures("window")
@pytest.mark.parametrize(("make", "retire_after"), streams.PLANS.values(), ids=streams.PLANS)
@pytest.mark.parametrize("trial", range(4))
def test_over_any_number_of_kills_the_ledger_has_one_place_for_each_prompt_of_an_epoch(
    make: Callable[[], Curriculum | None], retire_after: int, seed: int, trial: int
) -> None:
    ledger, end = streams.killed(make, retire_after, seed, trial)
    found = accounts([{"num_prompts": 37}, *ledger], end)
    assert all(account.finished for account in found[: end["epoch"]])
    assert not any(account.problems for account in found)
