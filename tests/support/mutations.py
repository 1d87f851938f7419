"""Mutants of a Python file: each is one small change of its syntax at one place, as a slip of the hand makes it.

Left alone: docstrings, annotations, decorators, what only a message or a log shows, and how long something waits.
"""

import ast
import functools
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
CALCULATED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift,
}  # fmt: skip
CALLED = {
    "min": "max", "max": "min", "any": "all", "all": "any", "amin": "amax", "amax": "amin", "floor": "ceil",
    "ceil": "floor", "nansum": "sum", "nanmean": "mean", "clamp_min": "clamp_max", "clamp_max": "clamp_min",
}  # fmt: skip
SPEAKS = {"say", "print", "log", "debug", "info", "warning", "warn", "error", "exception", "refused", "invalid"}
"""Functions that nothing but a reader depends on."""
NOT_MUTATED = {
    "strict",
    "encoding",
    "flush",
    "indent",
    "name",
    "message",
    "hint",
    "code",
    "description",
    "help",
    "daemon",
}
"""Keywords likewise, or whose effect only broken data shows."""
NUMERIC = {"int", "float", "Tensor"}
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


class Mutant(NamedTuple):
    id: str  # path:function:operator:k, the same wherever the lines move
    path: str  # below src/hocket
    function: str  # as code objects call it; "": what runs when the file is imported
    line: int
    before: str
    after: str
    source: str  # of the whole mutated file
    meaning: str = ""


class Place(NamedTuple):
    """Where a mutant can be made."""

    function: str
    operator: str
    node: ast.AST  # that is replaced
    after: ast.AST


def mutants(path: str, source: str, number: int = 0, seed: int = 0, only: Collection[str] = ()) -> list[Mutant]:
    """Return a file's mutants, or `only` these IDs: `number` of them, of all operators alike; 0: all."""
    places: dict[str, Place] = {}
    counts: Counter[str] = Counter()
    for place in _places(ast.parse(source), "", ""):
        start = f"{path}:{place.function}:{place.operator}"
        if not only or f"{start}:{counts[start]}" in only:
            places[f"{start}:{counts[start]}"] = place
        counts[start] += 1
    found = (_made(name, path, source, places[name]) for name in _sampled(places, f"{seed}:{path}"))
    return [*itertools.islice(filter(None, found), number or None)]


def replaced(name: str, source: str, before: str, after: str, meaning: str, path: str) -> Mutant:
    """Return the mutant that has another text where `before` stands, once."""
    line = source.count("\n", 0, source.index(before)) + 1
    node: ast.AST = ast.parse(source)
    function = ""
    while inside := [child for child, _ in _children(node) if _has(child, line)]:
        node = inside[0]
        function = _inner(node, function) if isinstance(node, Scope) and not isinstance(node, ast.Lambda) else function
    return Mutant(name, path, function.rstrip(":"), line, before, after, source.replace(before, after), meaning)


def _has(node: ast.AST, line: int) -> bool:
    return isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)


def _sampled(places: Mapping[str, Place], seed: str) -> Iterator[str]:
    """Yield the IDs so that any number of the first ones has all operators alike."""
    dice = random.Random(seed)
    of_operator = defaultdict[str, list[str]](list)
    for name, place in places.items():
        of_operator[place.operator].append(name)
    for names in of_operator.values():
        dice.shuffle(names)
    kinds = sorted(of_operator)
    dice.shuffle(kinds)
    while any(of_operator.values()):
        yield from (of_operator[kind].pop() for kind in kinds if of_operator[kind])


def _made(name: str, path: str, source: str, place: Place) -> Mutant | None:
    """Return the mutant; None where the file means the same."""
    node: ast.expr = place.node
    data = source.encode()
    lines = data.splitlines(keepends=True)
    start, end = (
        sum(map(len, lines[: line - 1])) + column
        for line, column in ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
    )
    text = ast.unparse(place.after)
    # In brackets it surely is one operand; without them it is easier to read.
    sure, plain = ((data[:start] + part.encode() + data[end:]).decode() for part in (f"({text})", text))
    if isinstance(node, ast.expr) and _dump(sure) != _dump(plain):
        text, plain = f"({text})", sure
    if _dump(plain) == _dump(source):
        return None
    return Mutant(name, path, place.function, node.lineno, data[start:end].decode(), text, plain)


@functools.lru_cache(1 << 3)
def _dump(source: str) -> str:
    try:
        return ast.dump(ast.parse(source))
    except SyntaxError:  # where a statement's operand begins with a bracket that it may not have
        return source


def _places(node: ast.AST, function: str, waits: str) -> Iterator[Place]:
    """Yield places in the order of the source. `waits`: the name that the node is given to."""
    if _is_quiet(node):
        return
    inner = _inner(node, function) if isinstance(node, Scope) else function
    for operator, old, new in _changes(node, waits):
        yield Place(inner.rstrip(":"), operator, old, new)
    for child, name in _children(node):
        yield from _places(child, function if isinstance(child, ast.arguments) else inner, name)


def _inner(node: Scope, function: str) -> str:
    """Return the name of a scope within another one; a class's ends with a colon, for what is within it."""
    between = "" if not function else "." if function.endswith(":") else ".<locals>."
    return f"{function.rstrip(':')}{between}{getattr(node, 'name', '<lambda>')}" + ":" * isinstance(node, ast.ClassDef)


