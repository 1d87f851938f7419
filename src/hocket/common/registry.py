"""Register what users can add: an unknown name lists the known ones, a double one raises."""

import difflib
import functools
import hashlib
import importlib.machinery
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, MappingProxyType, ModuleType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

from hocket.errors import ConfigError, HocketError

T = TypeVar("T")
Item = TypeVar("Item")

PLUGIN_PREFIX = "hocket_plugin_"  # of the module names that load_plugins makes
_WANTED = {  # by pydantic's word for a kind
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list: [one, two]",
    "dict": "a mapping of key: value",
    "model": "a mapping of key: value",
}
_OTHER_KIND = re.compile(f"({'|'.join(_WANTED)})_(type|parsing|from_float)")


class Registry(Generic[T]):
    """Named things of one kind, filled by a decorator; `kind` is the word for them in errors ("reward").

    `modules` are imported when a name that they register is first used; one that is not there registers none, as where
    hocket/extras is deleted.
    """

    every: ClassVar[list["Registry[Any]"]] = []

    def __init__(self, kind: str, **modules: str) -> None:
        self.kind = kind
        self._table = dict(modules)
        self._modules = modules
        self.items: dict[str, T] = {}
        self._origins: dict[str, str] = {}  # modules that registered them
        self.every.append(self)

    def register(self, name: str) -> Callable[[Item], Item]:
        """Add what is decorated as `name`. Raise ConfigError if that is taken, or missing."""
        if not isinstance(name, str):
            called = getattr(name, "__name__", "NAME")
            raise ConfigError(f'it needs a name: @{self.kind}("{called}")')
        module = sys._getframe(1).f_globals["__name__"]

        def add(item: Any) -> Any:
            if self._has(name):
                raise ConfigError(
                    f"{self.kind} {name!r} is registered twice; choose another name for one of them"
                )
            self.items[name] = item
            self._origins[name] = getattr(getattr(item, "function", item), "__module__", module)
            return item

        return add

    def _has(self, name: str) -> bool:
        if name in self._modules and is_there(self._modules[name]):
            module = self._modules.pop(name)  # first, as the module registers the name
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as error:
                self._modules[name] = module
                if not (error.name or "").startswith("hocket."):
                    raise
                raise ConfigError(
                    f"{self.kind} {name!r} needs {error.name}, which was deleted"
                ) from error
        return name in self.items

    @property
    def names(self) -> set[str]:
        return self.items.keys() | {
            name for name, module in self._modules.items() if is_there(module)
        }

    def each(self) -> Iterator[T]:
        """Yield all objects: those of the modules in the order of the table, then those that users have added."""
        for name in [*self._table, *(name for name in self.items if name not in self._table)]:
            if self._has(name):
                yield self.items[name]

    def of_module(self, module: str) -> list[str]:
        """Return the names that a module has registered."""
        return sorted(name for name in self.items if self._origins.get(name) == module)

    def forget(self, name: str) -> None:
        del self.items[name]

    def get(self, name: str, setting: str = "") -> T:
        """Return the object. Raise ConfigError that lists the known names."""
        if not self._has(name):
            advice = "add your own as a Python file under plugins"
            for key, plugin in _PLUGINS.items():
                if callable(getattr(sys.modules[key], name, None)):
                    advice = f'{plugin.path} has a function {name} without @{self.kind}("{name}")'
                    break
            names = ", ".join(sorted(self.names)) or "none, as files of hocket/extras were deleted"
            raise ConfigError(
                f"{setting}there is no {self.kind} {name!r}{nearest(name, self.names)}; known: {names}; {advice}"
            )
        return self.items[name]

    def choose(
        self, chosen: str | Mapping[str, Any], setting: str, keys: Collection[str] = ()
    ) -> T:
        """Return the object that `NAME` or `{name: NAME, option: value}` names, with these options bound to it.

        It is called by who asked, with the arguments `keys` beside the options; `bind` calls it at once, to try it.
        Raise ConfigError for an unknown name or option.
        """
        options = {"name": chosen} if isinstance(chosen, str) else dict(chosen)
        name = options.pop("name")
        target: Any = self.get(name, f"{setting}: ")
        read = options_of(f"{self.kind} {name}", target, options, section=setting, keys=keys)
        made: Any = functools.partial(target, **read)
        return cast(T, made)

    def bind(
        self, name: str, options: Mapping[str, Any] | None, *, section: str, keys: Collection[str]
    ) -> Callable[[], Any]:
        """Return a maker of `name` with a section's options beside its `keys`, tried once; ConfigError if it fails."""
        target: Any = self.get(name, f"{section}.name: ")
        called = f"{self.kind} {name}"
        make = functools.partial(
            target, **options_of(called, target, options, section=section, keys=keys)
        )
        try_out(make, called, section)
        return make


