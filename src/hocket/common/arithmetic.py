"""Compute arithmetic that a model wrote, by its syntax tree: the text is never run."""

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
    """Return the value of numbers with + - * / // % and brackets, and the numbers in order."""
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"an expression has at most {MAX_EXPRESSION} characters")
    numbers: list[float] = []
    return _value(ast.parse(expression.strip(), mode="eval").body, numbers), numbers


def _value(node: ast.AST, numbers: list[Any]) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        numbers.append(node.value)
        return node.value
    if isinstance(node, ast.BinOp | ast.UnaryOp) and type(node.op) in _OPERATORS:
        operands = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.operand,)
        return _OPERATORS[type(node.op)](*(_value(operand, numbers) for operand in operands))
    raise ValueError(
        f"can't compute {ast.unparse(node)!r}: only numbers with + - * / // % and brackets"
    )
