#!/usr/bin/env python3
"""Write the pages of docs/reference that hocket itself knows, below the line that says so.

PYTHONPATH=src:tests .venv/bin/python tests/reference.py          which pages are out of date?
PYTHONPATH=src:tests .venv/bin/python tests/reference.py --write
"""

import argparse
import ast
import builtins
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hocket
from hocket import config
from hocket.commands import cli
from hocket.commands.command import COMMANDS, SETTINGS
from hocket.common.registry import Registry
from hocket.observe import metrics, rows

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
MARK = "<!-- Everything below is written by tests/reference.py. -->"
PYTHON = {  # heading → objects, as a user imports them
    "Train": ("hocket.train", "hocket.sft", "hocket.rm", "hocket.dpo"),
    "Read configs and runs": (
        "hocket.config.load",
        "hocket.observe.rows.read_metrics",
        "hocket.observe.rows.read_rollouts",
        "hocket.observe.rows.read_summary",
    ),
    "Rewards": ("hocket.rewards.reward", "hocket.rewards.RetryError"),
    "Environments": (
        "hocket.envs.environment",
        "hocket.envs.Environment",
        "hocket.envs.Action",
        "hocket.envs.Observation",
        "hocket.envs.Step",
        "hocket.envs.history",
    ),
    "Tools and agents": ("hocket.envs.tool", "hocket.envs.agent", "hocket.envs.Task", "hocket.envs.Agent"),
    "Data": (
        "hocket.data.sources.source",
        "hocket.data.sources.TASKS",
        "hocket.data.curriculum",
        "hocket.data.Curriculum",
        "hocket.data.Candidates",
        "hocket.data.EpochPlan",
        "hocket.data.renderer.renderer",
    ),
    "Algorithms": (
        "hocket.algorithm.choices.advantage",
        "hocket.algorithm.choices.credit",
        "hocket.algorithm.choices.objective",
        "hocket.algorithm.choices.aggregate",
        "hocket.algorithm.choices.kl",
        "hocket.algorithm.choices.correction",
        "hocket.trainer.objective.column",
    ),
    "Parts of a run": ("hocket.run_part.run_part", "hocket.run_part.RunPart", "hocket.run_part.Joined"),
    "Parts of the server": (
        "hocket.server.parts.server_part",
        "hocket.server.parts.Server",
        "hocket.server.main.http_part",
        "hocket.sync.transports.transport",
    ),
    "Commands and output": (
        "hocket.commands.command.command",
        "hocket.commands.command.option",
        "hocket.launch.ENGINES",
        "hocket.observe.loggers.logger",
        "hocket.observe.loggers.Logger",
        "hocket.observe.metrics.metric_table",
        "hocket.observe.metrics.Metric",
        "hocket.observe.run_folder.report",
    ),
    "Types": (
        "hocket.types.Prompt",
        "hocket.types.Rollout",
        "hocket.types.TokenSequence",
        "hocket.types.TurnReward",
        "hocket.types.Score",
    ),
    "Errors": (
        "hocket.errors.HocketError",
        "hocket.errors.SetupError",
        "hocket.errors.ConfigError",
        "hocket.errors.DataError",
        "hocket.errors.RewardError",
        "hocket.errors.ServerError",
        "hocket.errors.SyncError",
        "hocket.errors.TrainerError",
    ),
}
SECTIONS = ("Args", "Returns", "Raises", "Yields", "Example", "Attributes")
TITLES = {"Args": "Arguments", "Attributes": "Attributes", "Returns": "Returns", "Raises": "Raises", "Yields": "Yields"}
WIDTH = 118  # of prose
CODE_WIDTH = 92  # of a signature on one line


def commands() -> str:
    """Writes every command with its arguments, options, examples and page."""
    return "\n\n".join(_command(name, text) for name, text in hocket.COMMANDS.items())


def _command(name: str, text: str) -> str:
    parts = [f"## {name}", f"{text[0].upper()}{text[1:]}."]
    if name not in COMMANDS.names:  # run.py's own
        parts.append(f"```sh\npython3 run.py {name}\n```")
        return "\n\n".join(parts)
    entry = COMMANDS.get(name)
    cells = []
    for names, keywords in entry.options:
        if keywords.get("help") == argparse.SUPPRESS or (names, keywords) == SETTINGS:
            continue
        given = names if names[0].startswith("-") or not keywords.get("metavar") else ()
        shown = f"{', '.join(given)} {keywords.get('metavar') or ''}".strip()
        cells.append((f"`{shown}`", str(keywords.get("help", ""))))
    if SETTINGS in entry.options:
        default = cli.DEFAULTS.get(name, "the defaults of all settings")
        cells.insert(0, ("`CONFIG`", f"YAML file. Default: `{cli.PROJECT}` of the folder, else {default}"))
        cells.insert(1, ("`section.key=value`", "replaces one setting; repeatable"))
    if cells:
        parts.append(config.sections.markdown_table(("argument", "meaning"), cells))
    lines = "\n".join(f"python3 run.py {name} {words}".rstrip() for words in entry.examples)
    parts.append(f"```sh\n{lines}\n```")
    title = (ROOT / "docs" / entry.page).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    parts.append(f"More: [{title}](../{entry.page})")
    return "\n\n".join(parts)


