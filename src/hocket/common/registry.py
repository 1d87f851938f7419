"""Registries of what users can add, the options of what they hold, and the plugin files of users.

An unknown name is refused with a list of the known ones, and so is a name that is registered twice.
"""

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

from hocket.common.files import shipped
from hocket.errors import ConfigError, HocketError, pip

T = TypeVar("T")
Item = TypeVar("Item")

PLUGIN_PREFIX = "hocket_plugin_"  # begins the names of the modules that load_plugins makes
# What a value must be, by the first word of pydantic's error types: int_type, int_parsing, ...
_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list: [one, two]",
    "dict": "a mapping of key: value",
    "model": "a mapping of key: value",
}
_WRONG_TYPE = re.compile(f"({'|'.join(_EXPECTED)})_(type|parsing|from_float)")


class Registry(Generic[T]):
    """Objects of one kind by name, filled by a decorator; errors call an object by its `kind`.

    Example: shapes that plugins can add, and that a setting chooses.

        from hocket.common.registry import Registry

        SHAPES = Registry("shape")


        @SHAPES.register("rectangle")
        def rectangle(height: float, width: float = 2.0) -> float:
            return height * width


        area = SHAPES.get("rectangle")(3.0)
        choice = SHAPES.choose({"name": "rectangle", "width": 5.0}, "draw.shape", keys=("height",))
        chosen_area = choice(3.0)

    `modules` maps names to the modules that register them. A module is imported when its name is
    first used. One whose file is missing registers nothing, as where hocket/extras is deleted.
    """

    every: ClassVar[list["Registry[Any]"]] = []  # all registries of this process

    def __init__(self, kind: str, **modules: str) -> None:
        self.kind = kind
        self._modules = modules
        self.items: dict[str, T] = {}
        self._origins: dict[str, str] = {}  # by name: the module that registered it
        self.every.append(self)

    def register(self, name: str) -> Callable[[Item], Item]:
        """Register the decorated object as `name`.

        Raises ConfigError if the name is taken, or if the decorator was used without one.
        """
        if not isinstance(name, str):
            function_name = getattr(name, "__name__", "NAME")
            raise ConfigError(f'it needs a name: @{self.kind}("{function_name}")')
        # Objects without a module of their own, such as tables, come from the calling module.
        calling_module = sys._getframe(1).f_globals["__name__"]

        def add(item: Any) -> Any:
            if self._has(name):
                raise ConfigError(
                    f"{self.kind} {name!r} is registered twice; choose another name for one of them"
                )
            self.items[name] = item
            function = getattr(item, "function", item)  # an item may be a record of a function
            self._origins[name] = getattr(function, "__module__", calling_module)
            return item

        return add

    def _has(self, name: str) -> bool:
        """Check whether a name is registered, and import its module first if that was not done."""
        module = self._modules.get(name)
        if module is not None and name not in self.items and is_there(module):
            # Its decorator comes here again. The second import does nothing, as the first one runs.
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as error:
                # A missing package is another error than a deleted part of hocket.
                if not (error.name or "").startswith("hocket."):
                    raise
                raise ConfigError(
                    f"{self.kind} {name!r} needs {error.name}, which was deleted"
                ) from error
        return name in self.items

    @property
    def names(self) -> set[str]:
        """All names: those that are registered, and those of modules not imported yet."""
        names = set(self.items)
        names.update(name for name, module in self._modules.items() if is_there(module))
        return names

    def each(self) -> Iterator[T]:
        """Yield all objects: first hocket's in the order of `modules`, then those of users."""
        of_users = [name for name in self.items if name not in self._modules]
        for name in list(self._modules) + of_users:
            if self._has(name):
                yield self.items[name]

    def of_module(self, module: str) -> list[str]:
        """List the names that a module has registered."""
        return sorted(name for name in self.items if self._origins.get(name) == module)

    def forget(self, name: str) -> None:
        """Remove a name, for a plugin that failed."""
        del self.items[name]

    def get(self, name: str, setting: str = "") -> T:
        """Get the object `name`. Raises ConfigError that lists the known names.

        The error begins with `setting`, such as "sync.backend: ".
        """
        if self._has(name):
            return self.items[name]
        advice = "add your own as a Python file under plugins"
        for module, plugin in _PLUGINS.items():
            if callable(getattr(sys.modules[module], name, None)):
                advice = f'{plugin.path} has a function {name} without @{self.kind}("{name}")'
                break
        names = ", ".join(sorted(self.names)) or "none, as files of hocket/extras were deleted"
        guess = nearest(name, self.names)
        raise ConfigError(
            f"{setting}there is no {self.kind} {name!r}{guess}; known: {names}; {advice}"
        )

    def choose(
        self, chosen: str | Mapping[str, Any], setting: str, keys: Collection[str] = ()
    ) -> T:
        """Choose an object by `NAME` or `{name: NAME, option: value}`, and bind the options to it.

        The result is still to be called with the arguments named in `keys`. Raises ConfigError for
        an unknown name or option.
        """
        options = {"name": chosen} if isinstance(chosen, str) else dict(chosen)
        name = options.pop("name")
        target: Any = self.get(name, f"{setting}: ")
        options = options_of(f"{self.kind} {name}", target, options, section=setting, keys=keys)
        return cast(T, functools.partial(target, **options))

    def bind(
        self, name: str, options: Mapping[str, Any] | None, *, section: str, keys: Collection[str]
    ) -> Callable[[], Any]:
        """Make a function without arguments that calls the object `name` with a section's options.

        `keys` are keys of the section that are not options. The function is called once, to try
        the options. Raises ConfigError if it refuses them.
        """
        target: Any = self.get(name, f"{section}.name: ")
        title = f"{self.kind} {name}"
        checked = options_of(title, target, options, section=section, keys=keys)
        make = functools.partial(target, **checked)
        try_out(make, title, section)
        return make


