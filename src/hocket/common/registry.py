"""One registry for everything a user can add: an unknown name lists the known ones, a double name raises."""

import difflib
import functools
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from hocket.errors import ConfigError, HocketError

T = TypeVar("T")
Item = TypeVar("Item")

PLUGIN_PREFIX = "hocket_plugin_"  # of the module names that load_plugins makes


class Registry(Generic[T]):
    """Named things of one kind, filled by a decorator; `kind` is the word for them in error messages ("reward")."""

    every: ClassVar[list["Registry[Any]"]] = []

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.items: dict[str, T] = {}
        self.unfinished: set[str] = set()  # names from a plugin that failed, which may be registered again
        self.every.append(self)

    def register(self, name: str) -> Callable[[Item], Item]:
        """Decorate a class or function to add it under `name`. Raise ConfigError if the name is taken."""

        def add(item: Any) -> Any:
            if name in self.items and name not in self.unfinished:
                raise ConfigError(f"{self.kind} {name!r} is registered twice; choose another name for one of them")
            self.unfinished.discard(name)
            self.items[name] = item
            return item

        return add

    def forget(self, name: str) -> None:
        """Remove what was registered under `name`."""
        del self.items[name]

    def get(self, name: str) -> T:
        """Return the object called `name`. Raise ConfigError that lists the known names."""
        if name not in self.items:
            plugins = [module for key, module in sys.modules.items() if key.startswith(PLUGIN_PREFIX)]
            files = [Path(str(one.__file__)).name for one in plugins if callable(getattr(one, name, None))]
            forgotten = f'{files[0]} has a function {name} without @{self.kind}("{name}")' if files else ""
            raise ConfigError(
                f"there is no {self.kind} {name!r}{nearest(name, self.items)}; known: "
                f"{', '.join(sorted(self.items))}; {forgotten or 'add your own as a Python file under plugins'}"
            )
        return self.items[name]

    def bind(self, name: str, options: Mapping[str, Any], *, section: str, keys: Iterable[str]) -> Callable[[], Any]:
        """Return a maker of `name` with a section's options beside its `keys`, tried once; ConfigError if it fails."""
        target: Any = self.get(name)
        called, make = f"{self.kind} {name}", functools.partial(target, **options)
        check_options(called, inspect.signature(target), options, section=section, keys=keys)
        try:
            make()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{called} refuses its options: {error}; change the section {section}") from error
        return make


def check_options(
    called: str, signature: inspect.Signature, options: Iterable[str], *, section: str, keys: Iterable[str]
) -> None:
    """Raise ConfigError for a parameter that `options` and `keys` lack or can't name, and an option that is none."""
    named = {p.name: p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD}
    called += str(signature.replace(return_annotation=inspect.Signature.empty))
    for option in options:
        if option not in named and len(named) == len(signature.parameters):  # there is no **options
            raise ConfigError(f"{called} has no option {option!r}{nearest(option, [*named, *keys])}")
    for name, parameter in named.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(f"{called} gets its arguments by name: remove the / from them")
        if parameter.default is parameter.empty and name not in (*keys, *options):
            close = nearest(name, [key for key in keys if key not in named])
            row = "; the row's answer is the argument answer, its other columns are in meta" if "meta" in keys else ""
            raise ConfigError(f"{called} needs the option {name!r}{close}: set {section}.{name}{row}")


def refuse_owned(
    where: str, given: Iterable[str], owned: Mapping[str, str], known: Collection[str], unknown: str
) -> None:
    """Raise ValueError that names all of `given` that are not `known`, or `owned` by a setting of hocket ("": none)."""
    wrong = []
    for name in given:
        if name in owned:
            advice = f"set {owned[name]}" if owned[name] else "leave it out"
            wrong.append(f"{where}{name} can't be set, as hocket sets it: {advice}")
        elif name not in known:
            wrong.append(f"{where}{name}{unknown}{nearest(name, set(known) - owned.keys())}")
    if wrong:
        raise ValueError("; ".join(wrong))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ' (did you mean ...?)' for the closest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def load_plugins(paths: Iterable[str]) -> None:
    """Import plain Python files so that their decorators run; a file is imported once per process."""
    for path in paths:
        file = Path(path).expanduser().resolve()
        if not file.is_file() or file.suffix != ".py":
            raise ConfigError(f"plugin {path!r} is not a Python file; paths are relative to {Path.cwd()}")
        name = f"{PLUGIN_PREFIX}{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
        if name in sys.modules:
            continue
        before = [(registry, {*registry.items}) for registry in Registry.every]
        spec: Any = importlib.util.spec_from_file_location(name, file)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]  # a later attempt must import it again, not find half a module
            for registry, names in before:
                registry.unfinished |= registry.items.keys() - names
            frames = traceback.walk_tb(error.__traceback__)
            lines = [1, *(line for frame, line in frames if frame.f_code.co_filename == str(file))]
            line = error.lineno if isinstance(error, SyntaxError) and error.filename == str(file) else lines[-1]
            cause = str(error) if isinstance(error, HocketError) else f"{type(error).__name__}: {error}"
            raise ConfigError(f"plugin {path!r} can't be imported: {file}, line {line}: {cause}") from error