def python() -> str:
    """Writes signature and docstring of what a program or a plugin may import."""
    parts = []
    for heading, names in PYTHON.items():
        parts.append(f"## {heading}")
        for name in names:
            parts += _object(name)
    return "\n\n".join(parts)


def item_of(name: str) -> Any:
    """Returns the object at a dotted name."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _object(name: str) -> Iterator[str]:
    module_name, _, attribute = name.rpartition(".")
    item = item_of(name)
    module, text = _home(module_name, attribute, item)
    yield f"### {name}"
    if name.startswith("hocket.errors."):
        yield from _docstring(text, module)
        return
    yield f"```python\n{_signature(attribute, item)}\n```"
    yield from _docstring(text, module)
    if inspect.isclass(item):
        attributes = list(_attributes(item))
        if attributes:
            cells = ("attribute", "type", "default", "meaning")
            yield config.sections.markdown_table(cells, attributes)
        methods = list(_methods(item))
        if methods:
            yield "Methods:"
            yield "\n".join(methods)


def _home(module_name: str, attribute: str, item: Any) -> tuple[Any, str]:
    """Returns the module in which an object is defined, and its docstring: of a name, the text behind it."""
    module = importlib.import_module(module_name)
    if inspect.isclass(item) or inspect.isfunction(item):
        return sys.modules[item.__module__], inspect.cleandoc(item.__doc__ or "")
    # Another module may have imported the name from where it is assigned.
    ours = [place for name, place in sys.modules.items() if name.startswith("hocket.")]
    for place in (module, *ours):
        if vars(place).get(attribute) != item:
            continue
        for statement, text in itertools.pairwise(ast.parse(inspect.getsource(place)).body):
            targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
            if [getattr(target, "id", None) for target in targets] == [attribute] and isinstance(text, ast.Expr):
                return place, inspect.cleandoc(ast.literal_eval(text.value))
    raise ValueError(f"{module_name}.{attribute} has no docstring")


def _signature(name: str, item: Any) -> str:
    if inspect.isclass(item):
        ours = [base.__name__ for base in item.__bases__ if base.__module__.startswith("hocket")]
        raised = ["Exception"] if issubclass(item, Exception) and not ours else []
        bases = ", ".join(ours + raised)
        return f"class {name}({bases}): ..." if bases else f"class {name}: ..."
    if isinstance(item, Registry):
        return f'{name}.register("NAME")'
    if not inspect.isfunction(item):  # a method of a registry
        return f"def {name}(name: str) -> Decorator: ..."
    function = ast.parse(textwrap.dedent(inspect.getsource(item))).body[0]
    assert isinstance(function, ast.FunctionDef)
    return _header(function)


def _header(function: ast.FunctionDef | ast.AsyncFunctionDef, *, method: bool = False) -> str:
    """Writes a function's name, arguments and type, on several lines where one would be too long."""
    for node in ast.walk(function.args):
        if isinstance(node, ast.arg) and node.annotation is not None:
            node.annotation = _Plain().visit(node.annotation)
    if function.returns is not None:
        function.returns = _Plain().visit(function.returns)
    if method:
        function.args.args = function.args.args[1:]
    returns = f" -> {ast.unparse(function.returns)}" if function.returns is not None else ""
    returns = re.sub(r"-> Callable\[\[(\w+|type\[\w+\])\], \1\]$", "-> Decorator", returns)
    start = "async def" if isinstance(function, ast.AsyncFunctionDef) else "def"
    arguments = [argument.replace("'", '"') for argument in _arguments(function.args)]
    line = f"{start} {function.name}({', '.join(arguments)}){returns}"
    if method:
        return re.sub("^(async )?def ", r"\1", line)
    if len(line) <= CODE_WIDTH:
        return f"{line}: ..."
    lines = "".join(f"    {argument},\n" for argument in arguments)
    return f"{start} {function.name}(\n{lines}){returns}: ..."


