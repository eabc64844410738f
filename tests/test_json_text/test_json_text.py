"""Editing JSON as text; the oracle is the parser of the standard library."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_eagle3_ext.json_text import REMOVE, edit_json


def kept_apart_from(old: str, new: str) -> int:
    """Count the characters of the old text that stand unchanged around the one place that was edited."""
    before = len(os.path.commonprefix([old, new]))
    after = len(os.path.commonprefix([old[before:][::-1], new[before:][::-1]]))
    return before + after


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-9, 10**12), st.floats(allow_nan=False), st.text(max_size=4))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=5)
LAYOUTS = st.fixed_dictionaries(
    {
        "indent": st.sampled_from([None, 0, 1, 4, "\t"]),
        "separators": st.sampled_from([None, (",", ":"), (", ", " : "), (" ,", ":  ")]),
        "ensure_ascii": st.booleans(),
    }
)


@settings(max_examples=100, deadline=None)
@given(OBJECTS, LAYOUTS, st.sampled_from(["\n", "\r\n"]), st.sampled_from(["", "\n", "\n\n"]), VALUES)
def test_an_inserted_member_leaves_every_other_character(config, layout, newline, end, value):
    config.pop("eagle3_ext", None)
    old = (json.dumps(config, **layout) + end).replace("\n", newline)
    new = edit_json(old, [(("eagle3_ext",), value)])
    assert json.loads(new) == {**config, "eagle3_ext": value}
    assert kept_apart_from(old, new) == len(old)
    assert newline == "\n" or "\n" not in new.replace("\r\n", "")


@settings(max_examples=100, deadline=None)
@given(OBJECTS.filter(bool), LAYOUTS, VALUES, st.data())
def test_replaced_and_removed_members_leave_every_other_value(config, layout, value, data):
    key = data.draw(st.sampled_from(sorted(config)))
    before, after = json.dumps({**config, key: "@here@"}, **layout).split('"@here@"')
    old = before + json.dumps(config, **layout)[len(before) : -len(after)] + after
    new = edit_json(old, [((key,), value)])
    assert json.loads(new) == {**config, key: value}
    assert (new[: len(before)], new[-len(after) :]) == (before, after)
    gone = edit_json(old, [((key,), REMOVE)])
    assert json.loads(gone) == {k: v for k, v in config.items() if k != key}


WEIRD = [
    pytest.param('{"a":1e-05,"b":[1,  2]}', id="one-line"),
    pytest.param('{\n\t"a": 1E-5,\n\t"b":\t[1,\n2]\n}', id="tabs-no-end"),
    pytest.param('{\r\n  "a": 0.10,\r\n\r\n  "b": [1]\r\n}\r\n', id="crlf"),
    pytest.param('  {  "a"  :  1.50  ,  "b"  :  "\\u00e9é\\ud83d"  }  \n\n', id="spaces"),
    pytest.param('{\n"ü": "漢",\n    "a": -0,\n "b": {}}\n', id="ragged"),
]


@pytest.mark.parametrize("old", WEIRD)
def test_weird_text_survives_set_and_unset(old: str):
    ext = {"sources": ["embed", "layer3"], "strict": True}
    new = edit_json(old, [(("eagle3_ext", key), value) for key, value in ext.items()])
    assert json.loads(new)["eagle3_ext"] == ext
    assert kept_apart_from(old, new) == len(old)
    assert edit_json(new, [(("eagle3_ext",), REMOVE)]) == old


def test_new_members_are_laid_out_like_their_neighbours():
    assert edit_json('{"a":1}', [(("x", "y"), [1, 2])]) == '{"a":1,"x":{"y":[1,2]}}'
    assert edit_json('{"a": 1}', [(("x", "y"), [1, 2])]) == '{"a": 1, "x": {"y": [1, 2]}}'
    assert (
        edit_json('{\n\t"x": {\n\t\t"y": 1\n\t}\n}', [(("x", "z"), [2])])
        == '{\n\t"x": {\n\t\t"y": 1,\n\t\t"z": [\n\t\t\t2\n\t\t]\n\t}\n}'
    )
    assert edit_json('{\n "x": {}\n}', [(("x", "z"), 2)]) == '{\n "x": {\n  "z": 2\n }\n}'


def test_a_key_that_stood_twice_stands_once():
    assert edit_json('{"x": 1, "a": 2, "x": 3}', [(("x",), 4)]) == '{"a": 2, "x": 4}'
    assert edit_json('{"x": {"y": 1}, "x": {"y": 2}}', [(("x", "z"), 3)]) == '{"x": {"y": 2, "z": 3}}'