def _is_quiet(node: ast.AST) -> bool:
    if isinstance(node, ast.JoinedStr):
        return True
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test) or "__name__" in ast.unparse(node.test)
    if isinstance(node, ast.Call):
        name = _name(node.func)
        return name in SPEAKS or name.endswith("Error")
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
    return isinstance(node, ast.Expr) and _is_quiet(node.value)


def _name(function: ast.AST) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def _children(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield what may be mutated below a node, and the name that gets it."""
    if isinstance(node, ast.Raise):
        return
    if isinstance(node, ast.Assert):
        yield node.test, ""
    elif isinstance(node, ast.AnnAssign):
        if node.value:
            yield node.value, _name(node.target)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.args, ""
        yield from ((child, "") for child in node.body)
    elif isinstance(node, ast.ClassDef):
        yield from ((child, "") for child in node.body)
    elif isinstance(node, ast.arguments):
        names = [argument.arg for argument in [*node.posonlyargs, *node.args]]
        yield from zip(node.defaults, names[len(names) - len(node.defaults) :], strict=True)
        pairs = zip(node.kw_defaults, node.kwonlyargs, strict=True)
        yield from ((default, argument.arg) for default, argument in pairs if default)
    elif isinstance(node, ast.keyword):
        if node.arg not in NOT_MUTATED:
            yield node.value, node.arg or ""
    else:
        targets = node.targets if isinstance(node, ast.Assign) else []
        yield from ((child, _name(targets[0]) if targets else "") for child in ast.iter_child_nodes(node))


def _changes(node: ast.AST, waits: str) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """Yield (operator, what is replaced, by what)."""
    match node:
        case ast.Compare():
            for index, operator in enumerate(node.ops):
                operators = [*node.ops[:index], COMPARED[type(operator)](), *node.ops[index + 1 :]]
                yield "compare", node, ast.Compare(node.left, operators, node.comparators)
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "and-or", node, ast.BoolOp(other, node.values)
            for index in range(len(node.values)):
                left = [*node.values[:index], *node.values[index + 1 :]]
                yield "operand", node, left[0] if len(left) == 1 else ast.BoolOp(node.op, left)
        case ast.UnaryOp(op=ast.Not()):
            yield "not", node, node.operand
        case ast.UnaryOp(op=ast.USub()) if not isinstance(node.operand, ast.Constant):
            yield "sign", node, node.operand
        case ast.BinOp() if type(node.op) in CALCULATED:
            yield "arithmetic", node, ast.BinOp(node.left, CALCULATED[type(node.op)](), node.right)
        case ast.AugAssign() if type(node.op) in CALCULATED:
            yield "arithmetic", node, ast.AugAssign(node.target, CALCULATED[type(node.op)](), node.value)
        case ast.Constant():
            yield from _constants(node, waits)
        case ast.Call():
            yield from _calls(node)
        case ast.If() | ast.IfExp():
            yield "if", node.test, ast.Constant(True)
            yield "if", node.test, ast.Constant(False)
        case ast.While():
            yield "if", node.test, ast.Constant(False)
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            for index, generator in enumerate(node.generators):
                for test in generator.ifs:
                    tests = [other for other in generator.ifs if other is not test]
                    less = ast.comprehension(generator.target, generator.iter, tests, generator.is_async)
                    fields = {name: getattr(node, name) for name in node._fields if name != "generators"}
                    generators = [*node.generators[:index], less, *node.generators[index + 1 :]]
                    yield "filter", node, type(node)(**fields, generators=generators)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from _returns(node)
    if isinstance(node, ast.Raise | ast.Continue | ast.Delete) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
    ):
        yield "statement", node, ast.Pass()
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    is_statement = isinstance(node, ast.Assign | ast.AugAssign)
    if is_statement and isinstance(targets[0], ast.Attribute | ast.Subscript):
        yield "statement", node, ast.Pass()


def _constants(node: ast.Constant, waits: str) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    value = node.value
    if isinstance(value, bool):
        yield "flag", node, ast.Constant(not value)
    elif isinstance(value, int | float) and not _is_time(waits):
        yield "plus-one", node, ast.Constant(value + 1)
        if value:
            yield "zero", node, ast.Constant(type(value)(0))
            yield "negated", node, ast.UnaryOp(ast.USub(), node)


def _is_time(name: str) -> bool:
    return name.lower().endswith("_s") or any(word in name.lower() for word in ("timeout", "seconds", "poll", "grace"))


def _calls(node: ast.Call) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    name = _name(node.func)
    if name in CALLED:
        changed = CALLED[name]
        attribute = isinstance(node.func, ast.Attribute)
        function = ast.Attribute(node.func.value, changed) if attribute else ast.Name(changed)
        yield "function", node, ast.Call(function, node.args, node.keywords)
    if len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred):
        yield "call", node, node.args[0]
    if name == "map" and len(node.args) == 2:
        yield "call", node, node.args[1]
    for keyword in node.keywords:
        if keyword.arg and keyword.arg not in NOT_MUTATED and not _is_time(keyword.arg):
            yield "keyword", node, ast.Call(node.func, node.args, [k for k in node.keywords if k is not keyword])


def _returns(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """Yield changes of a function's own returns."""
    todo = [*function.body]
    kind = ast.unparse(function.returns) if function.returns else ""
    while todo:
        node = todo.pop(0)
        if isinstance(node, Scope):
            continue
        if isinstance(node, ast.Return) and node.value and not isinstance(node.value, ast.Constant):
            yield "none", node.value, ast.Constant(None)
            if kind in NUMERIC:
                yield "negative", node.value, ast.UnaryOp(ast.USub(), node.value)
        todo[:0] = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.excepthandler)]