def is_there(module: str) -> bool:
    """Check whether a module of hocket has a file; other modules count as present."""
    if not module.startswith("hocket."):
        return True
    path = Path(__file__).parents[2].joinpath(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def options_of(
    title: str,
    target: Callable[..., Any],
    options: Mapping[str, Any] | None,
    *,
    section: str,
    keys: Collection[str] = (),
    row: str = "",
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Check the options of a plugin, and convert them to the types that it is annotated with.

    Raises ConfigError for options that are missing, unknown or of a wrong type.

    Args:
        title: the plugin's name in errors.
        target: its function or class.
        options: the values that the user has set.
        section: the setting that has them, in errors.
        keys: parameters of the target that are no options: hocket passes them.
        row: the end of the error of a missing option.
        elsewhere: name of a parameter in another program -> the key that it means.
    """
    import pydantic  # its import would take a third of a reward worker's start
    import typing_extensions as typed  # before Python 3.12 pydantic needs its TypedDict

    # The options are described to pydantic as a TypedDict, with a field for each parameter.
    parameters = inspect.signature(target).parameters
    plugin = f"{title}({', '.join(parameters)})"
    types = _option_types(plugin, parameters, keys)

    def explain_option(item: Any) -> str:
        """Turn one of pydantic's errors into a sentence."""
        key = ".".join(map(str, item["loc"]))
        if item["type"] == "extra_forbidden":
            return f"{plugin} has no option {key!r}{nearest(key, list(parameters) + list(keys))}"
        if item["type"] == "missing" and key in types:
            # The parameter may be a misspelled key, or a key's name in another program.
            guess = nearest(key, set(keys) - parameters.keys())
            if key in elsewhere and elsewhere[key] not in parameters:
                guess = f" (did you mean {elsewhere[key]!r}?)"
            return f"{plugin} needs the option {key!r}{guess}: set {section}.{key}{row}"
        return f"{section}.{key}: {explain(item)}"

    takes_any = any(value.kind is value.VAR_KEYWORD for value in parameters.values())
    config = pydantic.ConfigDict(
        extra="allow" if takes_any else "forbid",
        arbitrary_types_allowed=True,
        coerce_numbers_to_str=True,  # as the settings are read
        allow_inf_nan=False,
    )
    make_model: Any = typed.TypedDict
    model = pydantic.with_config(config)(make_model("Options", types))
    try:
        checked: dict[str, Any] = pydantic.TypeAdapter(model).validate_python(options or {})
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(map(explain_option, error.errors()))) from error
    except pydantic.PydanticUserError as error:
        raise ConfigError(
            f"{plugin} has an annotation that pydantic can't check: {error}"
        ) from error
    return checked


def _option_types(
    plugin: str, parameters: Mapping[str, inspect.Parameter], keys: Collection[str]
) -> dict[str, Any]:
    """Map the parameters that are options to their types; Any for those without a type."""
    import typing_extensions as typed

    types = {}
    for name, parameter in parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(f"{plugin} gets its arguments by name: remove the / from them")
        if parameter.kind is parameter.VAR_KEYWORD or name in keys:
            continue
        annotation = parameter.annotation
        if annotation is parameter.empty or isinstance(annotation, str):
            annotation = Any
        if parameter.default is not parameter.empty:
            annotation = typed.NotRequired[annotation]
        types[name] = annotation
    return types


def need(user: str, package: str) -> None:
    """Raise ConfigError if a package is not installed that `user`, such as "env.mcp", needs."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{user} needs the package {package}: {pip()} install {package}, or leave it out"
        )


def try_out(make: Callable[[], Any], title: str, section: str) -> None:
    """Call `make` once; raise ConfigError if it refuses the options of its section."""
    try:
        make()
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{title} refuses its options: {error}; change the section {section}"
        ) from error


def explain(item: Mapping[str, Any]) -> str:
    """Put an error of pydantic, an item of its `errors()`, into words for users."""
    message = str(item["msg"]).removeprefix("Value error, ")
    value = item["input"]
    wrong_type = _WRONG_TYPE.fullmatch(item["type"])
    if wrong_type:
        message = f"must be {_EXPECTED[wrong_type[1]]}, got {value!r:.80}"
        # YAML reads `key:value` as a text: a colon shows that a mapping was meant.
        if wrong_type[1] in ("dict", "model") and ":" in f"{item['loc'][-1:]}{value}":
            message += "; write a space after the colon"
    if item["type"] == "literal_error":
        message += nearest(str(value), re.findall("'(.*?)'", message))
    return message


def refuse_owned(
    prefix: str,
    names: Iterable[str],
    owned: Mapping[str, str],
    known_names: Collection[str],
    unknown: str,
) -> None:
    """Raise ValueError for the settings `names` of another program that a user can't set.

    `owned` maps a setting that hocket sets itself to the setting of hocket for it, or to "". A name
    that is in neither `owned` nor `known_names` is refused with the sentence `unknown`. The error
    lists all of these names, each behind `prefix`.
    """
    problems = []
    for name in names:
        if name in owned:
            advice = f"set {owned[name]}" if owned[name] else "leave it out"
            problems.append(f"{prefix}{name} can't be set, as hocket sets it: {advice}")
        elif name not in known_names:
            guess = nearest(name, set(known_names) - owned.keys())
            problems.append(f"{prefix}{name}{unknown}{guess}")
    if problems:
        raise ValueError("; ".join(problems))


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Write ' (did you mean ...?)' with the candidate closest to a name; "" if none is close."""
    matches = difflib.get_close_matches(name, list(candidates), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


STAND_INS: Registry[Callable[[], None]] = Registry("stand-in", openrlhf="hocket.extras.openrlhf")
"""Functions by the name of a package. A plugin that imports the package, where it is not installed,
gets the modules that the function puts in its place."""
stand_in = STAND_INS.register


class Plugin(NamedTuple):
    """A plugin file as it was when it was imported."""

    path: str  # as the config has it
    sha256: str
    text: str
    registers: tuple[str, ...]  # what its decorators registered, such as "reward share"


_PLUGINS: dict[str, Plugin] = {}  # by the name of its module


class _PluginLoader(importlib.machinery.SourceFileLoader):
    """Executes a file as it was when the loader was made, so that its SHA-256 is that of the code.

    No bytecode of an earlier version is used.
    """

    def __init__(self, name: str, file: Path) -> None:
        super().__init__(name, str(file))
        self.content = file.read_bytes()

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.content, self.path, "exec", dont_inherit=True)


def load_plugins(paths: Iterable[str]) -> list[Plugin]:
    """Import Python files, whose decorators register objects; each file once per process."""
    return [_PLUGINS[load_plugin(path).__name__] for path in paths]


def load_plugin(path: str) -> ModuleType:
    """Import a plugin file, unless that was done before, and return its module.

    Raises ConfigError for a file that is missing or that raises.
    """
    file = Path(shipped(path)).expanduser().resolve()
    if not file.is_file() or file.suffix != ".py":
        fact = "is not a Python file" if file.exists() else "does not exist"
        raise ConfigError(f"plugin {path!r} {fact}; paths are relative to {Path.cwd()}")
    # The name has a hash of the path: files of the same name are different plugins.
    path_hash = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    name = f"{PLUGIN_PREFIX}{file.stem}_{path_hash}"
    if name in _PLUGINS:
        return sys.modules[name]

    # Have stand-ins ready for the packages that the file mentions.
    loader = _PluginLoader(name, file)
    for package in STAND_INS.names:
        if package.encode() in loader.content:
            STAND_INS.get(package)()

    # Import the file. If it raises, undo what it has registered until then.
    spec: Any = importlib.util.spec_from_file_location(name, file, loader=loader)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]  # or a later attempt would get half a module
        for registry, item_name in _registered(name):
            registry.forget(item_name)
        raise ConfigError(_import_problem(path, file, error)) from error

    registers = tuple(f"{registry.kind} {item_name}" for registry, item_name in _registered(name))
    digest = hashlib.sha256(loader.content).hexdigest()
    _PLUGINS[name] = Plugin(path, digest, loader.content.decode(errors="replace"), registers)
    return module


def _import_problem(path: str, file: Path, error: BaseException) -> str:
    """Describe why a plugin can't be imported, with the last line of the file that was reached."""
    trace = "".join(traceback.format_exception(error))
    lines = re.findall(f'File "{re.escape(str(file))}", line ([0-9]+)', trace)
    line = lines[-1] if lines else "1"
    cause = str(error) if isinstance(error, HocketError) else f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError):
        cause += (
            f"; {pip()} install {error.name}, or, for a file of yours, set PYTHONPATH to its folder"
        )
    elif isinstance(error, ImportError) and error.name == "hocket":
        cause += "; decorators are in hocket.rewards and hocket.envs"
    return f"plugin {path!r} can't be imported: {file}, line {line}: {cause}"


def _registered(module: str) -> list[tuple[Registry[Any], str]]:
    """List the objects that a module has registered: their registries and names."""
    pairs = []
    for registry in Registry.every:
        pairs += [(registry, name) for name in registry.of_module(module)]
    return pairs
