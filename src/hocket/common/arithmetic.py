"""Compute arithmetic that a model wrote, from its syntax tree: the text is never executed."""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

MAX_EXPRESSION = 200  # characters
_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def compute(expression: str) -> tuple[float, list[float]]:
    """Compute an expression of numbers, + - * / // % and brackets.

    Returns its value, and its numbers in order. Raises ValueError, SyntaxError or ArithmeticError
    for anything else.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"an expression has at most {MAX_EXPRESSION} characters")
    tree = ast.parse(expression.strip(), mode="eval")
    numbers: list[float] = []
    return _value(tree.body, numbers), numbers


def _value(node: ast.AST, numbers: list[Any]) -> Any:
    """Compute a node, and append the numbers below it."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        numbers.append(node.value)
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        before = _value(node.left, numbers)
        after = _value(node.right, numbers)
        return _OPERATORS[type(node.op)](before, after)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand, numbers))
    raise ValueError(
        f"can't compute {ast.unparse(node)!r}: only numbers with + - * / // % and brackets"
    )