def is_there(module: str) -> bool:
    """Check whether a module has a file, if it is one of hocket's own."""
    if not module.startswith("hocket."):
        return True
    path = Path(__file__).parents[2].joinpath(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def options_of(
    called: str,
    target: Callable[..., Any],
    given: Mapping[str, Any] | None,
    *,
    section: str,
    keys: Collection[str] = (),
    row: str = "",
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return a plugin's options, read as its annotations say; its parameters named in `keys` it gets from elsewhere.

    Raise ConfigError for those that are missing, unknown or wrong; `row` is to be said of a missing one. `elsewhere`:
    what other programs call one of the keys → the key.
    """
    import pydantic  # would take a third of a reward worker's start
    import typing_extensions as typed  # pydantic wants its TypedDict before Python 3.12

    parameters = inspect.signature(target).parameters
    plugin = f"{called}({', '.join(parameters)})"
    kinds = dict[str, Any]()
    config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    config |= {"coerce_numbers_to_str": True, "allow_inf_nan": False}  # as settings are read
    for name, one in parameters.items():
        if one.kind is one.POSITIONAL_ONLY:
            raise ConfigError(f"{plugin} gets its arguments by name: remove the / from them")
        if one.kind is one.VAR_KEYWORD:
            config["extra"] = "allow"
        elif name not in keys:
            is_read = one.annotation is not one.empty and not isinstance(one.annotation, str)
            kind = one.annotation if is_read else Any
            kinds[name] = kind if one.default is one.empty else typed.NotRequired[kind]

    def wrong(item: Any) -> str:
        key = ".".join(map(str, item["loc"]))
        if item["type"] == "extra_forbidden":
            return f"{plugin} has no option {key!r}{nearest(key, [*parameters, *keys])}"
        if item["type"] == "missing" and key in kinds:
            close = nearest(key, {*keys} - parameters.keys())
            if elsewhere.get(key, key) not in parameters:
                close = f" (did you mean {elsewhere[key]!r}?)"
            return f"{plugin} needs the option {key!r}{close}: set {section}.{key}{row}"
        return f"{section}.{key}: {explain(item)}"

    make_model: Any = typed.TypedDict
    model = pydantic.with_config(config)(make_model("Options", kinds))
    try:
        options: dict[str, Any] = pydantic.TypeAdapter(model).validate_python(given or {})
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(map(wrong, error.errors()))) from error
    except pydantic.PydanticUserError as error:
        raise ConfigError(
            f"{plugin} has an annotation that pydantic can't check: {error}"
        ) from error
    return options


def need(what: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{what} needs the package {package}: .venv/bin/pip install {package}, or leave it out"
        )


def try_out(make: Callable[[], Any], called: str, section: str) -> None:
    try:
        make()
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{called} refuses its options: {error}; change the section {section}"
        ) from error


def explain(item: Mapping[str, Any]) -> str:
    """Say what pydantic finds wrong, one of its `errors()`."""
    message = str(item["msg"]).removeprefix("Value error, ")
    value = item["input"]
    if kind := _OTHER_KIND.fullmatch(item["type"]):
        message = f"must be {_WANTED[kind[1]]}, got {value!r:.80}"
        if kind[1] in ("dict", "model") and ":" in f"{item['loc'][-1:]}{value}":
            message += "; write a space after the colon"
    if item["type"] == "literal_error":
        message += nearest(str(value), re.findall("'(.*?)'", message))
    return message


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


STAND_INS: Registry[Callable[[], None]] = Registry("stand-in", openrlhf="hocket.extras.openrlhf")
"""Functions by the package whose modules each has plugins import where it is not installed."""
stand_in = STAND_INS.register


class Plugin(NamedTuple):
    path: str  # as the config has it
    sha256: str
    text: str
    registers: tuple[str, ...]  # such as "reward share"


_PLUGINS: dict[str, Plugin] = {}  # by module


class _PluginLoader(importlib.machinery.SourceFileLoader):
    """Executes what the file held when it was read, however often; no bytecode of an earlier version of it."""

    def __init__(self, name: str, file: Path) -> None:
        super().__init__(name, str(file))
        self.content = file.read_bytes()

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.content, self.path, "exec", dont_inherit=True)


def load_plugins(paths: Iterable[str]) -> list[Plugin]:
    """Import Python files, whose decorators register; each once per process."""
    return [_PLUGINS[load_plugin(path).__name__] for path in paths]


def load_plugin(path: str) -> ModuleType:
    """Import one as `load_plugins`, and return its module."""
    file = Path(path).expanduser().resolve()
    if not file.is_file() or file.suffix != ".py":
        raise ConfigError(
            f"plugin {path!r} is not a Python file; paths are relative to {Path.cwd()}"
        )
    name = f"{PLUGIN_PREFIX}{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in _PLUGINS:
        return sys.modules[name]
    loader = _PluginLoader(name, file)
    for package in STAND_INS.names:
        if package.encode() in loader.content:
            STAND_INS.get(package)()
    spec: Any = importlib.util.spec_from_file_location(name, file, loader=loader)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]  # a later attempt must import it again, not find half a module
        for registry, one in _registered(name):
            registry.forget(one)
        told = "".join(traceback.format_exception(error))
        line = ["1", *re.findall(f'File "{re.escape(str(file))}", line ([0-9]+)', told)][-1]
        cause = str(error) if isinstance(error, HocketError) else f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError):
            cause += f"; .venv/bin/pip install {error.name}, or, for a file of yours, set PYTHONPATH to its folder"
        elif isinstance(error, ImportError) and error.name == "hocket":
            cause += "; decorators are in hocket.rewards and hocket.envs"
        raise ConfigError(
            f"plugin {path!r} can't be imported: {file}, line {line}: {cause}"
        ) from error
    registers = tuple(f"{registry.kind} {one}" for registry, one in _registered(name))
    digest = hashlib.sha256(loader.content).hexdigest()
    _PLUGINS[name] = Plugin(path, digest, loader.content.decode(errors="replace"), registers)
    return module


def _registered(module: str) -> list[tuple[Registry[Any], str]]:
    """Return the names of what a module has registered."""
    return [(registry, name) for registry in Registry.every for name in registry.of_module(module)]
