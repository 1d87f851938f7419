"""The rewards that ship with hocket and ask nothing else (docs/rewards.md)."""

import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal

from hocket.common.arithmetic import compute
from hocket.rewards.base import reward
from hocket.types import Rollout

_THINK = re.compile(r"\s*<think>(?P<thought>.*)</think>(?P<answer>.*)", re.DOTALL)
_SCIENTIFIC = re.compile(r"(?<![\w.,\\])\d+(?:\.\d+)?[eE][+-]?\d{1,2}(?!\w|\.\d)")  # a number


@reward("exact_match", inline=True)
def exact_match(completion: str, answer: str) -> float:
    return float(completion.strip() == _reference(answer).strip())


@reward("position_match", inline=True)
def position_match(completion: str, answer: str) -> float:
    answer = _reference(answer)
    right = sum(said == wanted for said, wanted in zip(completion, answer, strict=False))
    return right / max(len(completion), len(answer), 1)


@reward("length", inline=True)
@dataclasses.dataclass(eq=False)
class LengthReward:
    """Return −min(1, |length − target| / target), or min(1, length / up_to)."""

    target: int = 0
    up_to: int = 0
    unit: Literal["tokens", "characters"] = "tokens"

    def __post_init__(self) -> None:
        if max(self.target, self.up_to) < 1 or min(self.target, self.up_to) != 0:
            raise ValueError(f"target or up_to must be at least 1, and the other one 0, got {self}")

    def __call__(self, completion: str, token_ids: tuple[int, ...]) -> float:
        actual = len(token_ids) if self.unit == "tokens" else len(completion)
        if self.up_to:
            return min(1.0, actual / self.up_to)
        return 0.0 - min(1.0, abs(actual - self.target) / self.target)  # not -0.0


@reward("think_format", inline=True)
def think_format(completion: str, opening: str = "") -> float:
    text = opening + completion  # the template may have opened the thought
    match = _THINK.fullmatch(text)
    if match is None or text.count("<think>") != 1 or text.count("</think>") != 1:
        return 0.0
    thought = match["thought"].strip() or "</think>" in opening
    return float(bool(thought and match["answer"].strip()))


@reward("repetition", inline=True)
def repetition(completion: str, n: int = 3) -> float:
    """Return −(1 − distinct / all n-grams of words) (arXiv 2502.03373, C.2)."""
    words = completion.lower().split()
    grams = list(zip(*(words[i:] for i in range(n)), strict=False))
    return len(set(grams)) / len(grams) - 1 if grams else 0.0


@reward("regex")
def regex(completion: str, pattern: str, full: bool = False) -> float:
    find = re.fullmatch if full else re.search
    return float(bool(find(pattern, completion, re.DOTALL)))


@reward("json_schema", imports=("jsonschema",))
def json_schema(
    completion: str, meta: Mapping[str, Any], opening: str = "", schema: Any = None
) -> float:
    from jsonschema import Draft202012Validator, validators

    if schema is not None:
        meta = {"schema": schema}
    schema = column(meta, "schema")
    if not isinstance(schema, Mapping | bool):
        advice = "set the option schema, or give the row a column 'schema'"
        raise ValueError(f"there is no schema: {advice}, got {schema!r}")
    kind = validators.validator_for(schema, default=Draft202012Validator)
    kind.check_schema(schema)
    said = after_thought(completion, opening)
    try:
        return float(
            kind(schema).is_valid(json.loads(last_block(said) or said, parse_constant=_refuse))
        )
    except (ValueError, RecursionError):
        return 0.0


@reward("countdown", inline=True)
def countdown(
    completion: str,
    answer: str,
    meta: Mapping[str, Any],
    numbers: str = "nums",
    format_score: float = 0.0,
) -> float:
    """Score the task of TinyZero; its `format_score` is 0.1."""
    given = [float(number) for number in list_of("numbers", meta, numbers)]  # tables may hold text
    target = float(_reference(answer))
    said, _, _ = completion.rpartition("</answer>")
    _, opened, told = said.rpartition("<answer>")
    if not opened:
        return 0.0
    try:
        value, used = compute(told)
    except (ArithmeticError, SyntaxError, ValueError):
        return format_score
    return 1.0 if sorted(used) == sorted(given) and abs(value - target) < 1e-5 else format_score


@reward("env", inline=True)
def env(rollout: Rollout) -> float:
    if rollout.reward is None:
        raise ValueError(
            "the episode has no reward: set env.name, let the agent return one, or name another reward"
        )
    return rollout.reward


@reward("random", inline=True)
def random(rollout: Rollout, seed: int = 0) -> float:
    return float(hashlib.sha256(f"{seed}:{rollout.id}".encode()).digest()[0] & 1)


@reward("math", imports=("math_verify",))
def math(completion: str, answer: str, opening: str = "") -> float:
    from math_verify import parse, verify

    # Its own time limits are alarm signals, which only work on a main thread; the worker has a deadline.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # An escaped dollar sign is a currency; the parser takes it for the start of a formula.
    reference = _in_digits(_reference(answer).replace(r"\$", ""))
    completion = _in_digits(completion.replace(r"\$", ""))
    delimited = "$" in reference or r"\boxed" in reference
    gold: list[Any] = parse(
        reference if delimited else rf"\boxed{{{reference}}}", parsing_timeout=None
    )
    if not gold:
        raise ValueError(f"math-verify can't read the reference answer {reference!r}")
    given: list[Any] = parse(after_thought(completion, opening), parsing_timeout=None)
    return float(verify(gold, given, timeout_seconds=None))


def _in_digits(text: str) -> str:
    """Write 1.5e-3 as 0.0015: math-verify takes the e for Euler's number."""
    return _SCIENTIFIC.sub(lambda number: f"{Decimal(number[0]):f}", text)


def column(meta: Mapping[str, Any], name: str) -> Any:
    """Return a column's value; text is read as JSON."""
    given = meta.get(name)
    return json.loads(given) if isinstance(given, str) else given


def list_of(option: str, meta: Mapping[str, Any], name: str) -> Sequence[Any]:
    """Return the list in the column that an option names. Raise ValueError without one."""
    given = column(meta, name)
    if not isinstance(given, Sequence) or not given:
        raise ValueError(
            f"the row has no list of {option} in the column {name!r}: set the option {option}"
        )
    return given


def last_block(text: str) -> str | None:
    """Return the text of the last fenced block."""
    blocks: list[str] = re.findall(r"```[^\n`]*\n(.*?)```", text, re.DOTALL)
    return blocks[-1] if blocks else None


def after_thought(completion: str, opening: str) -> str:
    """Return the text after the thought: none where the thought was not closed."""
    said = (opening + completion).rpartition("</think>")[2]
    return "" if "<think>" in said else said


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _reference(answer: str | None) -> str:
    if answer is None:
        raise ValueError("the prompt has no answer to compare with; set data.answer_column")
    return answer
