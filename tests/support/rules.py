"""What a test that is not marked long may not do: start a second engine, or sleep."""

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

import pytest

from support.processes import Process

STARTS = ("serve", "quickstart", "launch")
"""Commands that start an engine; a class that runs one has an attribute `starts_engine`."""
LONGEST_SLEEP_S = 0.1
"""Between two looks at what is waited for."""


def broken(item: Any) -> str | None:
    """Returns what an unmarked test does that only a long one may, as its code says, its fixtures' and helpers'."""
    if item.get_closest_marker("long") or item.get_closest_marker("gpu"):
        return None
    if any(seconds > LONGEST_SLEEP_S for seconds in slept(item.function.__code__)):
        return "it sleeps"
    functions: set[types.FunctionType] = set()
    for function in (item.function, *(found[-1].func for found in item._fixtureinfo.name2fixturedefs.values())):
        collect(function, functions)
    engines = started(functions)
    return f"it starts {engines} engines" if engines > 1 else None


def collect(function: Any, found: set[types.FunctionType]) -> None:
    """Adds a function, and those of the tests that it names."""
    if isinstance(function, types.FunctionType) and function not in found:
        found.add(function)
        for named in named_in(function):
            if getattr(named, "__module__", "").startswith(("tests.", "support.")):
                collect(named, found)


def started(functions: set[types.FunctionType]) -> int:
    """Returns how many engines functions start: by classes that say so, and by commands where a process is started."""
    if not any(isinstance(value, type) and is_process(value) for function in functions for value in named_in(function)):
        return 0
    named = [value for function in functions for value in globals_of(function) if isinstance(value, type)]
    engines = sum(getattr(value, "starts_engine", False) for value in named)
    if any(issubclass(value, Process) for value in named):
        engines += sum(word in STARTS for function in functions for word in first_words(function))
    return engines


def is_process(value: type) -> bool:
    return getattr(value, "starts_engine", False) or issubclass(value, Process)


@functools.cache  # a function has as many tests as sets of parameters
def named_in(function: types.FunctionType) -> list[Any]:
    """Returns the values of the global names in a function's code, and of attributes that are called alike."""
    names = {name for code in codes(function.__code__) for name in code.co_names}
    return [function.__globals__[name] for name in names if name in function.__globals__]


@functools.cache
def globals_of(function: types.FunctionType) -> list[Any]:
    """Returns the values of the global names in a function's code, as often as they occur."""
    names = (loaded.argval for loaded in loads(function) if loaded.opname == "LOAD_GLOBAL")
    return [function.__globals__.get(name) for name in names]


@functools.cache
def first_words(function: types.FunctionType) -> list[str]:
    """Returns the texts in a function's code, and the first ones of its lists of texts."""
    values = (loaded.argval for loaded in loads(function) if loaded.opname == "LOAD_CONST")
    return [str(value[0] if isinstance(value, tuple) and value else value) for value in values]


def loads(function: types.FunctionType) -> Iterator[dis.Instruction]:
    for code in codes(function.__code__):
        yield from dis.get_instructions(code)


@functools.cache
def slept(code: types.CodeType) -> list[float]:
    """Returns the seconds that the calls of `time.sleep` and `asyncio.sleep` name in a test itself."""
    if "sleep" not in code.co_names:
        return []
    seconds = []
    instructions = list(dis.get_instructions(code))
    for index, instruction in enumerate(instructions):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and instruction.argval == "sleep":
            following = instructions[index + 1]
            if following.opname == "LOAD_CONST" and isinstance(following.argval, int | float):
                seconds.append(following.argval)
    return seconds


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a function's code and that of the functions and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def check(items: list[pytest.Item]) -> None:
    """Refuses a suite with a test that breaks the rule."""
    wrong = [f"{item.nodeid}: {what}" for item in items if (what := broken(item))]
    if wrong:
        raise pytest.UsageError("mark these tests long, or mend them:\n  " + "\n  ".join(wrong))
