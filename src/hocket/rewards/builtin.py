"""The rewards that ship with hocket. Each docstring says what it gives, and its options with their defaults."""

import hashlib
import logging
import re
from typing import Any, Literal

from hocket.rewards.base import reward
from hocket.types import Rollout

_THINK = re.compile(r"\s*<think>(?P<thought>.*)</think>(?P<answer>.*)", re.DOTALL)


@reward("exact_match", inline=True)
def exact_match(completion: str, answer: str | None) -> float:
    """1 where the completion is the answer, spaces around both aside; else 0."""
    return float(completion.strip() == _reference(answer).strip())


@reward("length", inline=True)
def length(
    completion: str, token_ids: tuple[int, ...], target: int, unit: Literal["tokens", "characters"] = "tokens"
) -> float:
    """−min(1, |length − target| / target): 0 at the target, −1 at nothing and from twice the target on.

    Options:
        target: wanted length, at least 1.
        unit: "tokens" counts what was sampled, the end-of-sequence token included; "characters" counts the text.
    """
    if target < 1 or unit not in ("tokens", "characters"):
        raise ValueError(f"target must be at least 1 and unit tokens or characters, got {target} and {unit!r}")
    actual = len(token_ids) if unit == "tokens" else len(completion)
    return -min(1.0, abs(actual - target) / target)


@reward("think_format", inline=True)
def think_format(completion: str) -> float:
    """1 for `<think>a thought</think> an answer`: one pair of tags, nothing before it, neither part empty; else 0."""
    match = _THINK.fullmatch(completion)
    if match is None or completion.count("<think>") != 1 or completion.count("</think>") != 1:
        return 0.0
    return float(bool(match["thought"].strip() and match["answer"].strip()))


@reward("env", inline=True)
def env(rollout: Rollout) -> float:
    """What the environment gave: the sum over the episode's turns, and its last word where a limit ended it."""
    if rollout.reward is None:
        raise ValueError(
            "the episode was given no reward: set env.name, have an agent return a number, or name another reward"
        )
    return rollout.reward


@reward("random", inline=True)
def random(rollout: Rollout, seed: int = 0) -> float:
    """0 or 1 with equal chances, whatever the policy wrote: the control that must not teach anything.

    Options:
        seed: with the rollout's id it decides the outcome.
    """
    return float(hashlib.sha256(f"{seed}:{rollout.id}".encode()).digest()[0] & 1)


@reward("math", imports=("math_verify",))
def math(completion: str, answer: str | None) -> float:
    """1 where the last expression after </think> equals the answer mathematically (math-verify); else 0.

    The answer is a number, a plain expression or LaTeX, with or without dollar signs or \\boxed. A completion that
    opens a <think> and never closes it has given no answer.
    """
    from math_verify import parse, verify

    # Its own time limits are alarm signals, which only work on a main thread; the deadline here is the worker's.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # An escaped dollar sign is a currency; the parser takes it for the start of a formula.
    reference, completion = (text.replace(r"\$", "") for text in (_reference(answer), completion))
    delimited = "$" in reference or r"\boxed" in reference
    gold: list[Any] = parse(reference if delimited else rf"\boxed{{{reference}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify can't read the reference answer {reference!r}")
    _, opened, thought = completion.partition("<think>")
    if opened and "</think>" not in thought:
        return 0.0
    given: list[Any] = parse(completion.rpartition("</think>")[2], parsing_timeout=None)
    return float(verify(gold, given, timeout_seconds=None))


def _reference(answer: str | None) -> str:
    if answer is None:
        raise ValueError("the prompt has no answer to compare with; set data.answer_column")
    return answer