def _arguments(arguments: ast.arguments) -> Iterator[str]:
    """Yields each argument with its type and default."""
    none: list[ast.expr | None] = [None]
    for argument, default in zip(
        arguments.args, none * (len(arguments.args) - len(arguments.defaults)) + [*arguments.defaults], strict=True
    ):
        yield ast.unparse(argument) + (f" = {ast.unparse(default)}" if default is not None else "")
    if arguments.vararg is not None:
        yield f"*{ast.unparse(arguments.vararg)}"
    elif arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield ast.unparse(argument) + (f" = {ast.unparse(default)}" if default is not None else "")
    if arguments.kwarg is not None:
        yield f"**{ast.unparse(arguments.kwarg)}"


def _attributes(item: Any) -> Iterator[tuple[str, str, str, str]]:
    """Yields the cells of each public attribute: its meaning is the comment behind or above it."""
    source = textwrap.dedent(inspect.getsource(item))
    lines = source.splitlines()
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.FunctionDef) and "property" in map(ast.unparse, node.decorator_list):
            meaning = _first(ast.get_docstring(node) or "")
            yield f"`{node.name}`", f"`{_type(node.returns)}`", "", _meaning(meaning)
            continue
        target: ast.expr
        if isinstance(node, ast.AnnAssign):
            target, value, kind = node.target, node.value, _type(node.annotation)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            target, value, kind = node.targets[0], node.value, type(node.value.value).__name__
        else:
            continue
        name = ast.unparse(target)
        meaning = lines[(node.end_lineno or 0) - 1].encode()[node.end_col_offset :].decode().partition("#")[2]
        above = node.lineno - 2
        comments: list[str] = []
        while not meaning and lines[above].strip().startswith("#"):
            comments.insert(0, lines[above].strip()[1:].strip())
            above -= 1
        meaning = meaning.strip() or " ".join(comments)
        if name.startswith("_"):
            continue
        default = ast.unparse(value).replace("'", '"') if value is not None else ""
        default = {"list": "[]", "dict": "{}"}.get(default.partition("default_factory=")[2].rstrip(")"), default)
        default = "" if default.startswith("dataclasses.field") else default
        yield f"`{name}`", f"`{kind}`", f"`{default}`" if default else "", _meaning(meaning)


def _meaning(text: str) -> str:
    """Writes a sentence as a table has it."""
    text = _lower(text.removesuffix("."))
    return _marked(re.sub(r'"([^"]*<[^"]*)"', r"`\1`", text))


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:] if re.match("(?!True|False|None)[A-Z][a-z' ]", text) else text


def _marked(text: str) -> str:
    """Puts names of code with an underscore into backticks, where they are not in some."""
    parts = re.split(r"(`[^`]*`)", text)
    name = r"(?<![\w.\"/{])((?:[a-z]\w*\.)*[a-z]+(?:_[a-z0-9]+)+)(?![\w(/=]|\.\w)"
    return "".join(part if part.startswith("`") else re.sub(name, r"`\1`", part) for part in parts)


class _Plain(ast.NodeTransformer):
    """Writes annotations without what only checks their values, and without quotes."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if getattr(node.value, "id", "") == "Annotated":
            return self.visit(node.slice.elts[0])  # type: ignore[attr-defined, no-any-return]
        if getattr(node.value, "id", "") == "Literal":  # its quotes stay
            return node
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.parse(node.value, mode="eval").body if isinstance(node.value, str) else node


def _type(annotation: Any) -> str:
    text = ast.unparse(_Plain().visit(annotation)).replace("StrictStr", "str")
    return text.replace("StrictFloat | StrictBool", "float | bool")


def _methods(item: Any) -> Iterator[str]:
    """Yields a line for each public method: its arguments, and what it does."""
    source = textwrap.dedent(inspect.getsource(item))
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        text = ast.get_docstring(node)
        if text is None or node.decorator_list:
            continue
        paragraphs = [part for part in text.split("\n\n") if part.split(":")[0] not in SECTIONS]
        sentences = _marked(" ".join(" ".join(paragraphs).split()))
        yield _wrapped(f"`{_header(node, method=True)}`: {sentences}", "- ")
        listed = re.search(r"^Args:\n(.*?)(?:\n\n|\Z)", text, re.M | re.S)
        if listed is not None:
            yield from (_wrapped(_marked(_named(part)), "  - ") for part in _items(listed[1]))


def _first(docstring: str) -> str:
    return " ".join(inspect.cleandoc(docstring).split("\n\n")[0].split())


def _items(body: str) -> list[str]:
    """Divides the lines of a section: each item begins a line, its other lines are indented."""
    return [" ".join(item.split()) for item in re.split(r"\n(?=\S)", inspect.cleandoc("\n" + body))]


def _named(item: str) -> str:
    """Puts the name that an item begins with into backticks."""
    return re.sub(r"^([\w.]+): ", r"`\1`: ", item)


def _docstring(text: str, module: Any) -> Iterator[str]:
    """Writes a docstring of Google's style as Markdown."""
    for part in re.split(r"\n\n(?=\S)", text):
        title, _, body = part.partition("\n")
        section, colon, rest = title.partition(":")
        if not colon or section not in SECTIONS:
            yield _wrapped(_marked(" ".join(part.split())))
        elif section == "Example":
            before, _, code = f"{rest.strip()}\n{body}".partition("\n    ")
            yield _wrapped(f"Example: {' '.join(before.split())}" if before.strip() else "Example:")
            yield f"```python\n{_example(inspect.cleandoc('    ' + code), module)}\n```"
        elif section == "Returns":
            yield _wrapped(f"Returns {_lower(' '.join(body.split()))}")
        else:
            yield f"{TITLES[section]}:"
            yield "\n".join(_wrapped(_marked(_named(item)), "- ") for item in _items(body))


