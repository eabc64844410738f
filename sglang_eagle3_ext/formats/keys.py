"""Read the keys of a JSON object into a struct, so that every wrong value is reported and not only the first."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect as types


class WrongKey(NamedTuple):
    """One key that cannot be read.

    Attributes:
        key: its path below the object, with dots.
        text: what is wrong and what was expected, without a full stop.
    """

    key: str
    text: str


def read_keys(value: Mapping[str, Any], kind: type[msgspec.Struct]) -> tuple[dict[str, Any], list[WrongKey]]:
    """Read each key of a JSON object by itself.

    Args:
        value: the object.
        kind: the struct whose fields are the keys; keys that it lacks are wrong only where it forbids them.

    Returns:
        The values that could be read, by their keys and in the types of the struct, and one entry for each key that
        could not: of another type, out of its bounds, unknown, or missing though it is required.
    """
    read: dict[str, Any] = {}
    wrong: list[WrongKey] = []
    struct, annotations = _described(kind)
    for field in struct.fields:
        key = field.encode_name
        if key not in value:
            if field.required:
                wrong.append(WrongKey(key, f"got nothing; expected {allowed(field.type)}"))
            continue
        entry = value[key]
        if isinstance(field.type, types.StructType) and isinstance(entry, Mapping):
            inner, problems = read_keys(entry, field.type.cls)
            wrong += (WrongKey(f"{key}.{problem.key}", problem.text) for problem in problems)
            if not problems:
                read[key] = field.type.cls(**inner)
            continue
        try:
            read[key] = msgspec.convert(entry, annotations[key])
        except msgspec.ValidationError:
            wrong.append(WrongKey(key, f"got {spell(entry)}; expected {allowed(field.type)}"))
    if struct.forbid_unknown_fields:
        known = ", ".join(annotations)
        wrong += (
            WrongKey(str(key), f"unknown key; expected one of {known}") for key in value if key not in annotations
        )
    return read, wrong


@functools.cache
def _described(kind: type[msgspec.Struct]) -> tuple[Any, dict[str, Any]]:
    """Describe a struct and name the types of its keys, which takes longer than reading them."""
    return types.type_info(kind), {field.encode_name: field.type for field in msgspec.structs.fields(kind)}


def spell(value: object) -> str:
    """Spell a value as JSON does, cut where it gets long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."


def shown(names: Sequence[str], limit: int = 6) -> str:
    """Spell a list of names, cut where it gets long."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def allowed(kind: types.Type, *, plural: bool = False) -> str:
    """Say in words which values a type allows."""
    match kind:
        case types.UnionType():
            parts = sorted(kind.types, key=lambda part: isinstance(part, types.NoneType))
            return " or ".join(allowed(part, plural=plural) for part in parts)
        case types.LiteralType():
            return f"one of {', '.join(map(str, kind.values))}"
        case types.ListType():
            return f"{'lists' if plural else 'a list'} of {allowed(kind.item_type, plural=True)}"
        case types.IntType():
            return ("integers" if plural else "an integer") + _bounds(kind)
        case types.FloatType():
            return ("numbers" if plural else "a number") + _bounds(kind)
        case types.StrType():
            return "texts" if plural else "text"
        case types.BoolType():
            return "true or false"
        case types.NoneType():
            return "null"
        case types.StructType():
            return f"an object with {', '.join(field.encode_name for field in kind.fields if field.required)}"
        case _:
            return "objects" if plural else "an object"


def _bounds(kind: types.IntType | types.FloatType) -> str:
    # The largest float only says that infinity is none.
    highest = None if kind.le is None or kind.le >= sys.float_info.max else kind.le
    if kind.ge is not None and highest is not None:
        return f" from {kind.ge} to {highest}"
    if kind.gt is not None:
        return f" above {kind.gt}"
    return "" if kind.ge is None else f" of at least {kind.ge}"
