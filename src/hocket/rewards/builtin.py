"""The rewards that ship with hocket and need no service (docs/reference/rewards.md)."""

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
# A number in scientific notation, such as 1.5e-3, that is no part of a longer word or number.
_SCIENTIFIC = re.compile(r"(?<![\w.,\\])\d+(?:\.\d+)?[eE][+-]?\d{1,2}(?!\w|\.\d)")


@reward("exact_match", inline=True)
def exact_match(completion: str, answer: str) -> float:
    """Give 1 for the reference answer, white space around it ignored, else 0."""
    return float(completion.strip() == _reference(answer).strip())


@reward("position_match", inline=True)
def position_match(completion: str, answer: str) -> float:
    """Compute the share of positions at which the completion has the character of the answer."""
    answer = _reference(answer)
    num_equal = 0
    for character, expected in zip(completion, answer, strict=False):
        num_equal += character == expected
    return num_equal / max(len(completion), len(answer), 1)


@reward("length", inline=True)
@dataclasses.dataclass(eq=False)
class LengthReward:
    """Computes −min(1, |length − target| / target), or min(1, length / up_to)."""

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
        penalty = min(1.0, abs(actual - self.target) / self.target)
        return 0.0 - penalty  # -penalty would be -0.0 for the target's length


@reward("think_format", inline=True)
def think_format(completion: str, opening: str = "") -> float:
    """Give 1 for one thought that is closed and not empty, followed by an answer; else 0."""
    text = opening + completion  # the template may have opened the thought
    match = _THINK.fullmatch(text)
    if match is None or text.count("<think>") != 1 or text.count("</think>") != 1:
        return 0.0
    # A template that closes the thought too has switched thinking off: it may be empty.
    thought = match["thought"].strip() or "</think>" in opening
    return float(bool(thought and match["answer"].strip()))


@reward("repetition", inline=True)
def repetition(completion: str, n: int = 3) -> float:
    """Compute −(1 − distinct / all n-grams of words) (arXiv 2502.03373, C.2)."""
    words = completion.lower().split()
    shifted = [words[i:] for i in range(n)]
    grams = list(zip(*shifted, strict=False))
    if not grams:
        return 0.0
    return len(set(grams)) / len(grams) - 1


@reward("regex")
def regex(completion: str, pattern: str, full: bool = False) -> float:
    """Give 1 if the pattern matches a part of the completion, or with `full` all of it, else 0."""
    search = re.fullmatch if full else re.search
    return float(bool(search(pattern, completion, re.DOTALL)))


@reward("json_schema", imports=("jsonschema",))
def json_schema(
    completion: str, meta: Mapping[str, Any], opening: str = "", schema: Any = None
) -> float:
    """Give 1 for JSON that is valid by a schema: the option's, or that of the row."""
    from jsonschema import Draft202012Validator, validators

    # Read the schema. An error in it is the user's, not the model's: it is raised.
    schema = column(meta, "schema") if schema is None else _from_json(schema)
    if not isinstance(schema, Mapping | bool):
        advice = "set the option schema, or give the row a column 'schema'"
        raise ValueError(f"there is no schema: {advice}, got {schema!r}")
    validator_class = validators.validator_for(schema, default=Draft202012Validator)
    validator_class.check_schema(schema)

    # Read the model's JSON: the last fenced block, or all of the text.
    text = after_thought(completion, opening)
    try:
        value = json.loads(last_block(text) or text, parse_constant=_refuse)
        return float(validator_class(schema).is_valid(value))
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
    """Score the task of TinyZero: use each number once to compute the answer.

    `numbers` is the column with the row's numbers; TinyZero's `format_score` is 0.1.
    """
    row_numbers = list_of("numbers", meta, numbers)
    available = [float(number) for number in row_numbers]  # tables may hold them as text
    target = float(_reference(answer))
    # The expression is what the last pair of answer tags holds.
    before_end, _, _ = completion.rpartition("</answer>")
    _, tag, expression = before_end.rpartition("<answer>")
    if not tag:
        return 0.0
    try:
        value, used = compute(expression)
    except (ArithmeticError, SyntaxError, ValueError):
        return format_score
    is_correct = sorted(used) == sorted(available) and abs(value - target) < 1e-5
    return 1.0 if is_correct else format_score


@reward("env", inline=True)
def env(rollout: Rollout) -> float:
    """Pass on the reward of the episode, which its environment or agent gave."""
    if rollout.reward is None:
        raise ValueError(
            "the episode has no reward: set env.name, let the agent return one, or name another "
            "reward"
        )
    return rollout.reward


@reward("random", inline=True)
def random(rollout: Rollout, seed: int = 0) -> float:
    """Give 0 or 1 by a hash of the rollout's id: the same in every run with this seed."""
    return float(hashlib.sha256(f"{seed}:{rollout.id}".encode()).digest()[0] & 1)


@reward("math", imports=("math_verify",))
def math(completion: str, answer: str, opening: str = "") -> float:
    """Give 1 if math-verify finds the completion's answer equal to the reference, else 0."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # An escaped dollar sign is a currency; the parser takes it for the start of a formula.
    reference = _in_digits(_reference(answer).replace(r"\$", ""))
    completion = _in_digits(completion.replace(r"\$", ""))
    is_delimited = "$" in reference or r"\boxed" in reference
    formula = reference if is_delimited else rf"\boxed{{{reference}}}"
    # No time limits of math-verify: they are alarm signals, which only work on a main thread.
    # The worker has a deadline.
    expected: list[Any] = parse(formula, parsing_timeout=None)
    if not expected:
        raise ValueError(f"math-verify can't read the reference answer {reference!r}")
    answered: list[Any] = parse(after_thought(completion, opening), parsing_timeout=None)
    return float(verify(expected, answered, timeout_seconds=None))


def _in_digits(text: str) -> str:
    """Write 1.5e-3 as 0.0015: math-verify takes the e for Euler's number."""
    return _SCIENTIFIC.sub(lambda number: f"{Decimal(number[0]):f}", text)


def column(meta: Mapping[str, Any], name: str) -> Any:
    """Read a column of the row; text is parsed as JSON."""
    return _from_json(meta.get(name))


def _from_json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def list_of(option: str, meta: Mapping[str, Any], name: str) -> Sequence[Any]:
    """Read the list in the column `name`, which an option names. Raises ValueError without one."""
    value = column(meta, name)
    if not isinstance(value, Sequence) or not value:
        raise ValueError(
            f"the row has no list of {option} in the column {name!r}: set the option {option}"
        )
    return value


def last_block(text: str) -> str | None:
    """Find the last block between fences of three backticks; return its content."""
    blocks: list[str] = re.findall(r"```[^\n`]*\n(.*?)```", text, re.DOTALL)
    return blocks[-1] if blocks else None


def after_thought(completion: str, opening: str) -> str:
    """Cut the thought off. A thought that was not closed leaves an empty text."""
    text = (opening + completion).rpartition("</think>")[2]
    return "" if "<think>" in text else text


def _refuse(constant: str) -> None:
    """Refuse NaN and infinities, which Python's parser takes for JSON."""
    raise ValueError(f"{constant} is not JSON")


def _reference(answer: str | None) -> str:
    if answer is None:
        raise ValueError("the prompt has no answer to compare with; set data.answer_column")
    return answer