def _example(code: str, module: Any) -> str:
    """Writes an example as a file has it: with the imports that its docstring leaves out."""
    if ">>> " in code:
        lines = [
            re.sub(r"^(>>>|[.]{3}) ?", "", line) if line.startswith((">>>", "...")) else f"# {line}"
            for line in code.splitlines()
        ]
        code = "\n".join(lines)
    code = re.sub(r"\n{2,}(?=@|class |def |async def )", "\n\n\n", code.replace("'''", '"""'))
    imports = _imports(code, module)
    if not imports:
        return code
    return f"{imports}\n\n\n{code}" if code.startswith(("@", "def ", "class ")) else f"{imports}\n\n{code}"


def _imports(code: str, module: Any) -> str:
    """Finds where the names come from that an example uses and does not define."""
    tree = ast.parse(code)
    known = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    known |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    known |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            known |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - known - vars(builtins).keys()
    lines: dict[str, list[str]] = {"standard": [], "other": [], "hocket": []}
    places: dict[str, list[str]] = {}
    for name in sorted(used, key=lambda name: (not name.isupper(), name.islower(), name)):
        place = _place(name, module)
        if place:
            places.setdefault(place, []).append(name)
        else:
            lines["standard" if name in sys.stdlib_module_names else "other"].append(f"import {name}")
    for place in sorted(places):
        first = place.split(".")[0]
        kind = "hocket" if first == "hocket" else "standard" if first in sys.stdlib_module_names else "other"
        lines[kind].append(f"from {place} import {', '.join(places[place])}")
    return "\n\n".join("\n".join(group) for group in lines.values() if group)


def _place(name: str, module: Any) -> str:
    """Returns the module to import a name from; "" if it is a module itself."""
    for path in itertools.chain(*PYTHON.values()):
        if path.endswith(f".{name}") and (name != "reward" or module.__name__.startswith("hocket.rewards")):
            return path.rpartition(".")[0]
    if name in PLACES:
        return PLACES[name]
    value = getattr(module, name, None)
    if inspect.ismodule(value) or name in sys.stdlib_module_names or name == "uvicorn":
        return ""
    return str(getattr(value, "__module__", None) or module.__name__)


PLACES = {  # names that are defined elsewhere than where a user imports them
    "Any": "typing",
    "Callable": "collections.abc",
    "Config": "hocket.config",
    "DataConfig": "hocket.config",
    "Iterator": "collections.abc",
    "Message": "hocket.types",
    "Metrics": "hocket.types",
    "Options": "hocket.data.renderer",
    "Auxiliary": "hocket.trainer.objective",
    "Measure": "hocket.trainer.objective",
    "array": "array",
    "choose": "hocket.algorithm.choices",
    "SETTINGS": "hocket.commands.command",
    "Sequence": "collections.abc",
    "Tensor": "torch",
    "ToolSchemas": "hocket.data.renderer",
}


def _wrapped(text: str, bullet: str = "") -> str:
    """Breaks prose into lines, but no code in backticks."""
    whole = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(
        whole,
        WIDTH,
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\0", " ")


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": config.reference,
    "metrics.md": metrics.reference,
    "presets.md": config.preset_table,
    "run_folder.md": rows.reference,
    "commands.md": commands,
    "python_api.md": python,
}


def page(name: str) -> str:
    """Returns a page as it should be: what people wrote above the mark, and what hocket knows below."""
    head = (FOLDER / name).read_text(encoding="utf-8").partition(MARK)[0].rstrip()
    return f"{head}\n\n{MARK}\n\n{PAGES[name]().strip()}\n"


if __name__ == "__main__":
    stale = [name for name in PAGES if (FOLDER / name).read_text(encoding="utf-8") != page(name)]
    for name in stale:
        if "--write" in sys.argv:
            (FOLDER / name).write_text(page(name), encoding="utf-8")
        print(f"docs/reference/{name}: {'written' if '--write' in sys.argv else 'out of date'}")
    sys.exit(bool(stale) and "--write" not in sys.argv)
