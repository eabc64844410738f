"""The tables of docs/formats.md say what the code reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from checkpoints import DELETE, write_draft

from sglang_eagle3_ext import formats
from sglang_eagle3_ext.formats.deepseek import DeepseekConfig
from sglang_eagle3_ext.formats.eagle3_ext import PRODUCERS, Eagle3Ext
from sglang_eagle3_ext.formats.flat import FlatConfig, NestedConfig
from sglang_eagle3_ext.formats.reading import LayerConfig
from sglang_eagle3_ext.spec import DraftSpec

TEXT = "\n" + (Path(__file__).parents[2] / "docs/formats.md").read_text()
LAYER_KEYS = set(LayerConfig.__struct_fields__)
FLAT_KEYS = (set(FlatConfig.__struct_fields__) - LAYER_KEYS - {"eagle_config"}) | {
    "eagle_config.use_aux_hidden_state",
    "eagle_config.eagle_aux_hidden_state_layer_ids",
}
NULLS = ("rope_theta", "rope_scaling", "rope_parameters")


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading."""
    section = TEXT.split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def look_up(spec: DraftSpec, field: str) -> Any:
    value: Any = spec
    for part in field.split("."):
        value = getattr(value, part)
    return value


def literal(cell: str) -> str | None:
    """Return the value that a cell begins with, ``None`` where it is prose."""
    match = re.match(r"`([^`]+)`", cell)
    return match[1] if match else None


@pytest.mark.parametrize(
    ("heading", "dialect", "known"),
    [
        ("## Keys of the decoder layers", "specforge", LAYER_KEYS),
        ("## Keys of the flat layout", "specforge", FLAT_KEYS),
        ("## Keys of latent attention", "deepseek", set(DeepseekConfig.__struct_fields__)),
    ],
)
def test_every_key_has_a_row_and_its_default_is_the_code_s(tmp_path, heading, dialect, known):
    seen = []
    written = formats.read_draft(write_draft(tmp_path, dialect))
    for keys, field, default in rows(heading):
        seen += names(keys)
        if field == "none":
            continue
        deleted = dict.fromkeys((*names(keys), *(NULLS if "rope" in field else ())), DELETE)
        spec = formats.read_draft(write_draft(tmp_path, dialect, config_changes=deleted))
        value = look_up(spec, *names(field))
        expected = literal(default)
        assert expected in (None, str(value)), (keys, value)
        if dialect == "deepseek":
            # What a tensor stands for is what the key said.
            assert value == look_up(written, *names(field)), keys
    assert sorted(seen) == sorted(known)


def test_what_may_stand_in_eagle_config_is_documented():
    documented = {key.removeprefix("eagle_config.") for key in FLAT_KEYS}
    assert set(NestedConfig.__struct_fields__) <= documented


@pytest.mark.parametrize("dialect", sorted(formats.READERS))
def test_what_is_a_dialect_s_own_is_what_its_files_read_as(tmp_path, dialect):
    spec = formats.read_draft(write_draft(tmp_path, dialect))
    table = rows(f"### `{dialect}`")
    assert table
    for keys, field, reading in table:
        if field == "none":
            continue
        value = look_up(spec, *names(field))
        assert literal(reading) in (None, str(value)), (keys, value)


def test_the_overview_lists_every_dialect_with_what_its_ids_mean(tmp_path):
    words = {"output": "output", "boundary": "boundary", "stock": "what stock SGLang reads on the target at hand"}
    listed = {names(row[0])[0]: row[2:] for row in rows("# Checkpoints")}
    assert set(listed) == set(formats.READERS)
    for dialect, (meaning, order) in listed.items():
        spec = formats.read_draft(write_draft(tmp_path / dialect, dialect))
        assert meaning in (words[spec.layer_ids], "as `eagle`"), dialect
        assert order == spec.order.replace("_", " "), dialect


def test_the_object_and_its_producers_are_documented():
    keys = [key for row in rows("## The `eagle3_ext` object") for key in names(row[0])]
    assert sorted(keys) == sorted([*Eagle3Ext.__struct_fields__, *PRODUCERS])
