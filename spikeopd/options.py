"""Typed options of nested configurations: declare with `opt`, read YAML, convert by declaration, explain.

Nothing here knows a particular option. Problems are collected as lines, not raised one by one.
"""

from __future__ import annotations

import difflib
import math
import os
import types
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from spikeopd.errors import ConfigError, short

YAML_LIMIT = 1 << 16  # characters; PyYAML takes a second for some 50,000


def opt(
    default: Any,
    help: str,
    source: str = "",
    *,
    choices: Collection[str] | None = None,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    harmless: bool = False,
) -> Any:
    """Declare an option. source: where the default comes from; harmless: cannot change the result of a run.

    choices: may be a table of `registry`, so that what is added to it later can be chosen at once.
    """
    limits = {"choices": choices, "at_least": at_least, "above": above, "at_most": at_most}
    return field(default=default, metadata={"help": help, "source": source, "harmless": harmless, **limits})


@dataclass(frozen=True)
class Option:
    """One declared option: `section.name`, its type and the limits of `opt`."""

    key: str
    type: Any
    default: Any
    help: str
    source: str
    choices: Collection[str] | None
    at_least: float | None
    above: float | None
    at_most: float | None
    harmless: bool

    @property
    def optional(self) -> bool:
        return type(None) in get_args(self.type)

    @property
    def bare_type(self) -> Any:
        return next(t for t in get_args(self.type) if t is not type(None)) if self.optional else self.type

    @property
    def expected(self) -> str:
        """What may stand here, in words."""
        if self.choices:
            words = "one of " + ", ".join(self.choices)
        elif get_origin(self.bare_type) is tuple:
            words = "a list of " + ("numbers" if float in get_args(self.bare_type) else "whole numbers")
        else:
            words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[self.bare_type]
        limits = [f"at least {show(self.at_least)}"] if self.at_least is not None else []
        limits += [f"above {show(self.above)}"] if self.above is not None else []
        limits += [f"at most {show(self.at_most)}"] if self.at_most is not None else []
        words = " ".join([words, " and ".join(limits)]).strip()
        return f"{words}, or null" if self.optional else words


def option_table(sections: Mapping[str, type[Any]]) -> dict[str, Option]:
    """Every option of every section by its full key, in order of declaration."""
    return {key: option for section, kind in sections.items() for key, option in _section_options(section, kind)}  # type: ignore[arg-type]


@cache
def _section_options(section: str, kind: type[Any]) -> tuple[tuple[str, Option], ...]:
    hints = get_type_hints(kind)
    found = []
    for item in fields(kind):
        if item.default is MISSING:
            raise AssertionError(f"{section}.{item.name} has no default")
        meta, hint = dict(item.metadata), hints[item.name]
        if get_origin(hint) is Literal:
            meta["choices"], hint = get_args(hint), str
        if get_origin(hint) not in (None, tuple, Union, types.UnionType):
            raise AssertionError(f"{section}.{item.name}: type {hint} is not supported")
        key = f"{section}.{item.name}"
        found.append((key, Option(key=key, type=hint, default=item.default, **meta)))
    return tuple(found)


# --- reading ---------------------------------------------------------------------------------------------------------


def parse_yaml(text: str, name: str) -> dict[str, Any]:
    """A YAML mapping; syntax errors and repeated keys are errors that name the line."""
    import yaml

    if len(text) > YAML_LIMIT:
        raise ConfigError(f"recipe {name}: {len(text)} characters are too many for a recipe")

    class Loader(yaml.SafeLoader):
        """PyYAML keeps the last of two equal keys in silence and lets a few lines of aliases grow without end."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
                raise ConfigError(f"recipe {name}, line {line}: aliases (*name) are not read; write the value out")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key_node, _ in node.value:
                if not isinstance(key_node, yaml.ScalarNode):
                    line = key_node.start_mark.line + 1
                    raise ConfigError(f"recipe {name}, line {line}: a key is one word, not a list or a mapping")
                if key_node.value in seen:
                    line = key_node.start_mark.line + 1
                    raise ConfigError(f"recipe {name}, line {line}: '{key_node.value}' is given twice; keep one")
                seen.add(key_node.value)
            return dict(super().construct_mapping(node, deep))

    try:
        content = yaml.load(text, Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"recipe {name}{where}: not valid YAML ({short(reason)})") from error
    except RecursionError:
        raise ConfigError(f"recipe {name}: nested too deeply") from None
    except ValueError as error:  # PyYAML's own conversions: 0x_, 2020-99-99, a number of 5,000 digits
        raise ConfigError(f"recipe {name}: a value cannot be read ({short(error)}); put it in quotes") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"recipe {name}: expected sections such as `stage1:` with keys, got {type(content).__name__}")
    return content


def parse_scalar(text: str) -> Any:
    """The value of a `key=value` override, read as YAML; what is not YAML stays text and is converted by type."""
    import yaml

    if len(text) > YAML_LIMIT or "&" in text or "*" in text:  # an anchor has no place in one value
        return text
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError):
        return text


def dump_yaml(values: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections of one `key: value` per line, which are easy to read and to compare."""
    import yaml

    def inline(value: Any) -> str:
        text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=math.inf)
        return str(text).removesuffix("...\n").strip()

    lines = []
    for section, entries in values.items():
        lines += [f"{section}:", *(f"  {key}: {inline(value)}" for key, value in entries.items())]
    return "\n".join(lines) + "\n"


