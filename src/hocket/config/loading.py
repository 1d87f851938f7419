"""Load a Config from YAML and overrides, write it back, and print the table of settings.

YAML is read as version 1.2 says, in which `off` is text and `1e-6` is a number. PyYAML reads 1.1.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pydantic
import pydantic_core
import yaml
from pydantic.fields import FieldInfo

from hocket.common.files import kind_of, shipped
from hocket.common.registry import Registry, explain
from hocket.config.sections import Section, UserPath, leaves, markdown_table, put
from hocket.config.whole import RENAMED, Config
from hocket.errors import ConfigError

# Pydantic puts the member of a union that it tried behind the key: "trainer.steps.constrained-int".
UNION_MEMBER = re.compile(r"constrained-(int|float)|bool|[a-z-]+\[.*\]", re.DOTALL)
# Similarity, by difflib, from which a known key is offered for one that is unknown.
SURE = 0.9
# Text without quotes that YAML 1.2 takes for something else than a string.
PLAIN = {
    "null": "~|null|Null|NULL|",
    "bool": "true|True|TRUE|false|False|FALSE",
    "int": "[-+]?(0|[1-9][0-9]*)",
    "float": (
        r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
    ),
    "merge": "<<",
}

OTHER_NAMES: Registry[Mapping[str, str]] = Registry(
    "table of names", elsewhere="hocket.extras.elsewhere"
)
"""Tables of setting of hocket -> its names in other programs, separated by spaces.

A dotted name is given by its last words: "optim.lr" matches actor.optim.lr.
"""
other_names = OTHER_NAMES.register


class _Loader(yaml.SafeLoader):
    """Read YAML 1.2, and refuse a key that stands twice in one mapping."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        names = [str(key.value) for key, _ in node.value]
        if len(set(names)) < len(names):
            twice = max(names, key=names.count)
            problem = f"the key {twice!r} stands here twice: join the two"
            raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
        return node


class _Dumper(yaml.SafeDumper):
    """Quote text that YAML 1.1 or 1.2 would not read as text."""


# PyYAML's rules are of YAML 1.1, in which 1e-6 is text, off is false, and 010 is 8. The loader has
# those of 1.2 in their place, the dumper has both.
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern in PLAIN.items():
    for _yaml in (_Loader, _Dumper):
        _yaml.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"({_pattern})$"), None)


def load(
    path: str | Path | None = None, overrides: Iterable[str] | Mapping[str, Any] = ()
) -> Config:
    """Read a YAML file, if there is one, apply the overrides, and validate the result.

    Args:
        path: the file; None for the defaults of all settings.
        overrides: texts like "trainer.steps=10", or a mapping of such keys to values.

    Raises:
        ConfigError: the file can't be read, or a value is refused; with a line per fault.

    Example:
        >>> load(overrides=["trainer.steps=10"]).trainer.steps
        10
    """
    if isinstance(overrides, Mapping):
        values_by_key = dict(overrides)
    else:
        values_by_key = dict(_read_override(override) for override in overrides)

    values = {} if path is None else _read_file(Path(shipped(str(path))))
    for key, value in values_by_key.items():
        put(values, key, value)

    try:
        return Config.model_validate(values)
    except pydantic.ValidationError as error:
        lines = []
        for fault in error.errors():
            for key, text in _explain(fault):
                lines.append(_origin(key, path, values_by_key) + text)
        raise ConfigError("\n".join(lines)) from error


def _read_file(path: Path) -> dict[str, Any]:
    if path.is_dir():
        kind = kind_of(path) or "folder"
        raise ConfigError(f"{path} is a {kind}, not a config file; as a model: model.path={path}")
    try:
        with path.open(encoding="utf-8") as file:  # YAML's errors name an open file
            values = yaml.load(file, _Loader)
    except yaml.YAMLError as error:
        advice = "indent by spaces; text with : { or # needs quotes"
        raise ConfigError(f"can't read the config {path}: {error}; {advice}") from error
    except (OSError, UnicodeDecodeError) as error:
        advice = (
            f"paths are relative to {Path.cwd()}, text is UTF-8, settings look like "
            "section.key=value"
        )
        raise ConfigError(f"can't read the config {path}: {error}; {advice}") from error
    if not isinstance(values, dict | None):
        raise ConfigError(f"{path} must be a mapping of sections, got {type(values).__name__}")
    return values or {}


def read_settings(settings: Sequence[str], default: str | None = None) -> tuple[Config, list[str]]:
    """Read a command's words: at most one YAML file (else `default`), and overrides.

    Returns the config, and the words that give it again, for the command of another process.
    """
    paths: list[str] = []
    overrides: list[str] = []
    for setting in settings:
        # A file may have = in its name, where it exists.
        is_file = setting.endswith((".yaml", ".yml")) and Path(setting).is_file()
        if "=" not in setting or is_file:
            paths.append(setting)
        else:
            overrides.append(setting)

    if len(paths) > 1:
        # A shell may have cut a value into pieces: then an override is refused with better advice.
        for override in overrides:
            _read_override(override)
        advice = "settings look like section.key=value, and a value with blanks needs quotes"
        raise ConfigError(f"one config file at most, got {', '.join(paths)}; {advice}")

    file = paths[0] if paths else default
    arguments = [file] if file else []
    return load(file, overrides), arguments + overrides


