"""Load a Config from YAML and overrides, write it back, and print the table of keys."""

import difflib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pydantic
import pydantic_core
import yaml
from pydantic.fields import FieldInfo

from hocket.common.files import kind_of
from hocket.common.registry import Registry, explain
from hocket.config.sections import Section, UserPath, leaves, markdown_table, put
from hocket.config.whole import RENAMED, Config
from hocket.errors import ConfigError

UNION = re.compile(r"constrained-int|bool|[a-z-]+\[.*\]", re.DOTALL)  # pydantic's words for a kind, behind a key
SURE = 0.9  # similarity of a key to the one that was meant
PLAIN = {  # what is no text without quotes in YAML 1.2; in 1.1, PyYAML's, 1e-6 is text, off is false, and 010 is 8
    "null": "~|null|Null|NULL|",
    "bool": "true|True|TRUE|false|False|FALSE",
    "int": "[-+]?(0|[1-9][0-9]*)",
    "float": r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "merge": "<<",
}

OTHER_NAMES: Registry[Mapping[str, str]] = Registry("table of names", elsewhere="hocket.extras.elsewhere")
"""Tables: setting of hocket → what others call it, names with spaces between; of a dotted key, its last words."""
other_names = OTHER_NAMES.register


class _Loader(yaml.SafeLoader):
    """Read YAML 1.2; a key that stands twice is an error."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        names = [str(key.value) for key, _ in node.value]
        if len({*names}) < len(names):
            problem = f"the key {max(names, key=names.count)!r} stands here twice: join the two"
            raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
        return node


class _Dumper(yaml.SafeDumper):
    """Quote text that is none in YAML 1.1 or 1.2."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern in PLAIN.items():
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"({_pattern})$"), None)


def load(path: str | Path | None = None, overrides: Iterable[str] | Mapping[str, Any] = ()) -> Config:
    """Read a YAML file, if any, set `section.key=value` or a mapping's values, and validate."""
    given = dict(overrides) if isinstance(overrides, Mapping) else dict(map(_read, overrides))
    values = {} if path is None else _read_file(Path(path))
    for key, value in given.items():
        put(values, key, value)
    try:
        return Config.model_validate(values)
    except pydantic.ValidationError as error:
        wrong = itertools.chain.from_iterable(map(_explain, error.errors()))
        raise ConfigError("\n".join(_source(key, path, given) + text for key, text in wrong)) from error


def _read_file(path: Path) -> dict[str, Any]:
    if path.is_dir():
        kind = kind_of(path) or "folder"
        raise ConfigError(f"{path} is a {kind}, not a config file; as a model: model.path={path}")
    try:
        with path.open(encoding="utf-8") as file:  # YAML's errors name it
            values = yaml.load(file, _Loader)
    except yaml.YAMLError as error:
        advice = "indent by spaces; text with : { or # needs quotes"
        raise ConfigError(f"can't read the config {path}: {error}; {advice}") from error
    except (OSError, UnicodeDecodeError) as error:
        advice = f"paths are relative to {Path.cwd()}, text is UTF-8, settings look like section.key=value"
        raise ConfigError(f"can't read the config {path}: {error}; {advice}") from error
    if not isinstance(values, dict | None):
        raise ConfigError(f"{path} must be a mapping of sections, got {type(values).__name__}")
    return values or {}


def read_settings(settings: Sequence[str], default: str | None = None) -> tuple[Config, list[str]]:
    """Return the config of a YAML file (or `default`) and overrides, and arguments for it."""
    paths = [
        item for item in settings if "=" not in item or (item.endswith((".yaml", ".yml")) and Path(item).is_file())
    ]
    overrides = [item for item in settings if item not in paths]
    if len(paths) > 1:
        for override in overrides:
            _read(override)  # one that the shell has cut into pieces says so
        advice = "settings look like section.key=value, and a value with blanks needs quotes"
        raise ConfigError(f"one config file at most, got {', '.join(paths)}; {advice}")
    file = next(iter(paths), default)
    return load(file, overrides), [*filter(None, [file]), *overrides]


