"""Score programs by tests that they pass in the sandbox (docs/reference/rewards.md)."""

import secrets
import time
from collections.abc import Mapping
from typing import Any, Literal

from hocket.extras.code.sandbox import run, way
from hocket.rewards.base import reward
from hocket.rewards.builtin import after_thought, last_block, list_of
from hocket.types import Score

MAX_SHOWN = 800  # characters of each stream of a program that a note shows


def check(sandbox: str = "", **_: Any) -> None:
    """Raise ConfigError where programs can't be contained, and need not be."""
    way(bool(sandbox))


@reward("code", check=check)
def code(
    completion: str,
    meta: Mapping[str, Any],
    opening: str = "",
    tests: str = "tests",
    timeout_s: float = 10.0,
    partial: bool = False,
    sandbox: Literal["", "limits_only"] = "",
) -> Score:
    """Score the last program of a completion by the tests in the column `tests`.

    It is 1 if all tests pass, else 0; with `partial`, the share that passes. `timeout_s` is for all
    tests together.
    """
    all_tests = list_of("tests", meta, tests)
    num_tests = len(all_tests)
    for number, test in enumerate(all_tests, 1):
        _check(test, f"test {number} of {num_tests} in the column {tests!r}")
    program = last_block(after_thought(completion, opening))
    counts = dict.fromkeys(("passed", "wrong", "failed", "late"), 0)
    if program is None:
        return Score(total=0.0, parts=counts, note="there is no program in a fenced block")
    note = ""
    end = time.monotonic() + timeout_s
    for number, test in enumerate(all_tests, 1):
        remaining_s = max(end - time.monotonic(), 0.0)
        verdict, wrote = _verdict(f"{program}\n", test, remaining_s, bool(sandbox))
        counts[verdict] += 1
        if verdict == "passed":
            continue
        note = note or f"test {number} of {num_tests}: {verdict}\n{wrote}"
        if verdict == "late" or not partial:
            break
    shares = {name: count / num_tests for name, count in counts.items()}
    return Score(total=shares["passed"] if partial else float(not note), parts=shares, note=note)


def _check(test: Any, name: str) -> None:
    """Raise ValueError for a test that would be passed by any program, or by none."""
    if isinstance(test, str):
        return
    if not isinstance(test, Mapping):
        raise ValueError(
            f"{name} must be text or an object with input and output, got {test!r:.80}"
        )
    for key in ("input", "output"):
        if not isinstance(test.get(key), str | int | float):
            raise ValueError(
                f"{name}: its {key} must be text or a number, got {test.get(key)!r:.80}"
            )
    if test.get("fn_name") or test.get("testtype", "stdin") != "stdin":
        raise ValueError(
            f"{name} calls a function, but here input is what a program reads: write it as an "
            "assert"
        )


def _verdict(program: str, test: Any, timeout_s: float, limits_only: bool) -> tuple[str, str]:
    """Run one test; return its verdict and the ends of what the program wrote."""
    if isinstance(test, Mapping):
        ran = run(program, str(test["input"]), timeout_s, limits_only=limits_only)
        passed = _lines(ran.stdout) == _lines(str(test["output"]))
    else:
        # A program that exits well before the assert must not pass: only the assert's end prints
        # this mark, which no program can know.
        mark = secrets.token_hex(8)
        ran = run(f"{program}\n{test}\nprint({mark!r})", "", timeout_s, limits_only=limits_only)
        passed = _lines(ran.stdout)[-1:] == [mark]
    verdict = {None: "late", 0: "passed" if passed else "wrong"}.get(ran.status, "failed")
    return verdict, f"stdout: {ran.stdout[-MAX_SHOWN:]}\nstderr: {ran.stderr[-MAX_SHOWN:]}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