def flatten(content: Mapping[str, Any], sections: Mapping[str, type[Any]], problems: list[str]) -> dict[str, Any]:
    """`{"stage1": {"updates": 3}}` -> `{"stage1.updates": 3}`; full keys at the top level are accepted too."""
    flat: dict[str, Any] = {}
    for section, entries in content.items():
        if isinstance(entries, Mapping):
            if section in sections:
                flat |= {f"{section}.{key}": value for key, value in entries.items()}
            else:
                problems.append(f"{short(section)}: unknown section{nearest(str(section)[:99], sections)}")
        elif section in sections:
            if entries is not None:
                problems.append(f"{section}: a section holds keys, got {show(entries)}")
        else:
            flat[str(section)] = entries
    return flat


def convert_all(values: Mapping[str, Any], sections: Mapping[str, type[Any]], problems: list[str]) -> dict[str, Any]:
    """Converted values of the known keys; a line in `problems` for each unknown key and each unfit value."""
    table = option_table(sections)
    converted = {}
    for key, value in values.items():
        if key not in table:
            hint = _nearest_key(str(key)[:99], table) if len(problems) < 50 else ""  # looking is slow
            problems.append(f"{short(key)}: unknown key{hint}")
            continue
        try:
            converted[key] = _convert(value, table[key])
        except (ValueError, TypeError, OverflowError):
            problems.append(f"{key}: expected {table[key].expected}, got {show(value)}")
    return converted


def _convert(value: Any, option: Option) -> Any:
    if option.optional and (value is None or value in ("null", "none", "None", "")):
        return None
    kind = option.bare_type
    if get_origin(kind) is tuple:
        parts = value.split(",") if isinstance(value, str) else value if isinstance(value, (list, tuple)) else [value]
        read = _number if float in get_args(kind) else _whole
        return tuple(_within(read(part), option) for part in parts if part != "")
    if kind is bool:
        words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
        result: Any = (
            value if isinstance(value, bool) else words[value.lower()] if str(value).lower() in words else None
        )
        if result is None:
            raise ValueError
        return result
    if kind is str:
        if isinstance(value, bool) or not isinstance(value, (str, int, float, os.PathLike)):
            raise ValueError
        result = str(value)
        if option.choices and result not in option.choices or not result:
            raise ValueError
        return result
    return _within(_whole(value) if kind is int else _number(value), option)


def _within(value: float, option: Option) -> float:
    below = (
        option.at_least is not None and value < option.at_least or option.above is not None and value <= option.above
    )
    if below or option.at_most is not None and value > option.at_most:
        raise ValueError
    return value


def _whole(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lstrip("+-").replace("_", "").isdigit():
        return int(value)
    number = _number(value)  # 1e3, or 1000.0
    if not number.is_integer():
        raise ValueError
    return int(number)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


# --- words -----------------------------------------------------------------------------------------------------------


def show(value: Any) -> str:
    """A value as a recipe would write it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    try:
        if isinstance(value, (list, tuple)):
            return short("[" + ", ".join(show(entry) for entry in value[:100]) + "]")
        text = f"'{value}'" if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
    except (ValueError, RecursionError):  # a number with too many digits to be written, a list with itself in it
        text = f"a {type(value).__name__} that cannot be shown"
    return short(text)


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'tiny'?)`, or nothing."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{found[0]}'?)" if found else ""


def _nearest_key(key: str, table: Mapping[str, Option]) -> str:
    section, _, word = key.rpartition(".")

    def fits(known: str) -> bool:  # the right name in the wrong section or without one, or its initials (lr)
        name = known.split(".")[1]
        return word in (name, "".join(part[0] for part in name.split("_")))

    found = [known for known in table if fits(known)]
    found = [known for known in found if known.startswith(f"{section}.")] or found
    if found:
        return " (did you mean " + " or ".join(f"'{known}'" for known in found) + "?)"
    return nearest(key, [known for known in table if known.startswith(f"{section}.")]) or nearest(key, table)


def explain(key: str | None, sections: Mapping[str, type[Any]]) -> str:
    table = option_table(sections)
    if key is None or key in sections:
        return "\n".join(_explain_one(o) for k, o in table.items() if key is None or k.split(".")[0] == key)
    if key not in table:
        raise ConfigError(f"{key}: unknown key{_nearest_key(key, table)}")
    return _explain_one(table[key])


def _explain_one(option: Option) -> str:
    source = f" [{option.source}]" if option.source else ""
    return f"{option.key} = {show(option.default)}: {option.help}; {option.expected}{source}"