def to_yaml(values: Mapping[str, Any]) -> str:
    """Return YAML that `load` reads back."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def reference() -> str:
    rows = (
        (f"`{key}`", f"`{_default(field)}`", field.description.replace("\n", " "))
        for key, field in _fields()
        if field.description and not key.startswith(_AS_ELSEWHERE)
    )
    settings = markdown_table(("key", "default", "what it does"), rows)
    return f"{settings}\n\n{names_table()}"


_AS_ELSEWHERE = ("eval.data.", "rm.", "dpo.")
"""Sections whose keys are those of data, or of sft."""


def _fields(model: Any = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key with its field, also of sections that may be null."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        yield key, field
        kind, *_ = _kinds(field)
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _fields(kind, f"{key}.")


def _kinds(field: FieldInfo) -> tuple[Any, ...]:
    return get_args(field.annotation) or (field.annotation,)


_TEXTS = {key for key, field in _fields() if {*_kinds(field)} <= {str, UserPath, re.Pattern[str], type(None)}}
"""Keys whose value is literal text: "runs/a #3", "2024_10", "0123"."""


_MEANINGS = {key: field.description for key, field in _fields() if field.description}


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    value = {} if isinstance(value, Section) else pydantic_core.to_jsonable_python(value, exclude_none=True)
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def _read(override: str) -> tuple[str, Any]:
    found = re.fullmatch("([^=]+)=(.*)", override, re.DOTALL)
    if found is None:
        raise ConfigError(f"can't read {override!r}: overrides look like section.key=value, e.g. trainer.steps=10")
    key, text = found.groups()
    if text != "null" and key in _TEXTS:
        return key, text
    try:
        return key, yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", error)
        if text.count("[") + text.count("{") > text.count("]") + text.count("}"):
            problem = f"{problem}; a bracket is left open: quote the whole setting, as a shell splits it at blanks"
        raise ConfigError(f"the value in {override!r} is not valid YAML: {problem}") from error


def _source(key: str, path: str | Path | None, given: Iterable[str]) -> str:
    if path is None:
        return ""
    typed = any(f"{key}.".startswith(f"{one}.") for one in given)
    return "command line: " if typed else f"{path}: "


def _explain(item: Any) -> Iterator[tuple[str, str]]:
    key = ".".join(word for word in map(str, item["loc"]) if not UNION.fullmatch(word))
    if item["type"] == "extra_forbidden":
        for name in leaves({key: item["input"]}):
            yield name, f"unknown key {name!r}; {_hint(name)}"
    else:
        inside = ", ".join(one for one in _MEANINGS if one.startswith(f"{key}."))  # of a section
        meaning = _MEANINGS.get(key) or inside or _MEANINGS.get(key.rpartition(".")[0])  # of the list or mapping
        told = f"{explain(item)} ({meaning})" if meaning and item["type"] != "value_error" else explain(item)
        yield key, ": ".join(filter(None, [key, told]))


def as_setting(argument: str) -> str:
    """Say how what was typed as an option, such as --num_generations or --trainer.steps=5, is set."""
    name, _, value = argument.lstrip("-").partition("=")
    key = name.replace("-", "_")
    if key in dict(_fields()):
        return f"settings have no dashes: {key}={value or 'VALUE'}"
    return f"{_hint(key)}; settings have no dashes: section.key=value"


def _hint(key: str) -> str:
    if key in RENAMED:
        return f"it is {RENAMED[key]!r} now"
    if here := name_here(key):
        return f"here that is {here}"
    known = [*dict(_fields())]
    if key in known:
        return f"in a file, nest it: {key.replace('.', ': {')}: VALUE{'}' * key.count('.')}"
    same = [one for one in known if one.rpartition(".")[2] == key.rpartition(".")[2]]  # in another section
    close = difflib.get_close_matches(key, known, 1, SURE) or same
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return "`python run.py config --reference` lists all"


def name_here(key: str) -> str | None:
    """Return the setting of hocket for a key that ends with another program's name; None for no such name."""
    here = {name: setting for setting, names in _rows() for name in names.split()}
    words = key.split(".")
    ends = [".".join(words[i:]) for i in range(len(words))]
    return next((here[end] for end in ends if end in here), None)


def names_table() -> str:
    """Return the tables of names as one of Markdown."""
    rows = ((setting, f"`{names.replace(' ', '`, `')}`") for setting, names in _rows())
    return markdown_table(("here", "in TRL, OpenRLHF or verl"), rows)


def _rows() -> Iterator[tuple[str, str]]:
    for table in OTHER_NAMES.each():
        yield from table.items()
