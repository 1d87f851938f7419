"""From a YAML file and overrides to a checked Config and back; and the table of all keys."""

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import pydantic
import yaml

from hocket.config.sections import DataConfig, Section, UserPath
from hocket.config.whole import Config
from hocket.errors import ConfigError


def load(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Reads a YAML file (or only defaults), applies `section.key=value` overrides and validates.

    Args:
        path: YAML file; None for defaults.
        overrides: e.g. "trainer.steps=10", "rewards.functions={math: 1.0}"; the value is read as YAML.

    Raises:
        ConfigError: with the file, the key, and the nearest known key where one is unknown.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"can't read the config {path}: {error.strerror or error}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not valid YAML: {error}") from error
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(f"{path} must be a mapping of sections, got {type(loaded).__name__}")
        values = loaded or {}
    for override in overrides:
        _apply(values, override)
    try:
        return Config.model_validate(values)
    except pydantic.ValidationError as error:
        where = f"{path}: " if path is not None else ""
        raise ConfigError("\n".join(where + line for line in _explain(error))) from error


def dump(config: Config) -> str:
    """Returns the resolved config as YAML that `load` reads back to an equal config; the token is left out."""
    return yaml.safe_dump(as_dict(config), sort_keys=False)


def as_dict(config: Config) -> dict[str, Any]:
    """Returns the resolved config ready for JSON; the token is left out."""
    values = config.model_dump(mode="json", by_alias=True)
    values["server"]["token"] = None  # a run folder is shared; a secret is not
    return values


def changes(before: Mapping[str, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """Returns key → (then, now) of every setting that differs from an earlier `as_dict`.

    Where a run resumes does not count, and neither do settings that were not there yet.
    """
    after = as_dict(config)
    found: dict[str, tuple[Any, Any]] = {}
    for section in before.keys() & after.keys():
        if not isinstance(after[section], dict):
            pairs = {section: (before[section], after[section])}
        else:
            keys = before[section].keys() & after[section].keys()
            model: Any = Config.model_fields[section].annotation
            if model.model_config["extra"] == "allow":  # an option that is not there has a value, too: its default
                keys |= (before[section].keys() | after[section].keys()) - model.model_fields.keys()
            pairs = {f"{section}.{key}": (before[section].get(key), after[section].get(key)) for key in keys}
        found |= {key: (then, now) for key, (then, now) in pairs.items() if then != now}
    found.pop("checkpoint.resume", None)
    return dict(sorted(found.items()))


def reference() -> str:
    """Returns every key with its default and description, as a Markdown table."""
    rows = ["| key | default | what it does |", "|---|---|---|"]
    for section, field in Config.model_fields.items():
        model = field.annotation
        if not (isinstance(model, type) and issubclass(model, Section)):
            rows.append(f"| `{section}` | `{_default(field)}` | {field.description} |")
            continue
        for name, item in model.model_fields.items():
            key = item.alias or name
            rows.append(f"| `{section}.{key}` | `{_default(item)}` | {item.description} |")
            for name, inner in _optional_section(item).items():
                rows.append(f"| `{section}.{key}.{name}` | `{_default(inner)}` | {inner.description} |")
    return "\n".join(rows)


def _optional_section(field: pydantic.fields.FieldInfo) -> dict[str, pydantic.fields.FieldInfo]:
    """Returns the keys of a section that may be null."""
    sections = (kind for kind in get_args(field.annotation) if isinstance(kind, type) and issubclass(kind, Section))
    return next((section.model_fields for section in sections), {})


def _default(field: pydantic.fields.FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Section):
        value = value.model_dump(exclude_defaults=True)
    if isinstance(value, dict):
        value = {k: v.model_dump() if isinstance(v, Section) else v for k, v in value.items()}
    if isinstance(value, tuple):
        value = list(value)
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def _apply(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"can't read {override!r}: overrides look like section.key=value, e.g. trainer.steps=10")
    try:
        value = text if text != "null" and _is_text(key) else _number(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"the value in {override!r} is not valid YAML: {error}") from error
    *parents, leaf = key.split(".")
    for parent in parents:
        child = values[parent] = {} if values.get(parent) is None else values[parent]  # a file may say null
        if not isinstance(child, dict):
            raise ConfigError(f"can't set {key!r}: {parent!r} is not a section")
        values = child
    values[leaf] = value


def _is_text(key: str) -> bool:
    """Returns whether the key's value is text, which is then taken as it stands: "runs/a #3", "2024_10", "0123"."""
    model: Any = Config
    for part in key.split("."):
        field = model.model_fields.get(part) if isinstance(model, type) and issubclass(model, Section) else None
        if field is None:
            return False
        model = field.annotation
    return all(kind in (str, UserPath, type(None)) for kind in get_args(model) or (model,))


def _number(value: Any) -> Any:
    # YAML 1.1 reads 1e-6 as text
    return float(value) if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value) else value


def _explain(error: pydantic.ValidationError) -> list[str]:
    lines = []
    for item in error.errors():
        where = [str(part) for part in item["loc"]]
        key = ".".join(where)
        if item["type"] == "extra_forbidden":
            close = difflib.get_close_matches(key, _known_keys(), n=1) or difflib.get_close_matches(
                where[-1], [k for k in _known_keys() if "." not in k], n=1
            )
            hint = f"; did you mean {close[0]!r}?" if close else "; `python run.py config --reference` lists every key"
            lines.append(f"unknown key {key!r}{hint}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"{key}: {message}" if key else message)
    return lines


def _known_keys() -> list[str]:
    keys: list[str] = []
    for section, field in Config.model_fields.items():
        keys.append(section)
        model = field.annotation
        if isinstance(model, type) and issubclass(model, Section):
            for name, item in model.model_fields.items():
                key = item.alias or name
                keys += [f"{section}.{key}", *(f"{section}.{key}.{name}" for name in _optional_section(item))]
    keys += [f"eval.data.{key}" for key in DataConfig.model_fields]
    return keys
