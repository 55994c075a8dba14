"""TOML tables for dataclasses: values checked against their fields, overrides, and the way back."""

import tomllib
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from diloco import conf


T = TypeVar("T")
_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    tuple: "a list",
}


def build(cls: type[T], table: dict[str, Any], where: str) -> T:
    """Builds a dataclass from a table whose values have the types of its fields.

    A whole number is taken for a float and a list for a tuple; nothing else is converted.

    Args:
        cls: A dataclass.
        table: Field name to value.
        where: Names the table in a message.

    Returns:
        The instance.

    Raises:
        TypeError: If a value has another type than its field.
        ValueError: If a string has a NUL character, or as `diloco.conf.build` and `cls` raise it.

    Example:
        >>> from diloco.config import DiLoCoConfig
        >>> build(DiLoCoConfig, {"num_islands": 2, "sync_period": "8"}, "[diloco]")
        Traceback (most recent call last):
        TypeError: sync_period in [diloco] is '8'; use a whole number
    """
    hints = typing.get_type_hints(cls)
    return conf.build(
        cls,
        {k: _typed(v, hints[k], f"{k} in {where}") if k in hints else v for k, v in table.items()},
        where,
    )


def override(tables: dict[str, dict[str, Any]], text: str, sections: Sequence[str]) -> None:
    """Sets one value of nested tables in place.

    Args:
        tables: Section name to table.
        text: `section.key=value`; the value as in TOML, or a bare word for a string.
        sections: The sections that exist.

    Raises:
        ValueError: If `text` has another form or names another section.

    Example:
        >>> tables = {"train": {"steps": 300}}
        >>> override(tables, "train.steps=20", ["train", "data"])
        >>> override(tables, "data.split=non-iid", ["train", "data"])
        >>> tables
        {'train': {'steps': 20}, 'data': {'split': 'non-iid'}}
    """
    path, equals, value = text.partition("=")
    section, dot, key = path.strip().partition(".")
    if not (equals and dot and key):
        raise ValueError(
            f"override {text!r} is not section.key=value; write for example train.steps=100"
        )
    if section not in sections:
        raise ValueError(
            f"override {text!r} names no section; {conf.nearest(section, list(sections))}"
        )
    try:
        parsed = tomllib.loads(f"x = {value.strip()}")["x"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    tables.setdefault(section, {})[key] = parsed


def dumps(tables: dict[str, dict[str, Any]]) -> str:
    """Writes tables of plain values as TOML that `tomllib` reads back to equal ones.

    Args:
        tables: Section name to table; a value of None is left out.

    Returns:
        The text.

    Example:
        >>> print(dumps({"data": {"corpus": "python", "sequence_length": 128}}))
        [data]
        corpus = "python"
        sequence_length = 128
    """
    lines = []
    for section, table in tables.items():
        pairs = (f"{k} = {_value(v)}" for k, v in table.items() if v is not None)
        lines += [f"[{section}]", *pairs, ""]
    return "\n".join(lines)


def _typed(value: Any, hint: Any, where: str) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    origins = [typing.get_origin(option) or option for option in options]
    kinds = [str if origin is Literal else origin for origin in origins]
    if type(value) is int and float in kinds and int not in kinds:
        return float(value)
    if type(value) is list and tuple in kinds:
        return tuple(value)
    if type(value) not in kinds:
        names = " or ".join(_KINDS[kind] for kind in kinds if kind in _KINDS)
        raise TypeError(f"{where} is {value!r}; use {names}")
    if isinstance(value, str) and "\0" in value:  # no path or script can hold one
        raise ValueError(f"{where} is {value!r}; leave the NUL character out")
    return value


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        plain = (c if c >= " " and c != "\x7f" else f"\\u{ord(c):04X}" for c in escaped)
        return f'"{"".join(plain)}"'
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value)
