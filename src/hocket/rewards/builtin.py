"""The rewards that ship with hocket. Each docstring gives the value and the options."""

import hashlib
import logging
import re
from typing import Any, Literal

from hocket.rewards.base import reward
from hocket.types import Rollout

_THINK = re.compile(r"\s*<think>(?P<thought>.*)</think>(?P<answer>.*)", re.DOTALL)


@reward("exact_match", inline=True)
def exact_match(completion: str, answer: str | None) -> float:
    """Return 1 if the completion is the answer, spaces around both aside; else 0."""
    return float(completion.strip() == _reference(answer).strip())


@reward("length", inline=True)
def length(
    completion: str, token_ids: tuple[int, ...], target: int, unit: Literal["tokens", "characters"] = "tokens"
) -> float:
    """Return −min(1, |length − target| / target): 0 at the target, −1 for an empty text and from twice the target on.

    The unit "tokens" counts sampled tokens, the end-of-sequence token included; "characters" counts the text.
    """
    if target < 1 or unit not in ("tokens", "characters"):
        raise ValueError(f"target must be at least 1 and unit tokens or characters, got {target} and {unit!r}")
    actual = len(token_ids) if unit == "tokens" else len(completion)
    return 0.0 - min(1.0, abs(actual - target) / target)  # not -0.0


@reward("think_format", inline=True)
def think_format(completion: str, opening: str = "") -> float:
    """Return 1 for `<think>a thought</think> an answer`: one pair of tags at the start, no part empty; else 0.

    Where the template opens the thought in the prompt, the completion closes it; where the template closes it, too, the
    completion is the answer alone.
    """
    text = opening + completion
    match = _THINK.fullmatch(text)
    if match is None or text.count("<think>") != 1 or text.count("</think>") != 1:
        return 0.0
    thought = match["thought"].strip() or "</think>" in opening
    return float(bool(thought and match["answer"].strip()))


@reward("env", inline=True)
def env(rollout: Rollout) -> float:
    """Return the environment's reward: the sum over the turns, and over the end if a limit cut the episode off."""
    if rollout.reward is None:
        raise ValueError("the episode has no reward: set env.name, let the agent return one, or name another reward")
    return rollout.reward


@reward("random", inline=True)
def random(rollout: Rollout, seed: int = 0) -> float:
    """Return 0 or 1 with equal chances, by seed and rollout id: the control from which nothing can be learned."""
    return float(hashlib.sha256(f"{seed}:{rollout.id}".encode()).digest()[0] & 1)


@reward("math", imports=("math_verify",))
def math(completion: str, answer: str | None, opening: str = "") -> float:
    """Return 1 if the last expression after </think> equals the answer mathematically (math-verify); else 0.

    The answer is a number, a plain expression or LaTeX, with or without dollar signs or \\boxed. A thought that is not
    closed, wherever it was opened, is no answer.
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
    said = (opening + completion).rpartition("</think>")[2]
    if "<think>" in said:
        return 0.0
    given: list[Any] = parse(said, parsing_timeout=None)
    return float(verify(gold, given, timeout_seconds=None))


def _reference(answer: str | None) -> str:
    if answer is None:
        raise ValueError("the prompt has no answer to compare with; set data.answer_column")
    return answer