def to_yaml(values: Mapping[str, Any]) -> str:
    """Return YAML that `load` reads back."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


_REPEATED = {"eval.data.": "data.", "rm.": "sft.", "dpo.": "sft."}
"""Sections whose keys `reference` leaves out where another section has the same ones."""


def reference() -> str:
    """Print all settings as Markdown (docs/reference/settings.md).

    The first table has their defaults and meanings, the second their names in other programs.
    """
    rows = []
    listed = set()
    for key, field in _fields():
        if not field.description:
            continue
        row = (f"`{_default(field)}`", field.description.replace("\n", " "))
        listed.add((key, *row))
        twins = []
        for prefix, twin in _REPEATED.items():
            if key.startswith(prefix):
                twins.append(key.replace(prefix, twin, 1))
        if not any((twin, *row) in listed for twin in twins):
            rows.append((f"`{key}`", *row))
    settings = markdown_table(("key", "default", "what it does"), rows)
    elsewhere = [(key, f"`{names.replace(' ', '`, `')}`") for key, names in _names_elsewhere()]
    return f"{settings}\n\n{markdown_table(('here', 'in TRL, OpenRLHF or verl'), elsewhere)}"


def _fields(model: Any = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key with its field, also those of sections that may be null."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        yield key, field
        kind = _kinds(field)[0]  # of a section that may be null the first one of two
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _fields(kind, f"{key}.")


def _kinds(field: FieldInfo) -> tuple[Any, ...]:
    """Return the types that a field takes: the members of a union, or its one type."""
    return get_args(field.annotation) or (field.annotation,)


_OF_TEXT = {str, UserPath, re.Pattern[str], type(None)}  # types that no YAML is read for
_TEXTS = {key for key, field in _fields() if set(_kinds(field)) <= _OF_TEXT}
"""Keys whose value is literal text: "runs/a #3", "2024_10", "0123"."""

_MEANINGS = {key: field.description for key, field in _fields() if field.description}


def _default(field: FieldInfo) -> str:
    """Write a field's default as YAML; {} for a section, whose keys are listed themselves."""
    default = field.get_default(call_default_factory=True)
    is_section = isinstance(default, Section)
    value = {} if is_section else pydantic_core.to_jsonable_python(default, exclude_none=True)
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def _read_override(override: str) -> tuple[str, Any]:
    """Split "section.key=value" into key and value, which is YAML unless the key takes text."""
    match = re.fullmatch("([^=]+)=(.*)", override, re.DOTALL)
    if match is None:
        raise ConfigError(
            f"can't read {override!r}: overrides look like section.key=value, e.g. trainer.steps=10"
        )
    key, text = match.groups()
    if text != "null" and key in _TEXTS:
        return key, text
    try:
        return key, yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", error)
        if text.count("[") + text.count("{") > text.count("]") + text.count("}"):
            advice = "quote the whole setting, as a shell splits it at blanks"
            problem = f"{problem}; a bracket is left open: {advice}"
        raise ConfigError(f"the value in {override!r} is not valid YAML: {problem}") from error


def _origin(key: str, path: str | Path | None, overridden: Iterable[str]) -> str:
    """Name where a refused value was written, as the beginning of a line; "" without a file."""
    if path is None:
        return ""
    is_typed = any(f"{key}.".startswith(f"{name}.") for name in overridden)
    return "command line: " if is_typed else f"{path}: "


def _explain(fault: Any) -> Iterator[tuple[str, str]]:
    """Yield key and line for each value that one of pydantic's errors is about."""
    words = [str(word) for word in fault["loc"]]
    key = ".".join(word for word in words if not UNION_MEMBER.fullmatch(word))
    if fault["type"] == "extra_forbidden":
        for name in leaves({key: fault["input"]}):
            yield name, f"unknown key {name!r}; {_hint(name)}"
        return

    # A section has no meaning of its own: its keys are listed. An item of a list or a mapping has
    # that of the whole.
    section_keys = ", ".join(name for name in _MEANINGS if name.startswith(f"{key}."))
    meaning = _MEANINGS.get(key) or section_keys or _MEANINGS.get(key.rpartition(".")[0])
    text = explain(fault)
    # hocket's own errors, which pydantic calls value_error, need no further words.
    if meaning and fault["type"] != "value_error":
        text = f"{text} ({meaning})"
    yield key, f"{key}: {text}" if key else text


def as_setting(argument: str) -> str:
    """Say how an option that was typed, such as --num_generations or --trainer.steps=5, is set."""
    name, _, value = argument.lstrip("-").partition("=")
    key = name.replace("-", "_")
    if key in dict(_fields()):
        return f"settings have no dashes: {key}={value or 'VALUE'}"
    return f"{_hint(key)}; settings have no dashes: section.key=value"


def _hint(key: str) -> str:
    """Say what was probably meant by a key that is unknown."""
    if key in RENAMED:
        return f"it is {RENAMED[key]!r} now"
    setting = _name_here(key)
    if setting:
        return f"here that is {setting}"
    known_keys = list(dict(_fields()))
    if key in known_keys:  # with its dots: advise {section: {key: VALUE}}
        return f"in a file, nest it: {key.replace('.', ': {')}: VALUE{'}' * key.count('.')}"
    last_word = key.rpartition(".")[2]
    elsewhere = [name for name in known_keys if name.rpartition(".")[2] == last_word]
    close = difflib.get_close_matches(key, known_keys, 1, SURE) or elsewhere
    if close:
        return f"did you mean {' or '.join(repr(name) for name in close)}?"
    return "`python run.py config --reference` lists all"


def _name_here(key: str) -> str | None:
    """Find the setting of hocket for a key that ends with another program's name for it."""
    settings = {}
    for setting, names in _names_elsewhere():
        for name in names.split():
            settings[name] = setting

    # "actor.optim.lr" is looked up whole, then as "optim.lr", then as "lr".
    while key and key not in settings:
        key = key.partition(".")[2]
    return settings.get(key)


def _names_elsewhere() -> Iterator[tuple[str, str]]:
    """Yield each setting that other programs have, and its names there, separated by spaces."""
    for table in OTHER_NAMES.each():
        yield from table.items()
