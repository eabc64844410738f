"""A JSON object changed as text: what is edited changes, and every other byte stays as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

REMOVE = object()
"""As the value of an edit: take the member out."""

Edit = tuple[tuple[str, ...], Any]
"""The path of a member of a JSON object, and its new value."""


class _Member(NamedTuple):
    """One member of an object, by the places in the text where key and value begin and end."""

    key: str
    key_start: int
    key_end: int
    start: int
    end: int


_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def edit_json(text: str, edits: Iterable[Edit]) -> str:
    """Change members of a JSON object and leave every other byte of its text as it is.

    Args:
        text: a JSON object, however it is laid out.
        edits: paths and their new values, or :data:`REMOVE`; objects on the way are made where they are missing.

    Returns:
        The new text, in the indentation, line ends and spacing of the old one. A member that stood in the text
        more than once and is edited stands there once.

    Raises:
        ValueError: the text is no JSON object.
    """
    expected = json.loads(text)
    if not isinstance(expected, dict):
        raise ValueError(f"text: got {type(expected).__name__}; expected a JSON object. Check the file.")
    for path, value in edits:
        text = _edit(text, _skip(text, 0), path, value)
        _apply(expected, path, value)
    if json.dumps(json.loads(text), sort_keys=True) != json.dumps(expected, sort_keys=True):
        raise ValueError("text: the edit would change more than was asked for; expected no such text. Report it.")
    return text


def _apply(config: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Make an edit on the parsed object, as the independent check of the one on its text."""
    *parents, last = path
    for key in parents:
        if not isinstance(config.get(key), dict):
            if value is REMOVE:
                return
            config[key] = {}
        config = config[key]
    if value is REMOVE:
        config.pop(last, None)
    else:
        config[last] = value


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _members(text: str, brace: int) -> tuple[list[_Member], int]:
    """List the members of the object that opens at ``brace``, and the place of its closing brace."""
    members = []
    at = _skip(text, brace + 1)
    while text[at] != "}":
        key, key_end = _DECODER.raw_decode(text, at)
        start = _skip(text, _skip(text, key_end) + 1)
        _, end = _DECODER.raw_decode(text, start)
        members.append(_Member(key, at, key_end, start, end))
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return members, at


def _edit(text: str, brace: int, path: Sequence[str], value: Any) -> str:
    key, *rest = path
    members, close = _members(text, brace)
    same = [i for i, member in enumerate(members) if member.key == key]
    if len(same) > 1:
        # The last one is what every reader of ours believes.
        return _edit(_cut(text, brace, same[0]), brace, path, value)
    found = members[same[0]] if same else None
    if found is not None and rest and text[found.start] == "{":
        return _edit(text, found.start, rest, value)
    if value is REMOVE:
        return text if found is None or rest else _cut(text, brace, same[0])
    for part in reversed(rest):
        value = {part: value}
    if found is not None:
        return text[: found.start] + _render(text, value, brace, same[0]) + text[found.end :]
    if not members:
        return _fill_empty(text, brace, close, key, value)
    last = members[-1]
    lead, colon = _lead(text, brace, len(members) - 1), text[last.key_end : last.start]
    if not lead and colon != ":":
        lead = " "  # the only member of an object on one line
    added = f",{lead}{json.dumps(key, ensure_ascii=False)}{colon}{_render(text, value, brace, len(members) - 1)}"
    return text[: last.end] + added + text[last.end :]


def _cut(text: str, brace: int, index: int) -> str:
    """Take a member out with the comma that belongs to it."""
    members, close = _members(text, brace)
    if index:
        return text[: members[index - 1].end] + text[members[index].end :]
    if len(members) > 1:
        return text[: members[0].key_start] + text[members[1].key_start :]
    return text[: brace + 1] + text[close:]


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _lead(text: str, brace: int, index: int) -> str:
    """Tell the white space before a member, blank lines aside."""
    members, _ = _members(text, brace)
    before = _skip(text, members[index - 1].end) if index else brace
    lead = text[before + 1 : members[index].key_start]
    return _newline(text) + lead.rpartition("\n")[2] if "\n" in lead else lead


def _unit(text: str) -> str:
    """Tell by how much the text indents one level."""
    brace = _skip(text, 0)
    members, _ = _members(text, brace)
    return _lead(text, brace, 0).rpartition("\n")[2] if members else "  "


def _render(text: str, value: Any, brace: int, index: int) -> str:
    """Spell a value the way the member at ``index`` is laid out."""
    member = _members(text, brace)[0][index]
    lead, colon = _lead(text, brace, index), text[member.key_end : member.start]
    return _spell(text, value, lead, colon)


def _spell(text: str, value: Any, lead: str, colon: str) -> str:
    if "\n" not in lead:
        comma = "," if colon == ":" else ", "
        return json.dumps(value, ensure_ascii=False, separators=(comma, colon))
    lines = json.dumps(value, ensure_ascii=False, indent=_unit(text), separators=(",", colon))
    return lines.replace("\n", lead)


def _fill_empty(text: str, brace: int, close: int, key: str, value: Any) -> str:
    """Put the first member into an empty object, one level deeper than the line it opens on."""
    if "\n" not in text.strip():
        return f"{text[: brace + 1]}{json.dumps(key)}: {_spell(text, value, '', ': ')}{text[close:]}"
    line = text[text.rfind("\n", 0, brace) + 1 : brace]
    outer = _newline(text) + line[: _skip(line, 0)]
    lead = outer + _unit(text)
    return f"{text[: brace + 1]}{lead}{json.dumps(key)}: {_spell(text, value, lead, ': ')}{outer}{text[close:]}"
